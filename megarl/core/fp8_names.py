"""Checkpoints with FP8 blocks: tensors in FP8, and the entry in config.json. Without torch, so that plans can ask."""

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

BLOCK = (128, 128)
SCALE = "_scale_inv"
"""Suffix of the name of a weight for the name of the scales."""
_LINEAR = re.compile(r"\.(?!eh_proj\.|weights_proj\.)(\w+_proj|kv_a_proj_with_mqa|w[123]|wq_b|wk)\.weight$")
"""Projections of attention, indexers, MLPs and experts. The ``eh_proj`` of a prediction layer and the ``weights_proj``
of an indexer are plain linear layers in engines."""
_HIGH = re.compile(r"((^|\.)(embed_tokens|lm_head|gate|router|shared_expert_gate|eh_proj|weights_proj)\.weight|bias)$")


@cache  # every update asks for the same names
def is_fp8_weight(name: str) -> bool:
    """Return whether an FP8 checkpoint holds the tensor with the Hugging Face name in FP8.

    These are the linear weights of attention, dense MLPs and experts.
    """
    return _LINEAR.search(name) is not None


def is_known_precision(name: str) -> bool:
    """Return whether FP8 engines are known to hold the matrix in FP8, or known to hold it in high precision."""
    return is_fp8_weight(name) or _HIGH.search(name) is not None


def fp8_config(keep: Sequence[str], block: tuple[int, int] = BLOCK) -> dict[str, Any]:
    """The ``quantization_config`` of a checkpoint with FP8 blocks; the modules in ``keep`` stay in high precision.

    Routers, norms and embeddings are in high precision with every engine; transformers takes a linear module for FP8
    that is not in ``keep``.
    """
    form = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    return {**form, "weight_block_size": list(block), "modules_to_not_convert": list(keep)}


def grid_of(shape: Sequence[int], block: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of the scales of a matrix."""
    rows, columns = (-(-size // length) for size, length in zip(shape, block, strict=True))
    return rows, columns
