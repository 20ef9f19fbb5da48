"""Moves rows of routing traces to the ranks whose routers need them: each rank gets its own tokens and layers.

A row is the experts of one token in the MoE layers. A ``Placement``, a few integers per sequence, says which rows a
rank has or wants. Ranks exchange placements and compute the rest. Then each row is sent once, as one byte per expert
(two above 256 experts).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from megarl.errors import TraceError
from megarl.megatron.distributed import cp_position, gather_bytes, tp_position
from megarl.megatron.passes.micro_batches import MicroBatch, router_tokens


@dataclass(frozen=True, slots=True)
class Piece:
    """The sequences of one micro-batch, or any sequences back to back."""

    sequences: np.ndarray
    """int64 [N], an id of each sequence, the same on all ranks of the exchange."""
    lengths: np.ndarray
    """int64 [N], tokens."""
    num_slots: int
    """Slots of the micro-batch, padding included."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The rows that one rank has or wants: those of the tokens that its routers see, in their order."""

    pieces: tuple[Piece, ...]
    layers: tuple[int, ...]
    """0-based global layers."""
    tp: tuple[int, int] = (1, 0)
    cp: tuple[int, int] = (1, 0)
    """Size and rank."""

    @staticmethod
    def of_micro_batches(
        micro_batches: Sequence[MicroBatch], layers: Sequence[int], sequences: Sequence[int] | None = None
    ) -> Placement:
        """What this rank's routers see. ``sequences`` [N]: ids of the mini-batch's sequences; default 0..N-1."""
        names = None if sequences is None else np.asarray(sequences, np.int64)
        pieces = []
        for micro in micro_batches:
            local = np.asarray(micro.sequences, np.int64)
            lengths = np.diff(micro.batch.cu_seqlens.cpu().numpy())
            pieces.append(Piece(local if names is None else names[local], lengths, micro.num_slots))
        return Placement(tuple(pieces), tuple(layers), tp_position(), cp_position())

    @staticmethod
    def of_sequences(sequences: Sequence[int], lengths: Sequence[int], layers: Sequence[int]) -> Placement:
        """Whole sequences, each token once, as an engine returns them."""
        piece = Piece(np.asarray(sequences, np.int64), np.asarray(lengths, np.int64), int(sum(lengths)))
        return Placement((piece,), tuple(layers))

    def rows(self) -> np.ndarray:
        """int64 [R]: sequence * 2^32 + position of each row, -1 for padding."""
        return np.concatenate([np.empty(0, np.int64), *(self._rows_of(piece) for piece in self.pieces)])

    def meets(self, other: Placement) -> bool:
        """Whether the two have a sequence in common. A cheap test that most pairs of ranks fail."""
        mine, theirs = ({name for piece in one.pieces for name in piece.sequences.tolist()} for one in (self, other))
        return not mine.isdisjoint(theirs)

    def encode(self) -> np.ndarray:
        """Return all numbers of the placement as int64 bytes."""
        parts = [np.array([len(self.layers), *self.layers, *self.tp, *self.cp, len(self.pieces)], np.int64)]
        for piece in self.pieces:
            parts += [np.array([piece.num_slots, len(piece.sequences)], np.int64), piece.sequences, piece.lengths]
        return np.concatenate(parts).astype(np.int64).view(np.uint8)

    @staticmethod
    def decode(data: np.ndarray) -> Placement:
        """Inverse of ``encode``."""
        numbers = iter(data.view(np.int64).tolist())

        def take(count: int) -> list[int]:
            return [next(numbers) for _ in range(count)]

        layers = tuple(take(next(numbers)))
        tp, tp_rank, cp, cp_rank, num_pieces = take(5)
        pieces = []
        for _ in range(num_pieces):
            num_slots, size = take(2)
            pieces.append(Piece(np.array(take(size), np.int64), np.array(take(size), np.int64), num_slots))
        return Placement(tuple(pieces), layers, (tp, tp_rank), (cp, cp_rank))

    def rows_by_piece(self) -> list[int]:
        """How many rows each piece has."""
        return [piece.num_slots // (self.tp[0] * self.cp[0]) for piece in self.pieces]

    def _rows_of(self, piece: Piece) -> np.ndarray:
        bounds = np.concatenate([[0], np.cumsum(piece.lengths)])
        tokens = router_tokens(torch.from_numpy(bounds), piece.num_slots, self.tp, self.cp).numpy()
        names = np.repeat(piece.sequences << 32, piece.lengths)
        ids = names + np.arange(bounds[-1]) - np.repeat(bounds[:-1], piece.lengths)
        return np.where(tokens >= 0, ids[tokens], -1) if len(ids) else np.full(len(tokens), -1)


def exchange(have: Placement, rows: torch.Tensor, want: Placement, group: dist.ProcessGroup) -> torch.Tensor:
    """Send each rank of a group the rows that it wants: [R_have, L_have, K] -> [R_want, L_want, K]; a collective call.

    ``rows`` have a narrow integer dtype. Padding rows are 0. TraceError names the sequence if no rank has a wanted row.
    """
    mine, wanted = have.rows(), want.rows()
    if len(mine) != len(rows) or rows.size(1) != len(have.layers):
        raise TraceError(f"routes are {list(rows.shape)}, expected {len(mine)} rows of {len(have.layers)} layers")
    # As tensors: no pickled object travels in a step.
    has, wants = ([Placement.decode(d) for d in gather_bytes(p.encode(), group)] for p in (have, want))
    placements = list(zip(has, wants, strict=True))
    order = np.argsort(mine, kind="stable")
    known = mine[order]
    parcels = [_parcel(have, rows, order, known, of_rank) for _, of_rank in placements]
    result = rows.new_zeros(len(wanted), len(want.layers), rows.size(2))
    filled = np.zeros((len(wanted), len(want.layers)), bool)
    slots = [_slots_from(of_rank, want, wanted) for of_rank, _ in placements]
    sizes = [len(at) * len(columns) * rows.size(2) for at, columns in slots]
    for (at, columns), parcel in zip(slots, _all_to_all(parcels, sizes, group), strict=True):
        if len(at) and columns:
            grid = np.ix_(at, columns)
            result[grid] = parcel.view(len(at), len(columns), rows.size(2))
            filled[grid] = True
    lacking = ~filled & (wanted >= 0)[:, None]
    if lacking.any():
        row, column = np.argwhere(lacking)[0]
        sequence, position = divmod(int(wanted[row]), 1 << 32)
        raise TraceError(
            f"sequence {sequence}, token {position}: no rank has its route in layer {want.layers[column]} "
            f"({np.count_nonzero(lacking)} such rows); the rank that sampled or recorded the sequence must pass it"
        )
    return result


def _parcel(have: Placement, rows: torch.Tensor, order: np.ndarray, known: np.ndarray, want: Placement) -> torch.Tensor:
    """What this rank sends to one other, flat, in the other's order; ``known`` are our rows, sorted by ``order``."""
    columns = [have.layers.index(layer) for layer in want.layers if layer in have.layers]
    if not columns or not have.meets(want):
        return rows.new_empty(0)
    wanted = want.rows()
    found = np.searchsorted(known, wanted)
    hit = (found < len(known)) & (wanted >= 0)
    hit[hit] = known[found[hit]] == wanted[hit]
    return rows[torch.from_numpy(order[found[hit]])][:, columns].reshape(-1)


def _slots_from(have: Placement, want: Placement, wanted: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """Where to put the parcel of a rank with these rows: int64 row indices, and columns."""
    columns = [column for column, layer in enumerate(want.layers) if layer in have.layers]
    if not columns or not have.meets(want):
        return np.empty(0, np.int64), []
    return np.flatnonzero(np.isin(wanted, have.rows()) & (wanted >= 0)), columns


def _all_to_all(parcels: Sequence[torch.Tensor], sizes: Sequence[int], group: dist.ProcessGroup) -> list[torch.Tensor]:
    if group.size() == 1:
        return list(parcels)
    device = torch.cuda.current_device()
    width = parcels[0].element_size()
    sent = torch.cat(list(parcels)).view(torch.uint8).to(device)
    received = torch.empty(sum(sizes) * width, dtype=torch.uint8, device=device)
    dist.all_to_all_single(
        received, sent, [size * width for size in sizes], [parcel.numel() * width for parcel in parcels], group=group
    )
    return list(received.cpu().view(parcels[0].dtype).split(list(sizes)))
