"""Parts of ``tools/evidence.py``: the experiments behind docs/evidence.md.

- ``testbed``: a tiny MoE, a task of 64 tokens that can be solved, gaps between the engines, and one training run.
- ``grids``: the runs, as data (``grids.toml``).
- ``outcomes``: what a run's metrics say: collapse, rewards, intervals.
- ``figures``, ``page``: pictures and tables, from stored metrics alone.
- ``sources``: smaller experiments without training of a language model.
"""
