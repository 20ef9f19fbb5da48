"""What all tables of a configuration have in common."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=0)]
NonNegative = Annotated[float, Field(ge=0)]


class Table(BaseModel):
    """Base of all tables: frozen, no unknown keys, no conversions (TOML has types), no infinities."""

    # Every optional field has the default None, because TOML has no null: an absent key must read back as None.
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
