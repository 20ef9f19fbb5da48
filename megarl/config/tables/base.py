"""Base class of all tables, and the types of values."""

from collections.abc import Iterable
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from megarl.config.rows import Row, refuse

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
