"""``megarl report``, ``samples`` and ``trace``: pages and tables of a run's output. Nothing needs a GPU or a model.

The way through:

    report    the HTML page of a run, or of several overlaid, with the verdicts on a run's health (templates: *.html)
    series    curves, from the metrics of a run; panels and glossary, from panels.toml and glossary.toml
    figures   figures as plotly's JSON
    samples   the model's texts
    traces    tables and comparison of routing-trace files
"""
