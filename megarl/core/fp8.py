"""FP8 block rounding: the weights as an engine would hold them that serves an FP8 checkpoint.

The layout is that of ``quantization_config: {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}``:
each block of a weight [out, in] has one fp32 scale, ``w ~ q * scale`` with ``q`` in float8_e4m3fn. Blocks start at the
upper left corner; those at the right and lower edge are smaller.
"""

from __future__ import annotations

import re

import torch
import torch.nn.functional as F

E4M3_MAX = 448.0
_SMALLEST_ABSMAX = 1e-12
"""Stands in for the maximum of a block of zeros, whose scale would otherwise be 0 and its quotient NaN."""

_LINEAR = re.compile(r"\.(\w+_proj|kv_a_proj_with_mqa|w[123])\.weight$")
"""Projections of attention, MLPs and experts. Embeddings, norms, lm_head and router gates have other names."""


def is_fp8_weight(name: str) -> bool:
    """Tells whether an FP8 checkpoint holds the tensor of this Hugging Face name in FP8.

    True for the linear weights of attention, dense MLPs and experts; False for lm_head, embeddings, all norms, biases
    and the router's gate, which stay in high precision.
    """
    return _LINEAR.search(name) is not None


def quantize_fp8(weight: torch.Tensor, block: tuple[int, int] = (128, 128)) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises a weight block by block: ``scale = max|w| / 448`` and ``q = e4m3(w / scale)``, computed in fp32.

    ``weight`` is [out, in] of any floating dtype. Returns ``q`` float8_e4m3fn [out, in] and ``scale`` float32
    [ceil(out / block[0]), ceil(in / block[1])], named ``weight_scale_inv`` in checkpoints. A block of zeros gives
    zeros. Raises ValueError if the weight is not a matrix.
    """
    quantized, scale = _quantize_blocks(weight, block)
    return _as_matrix(quantized, weight.shape).contiguous(), scale


def dequantize_fp8(quantized: torch.Tensor, scale: torch.Tensor, block: tuple[int, int] = (128, 128)) -> torch.Tensor:
    """Undoes ``quantize_fp8``: ``w = q * scale``, float32 [out, in]."""
    return _as_matrix(_as_blocks(quantized.float(), block) * scale[:, None, :, None], quantized.shape)


def round_through_fp8(weight: torch.Tensor, block: tuple[int, int] = (128, 128)) -> torch.Tensor:
    """The values that an FP8 engine computes with: quantised and dequantised, in the dtype of ``weight`` [out, in].

    Normally distributed weights come out with a relative error (Frobenius norm) of about 0.026.
    """
    quantized, scale = _quantize_blocks(weight, block)
    return _as_matrix(quantized.float() * scale[:, None, :, None], weight.shape).to(weight.dtype)


def _quantize_blocks(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """float8_e4m3fn blocks as ``_as_blocks`` makes them, and float32 scales [block rows, block columns]."""
    if weight.dim() != 2 or min(block) < 1:
        raise ValueError(f"FP8 blocks need a matrix and sizes >= 1, found shape {tuple(weight.shape)}, block {block}")
    blocks = _as_blocks(weight.float(), block)
    scale = blocks.abs().amax(dim=(1, 3)).clamp_(min=_SMALLEST_ABSMAX).div_(E4M3_MAX)
    # The quotient of the maximum may come out one rounding above 448; e4m3 has no infinity, so it must not pass it.
    scaled = blocks.div(scale[:, None, :, None]).clamp_(-E4M3_MAX, E4M3_MAX)
    return scaled.to(torch.float8_e4m3fn), scale


def _as_blocks(matrix: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """[out, in] -> [block rows, rows of a block, block columns, columns of a block], the edges filled with zeros."""
    rows, columns = matrix.shape
    # A matrix smaller than one block is one small block: the zeros would change nothing but the time.
    height, width = min(block[0], rows), min(block[1], columns)
    if rows % height or columns % width:
        matrix = F.pad(matrix, (0, -columns % width, 0, -rows % height))
    return matrix.reshape(matrix.shape[0] // height, height, matrix.shape[1] // width, width)


def _as_matrix(blocks: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Undoes ``_as_blocks``."""
    block_rows, height, block_columns, width = blocks.shape
    return blocks.view(block_rows * height, block_columns * width)[: shape[0], : shape[1]]
