"""Base class of all tables, and the types of values."""

import json
import re
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from megarl.config.addresses import has_host
from megarl.errors import ConfigError

Count = Annotated[int, Field(ge=0)]
NonNegative = Annotated[float, Field(ge=0)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Dtype = Literal["fp32", "bf16"]
_TEXTS: dict[str, str] = tomllib.loads(Path(__file__).parents[1].joinpath("refusals.toml").read_text("utf-8"))


class Table(BaseModel):
    """Base of all tables: frozen, no unknown keys, no conversions (TOML has types), no infinities."""

    # Every optional field has the default None: TOML has no null, so an absent key must read back as None.
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @model_validator(mode="after")
    def _validate(self) -> Self:
        refuse(self.rows())
        return self

    def rows(self) -> "Iterable[Row]":
        """Return the rules on the table's own keys; messages begin with the key."""
        return ()

    def only_with(self, need: str, holds: object, *keys: str) -> "Iterator[Row]":
        """Yield rules that refuse keys of this table with other values than the default where ``need`` does not
        hold."""
        for key in keys:
            value, default = getattr(self, key), type(self).model_fields[key].default
            is_stray = value != default and not holds
            yield self.row("goes_only_with", is_stray, key=key, value=json.dumps(value), need=need)

    def row(self, name: str, is_broken: object, /, **facts: Any) -> "Row":
        """Return the row of a rule by its name in refusals.toml; its text may name keys of the table and ``facts``."""
        return row(name, is_broken, **dict(self) | facts)

    def urls_rules(self, urls: list[str]) -> "Iterator[Row]":
        """Yield the rules on the servers in a key ``urls``."""
        for url in urls:
            fits = re.fullmatch(r"https?://[^/?#@\s]+(/[^?#@\s]*)?(?<!/)", url) and has_host(url)
            yield self.row("urls", not fits or urls.count(url) > 1, url=url.rpartition("@")[2])


Row = tuple[object, str]
"""(condition, message). A true condition breaks the rule."""


def row(name: str, is_broken: object, /, **facts: Any) -> Row:
    """Return the row of a rule by its name in refusals.toml, with ``facts`` in its text."""
    return is_broken, _TEXTS[name].format(**facts) if is_broken else name


def refuse(rows: Iterable[Row]) -> None:
    """Raise ConfigError for the first row whose condition holds; later rows are not computed."""
    for is_broken, message in rows:
        if is_broken:
            raise ConfigError(message)
