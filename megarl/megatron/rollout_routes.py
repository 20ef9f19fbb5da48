"""Routes between the trainer's rollouts and its micro-batches: check, move, deliver to routers, compare afterwards.

A row is the experts of one token in the MoE layers. A ``Placement``, a few integers per sequence, says which rows a
rank has or wants. Ranks exchange placements and compute the rest. Then each row is sent once, as one byte per expert
(two above 256 experts); further columns of the row travel with it, as bytes. A loop that builds ``MicroRoutes`` itself
needs nothing of this.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megarl.core.devices import to_device
from megarl.core.types import REPLAYED, Rollout, TrainBatch
from megarl.errors import TraceError, refusal
from megarl.megatron.distributed import gather_objects, model_group
from megarl.megatron.passes.micro_batches import MicroBatch, gather_slots, router_tokens
from megarl.models.shapes import ModelShape
from megarl.replay.megatron_state import cp_position, tp_position
from megarl.replay.records import MicroRoutes
from megarl.routes import RoutingTrace
from megarl.routes.trace import narrow_dtype

Micros = Sequence[MicroBatch]
Dtypes = Mapping[str, type[np.generic]]
"""Of the columns of a rollout, by name."""


@dataclass(frozen=True, slots=True)
class PackedPiece:
    """The sequences of one micro-batch, or any sequences back to back."""

    sequences: np.ndarray
    """int64 [N], an id of each sequence, the same on all ranks of the exchange."""
    lengths: np.ndarray
    num_slots: int
    """Of the micro-batch, padding included."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The rows that one rank has or wants: of the tokens of its routers, in order."""

    pieces: tuple[PackedPiece, ...]
    layers: tuple[int, ...]
    """0-based global layers."""
    tp: tuple[int, int] = (1, 0)
    cp: tuple[int, int] = (1, 0)
    """Size and rank."""

    @staticmethod
    def of_micro_batches(micro_batches: Sequence[MicroBatch], layers: Sequence[int]) -> "Placement":
        """What this rank's routers see. Sequences have the numbers 0..N-1 of their places in the mini-batch."""
        pieces = []
        for micro in micro_batches:
            lengths = np.diff(micro.batch.cu_seqlens.cpu().numpy())
            pieces.append(PackedPiece(np.asarray(micro.sequences, np.int64), lengths, micro.num_slots))
        return Placement(tuple(pieces), tuple(layers), tp_position(), cp_position())

    @staticmethod
    def of_sequences(sequences: Sequence[int], lengths: Sequence[int], layers: Sequence[int]) -> "Placement":
        """Whole sequences, each token once, as an engine returns them."""
        piece = PackedPiece(np.asarray(sequences, np.int64), np.asarray(lengths, np.int64), int(sum(lengths)))
        return Placement((piece,), tuple(layers))

    def rows(self) -> np.ndarray:
        """int64 [R]: sequence * 2^32 + position of each row, -1 for padding."""
        return np.concatenate([np.empty(0, np.int64), *(self._rows_of(piece) for piece in self.pieces)])

    def rows_by_piece(self) -> list[int]:
        """How many rows each piece has."""
        return [piece.num_slots // (self.tp[0] * self.cp[0]) for piece in self.pieces]

    def _rows_of(self, piece: PackedPiece) -> np.ndarray:
        bounds = np.concatenate([[0], np.cumsum(piece.lengths)])
        tokens = router_tokens(torch.from_numpy(bounds), piece.num_slots, self.tp, self.cp).numpy()
        ids = np.repeat((piece.sequences << 32) - bounds[:-1], piece.lengths) + np.arange(bounds[-1])
        return np.where(tokens >= 0, ids[tokens], -1) if len(ids) else np.full(len(tokens), -1)


def exchange(have: Placement, rows: torch.Tensor, want: Placement, group: dist.ProcessGroup) -> torch.Tensor:
    """Send each rank of a group the rows that it wants: [R_have, L_have, K] -> [R_want, L_want, K]; a collective call.

    The result is stored layer by layer. Padding rows are 0. TraceError names the sequence if no rank has a wanted row.
    """
    rows_here, wanted_rows = have.rows(), want.rows()
    if len(rows_here) != len(rows) or rows.size(1) != len(have.layers):
        raise TraceError(f"routes are {list(rows.shape)}, expected {len(rows_here)} rows of {len(have.layers)} layers")
    placements = gather_objects((have, want), group)
    has, wants = ([(placement, placement.rows()) for placement in of_kind] for of_kind in zip(*placements, strict=True))
    outgoing = [_find_common(have, rows_here, *other) for other in wants]
    incoming = outgoing if group.size() == 1 else [_find_common(*other, want, wanted_rows) for other in has]
    parcels = []
    for (placement, _), (columns, _, sent) in zip(wants, outgoing, strict=True):
        layers = [have.layers.index(placement.layers[column]) for column in columns]
        block = rows.index_select(0, sent)
        parcels.append((block if layers == [*range(rows.size(1))] else block[:, layers]).flatten())
    result = rows.new_zeros(len(wanted_rows), len(want.layers), rows.size(2))
    filled = np.zeros((len(wanted_rows), len(want.layers)), bool)
    sizes = [len(columns) * len(places) * rows.size(2) for columns, places, _ in incoming]
    for (columns, places, _), parcel in zip(incoming, _all_to_all(parcels, sizes, group), strict=True):
        block = parcel.view(len(places), len(columns), rows.size(2))
        if columns:
            result[places[:, None], torch.tensor(columns)] = block
            filled[places.numpy()[:, None], columns] = True
    is_lacking = ~filled & (wanted_rows >= 0)[:, None]
    if is_lacking.any():
        row, column = np.argwhere(is_lacking)[0]
        sequence, position = divmod(int(wanted_rows[row]), 1 << 32)
        facts = {"sequence": sequence, "position": position, "layer": want.layers[column]}
        raise TraceError(refusal("row_on_no_rank", lacking=np.count_nonzero(is_lacking), **facts))
    return result.transpose(0, 1).contiguous().transpose(0, 1)  # a replay reads layer by layer


def _find_common(
    have: Placement, rows: np.ndarray, want: Placement, wanted_rows: np.ndarray
) -> tuple[list[int], torch.Tensor, torch.Tensor]:
    """Which wanted columns and rows (int64) another placement has, and where these rows are in it.

    ``rows`` and ``wanted`` are those of the placements.
    """
    no_rows = torch.empty(0, dtype=torch.int64)
    columns = [column for column, layer in enumerate(want.layers) if layer in have.layers]
    ids = [{name for piece in place.pieces for name in piece.sequences.tolist()} for place in (have, want)]
    if not columns or ids[0].isdisjoint(ids[1]):  # a cheap test that most pairs of ranks fail
        return [], no_rows, no_rows
    order = np.argsort(rows, kind="stable")
    place = order[np.searchsorted(rows[order], wanted_rows).clip(max=len(rows) - 1)]
    places = np.flatnonzero((rows[place] == wanted_rows) & (wanted_rows >= 0))
    return columns, torch.from_numpy(places), torch.from_numpy(place[places])


def _all_to_all(parcels: Sequence[torch.Tensor], sizes: Sequence[int], group: dist.ProcessGroup) -> list[torch.Tensor]:
    if group.size() == 1:
        return list(parcels)
    device, width = torch.cuda.current_device(), parcels[0].element_size()
    received = torch.empty(sum(sizes) * width, dtype=torch.uint8, device=device)
    sent = to_device(torch.cat(list(parcels)).view(torch.uint8), device)
    received_sizes, sent_sizes = [size * width for size in sizes], [parcel.numel() * width for parcel in parcels]
    dist.all_to_all_single(received, sent, received_sizes, sent_sizes, group=group)
    return list(received.cpu().view(parcels[0].dtype).split(list(sizes)))


def check_rollouts(rollouts: Sequence[Rollout], shape: ModelShape, gates: bool = False, keys: bool = False) -> None:
    """TraceError naming the first rollout whose routes cannot be of this model; before a step.

    gates: check gate weights, too; keys: those of indexers.
    """
    expected = (len(shape.moe_layers), shape.topk)
    for r in rollouts:
        if (experts := r.routed_experts) is None:
            if r.routed_mask is not None:
                continue  # the routes are on a different rank, and checked there
            raise TraceError(f"{r.label}: no routed experts, but replay needs them: was the engine asked for routes?")
        RoutingTrace(experts, shape.num_experts, r.routed_mask, r.label)
        if experts.shape[1:] != expected:
            raise TraceError(refusal("routes_of_other_model", r=r, shape=experts.shape, expected=expected))
        rows = slice(None) if r.routed_mask is None else r.routed_mask
        if gates and (r.gate_weights is None or not np.isfinite(r.gate_weights[rows]).all()):
            raise TraceError(f"{r.label}: gate weights are absent or not finite, expected one for each expert of a row")
        if keys:
            _check_keys(r, len(shape.indexer_layers), shape.fields["dsa_indexer_topk"])


def _check_keys(rollout: Rollout, num_layers: int, topk: int) -> None:
    keys, expected = rollout.indexer_topk, (rollout.num_tokens, num_layers, topk)
    if keys is None or keys.shape != expected:
        state = "absent" if keys is None else keys.shape
        raise TraceError(f"{rollout.label}: keys of the indexers are {state}, expected {expected}")
    positions, ordered = np.arange(len(keys))[:, None, None], np.sort(keys, -1)
    is_key = np.arange(topk) >= topk - 1 - positions  # -1 comes first in a sorted row
    is_right = np.where(is_key, np.diff(ordered, prepend=-1) > 0, ordered == -1) & (ordered <= positions)
    present = np.ones(len(keys), bool) if rollout.routed_mask is None else rollout.routed_mask
    if (is_wrong := ~is_right.all(-1) & present[:, None]).any():
        token, layer = np.argwhere(is_wrong)[0]
        facts = {"rollout": rollout, "token": token, "keys": keys[token, layer].tolist(), "layer": layer}
        raise TraceError(refusal("keys_of_indexer", count=min(token + 1, topk), **facts))


def deliver_routes(
    rollouts: Sequence[Rollout], micro_batches: Micros, layers: Sequence[int], shape: ModelShape, gates: bool = False
) -> list[MicroRoutes]:
    """R3: bring routes from the ranks that sampled to the ranks that replay; a collective call of a model copy.

    ``rollouts`` are the mini-batch that ``micro_batches`` split, each with ``routed_experts`` on at least one rank.
    gates: bring ``gate_weights``, too.
    """
    dtypes = dict(zip(REPLAYED, (narrow_dtype(shape.num_experts, signed=True), np.float32)[: 1 + gates], strict=False))
    want = Placement.of_micro_batches(micro_batches, layers)
    delivered = _deliver(rollouts, dtypes, shape.topk, shape.moe_layers, micro_batches, want)
    return [select_routes(token, rows[0], micro.batch, *rows[1:]) for micro, token, rows in delivered]


def deliver_keys(
    rollouts: Sequence[Rollout], micro_batches: Micros, layers: Sequence[int], shape: ModelShape
) -> list[MicroBatch]:
    """Return micro-batches that replay the rollouts' keys in the indexers of ``layers``; as ``deliver_routes``."""
    # An indexer sees the tokens of all tensor-parallel ranks.
    want = replace(Placement.of_micro_batches(micro_batches, layers), tp=(1, 0))
    topk, replaying = shape.fields["dsa_indexer_topk"], []
    delivered = _deliver(rollouts, {"indexer_topk": np.int32}, topk, shape.indexer_layers, micro_batches, want)
    for micro, token, (keys,) in delivered:
        if (present := select_routes(token, keys, micro.batch).present) is not None:
            keys = keys.masked_fill(~present[:, None, None], -1)
        by_layer = zip(layers, to_device(keys, micro.slots.device).unbind(1), strict=True)
        replaying.append(replace(micro, packing=replace(micro.packing, replayed=dict(by_layer))))
    return replaying


def _deliver(
    rollouts: Sequence[Rollout], dtypes: Dtypes, width: int, layers: Sequence[int], micros: Micros, want: Placement
) -> Iterator[tuple[MicroBatch, torch.Tensor, tuple[torch.Tensor, ...]]]:
    """Yield each micro-batch, the packed token of each of its rows here, and the rows [T_local, L_local, width] of the
    columns that ``dtypes`` names. layers: of the rollouts.
    """
    local = {index: rollout for index, rollout in enumerate(rollouts) if rollout.routed_experts is not None}
    have = Placement.of_sequences([*local], [rollout.num_tokens for rollout in local.values()], layers)
    columns, sizes = [], [width * np.dtype(dtype).itemsize for dtype in dtypes.values()]
    for name, dtype in dtypes.items():
        rows = [np.empty((0, len(layers), width), dtype), *(getattr(rollout, name) for rollout in local.values())]
        columns.append(np.concatenate(rows, dtype=dtype, casting="unsafe").view(np.uint8))
    received = exchange(have, torch.from_numpy(np.concatenate(columns, 2)), want, model_group()).transpose(0, 1).numpy()
    # Copies, because a slice may begin where its dtype cannot.
    slices = zip(np.split(received, np.cumsum(sizes)[:-1], 2), dtypes.values(), strict=True)
    tensors = [torch.from_numpy(raw.copy().view(dtype)).transpose(0, 1) for raw, dtype in slices]
    by_micro = zip(*(column.split(want.rows_by_piece()) for column in tensors), strict=True)
    for micro, rows in zip(micros, by_micro, strict=True):
        yield micro, router_tokens(micro.batch.cu_seqlens, micro.num_slots, want.tp, want.cp), rows


def select_routes(
    token: torch.Tensor, experts: torch.Tensor, batch: TrainBatch, gates: torch.Tensor | None = None
) -> MicroRoutes:
    """Experts and gates [T_local, L_local, K] of ``router_tokens`` as MicroRoutes; missing rows and padding are not
    present."""
    assert batch.routed_mask is not None
    place = token.clamp(min=0)
    present = (token >= 0) & batch.routed_mask[place]
    return MicroRoutes(experts, None if bool(present.all()) else present, batch.tokens[place], gates)


def gather_shared(
    counts: Sequence[Sequence[torch.Tensor]], micro_batches: Sequence[MicroBatch], layers: Sequence[int]
) -> list[np.ndarray]:
    """How many experts sets of routes share: per micro-batch uint8 [T', L, C], of the T' tokens with a rollout row.

    ``counts``: C times the uint8 [T_local, L_local] of all micro-batches, of this rank's tokens and ``layers``
    (``Recording.shared``). Without rollout routes, T' is T. A collective call: a stage without MoE layers takes part
    with tensors that have no columns. The host waits for the device once.
    """
    num_shared = [torch.stack(of_micro, -1) for of_micro in zip(*counts, strict=True)]
    if not layers:
        device = torch.cuda.current_device()  # tensors of all stages must be on the same kind of device
        rows = Placement.of_micro_batches(micro_batches, layers).rows_by_piece()
        num_shared = [torch.zeros(count, 0, len(counts), dtype=torch.uint8, device=device) for count in rows]
    by_token = [gather_slots(share, micro)[micro.slots] for share, micro in zip(num_shared, micro_batches, strict=True)]
    on_host = torch.cat(by_token).cpu().split([micro.batch.num_tokens for micro in micro_batches])
    masks = (micro.batch.routed_mask for micro in micro_batches)
    by_micro = [
        share.numpy() if mask is None else share.numpy().compress(mask.numpy(), 0)
        for share, mask in zip(on_host, masks, strict=True)
    ]
    stages = gather_objects((layers, by_micro), parallel_state.get_pipeline_model_parallel_group())
    if len(stages) == 1:
        return by_micro
    order = np.argsort([layer for of_stage, _ in stages for layer in of_stage])
    of_stages = zip(*(counts for _, counts in stages), strict=True)
    return [np.concatenate(columns, 1).take(order, 1) for columns in of_stages]
