"""The whole configuration of a run."""

from __future__ import annotations

from typing import Self

import tomli_w
from pydantic import model_validator

from megarl.config import rules
from megarl.config.layout import Layout, divide_ranks
from megarl.config.tables.together import Tables


class Config(Tables):
    """A configuration that has been checked: each table by itself, and all together."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        rules.check(self)
        return self

    @property
    def warnings(self) -> tuple[str, ...]:
        """One sentence for each setting that is allowed but biases the gradient; shown at start and by the doctor."""
        return rules.find_warnings(self)

    def check_world_size(self, world_size: int) -> Layout:
        """Divide world_size ranks; ConfigError if the layout or the batch does not come out even."""
        return divide_ranks(self, world_size)

    def to_toml(self) -> str:
        """The resolved configuration as TOML; ``file.parse(tomllib.loads(text))`` equals this one."""
        return tomli_w.dumps(self.model_dump(exclude_none=True))
