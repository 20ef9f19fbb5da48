"""Base class of all tables, and the types of values."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from megarl.config.addresses import has_host
from megarl.errors import ConfigError

Count = Annotated[int, Field(ge=0)]
NonNegative = Annotated[float, Field(ge=0)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Dtype = Literal["fp32", "bf16"]


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

    def rows(self) -> Iterable[Row]:
        """Return the rules on the table's own keys; messages begin with the key."""
        return ()

    def only_with(self, need: str, holds: object, *keys: str) -> Iterator[Row]:
        """Yield rules that refuse keys of this table with other values than the default where ``need`` does not
        hold."""
        for key in keys:
            value, default = getattr(self, key), type(self).model_fields[key].default
            message = f"{key}: found {json.dumps(value)}, which goes only with {need}"
            yield value != default and not holds, message, "set that, or remove it"


Row = tuple[object, str] | tuple[object, str, str]
"""(condition, message, remedy). A true condition breaks the rule. The message names the key, the finding and the
expectation. The remedy is optional."""


def for_urls(urls: Sequence[str]) -> Iterator[Row]:
    """Yield the rules on the servers in a key ``urls``."""
    for url in urls:
        fits = re.fullmatch(r"https?://[^/?#@\s]+(/[^?#@\s]*)?(?<!/)", url) and has_host(url)
        yield (
            not fits or urls.count(url) > 1,
            f"urls: found {url.rpartition('@')[2]}, expected each server once, as http://host:port (an IPv6 address in "
            "brackets) without a slash at the end, a question mark or a password",
            "name a variable in api_key_env for the key",
        )


def refuse(rows: Iterable[Row]) -> None:
    """Raise ConfigError for the first row whose condition holds; later rows are not computed."""
    for is_broken, *texts in rows:
        if is_broken:
            raise ConfigError("; ".join(texts))
