"""Input and result of a replay block."""

from dataclasses import dataclass, field

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class MicroRoutes:
    """The experts of one micro-batch for the routers of one rank."""

    experts: torch.Tensor
    """uint8 or wider integers [T_local, L_local, K]; layers in the order of ``RoutingReplay.layers``."""
    present: torch.Tensor | None = None
    """bool [T_local], False where the row is missing and the router chooses; None = all present."""
    token_ids: torch.Tensor | None = None
    """integers [T_local], the token of each row, compared with the model's input; None skips the comparison."""
    gates: torch.Tensor | None = None
    """floating [T_local, L_local, K], the rollout's gate weights in the order of ``experts``, all scaling included;
    None: the router's own."""


@dataclass(frozen=True, slots=True)
class RouterScores:
    """How likely one micro-batch's routers found experts, on the device."""

    experts: torch.Tensor
    """uint8 or int16 [T_local, L_local, K]."""
    log_probs: torch.Tensor
    """fp32 [T_local, L_local, K], ln r (``Hook.log_probs``)."""


@dataclass(slots=True)
class Recording:
    """Results of a block, one entry per forward micro-batch; complete when the block has closed."""

    routes: list[MicroRoutes] = field(default_factory=list)
    """Of ``record()``: the routers' choice with the token ids of the model, ready to be replayed."""
    native: list[MicroRoutes] = field(default_factory=list)
    """Of ``replay(observe=True)``: each router's own choice, given its replayed input."""
    shared: list[torch.Tensor] = field(default_factory=list)
    """uint8 [T_local, L_local]: number of used experts found in the ``compared`` routes too."""
    native_shared: list[torch.Tensor] = field(default_factory=list)
    """Of ``replay()``: ``shared`` for the router's own choice."""
    replaced: list[torch.Tensor] = field(default_factory=list)
    """Of ``replay()`` with ``min_score``: uint8 [T_local, L_local], experts that the router's own choice replaced."""
    scores: list[RouterScores] = field(default_factory=list)
    """With ``scored``: of the experts in use, or of those that ``scored`` names."""
    agreement: np.ndarray | None = None
    """Of ``replay()``: float64 [micro-batches, L_local], see ``agreement.py``. None if ``min_agreement`` is 0."""
    compared_tokens: int = 0
    """Of ``replay()``: micro-batches whose ``token_ids`` were compared with the model's input."""
    native_rows: int = 0
    """Of ``replay()``: rows without a route (missing, or padding), counted per token and layer of a forward pass."""
