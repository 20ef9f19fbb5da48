"""Which rows of a micro-batch this rank's routers see, and in which order: the layouts of Megatron-Core."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from megarl.core.parallel import held_tokens, sequence_parallel_slice, zigzag_indices
from megarl.errors import ReplayError, refusal, reworded
from megarl.files.hf_config import MoeShape
from megarl.replay.records import MicroRoutes
from megarl.routes import RoutingTrace


def stack_routes(traces: Sequence[RoutingTrace], seq_length: int | None = None) -> tuple[Tensor, Tensor]:
    """Return (experts, present) of the sequences of a batch, as ``RoutingReplay.rows`` takes them.

    [b, s, L, K] and bool [b, s] if ``seq_length`` s is given, else packed [T, L, K] and bool [T]. ReplayError if a
    trace is longer than s, or if two traces are of different models.
    """
    kinds = {(*trace.experts.shape[1:], trace.num_experts) for trace in traces}
    if len(kinds) != 1:
        raise ReplayError(f"found traces of {len(kinds)} models (layers, top-k, experts: {kinds}), expected one")
    longest = max(len(trace.experts) for trace in traces)
    if seq_length is not None and longest > seq_length:
        raise ReplayError(f"a trace has {longest} tokens, expected at most seq_length = {seq_length}")
    dtype = torch.uint8 if kinds.pop()[2] <= 256 else torch.int16
    experts, present = [], []
    for trace in traces:
        padding = 0 if seq_length is None else seq_length - len(trace.experts)
        rows = torch.from_numpy(trace.experts.astype("int64")).to(dtype)
        experts.append(pad(rows, (0, 0, 0, 0, 0, padding)))
        present.append(pad(torch.from_numpy(trace.row_mask), (0, padding)))
    join = torch.cat if seq_length is None else torch.stack
    return join(experts), join(present)


def local_rows(
    shape: MoeShape, layers: Sequence[int], tp: tuple[int, int], cp: tuple[int, int], experts: Tensor,
    present: Tensor | None = None, token_ids: Tensor | None = None, cu_seqlens: Tensor | None = None,
    cu_seqlens_padded: Tensor | None = None, gates: Tensor | None = None,
) -> MicroRoutes:  # fmt: skip
    """``RoutingReplay.rows`` of any rank: its global layers, and its size and rank in tp (1, 0 without SP) and cp.
    ReplayError for columns of other shapes; experts, gates [tokens, L, K].
    """
    form = "[b, s, L, K]" if cu_seqlens is None else "[T, L, K] with cu_seqlens"
    lead = experts.dim() - 2
    if lead != (2 if cu_seqlens is None else 1):
        raise ReplayError(f"experts are {list(experts.shape)}, expected {form}; packed sequences need cu_seqlens")
    if experts.size(-2) != len(shape.moe_layers):
        facts = {"layers": experts.size(-2), "expected": len(shape.moe_layers), "moe_layers": list(shape.moe_layers)}
        raise ReplayError(refusal("layers_of_routes", **facts))
    for name, column, dims in (("present", present, lead), ("token_ids", token_ids, lead), ("gates", gates, lead + 2)):
        if column is not None and column.shape != experts.shape[:dims]:
            raise ReplayError(f"{name} is {list(column.shape)}, expected {list(experts.shape[:dims])} as of experts")
    with reworded(ValueError, ReplayError, "rows do not divide as Megatron divides them: "):
        if cu_seqlens is None:
            token = _padded_rows(experts.size(0), experts.size(1), tp, cp)
        else:
            bounds = cu_seqlens.cpu().long()
            padded = bounds if cu_seqlens_padded is None else cu_seqlens_padded.cpu().long()
            token = held_tokens(bounds, padded, tp, cp)
            if int(bounds[-1]) != len(experts):
                raise ValueError(f"cu_seqlens end at {int(bounds[-1])}, expected {len(experts)}, the rows of experts")
    place, columns = token.clamp(min=0), [shape.moe_layers.index(layer) for layer in layers]
    is_present = token >= 0 if present is None else (token >= 0) & present.flatten().cpu()[place]
    ids = None if token_ids is None else _take(token_ids, lead, place)
    weights = None if gates is None else _take(gates, lead, place)[:, columns]
    return MicroRoutes(_take(experts, lead, place)[:, columns], is_present, ids, weights)


def _padded_rows(b: int, s: int, tp: tuple[int, int], cp: tuple[int, int]) -> Tensor:
    """int64 [rows]: of flattened [b, s]. Hidden states are [s, b, h], so positions come first."""
    position = zigzag_indices(torch.tensor([0, s]), *cp)
    position = position[sequence_parallel_slice(len(position), *tp)]
    return (torch.arange(b) * s + position[:, None]).flatten()


def _take(column: Tensor, lead: int, place: Tensor) -> Tensor:
    return column.flatten(0, lead - 1)[place.to(column.device)]
