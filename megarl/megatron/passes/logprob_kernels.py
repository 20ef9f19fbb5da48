"""Triton kernels of ``linear_logprobs``: one pass over a block of logits forward, one backward.

A program takes a row of the block. ``fold`` adds the row to the statistics of its token: maximum, sums, the label's
logit. ``by_logit`` writes the gradient of the row's logits, in the dtype of the products, over the logits themselves.
All arithmetic is fp32, and equals that of the block version in ``logprobs.py``, which is the fall-back and the oracle.
``TRITON_INTERPRET=1`` runs the kernels on a CPU. ``logprobs.py`` imports this module for CUDA tensors only.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

FOLD, BY_LOGIT = (2048, 4), (4096, 4)
"""Most columns that a program has in registers, and its warps."""
ENTRIES = 64
"""Entries of a kept set that a program takes at once."""


def fold(
    logits: Tensor, scale: float, labels: Tensor, first_id: int,
    largest: Tensor, sums: Tensor, kept: tuple[Tensor, Tensor, Tensor] | None,
) -> None:  # fmt: skip
    """Add a block of products fp32 [R, C] to the running maximum [R] and sums [3, R] of the rows.

    Logits are ``scale`` times the products. ``sums``: sum exp(z - m), sum (z - m) exp(z - m), logit of the label.
    labels: int64 [R]; ``first_id``: the id of the first column. kept: (ids [M], offsets [R+1], logits fp32 [M]) of all
    kept sets; the logits of the block's own entries are written.
    """
    _fold_kernel[logits.size(0),](
        logits, logits.stride(0), logits.size(1), scale, labels, first_id,
        largest, sums, sums.stride(0), *_pointers(kept, labels, labels, sums), HAS_KEPT=kept is not None,
        BLOCK=min(FOLD[0], max(32, triton.next_power_of_2(logits.size(1)))), ENTRIES=ENTRIES, num_warps=FOLD[1],
    )  # fmt: skip


def by_logit(
    logits: Tensor, scale: float, labels: Tensor, first_id: int, of_logprob: tuple[Tensor, Tensor],
    of_entropy: tuple[Tensor, Tensor, Tensor] | None, kept: tuple[Tensor, Tensor, Tensor] | None, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Overwrite a block of products fp32 [R, C] with its gradient, and return it as a view of ``dtype`` [R, C].

    of_logprob: (normaliser, factor), of_entropy: (log_sum, entropies, factor), fp32 [R] each; the rest as in ``fold``.
    The gradient of a logit is ``factor (1[v = label] - exp(z - normaliser)) - factor' p (ln p + entropy)``.
    """
    result = logits.view(dtype)[:, : logits.size(1)]
    _by_logit_kernel[logits.size(0),](
        logits, logits.stride(0), result, result.stride(0), logits.size(1), scale, labels, first_id,
        *of_logprob, *_pointers(of_entropy, *of_logprob, of_logprob[0]), *_pointers(kept, labels, labels, logits),
        HAS_ENTROPY=of_entropy is not None, HAS_KEPT=kept is not None,
        BLOCK=min(BY_LOGIT[0], max(32, triton.next_power_of_2(logits.size(1)))), ENTRIES=ENTRIES, num_warps=BY_LOGIT[1],
    )  # fmt: skip
    return result


def _pointers(given: tuple[Tensor, ...] | None, *unused: Tensor) -> tuple[Tensor, ...]:
    return unused if given is None else given


