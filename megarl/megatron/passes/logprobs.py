"""Log-probabilities and entropies of given tokens from hidden states, without the [S, V] logits as a whole.

``logprob = z_label - log sum_w exp z_w`` and ``entropy = -sum_w p_w log p_w`` with ``z = h W^T / temperature``. A row
may have a kept set, the tokens that top-p or top-k left to the sampler: the log-probability then sums over the set.

The logits are computed block by block (rows x vocabulary), reduced at once to a maximum, a sum of exponentials and a
weighted sum per row, and computed again in the backward pass. The vocabulary may be split over a tensor-parallel group:
the reductions combine exactly, with two small all-reduces in the forward pass and none in the backward pass.

On a GPU, products are 16-bit with fp32 accumulation (``out_dtype``, torch 2.8), and the host never waits for the GPU.
There, Triton kernels (``logprob_kernels.py``) pass over a block once forward and once backward. Without Triton, and on
a CPU, torch operations do the same in about ten passes over smaller blocks.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.core.devices import to_device
from megarl.core.ratios import segment_ids, segment_lengths
from megarl.errors import refusal
from megarl.megatron.passes.blocks import fused_shape, round_up

Group = dist.ProcessGroup | None
ROWS, COLUMNS = 1024, 8192
"""Largest block of logits: 32 MiB in fp32."""


def kernels_for(device: torch.device) -> ModuleType | None:
    """The module with the Triton kernels: for CUDA devices, where Triton is installed."""
    if device.type != "cuda" or find_spec("triton") is None:
        return None
    from megarl.megatron.passes import logprob_kernels

    return logprob_kernels


def linear_logprobs(
    hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, vocab_size: int, group: Group = None,
    kept: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """hidden [S, H], weight [V / tp, H] (rank r holds rows r V / tp ...), labels int64 [S] -> fp32 [S], fp32 [S].

    Log-probabilities and entropies have gradients to hidden and weight, ``dz_v = c (1[v = y] - p_v) - e p_v (ln p_v +
    entropy)`` of incoming c and e. Entropies cost nothing without an incoming gradient. Logits and reductions are fp32.

    kept: (ids [M], offsets int64 [S+1]), row s has the distinct ids ``ids[offsets[s]:offsets[s+1]]`` of the whole
    vocabulary. The row's log-probability and c's gradient are of the softmax over the set. An empty set stands for the
    whole vocabulary. A label outside its set has log-probability -inf and no gradient. Entropies ignore the sets.
    Offsets belong on the host: elsewhere every call waits for them. ValueError if they do not fit ids and labels.

    The gradient of ``hidden`` is this rank's part in fp32; the mapping in front of this function sums the parts. Rows
    of ``weight`` beyond ``vocab_size`` pad the vocabulary and have probability 0. Products use ``hidden`` in the dtype
    of ``weight``, which is exact: Megatron's Float16Module only widened a 16-bit model's hidden states to fp32.
    """
    sets = None if kept is None else _Kept(*kept, labels)
    return _LinearLogprobs.apply(hidden, weight, labels, temperature, vocab_size, group, sets)


class _Shard:
    """The rank's rows of the vocabulary, in blocks."""

    def __init__(self, weight: Tensor, vocab_size: int, group: Group) -> None:
        self.group = group if group is not None and group.size() > 1 else None
        self.first = weight.size(0) * (self.group.rank() if self.group else 0)
        self.rows = max(0, min(weight.size(0), vocab_size - self.first))  # without the padding

    def cut(self, columns: int) -> list[tuple[int, int]]:
        """(start, end) of blocks of so many rows of the weight, the columns of the logits."""
        return [(start, min(start + columns, self.rows)) for start in range(0, self.rows, columns)]

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        if self.group:
            dist.all_reduce(tensor, op=op, group=self.group)

    def local_labels(self, labels: Tensor, start: int, end: int) -> tuple[Tensor, Tensor]:
        """[R, 1] each: whether the block has the label, and at which column (any column if not)."""
        # Selecting the rows in the block would make the host wait for the GPU once per block.
        local = (labels - (self.first + start))[:, None]
        column = local.clamp(0, end - start - 1)
        return local == column, column


