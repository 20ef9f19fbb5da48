"""``megarl report`` and ``megarl trace``: pictures and tables of what a run wrote. Nothing here needs a GPU or a model.

The way through:

    report   the HTML page of a run
    panels   its panels, as data (panel: one of them)
    series   the curves of a run, from its metrics
    plots    lines, bands, bars, and the style (maps: layers against steps or tokens)
    traces   tables and comparison of routing-trace files
"""
