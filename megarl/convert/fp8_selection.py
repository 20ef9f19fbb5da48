"""Which tensors of a model become FP8 blocks, and how the config tells transformers and SGLang.

Both treat every linear module as FP8, except for the modules in ``modules_to_not_convert``. The names are matched
differently:

- transformers 5.12: a regular expression for the beginning of a module's name, or for the end;
- SGLang 0.5.23: whole components of the name; some earlier releases: any substring.

Both hold the experts of a layer as a single module. SGLang also joins some projections.
"""

import fnmatch
import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megarl.core.fp8 import fp8_config, grid_of, is_fp8_weight
from megarl.errors import ConfigError, some

_WEIGHT = ".weight"
_HIGH = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_EXPERTS = re.compile(r"(.*\.experts)\.")
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("q_a_proj", "kv_a_proj_with_mqa"))
"""Projections that engines join into a single matrix."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """Name, shape and dtype of a source tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def module(self) -> str:
        """The engine's module that holds the tensor."""
        experts = _EXPERTS.match(self.name)
        return experts[1] if experts else self.name.removesuffix(_WEIGHT)


def select_tensors(
    tensors: Sequence[Tensor], keep: Sequence[str], block: tuple[int, int]
) -> tuple[set[str], dict[str, Any]]:
    """Return (names of the tensors that become FP8, ``quantization_config`` of the result).

    keep: globs of names, with or without ``.weight``, that stay in high precision.

    ConfigError for a glob without a match, weights that cannot be quantised, and a selection that engines would
    misunderstand.
    """
    if min(block) < 1:
        raise ConfigError(f"blocks of {block[0]} x {block[1]} are empty, expected two numbers of at least 1")
    high = _match(tensors, keep)
    matrices = [tensor for tensor in tensors if len(tensor.shape) == 2 and is_fp8_weight(tensor.name)]
    quantized = {tensor.name for tensor in matrices} - high
    if not quantized:
        raise ConfigError("no linear weight is left to be quantised: the model has none, or --keep names all of them")
    if integers := [f"{t.name} ({t.dtype})" for t in tensors if t.name in quantized and t.dtype not in _HIGH]:
        raise ConfigError(f"{some(integers)} are quantised already, expected weights in high precision")
    if fused := [t.name for t in tensors if t.name not in high and len(t.shape) > 2 and _EXPERTS.match(t.name)]:
        raise ConfigError(
            f"{some(fused)} hold all experts of a layer, expected one matrix per expert; to leave them in high "
            "precision, --keep them"
        )
    _require_whole_matrices(matrices, quantized)
    modules = _modules_to_keep([tensor for tensor in tensors if tensor.name not in quantized])
    _require_distinct(modules, list(dict.fromkeys(t.module for t in matrices if t.name in quantized)))
    return quantized, fp8_config(modules, block)


def is_misread(shape: Sequence[int], block: tuple[int, int]) -> bool:
    """Whether transformers 5.12 misreads or refuses a matrix of this shape when it dequantises.

    transformers divides rows and columns evenly by the number of scales, which may give blocks other than ``block``.
    """
    axes = zip(shape, block, grid_of(shape, block), strict=True)
    return any(count > 1 and size % length for size, length, count in axes)


def _match(tensors: Sequence[Tensor], keep: Sequence[str]) -> set[str]:
    names: set[str] = set()
    for pattern in keep:
        globs = (pattern, pattern + _WEIGHT)
        matched = {t.name for t in tensors if any(fnmatch.fnmatchcase(t.name, glob) for glob in globs)}
        if not matched:
            raise ConfigError(f"--keep {pattern!r} matches no tensor of the model, such as {tensors[-1].name}")
        names |= matched
    return names


def _require_whole_matrices(matrices: Sequence[Tensor], quantized: set[str]) -> None:
    """Refuse two precisions within a matrix of the engine."""
    groups: dict[tuple[str, Any], list[str]] = defaultdict(list)
    for tensor in matrices:
        if _EXPERTS.match(tensor.name):
            groups[tensor.module, None].append(tensor.name)
            continue
        parent, _, leaf = tensor.name.removesuffix(_WEIGHT).rpartition(".")
        for fused in _FUSED:
            if leaf in fused:
                groups[parent, fused].append(tensor.name)
    for (module, _), names in groups.items():
        high = [name for name in names if name not in quantized]
        if high and len(high) < len(names):
            raise ConfigError(
                f"--keep leaves {some(high)} in high precision, but not {some(quantized & set(names))}: engines hold "
                f"them as one matrix of {module}, so --keep all of them or none"
            )


def _modules_to_keep(tensors: Sequence[Tensor]) -> list[str]:
    """Return the modules of the matrices that stay, in model order. ``lm_head`` always: a tied head has no tensor."""
    matrices = (tensor for tensor in tensors if len(tensor.shape) > 1)
    modules = [t.module for t in matrices if t.name.endswith(_WEIGHT) or _EXPERTS.match(t.name)]
    return list(dict.fromkeys(["lm_head", *modules]))


def _require_distinct(high: Sequence[str], quantized: Sequence[str]) -> None:
    for name in high:
        pattern = re.compile(name)
        confused = [module for module in quantized if pattern.match(module) or name in module]
        if confused:
            raise ConfigError(
                f"{name} stays in high precision, and its name would make engines take {some(confused)} for such a "
                f"module too: --keep {confused[0]!r} as well"
            )
