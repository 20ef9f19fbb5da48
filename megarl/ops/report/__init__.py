"""``megarl report``, ``samples`` and ``trace``: pages and tables of what a run wrote. Nothing needs a GPU or a model.

The way through:

    report    the HTML page of a run, or of several overlaid
    panels    its panels and the glossary of metrics, from panels.toml and glossary.toml
    series    the curves of a run, from its metrics
    figures   the figures, as plotly's JSON
    verdicts  what the checks of a run's health say
    samples   what the model wrote
    page      the HTML page around them (page.html, page.js)
    traces    tables and comparison of routing-trace files
"""
