"""FP8 block rounding: weights, activations and caches as in an engine with an FP8 checkpoint.

The layout is that of ``quantization_config: {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}``:
each block of a weight [out, in] has one fp32 scale, ``w ~ q * scale`` with ``q`` in float8_e4m3fn. Blocks start at the
upper left corner; those at the right and lower edge are smaller.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from megarl.core.fp8_names import BLOCK

E4M3_MAX = 448.0
_SMALLEST = 1e-12
"""The maximum of a block of zeros: a scale of 0 would give NaN."""


def quantize_fp8(weight: torch.Tensor, block: tuple[int, int] = BLOCK) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises weights block by block: ``scale = max|w| / 448`` and ``q = e4m3(w / scale)``, computed in fp32.

    ``weight`` is [out, in], or a stack [..., out, in], of any floating dtype. Returns ``q`` float8_e4m3fn of its shape
    and ``scale`` float32 [..., ceil(out / block[0]), ceil(in / block[1])], named ``weight_scale_inv`` in checkpoints. A
    block of zeros gives zeros. Raises ValueError if the weight is no matrix.
    """
    blocks, scale = _scale_blocks(weight, block)
    # The quotient of the maximum may come out one rounding above 448; e4m3 has no infinity: clamp.
    codes = blocks.div(_spread(scale)).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return _as_matrix(codes, weight.shape).contiguous(), scale


def dequantize_fp8(quantized: torch.Tensor, scale: torch.Tensor, block: tuple[int, int] = BLOCK) -> torch.Tensor:
    """Undoes ``quantize_fp8``: ``w = q * scale``, float32. quantized: [..., out, in]."""
    return _as_matrix(as_blocks(quantized.float(), block) * _spread(scale), quantized.shape)


def round_through_fp8(weight: torch.Tensor, block: tuple[int, int] = BLOCK) -> torch.Tensor:
    """The values that an FP8 engine computes with: [..., out, in] quantised and dequantised, in its own dtype.

    Normally distributed weights come out with a relative error (Frobenius norm) of about 0.026.
    """
    return round_to_fp32(weight, block).to(weight.dtype)


def round_to_fp32(weight: torch.Tensor, block: tuple[int, int] = BLOCK, smallest: float = _SMALLEST) -> torch.Tensor:
    """``round_through_fp8``, but float32: [..., out, in]."""
    blocks, scale = _scale_blocks(weight, block, smallest)
    return _as_matrix(_round(blocks, _spread(scale)), weight.shape)


def round_activations(activations: torch.Tensor, group: int = BLOCK[1]) -> torch.Tensor:
    """Return the activations that an FP8 engine multiplies with weights: quantised per token in groups of channels,
    float32 [..., K].

    For each 128 channels of a token ``scale = max(max|x|, 1e-10) / 448`` and ``q = e4m3(x / scale)``, as SGLang 0.5.23
    does (``per_token_group_quant_fp8``, float32 scales). ``activations`` [..., K] are of any floating dtype. The last
    group may be smaller; SGLang has no kernel for that.
    """
    if not activations.numel():
        return activations.float()
    tokens = activations.reshape(-1, activations.shape[-1])
    return round_to_fp32(tokens, (1, group), smallest=1e-10).reshape(activations.shape)


def round_to_e4m3(values: torch.Tensor) -> torch.Tensor:
    """Rounds to e4m3 without a scale and cuts off at 448, in the dtype of ``values``: an FP8 cache. values: [...]."""
    return _round(values.float().clamp(-E4M3_MAX, E4M3_MAX), 1.0).to(values.dtype)


def _spread(scale: torch.Tensor) -> torch.Tensor:
    """[..., block rows, block columns] -> the shape of ``as_blocks``."""
    return scale[..., :, None, :, None]


def _scale_blocks(
    weight: torch.Tensor, block: tuple[int, int], smallest: float = _SMALLEST
) -> tuple[torch.Tensor, torch.Tensor]:
    """(``as_blocks`` of the weight, the scale of each), float32."""
    if weight.dim() < 2 or min(block) < 1:
        raise ValueError(f"FP8 blocks need a matrix and sizes >= 1, found shape {tuple(weight.shape)}, block {block}")
    blocks = as_blocks(weight.float(), block)
    largest = torch.maximum(blocks.amax((-3, -1)), blocks.amin((-3, -1)).neg_())
    return blocks, largest.clamp_(min=smallest).div_(E4M3_MAX)


def _round(values: torch.Tensor, scale: torch.Tensor | float) -> torch.Tensor:
    """float32, of quotients below 464, which e4m3 rounds to 448."""
    return (values / scale).to(torch.float8_e4m3fn).float().mul_(scale)


def as_blocks(matrix: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """[..., out, in] -> [..., block rows, rows of a block, block columns, columns of a block], the edges filled with
    zeros."""
    *stack, rows, columns = matrix.shape
    # A matrix smaller than a block is a single block without padding.
    height, width = min(block[0], rows), min(block[1], columns)
    if rows % height or columns % width:
        matrix = F.pad(matrix, (0, -columns % width, 0, -rows % height))
    rows, columns = matrix.shape[-2:]
    return matrix.reshape(*stack, rows // height, height, columns // width, width)


def _as_matrix(blocks: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Undoes ``as_blocks``."""
    *stack, block_rows, height, block_columns, width = blocks.shape
    return blocks.reshape(*stack, block_rows * height, block_columns * width)[..., : shape[-2], : shape[-1]]
