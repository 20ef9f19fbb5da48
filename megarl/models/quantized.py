"""Weights that checkpoints store as codes beside scales: which tensors belong together, and the values.

| form | codes | scales |
|---|---|---|
| FP8 | ``X.weight`` e4m3 [..., out, in] | ``X.weight_scale_inv``, ``X.weight_scale`` or ``X.scale`` |
| MXFP4 (gpt-oss) | ``X_blocks`` uint8 [E, out, in / 32, 16] | ``X_scales`` uint8 [E, out, in / 32]; X is [E, in, out] |
| FP4 rows | ``X.weight`` int8 [..., out, in / 2] | as FP8 [..., out, in / 32] |
| INT4 (compressed-tensors) | ``X.weight_packed`` int32 [out, in / 8] | ``X.weight_scale`` [out, in / group] |

A weight is ``code * scale``; a grid of scales [..., block rows, block columns] covers the weight in equal blocks.
Scales in uint8 or e8m0 are exponents of two.
"""

import math
import re
from collections.abc import Mapping, Sequence

import torch

from megarl.core.fp8 import dequantize_fp8
from megarl.core.fp8_names import grid_of

CODES = ("F8_E4M3", "U8", "I8", "I32")
"""safetensors' names of the dtypes of codes."""
FLOATS = ("F64", "F32", "F16", "BF16")
SCALES = {"F8_E4M3": (*FLOATS, "F8_E8M0", "U8"), "U8": ("U8", "F8_E8M0"), "I8": (*FLOATS, "F8_E8M0", "U8")}
"""dtype of codes -> dtypes that their scales may have; ``FLOATS`` for others."""
_OF_INPUTS = re.compile(r".*([._](input|activation)|\.[kv])_scale|.*\.weight_shape")
"""Calibrated scales of activations and caches, and shapes that the codes have too."""


def pair_codes(dtypes: Mapping[str, str]) -> tuple[dict[str, tuple[str, str]], set[str]]:
    """Return (weight -> names of its codes and scales, the names that are no weights) of a quantised checkpoint.

    dtypes: of all tensors, in safetensors' words.
    """
    pairs = dict[str, tuple[str, str]]()
    for name in (name for name, dtype in dtypes.items() if dtype in CODES):
        if name.endswith(("_blocks", ".weight_packed")):
            weight = name.removesuffix("_blocks").removesuffix("_packed")
            scales = [weight + ("_scales" if name.endswith("_blocks") else "_scale")]
        else:
            weight = name
            scales = [name + "_scale_inv", name + "_scale", re.sub(r"\.weight$", ".scale", name)]
        if scale := next((scale for scale in scales if scale in dtypes and scale != name), None):
            pairs[weight] = name, scale
    hidden = {name for pair in pairs.values() for name in pair} - pairs.keys()
    return pairs, hidden | {name for name in dtypes if _OF_INPUTS.fullmatch(name)}


def shape_of_weight(codes: Sequence[int], dtype: str) -> tuple[int, ...]:
    """Return the shape of a weight whose codes have this shape and safetensors dtype."""
    if dtype == "U8" and len(codes) == 4:
        experts, rows, groups, half = codes
        return experts, 2 * groups * half, rows
    return (*codes[:-1], codes[-1] * {"U8": 2, "I8": 2, "I32": 8}.get(dtype, 1))


def find_grid(shape: Sequence[int], scales: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of scales as a grid over a weight of ``shape``: one scale, or one for each first index, too."""
    if math.prod(scales) == 1:
        return (1,) * len(shape)
    return (*scales, *[1] * (len(shape) - 1)) if [*scales] == [shape[0]] else tuple(scales)


def describe_misfit(shape: Sequence[int], scales: Sequence[int], block: tuple[int, int] | None) -> str:
    """Return the expected shape of the scales in words; "" if the scales fit. block: None for any equal blocks."""
    grid = find_grid(shape, scales)
    if block is not None:
        expected = (*shape[:-2], *grid_of(shape[-2:], block))
        return "" if grid == expected else f"{expected} for blocks of {block}"
    pairs = [*zip(shape, grid, strict=False)]
    fits = len(grid) == len(shape) > 1 and all(count in (1, size) for size, count in pairs[:-2])
    fits = fits and all(count and size % count == 0 for size, count in pairs[-2:])
    return "" if fits else f"a grid that divides {tuple(shape)} into equal blocks"


def dequantize(codes: torch.Tensor, scales: torch.Tensor, block: tuple[int, int] | None) -> torch.Tensor:
    """Return the weight float32 [..., out, in] of codes and scales; of MXFP4 [..., in, out].

    block: None for equal blocks.
    """
    transposed = codes.dtype == torch.uint8
    values = _unpack(codes.flatten(-2) if transposed else codes)
    scales = (scales.float() - 127).exp2() if scales.dtype == torch.uint8 else scales.float()
    scales = scales.reshape(find_grid(values.shape, scales.shape))
    rows, columns = (max(1, size // count) for size, count in zip(values.shape[-2:], scales.shape[-2:], strict=True))
    weight = dequantize_fp8(values, scales, block or (rows, columns))
    return weight.transpose(-1, -2).contiguous() if transposed else weight


def _unpack(codes: torch.Tensor) -> torch.Tensor:
    """Return float32 [..., out, in]: the lower bits of a code come first."""
    if codes.dtype == torch.int32:
        shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=codes.device)
        return (codes[..., None] >> shifts).bitwise_and_(15).flatten(-2).float() - 8
    if codes.dtype == torch.float8_e4m3fn:
        return codes.float()
    positive = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]  # e2m1
    values = torch.tensor([*positive, *(-value for value in positive)], device=codes.device)
    octets = torch.arange(256, device=codes.device)
    return torch.stack([values[octets & 15], values[octets >> 4]], -1)[codes.view(torch.uint8).int()].flatten(-2)
