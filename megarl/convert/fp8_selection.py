"""Which tensors of a model become FP8 blocks, and how its config tells transformers and SGLang.

Both treat every linear module as FP8 unless ``modules_to_not_convert`` names it. They match names differently:

- transformers 5.12: a regular expression for the beginning of a module's name, or its end;
- SGLang 0.5.23: whole parts of the name; some earlier releases: any substring.

Both hold the experts of a layer as one module, and SGLang also joins some projections.
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
"""Projections that engines join into one matrix."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of the source, without its content."""

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
    """(names of the tensors that become FP8, ``quantization_config`` of the result), by name and shape.

    ``keep`` are globs of names, with or without ``.weight``, that stay as they are. ConfigError for a glob that matches
    nothing, weights that cannot be quantised, and a selection that engines would not understand.
    """
    if min(block) < 1:
        raise ConfigError(f"blocks of {block[0]} x {block[1]} are empty, expected two numbers of at least 1")
    kept = _match(tensors, keep)
    matrices = [one for one in tensors if len(one.shape) == 2 and is_fp8_weight(one.name)]
    quantized = {one.name for one in matrices} - kept
    if not quantized:
        raise ConfigError("no linear weight is left to be quantised: the model has none, or --keep names all of them")
    integers = [f"{one.name} ({one.dtype})" for one in tensors if one.name in quantized and one.dtype not in _HIGH]
    if integers:
        raise ConfigError(f"{some(integers)} are quantised already, expected weights in high precision")
    joined = [one.name for one in tensors if one.name not in kept and len(one.shape) > 2 and _EXPERTS.match(one.name)]
    if joined:
        raise ConfigError(
            f"{some(joined)} hold all experts of a layer, expected one matrix per expert; to leave them in high "
            "precision, --keep them"
        )
    _require_whole_matrices(matrices, quantized)
    modules = _modules_to_keep([one for one in tensors if one.name not in quantized])
    _require_distinct(modules, list(dict.fromkeys(one.module for one in matrices if one.name in quantized)))
    return quantized, fp8_config(modules, block)


def is_misread(shape: Sequence[int], block: tuple[int, int]) -> bool:
    """Whether transformers 5.12 misreads or refuses a matrix of this shape when it dequantises.

    It divides rows and columns evenly by the number of scales, so its blocks may differ from ``block``.
    """
    axes = zip(shape, block, grid_of(shape, block), strict=True)
    return any(number > 1 and size % length for size, length, number in axes)


def _match(tensors: Sequence[Tensor], keep: Sequence[str]) -> set[str]:
    kept: set[str] = set()
    for pattern in keep:
        globs = (pattern, pattern + _WEIGHT)
        matched = {one.name for one in tensors if any(fnmatch.fnmatchcase(one.name, glob) for glob in globs)}
        if not matched:
            raise ConfigError(f"--keep {pattern!r} matches no tensor of the model, such as {tensors[-1].name}")
        kept |= matched
    return kept


def _require_whole_matrices(matrices: Sequence[Tensor], quantized: set[str]) -> None:
    """Refuse two precisions within what engines hold as one matrix."""
    groups: dict[tuple[str, Any], list[str]] = defaultdict(list)
    for one in matrices:
        parent, _, leaf = one.name.removesuffix(_WEIGHT).rpartition(".")
        if _EXPERTS.match(one.name):
            groups[one.module, None].append(one.name)
            continue
        for fused in _FUSED:
            if leaf in fused:
                groups[parent, fused].append(one.name)
    for (module, _), names in groups.items():
        high = [name for name in names if name not in quantized]
        if high and len(high) < len(names):
            others = some(sorted(quantized & set(names)))
            raise ConfigError(
                f"--keep leaves {some(high)} in high precision, but not {others}: engines hold them as one matrix of "
                f"{module}, so --keep all of them or none"
            )


def _modules_to_keep(tensors: Sequence[Tensor]) -> list[str]:
    """Modules of the matrices that stay, in model order; ``lm_head`` always, because a tied one has no tensor."""
    matrices = (one for one in tensors if len(one.shape) > 1)
    modules = [one.module for one in matrices if one.name.endswith(_WEIGHT) or _EXPERTS.match(one.name)]
    return list(dict.fromkeys(["lm_head", *modules]))


def _require_distinct(kept: Sequence[str], quantized: Sequence[str]) -> None:
    for name in kept:
        pattern = re.compile(name)
        taken = [module for module in quantized if pattern.match(module) or name in module]
        if taken:
            raise ConfigError(
                f"{name} stays in high precision, and its name would make engines take {some(taken)} for such a "
                f"module too: --keep {taken[0]!r} as well"
            )
