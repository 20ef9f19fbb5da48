"""What all tables have in common: their base class and the types of their values."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Count = Annotated[int, Field(ge=0)]
NonNegative = Annotated[float, Field(ge=0)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Dtype = Literal["fp32", "bf16"]


class Table(BaseModel):
    """Base of all tables: frozen, no unknown keys, no conversions (TOML has types), no infinities."""

    # Every optional field has the default None, because TOML has no null: an absent key must read back as None.
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @model_validator(mode="after")
    def _validate(self) -> Self:
        self.check()
        return self

    def check(self) -> None:
        """Raise ValueError or ConfigError if keys do not go together."""
