"""Functions of the user that stand for a part of an objective: they get copies, and what they return is checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from megarl.core.choices.own import call_own, name_of
from megarl.core.objectives.columns import TokenColumns, TokenState
from megarl.errors import ConfigError, NumericsError


def copy_columns(source: TokenColumns | TokenState, loss_mask: Tensor) -> TokenColumns:
    """Return columns without gradient that a function may change."""
    given = {field.name: getattr(source, field.name) for field in fields(TokenColumns) if field.name != "loss_mask"}
    copies = {name: column.detach().clone() for name, column in given.items() if column is not None}
    return TokenColumns(**copies, loss_mask=loss_mask.clone())


def call_part(part: str, function: Callable[..., Any], *given: Any, like: Tensor, where: Tensor) -> Tensor:
    """Return ``function(*given)``, checked by ``check_returned``; ConfigError if it raises."""
    return check_returned(part, function, call_own(part, function, *given), like, where)


def check_returned(part: str, function: Callable[..., Any], found: object, like: Tensor, where: Tensor) -> Tensor:
    """Return what a function returned, without gradient and 0 outside of ``where``, bool [T].

    ConfigError unless it is a tensor of the shape, the device and the kind (bool or floating point) of ``like``,
    NumericsError if it is not finite somewhere in ``where``. Part and function are for the messages.
    """
    who, each = f"{part}: the function {name_of(function)} returned", "response" if part == "advantage" else "token"
    is_bool = like.dtype == torch.bool
    if (
        not isinstance(found, Tensor)
        or found.shape != like.shape
        or (found.dtype != torch.bool if is_bool else not found.is_floating_point())
        or found.device != like.device
    ):
        what = type(found).__name__
        if isinstance(found, Tensor):
            what = f"{found.dtype} {list(found.shape)} on {found.device}"
        kind = "bool" if is_bool else "float"
        raise ConfigError(f"{who} {what}, expected one {kind} for each {each}, {list(like.shape)} on {like.device}")
    values = torch.where(where, found.detach(), torch.zeros((), dtype=found.dtype, device=found.device))
    bad = ~torch.isfinite(values)
    if bool(bad.any()):
        first = int(bad.nonzero()[0])
        raise NumericsError(
            f"{who} {values[first].item()} at {each} {first} of {len(values)} ({int(bad.sum())} such {each}s that "
            "train), expected finite numbers"
        )
    return values
