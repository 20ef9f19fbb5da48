"""What FP8 blocks change about a weight, summed up over stripes of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megarl.core.fp8 import BLOCK, E4M3_MAX, as_blocks, grid_of, quantize_fp8

_HALF_STEP = 16.0
"""Half the distance between e4m3's largest values: what lies further beyond 448 was cut off, not rounded."""
_STRIPE_VALUES = 1 << 20


@dataclass(frozen=True, slots=True)
class BlockErrors:
    """How a quantised weight differs from what it was."""

    relative_error: float
    """Frobenius norm of the difference over that of the weight; 0 for a weight of zeros."""
    max_error: float
    """Largest absolute difference."""
    max_error_of_block: float
    """Largest difference over the largest absolute value of its block."""
    underflow: float
    """Share of all values that were not 0 and are."""
    num_zero_blocks: int
    """Blocks without another value than 0."""
    num_saturated: int
    """Values beyond the range of their block by more than half a step; 0 unless a scale is wrong."""


class ErrorSum:
    """Adds up the errors of a weight's stripes."""

    def __init__(self, block: tuple[int, int] = BLOCK) -> None:
        self._block = block
        self._squares = self._squared_errors = self._max_error = self._max_of_block = 0.0
        self._values = self._flushed = self._zero_blocks = self._saturated = 0

    def add(self, weight: torch.Tensor, quantized: torch.Tensor, scale: torch.Tensor) -> None:
        """One more stripe: ``weight`` [rows, in] of any floating dtype, and what ``quantize_fp8`` made of it."""
        before = as_blocks(weight.float(), self._block)
        codes = as_blocks(quantized.float(), self._block)
        spread = scale[:, None, :, None]
        error = (codes * spread).sub_(before).abs_()
        size = before.abs()
        largest, largest_error = size.amax((1, 3)), error.amax((1, 3))
        self._squares += float(torch.linalg.vector_norm(before, dtype=torch.float64)) ** 2
        self._squared_errors += float(torch.linalg.vector_norm(error, dtype=torch.float64)) ** 2
        self._max_error = max(self._max_error, float(largest_error.max()))
        of_block = (largest_error / largest)[largest > 0]
        self._max_of_block = max(self._max_of_block, float(of_block.max()) if len(of_block) else 0.0)
        self._values += weight.numel()
        self._flushed += int(((codes == 0) & (before != 0)).sum())
        self._zero_blocks += int((largest == 0).sum())
        self._saturated += int((size > spread * (E4M3_MAX + _HALF_STEP)).sum())

    def total(self) -> BlockErrors:
        return BlockErrors(
            relative_error=(self._squared_errors / self._squares) ** 0.5 if self._squares else 0.0,
            max_error=self._max_error,
            max_error_of_block=self._max_of_block,
            underflow=self._flushed / max(self._values, 1),
            num_zero_blocks=self._zero_blocks,
            num_saturated=self._saturated,
        )


def quantize_by_stripes(
    weight: torch.Tensor, block: tuple[int, int] = BLOCK, errors: ErrorSum | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What ``quantize_fp8`` returns, with intermediate values of about a million elements at a time instead of all;
    ``errors`` are added up on the way."""
    rows, columns = weight.shape
    height = max(1, _STRIPE_VALUES // (block[0] * max(1, columns)))  # in blocks
    quantized = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    scale = torch.empty(grid_of(weight.shape, block))
    for top in range(0, len(scale), height):
        stripe = slice(top * block[0], (top + height) * block[0])
        part = quantize_fp8(weight[stripe], block)
        if errors is not None:
            errors.add(weight[stripe], *part)
        quantized[stripe], scale[top : top + height] = part
    return quantized, scale
