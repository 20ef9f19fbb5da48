"""``megarl quantize``: write a Hugging Face or Megatron checkpoint as a Hugging Face folder with FP8 blocks.

Memory: a file of ``shard_bytes``, and a parameter. Under torchrun the ranks divide the files.

transformers and SGLang treat every linear module as FP8, except for the modules in ``modules_to_not_convert`` of the
config. They match the names differently:

- transformers 5.12: a regular expression for the beginning of a module's name, or for the end;
- SGLang 0.5.23: whole components of the name; some earlier releases: any substring.

Both hold the experts of a layer as a single module. SGLang also joins some projections.
"""

import fnmatch
import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.filesize import decimal

from megarl.convert.conversion import hf_tensors
from megarl.convert.job import ConversionJob, Options, Ranks, require_unchanged, same_bits
from megarl.convert.megatron_files import MegatronCheckpoint, Piece, model_folder, torch_dist_folder, units_of
from megarl.core.fp8 import SCALE, fp8_config, grid_of, is_fp8_weight, quantize_by_stripes
from megarl.errors import CheckpointError, ConfigError, NumericsError, some
from megarl.files.hf_config import find_quantization
from megarl.models.hf_files import HFCheckpoint, copy_model_files, pack_shards
from megarl.models.hf_folder import read_json
from megarl.models.names import hf_shapes
from megarl.models.shapes import read_shape

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


@dataclass(frozen=True, slots=True)
class Quantized:
    """Result of a quantisation."""

    out: Path
    names: list[str]
    """Names of the quantised tensors."""
    shapes: dict[str, tuple[int, ...]]
    """Shapes of all tensors."""
    bytes_before: int
    bytes_after: int
    num_files: int


@dataclass(frozen=True, slots=True)
class _Group:
    """Tensors of the source that are read together."""

    tensors: list[Tensor]
    read: Callable[[], list[torch.Tensor]]


def quantize(source: Path, out: Path, model: Path | None, options: Options, ranks: Ranks) -> Quantized:
    """Write ``source``, a Hugging Face folder or a ``torch_dist`` checkpoint, as an FP8 checkpoint, on all ranks alike.

    model: the folder with config and tokenizer of a Megatron checkpoint; None for the folder inside a converted one.

    ConfigError for a source that is quantised already, CheckpointError for an incomplete source or a full disk,
    NumericsError for a value that is not finite; ``out`` is then unchanged.
    """
    is_hf = source.is_dir() and any(source.glob("*.safetensors"))
    source, model, groups = _open_hf(source, model) if is_hf else _open_megatron(source, model)
    job = ConversionJob(out, source, model, options, ranks)
    if options.verify:
        require_unchanged(source, ranks)
    tensors = [tensor for group in groups for tensor in group.tensors]
    quantized, config = select_tensors(tensors, options.keep, options.block)
    encode = partial(_encode, quantized=quantized, block=options.block)
    sizes = [sum(_num_bytes(tensor, quantized, options.block) for tensor in group.tensors) for group in groups]
    shards, totals = pack_shards(groups, sizes, options.shard_bytes)
    with job:

        def finish() -> None:
            copy_model_files(model, job.folder, None, config, predicts=is_hf)

        job.write_shards(shards, totals, encode, finish)
        if options.verify:
            with HFCheckpoint(job.folder) as written:

                def find_changed(group: _Group) -> list[str]:
                    expected = encode(group).items()
                    return [name for name, tensor in expected if not same_bits(written.stored(name), tensor)]

                job.verify(shards, totals, find_changed)
        job.publish(to="fp8", block=options.block, keep=options.keep, verified=options.verify)
    bytes_before = sum(tensor.num_bytes for tensor in tensors)
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    return Quantized(out, sorted(quantized), shapes, bytes_before, sum(totals), len(shards))


def _open_hf(source: Path, model: Path | None) -> tuple[Path, Path, list[_Group]]:
    if model is not None:
        raise ConfigError(f"{source} is a Hugging Face folder, which has its own config; --model goes with Megatron's")
    if (table := find_quantization(read_json(source / "config.json"))) is not None:
        raise ConfigError(
            f"{source} is quantised already ({table.get('quant_method')!r}, blocks {table.get('weight_block_size')}), "
            "expected a model in high precision: quantising twice adds errors"
        )
    hf = HFCheckpoint(source)
    tensors = [Tensor(name, hf.shape(name), hf.dtype(name)) for name in hf.names()]
    return source, source, [_Group([t], lambda name=t.name: [hf.read(name)]) for t in tensors]


def _open_megatron(source: Path, model: Path | None) -> tuple[Path, Path, list[_Group]]:
    if not source.is_dir():
        raise CheckpointError(f"{source} is no folder, expected a Hugging Face or Megatron checkpoint")
    source = torch_dist_folder(source)
    model = model_folder(source, model)
    shape = read_shape(model)
    megatron, shapes = MegatronCheckpoint(source, shape), hf_shapes(shape)

    def group(piece: Piece) -> _Group:
        tensors = [Tensor(name, shapes[name], megatron.dtype(piece)) for name in piece.hf]
        return _Group(tensors, lambda: [tensor for _, tensor in hf_tensors(piece, megatron, Options())])

    groups = [group(piece) for unit in units_of(shape) for piece in unit]
    return source, model, groups


def _num_bytes(tensor: Tensor, quantized: set[str], block: tuple[int, int]) -> int:
    if tensor.name not in quantized:
        return tensor.num_bytes
    return math.prod(tensor.shape) + torch.float32.itemsize * math.prod(grid_of(tensor.shape, block))


def _encode(group: _Group, quantized: set[str], block: tuple[int, int]) -> dict[str, torch.Tensor]:
    """Return the tensors of a group as stored."""
    stored: dict[str, torch.Tensor] = {}
    for tensor, content in zip(group.tensors, group.read(), strict=True):
        name = tensor.name
        if content.is_floating_point() and not (finite := content.isfinite()).all():
            raise NumericsError(
                f"{name} holds {int((~finite).sum())} values of {content.numel()} that are not finite; the source is "
                "not worth quantising, and nothing was put in place"
            )
        if name not in quantized:
            stored[name] = content.contiguous()
        else:
            stored[name], stored[name + SCALE] = quantize_by_stripes(content, block)
    return stored


def quantize_and_show(source: Path, out: Path, model: Path | None, options: Options) -> None:
    """Run ``quantize`` on all ranks; rank 0 prints what was written."""
    ranks = Ranks()
    result = quantize(source, out, model, options, ranks)
    if ranks.rank:
        return
    rows, columns = options.block
    print(
        f"{result.out}: {len(result.names)} of {len(result.shapes)} tensors in FP8, blocks of {rows} x {columns}; "
        f"{decimal(result.bytes_before)} -> {decimal(result.bytes_after)}, {result.num_files} files; "
        f"{'verified' if options.verify else 'not verified'}"
    )
    if ragged := [name for name in result.names if is_misread(result.shapes[name], options.block)]:
        print(
            f"note: {some(ragged)} are no whole number of blocks; transformers 5.12 refuses or misreads such weights "
            "where it dequantises, and SGLang refuses some of them"
        )