@triton.jit
def _fold_kernel(
    logits_ptr, row_stride, columns, scale, labels_ptr, first_id,
    largest_ptr, sums_ptr, sums_stride, ids_ptr, offsets_ptr, kept_logits_ptr,
    HAS_KEPT: tl.constexpr, BLOCK: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    largest = tl.load(largest_ptr + row)
    total = tl.load(sums_ptr + row)
    weighted = tl.load(sums_ptr + sums_stride + row)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        z = tl.load(logits_ptr + column, mask=column < columns, other=float("-inf")) * scale
        new = tl.maximum(largest, tl.max(z, 0))
        is_first = largest == float("-inf")
        shift = tl.where(is_first, 0.0, largest - new)
        rescale = tl.where(is_first, 0.0, tl.exp(shift))
        z -= new
        exponential = tl.exp(z)
        weighted = rescale * (weighted + shift * total) + tl.sum(tl.where(column < columns, z * exponential, 0.0), 0)
        total = rescale * total + tl.sum(exponential, 0)
        largest = new
    tl.store(largest_ptr + row, largest)
    tl.store(sums_ptr + row, total)
    tl.store(sums_ptr + sums_stride + row, weighted)
    label = tl.load(labels_ptr + row) - first_id
    if (label >= 0) & (label < columns):
        tl.store(sums_ptr + 2 * sums_stride + row, tl.load(logits_ptr + label) * scale)
    if HAS_KEPT:
        end = tl.load(offsets_ptr + row + 1)
        for start in range(tl.load(offsets_ptr + row), end, ENTRIES):
            entry = start + tl.arange(0, ENTRIES)
            column = tl.load(ids_ptr + entry, mask=entry < end, other=-1) - first_id
            is_here = (entry < end) & (column >= 0) & (column < columns)
            z = tl.load(logits_ptr + column, mask=is_here, other=0.0) * scale
            tl.store(kept_logits_ptr + entry, z, mask=is_here)


@triton.jit
def _by_logit_kernel(
    logits_ptr, row_stride, result_ptr, result_stride, columns, scale, labels_ptr, first_id,
    normaliser_ptr, factor_ptr, log_sum_ptr, entropies_ptr, entropy_factor_ptr, ids_ptr, offsets_ptr, kept_logits_ptr,
    HAS_ENTROPY: tl.constexpr, HAS_KEPT: tl.constexpr, BLOCK: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    result_ptr += row * result_stride
    label = tl.load(labels_ptr + row) - first_id
    normaliser = tl.load(normaliser_ptr + row)
    factor = tl.load(factor_ptr + row)
    log_sum = tl.load(log_sum_ptr + row)
    entropy = tl.load(entropies_ptr + row)
    entropy_factor = tl.load(entropy_factor_ptr + row)
    begin = row * 0
    end = begin
    if HAS_KEPT:
        begin = tl.load(offsets_ptr + row)
        end = tl.load(offsets_ptr + row + 1)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        z = tl.load(logits_ptr + column, mask=column < columns, other=0.0) * scale
        gradient = ((column == label).to(tl.float32) - tl.exp(z - normaliser)) * factor
        if HAS_KEPT:  # outside of a set, exp may be infinite; the set's own entries follow below
            gradient = tl.where(begin == end, gradient, 0.0)
        if HAS_ENTROPY:
            log_p = z - log_sum
            gradient -= tl.exp(log_p) * (log_p + entropy) * entropy_factor
        # The gradient may be narrower than the logits that it overwrites: no warp may write before all have read.
        tl.debug_barrier()
        tl.store(result_ptr + column, gradient.to(result_ptr.dtype.element_ty), mask=column < columns)
    if HAS_KEPT:
        tl.debug_barrier()
        for start in range(begin, end, ENTRIES):
            entry = start + tl.arange(0, ENTRIES)
            column = tl.load(ids_ptr + entry, mask=entry < end, other=-1) - first_id
            is_here = (entry < end) & (column >= 0) & (column < columns)
            z = tl.load(kept_logits_ptr + entry, mask=is_here, other=0.0)
            gradient = ((column == label).to(tl.float32) - tl.exp(z - normaliser)) * factor
            if HAS_ENTROPY:
                log_p = z - log_sum
                gradient -= tl.exp(log_p) * (log_p + entropy) * entropy_factor
            tl.store(result_ptr + column, gradient.to(result_ptr.dtype.element_ty), mask=is_here)
