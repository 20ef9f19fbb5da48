"""What goes into a replay block and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class MicroRoutes:
    """The experts of one micro-batch as one rank needs them: the tokens its routers see, the MoE layers it holds."""

    experts: torch.Tensor
    """uint8 or wider integers [T_local, L_local, K]; layers in the order of ``RoutingReplay.layers``."""
    present: torch.Tensor | None = None
    """bool [T_local], False where the row is missing and the router chooses natively; None = all present."""
    token_ids: torch.Tensor | None = None
    """integers [T_local], the token of each row; compared with what the model's forward pass gets. None = not known.

    Carry them through every step that reorders or cuts the rows: then rows that end up elsewhere are found exactly."""


@dataclass(slots=True)
class Recording:
    """What a block has seen, one entry per forward micro-batch; complete when the block has closed."""

    routes: list[MicroRoutes] = field(default_factory=list)
    """Of ``record()``: the experts that the routers have chosen, with the token ids that the model got. They can be
    replayed."""
    native: list[MicroRoutes] = field(default_factory=list)
    """Of ``replay()``, on demand: the experts each router would have chosen by itself, given its replayed input."""
    shared: list[torch.Tensor] = field(default_factory=list)
    """uint8 [T_local, L_local]: how many of the experts in use are in the routes that the block was compared with."""
    native_shared: list[torch.Tensor] = field(default_factory=list)
    """Of ``replay()``: the same of the experts that each router would have chosen by itself."""
    agreement: np.ndarray | None = None
    """Of ``replay()``: float64 [micro-batches, L_local], the share of the replayed experts that the router would have
    chosen itself, over a sample of rows; NaN without present rows. None if ``min_agreement`` is 0."""
    compared_tokens: int = 0
    """Of ``replay()``: micro-batches whose ``token_ids`` were compared with the model's input."""
    native_rows: int = 0
    """Of ``replay()``: rows, one per token and layer of a forward pass, that had no route: missing, or padding."""
    untraced_rows: int = 0
    """Rows of multi-token-prediction layers, which no trace has: they route natively in any block."""