class _Kept:
    """The kept sets of all rows of ``linear_logprobs``, and their entries in a block of logits."""

    def __init__(self, ids: Tensor, offsets: Tensor, labels: Tensor) -> None:
        # The host knows the entries of each block of rows: slicing does not wait for the device.
        self._bounds = [*offsets[::ROWS].tolist(), *offsets[-1:].tolist()]
        if offsets.numel() != labels.numel() + 1 or self._bounds[-1] != ids.numel():
            facts = {"offsets": offsets.numel(), "end": self._bounds[-1], "expected": labels.numel() + 1}
            raise ValueError(refusal("offsets_of_kept_ids", labels=labels.numel(), ids=ids.numel(), **facts))
        self._offsets = to_device(offsets, labels.device)
        self._ids, self.row = ids, segment_ids(self._offsets, ids.numel())
        self.is_empty = segment_lengths(self._offsets) == 0
        label_row = torch.where(ids == labels[self.row], self.row, labels.numel())
        self.has_label = self.is_empty | self.is_empty.new_zeros(labels.numel() + 1).scatter_(0, label_row, True)[:-1]
        self.logits = torch.full(ids.shape, float("-inf"), device=labels.device)
        """fp32 [M], from the blocks that were given to ``take`` or to a kernel."""

    def of_rows(self, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        """(ids [M], offsets [R+1] of the rows, logits [M]) for a kernel."""
        return self._ids, self._offsets[rows.start : rows.stop + 1], self.logits

    def take(self, logits: Tensor, first_id: int, rows: slice) -> None:
        """Keep the sets' own logits of a block [R, C] whose columns start at ``first_id``."""
        entries, hit, place = self._find(first_id, rows, logits.size(1))
        self.logits[entries] = torch.where(hit, logits.view(-1).gather(0, place), self.logits[entries])

    def outside(self, first_id: int, rows: slice, shape: torch.Size) -> Tensor:
        """bool, of the block's shape [R, C]: True where a logit is not of its row's set."""
        _, hit, place = self._find(first_id, rows, shape[1])
        flat = self.is_empty.new_empty(shape.numel() + 1)  # the last is for entries of other blocks
        flat[:-1].view(shape).copy_(~self.is_empty[rows, None])
        return flat.scatter_(0, torch.where(hit, place, shape.numel()), False)[:-1].view(shape)

    def _find(self, first_id: int, rows: slice, width: int) -> tuple[slice, Tensor, Tensor]:
        """Return the entries of a block of rows; of each, whether the block of logits has the entry, and at which
        place.
        """
        index = rows.start // ROWS
        entries = slice(self._bounds[index], self._bounds[index + 1])
        column = self._ids[entries] - first_id
        place = (self.row[entries] - rows.start) * width + column.clamp(0, width - 1)
        return entries, (column >= 0) & (column < width), place


def _operand(tensor: Tensor) -> Tensor:
    """The tensor for a product: 16-bit on a GPU, whose tensor cores accumulate in fp32; fp32 elsewhere."""
    return tensor if tensor.is_cuda and tensor.dtype in (torch.bfloat16, torch.float16) else tensor.float()


def _product(first: Tensor, second: Tensor, out: Any = None, adds: bool = False) -> Tensor:
    """left @ right, accumulated and returned in fp32; ``adds``: added to ``out``, in the product's own pass over it."""
    more: dict[str, Any] = {} if first.dtype == torch.float32 else {"out_dtype": torch.float32}
    return torch.addmm(out, first, second, out=out, **more) if adds else torch.mm(first, second, out=out, **more)


class _Block(NamedTuple):
    """Logits of some rows and columns."""

    rows: slice
    columns: tuple[int, int]
    weight: Tensor
    """[C, H], in the dtype of products."""
    hidden: Tensor
    """[R, H], likewise."""
    logits: Tensor
    """fp32 [R, C], before the temperature; valid until the next block."""


def _blocks(hidden: Tensor, weight: Tensor, shard: _Shard, kernels: ModuleType | None) -> Iterator[_Block]:
    """All blocks, column by column. They share one piece of memory."""
    num_rows = hidden.size(0)
    rows, columns = (ROWS, COLUMNS) if kernels is None else fused_shape(num_rows, shard.rows)
    rows, align = min(rows, num_rows), 1 if kernels is None else 64  # rows of 256 bytes suit the GPU
    memory = torch.empty(rows * round_up(min(columns, shard.rows), align), dtype=torch.float32, device=hidden.device)
    for start, end in shard.cut(columns):
        block_weight, stride = _operand(weight[start:end]), round_up(end - start, align)
        for top in range(0, num_rows, rows):
            part = slice(top, min(top + rows, num_rows))
            block_hidden, num_parts = _operand(hidden[part]), part.stop - top
            logits = memory[: num_parts * stride].view(num_parts, stride)[:, : end - start]
            _product(block_hidden, block_weight.t(), logits)
            yield _Block(part, (start, end), block_weight, block_hidden, logits)


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, vocab_size: int, group: Group,
        kept: _Kept | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        shard, scale, ctx.hidden_dtype = _Shard(weight, vocab_size, group), 1.0 / temperature, hidden.dtype
        hidden = hidden.to(weight.dtype)
        shape, fp32 = (hidden.size(0),), {"dtype": torch.float32, "device": hidden.device}
        largest = torch.full((1 if kept is None else 2, *shape), float("-inf"), **fp32)  # of all, of the kept set
        # sum exp(z - m), sum (z - m) exp(z - m), logit of the label, sum exp(z - m) over the kept set
        sums = torch.zeros(2 + len(largest), *shape, **fp32)
        kernels = kernels_for(hidden.device)
        for rows, (start, end), *_, logits in _blocks(hidden, weight, shard, kernels):
            own, first_id, row_labels = (largest[0, rows], sums[:3, rows]), shard.first + start, labels[rows]
            if kernels is not None:
                kernels.fold(logits, scale, row_labels, first_id, *own, None if kept is None else kept.of_rows(rows))
                continue
            logits.mul_(scale)
            hit, column = shard.local_labels(row_labels, start, end)
            sums[2, rows] += torch.where(hit, logits.gather(1, column), 0.0).squeeze(1)
            if kept is not None:
                kept.take(logits, first_id, rows)
            _fold(*own, logits)
        if kept is not None:
            largest[1].scatter_reduce_(0, kept.row, kept.logits, "amax")
        overall = largest.clone()
        shard.all_reduce(overall, dist.ReduceOp.MAX)
        _rescale(largest[0], sums[:2], overall[0])
        if kept is not None:
            sums[3].index_add_(0, kept.row, (kept.logits - overall[1, kept.row]).exp_())
            if kernels is None:
                del kept.logits  # the kernels need them in the backward pass
        shard.all_reduce(sums)
        log_sum = normaliser = sums[0].log() + overall[0]
        entropies = log_sum - overall[0] - sums[1] / sums[0]
        if kept is not None:
            normaliser = torch.where(kept.is_empty, log_sum, sums[3].log() + overall[1])
        logprobs = sums[2] - normaliser
        if kept is not None:
            logprobs.masked_fill_(~kept.has_label, float("-inf"))
        ctx.save_for_backward(hidden, weight, labels, normaliser, log_sum, entropies)
        ctx.shard, ctx.scale, ctx.kept = shard, scale, kept
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        grad, entropy_grad = gradients
        hidden, weight, labels, normaliser, log_sum, entropies = ctx.saved_tensors
        shard, scale, kept = ctx.shard, ctx.scale, ctx.kept
        grad_hidden = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        factor = torch.zeros_like(log_sum) if grad is None else grad.float() * scale
        if kept is not None:
            factor = torch.where(kept.has_label, factor, 0.0)
        of_entropy = None if entropy_grad is None else (log_sum, entropies, entropy_grad.float() * scale)
        kernels, block_grad = kernels_for(hidden.device), None

        def differentiate(block: _Block) -> Tensor:
            """[R, C] in the dtype of products: the gradient of a block's products, which it overwrites."""
            rows, logits, dtype, first_id = block.rows, block.logits, block.weight.dtype, shard.first + block.columns[0]
            pair = normaliser[rows], factor[rows]
            triple = None if of_entropy is None else tuple(column[rows] for column in of_entropy)
            if kernels is not None:
                sets = None if kept is None else kept.of_rows(rows)
                return kernels.by_logit(logits, scale, labels[rows], first_id, pair, triple, sets, dtype)
            logits.mul_(scale)
            by_entropy = None
            if triple is not None:  # factor d entropy / d z = -factor p (ln p + entropy)
                log_sums, entropy, entropy_factor = (column[:, None] for column in triple)
                log_p = logits - log_sums
                by_entropy = log_p.exp().mul_(log_p.add_(entropy)).mul_(entropy_factor.neg())
            if kept is not None:
                logits.masked_fill_(kept.outside(first_id, rows, logits.shape), float("-inf"))
            # factor d logprob / d z = factor (onehot(label) - softmax(z))
            by_logit = logits.sub_(pair[0][:, None]).exp_().neg_()
            hit, column = shard.local_labels(labels[rows], *block.columns)
            by_logit.scatter_(1, column, by_logit.gather(1, column) + hit).mul_(pair[1][:, None])
            return (by_logit if by_entropy is None else by_logit.add_(by_entropy)).to(dtype)

        for block in _blocks(hidden, weight, shard, kernels):
            by_logit = differentiate(block)
            _product(by_logit, block.weight, grad_hidden[block.rows], adds=True)
            if grad_weight is None:
                continue
            block_grad = _product(by_logit.t(), block.hidden, block_grad, adds=block_grad is not None)
            if block.rows.stop == hidden.size(0):
                grad_weight[slice(*block.columns)], block_grad = block_grad, None
        return grad_hidden.to(ctx.hidden_dtype), grad_weight, None, None, None, None, None


def _fold(largest: Tensor, sums: Tensor, logits: Tensor) -> None:
    """Add a block of logits [R, C] (overwritten) to the running maximum [R] and sums [2, R]."""
    new = torch.maximum(largest, logits.amax(1))
    _rescale(largest, sums, new)
    logits.sub_(new[:, None])
    exponentials = logits.exp()
    sums[0] += exponentials.sum(1)
    sums[1] += torch.linalg.vecdot(exponentials, logits)
    largest.copy_(new)


def _rescale(old: Tensor, sums: Tensor, new: Tensor) -> None:
    """Make sums relative to maximum ``old`` [R] relative to ``new``; ``old`` is -inf where there was no logit yet."""
    shift = torch.where(torch.isneginf(old), 0.0, old - new)
    scale = shift.exp() * (~torch.isneginf(old)).float()
    sums[1].mul_(scale).add_(shift * scale * sums[0])
    sums[0].mul_(scale)
