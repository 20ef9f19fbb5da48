"""A rule as a row: a condition, what is wrong where the condition holds, and the remedy."""

from collections.abc import Iterable

from megarl.errors import ConfigError

Row = tuple[object, str] | tuple[object, str, str]
"""(condition, message, remedy). A true condition breaks the rule. The message names the key, the finding and the
expectation. The remedy is optional."""


def refuse(rows: Iterable[Row]) -> None:
    """Raise ConfigError for the first row whose condition holds; later rows are not computed."""
    for is_broken, *texts in rows:
        if is_broken:
            raise ConfigError("; ".join(texts))
