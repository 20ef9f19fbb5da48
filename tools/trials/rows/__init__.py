"""Rows 4 to 18 of docs/evidence.md: claims of the sources, repeated without training a language model.

- ``source_row``: the form of a row. ``ALL``: every row, in the order of their numbers.
- ``sampling_rows``, ``budget_rows``, ``cost_rows``: rules of sampling, on ``prompt_bandit``; ``intervals`` of them.
- ``ratio_rows``, ``credit_rows``: ratios of policies and exact gradients, with their small worlds ``replay_effects``,
  ``tool_episodes``, ``chain_problem``, ``stopping_problem``, ``allocation_bandit``.
"""

from trials.rows import budget_rows, cost_rows, credit_rows, ratio_rows, sampling_rows
from trials.rows.source_row import SourceRow

MODULES = (sampling_rows, budget_rows, cost_rows, ratio_rows, credit_rows)
ALL: tuple[SourceRow, ...] = tuple(
    sorted((row for module in MODULES for row in module.ROWS), key=lambda row: row.number)
)
