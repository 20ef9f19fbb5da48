"""High-precision checkpoints, of Hugging Face or Megatron, into Hugging Face folders with FP8 blocks, file by file.

A linear weight is stored as e4m3 with the fp32 scales of its blocks (``core/fp8.py``); everything else as it is. Memory
is that of one file of ``shard_bytes``, beside one parameter. Under torchrun the ranks divide the files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from megarl.convert import conversion
from megarl.convert.conversion import hf_tensors, model_folder, same_bits, torch_dist_folder, verify
from megarl.convert.job import ConversionJob, Ranks, describe, require_apart, require_unchanged
from megarl.convert.megatron_files import MegatronCheckpoint, units_of
from megarl.convert.quantization_plan import Tensor, plan_of
from megarl.core.fp8 import BLOCK, SCALE, grid_of
from megarl.core.fp8_errors import BlockErrors, ErrorSum, quantize_by_stripes
from megarl.data.files import write_atomically
from megarl.errors import CheckpointError, ConfigError, NumericsError
from megarl.models.hf_reader import HFCheckpoint, read_json
from megarl.models.hf_writer import FP8_ERRORS, copy_model_files, pack_shards, save_tensors, shard_name, write_index
from megarl.models.names import hf_shapes
from megarl.models.shapes import read_shape


@dataclass(frozen=True, slots=True)
class Options:
    """How to quantise."""

    block: tuple[int, int] = BLOCK
    """Rows and columns of a block."""
    keep: tuple[str, ...] = ()
    """Globs of tensors that stay in high precision, beside those that always do."""
    shard_bytes: int = 2 << 30
    """Largest safetensors file, unless one parameter is larger."""
    verify: bool = True
    """Read everything back and compare it, bit for bit, with the source quantised once more."""
    overwrite: bool = False


@dataclass(frozen=True, slots=True)
class Quantized:
    """What a quantisation did."""

    out: Path
    errors: dict[str, BlockErrors]
    """Of each quantised tensor."""
    shapes: dict[str, tuple[int, ...]]
    """Of all tensors."""
    bytes_before: int
    bytes_after: int
    num_files: int
    num_resumed: int
    """Files of this rank that an interrupted start had left."""
    source_checksums: bool
    """The source's files were compared with the checksums that a conversion had left."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Tensors of the source that are read together."""

    tensors: list[Tensor]
    read: Callable[[], list[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class _Source:
    path: Path
    model: Path
    """Where config and tokenizer are."""
    files: list[Path]
    parts: list[_Part]


def quantize(source: Path, out: Path, model: Path | None, options: Options, ranks: Ranks) -> Quantized:
    """Write ``source``, a Hugging Face folder or a ``torch_dist`` checkpoint, as an FP8 checkpoint, on all ranks alike.

    ``model`` is the folder with config and tokenizer of a Megatron checkpoint, by default the one inside a converted
    one. Raises ConfigError for a source that is quantised already and settings that do not fit, CheckpointError for a
    source that is not whole or if ``out`` cannot be written, NumericsError for a value that is not finite; ``out`` is
    then as it was.
    """
    with _opened(source, model) as found:
        require_apart(out, found.path, found.model)
        checked = options.verify and require_unchanged(found.path, ranks)
        tensors = [tensor for part in found.parts for tensor in part.tensors]
        plan = plan_of(tensors, options.keep, options.block)
        sizes = [sum(_num_bytes(tensor, plan.quantized, options) for tensor in part.tensors) for part in found.parts]
        shards, totals = pack_shards(found.parts, sizes, options.shard_bytes)
        with ConversionJob(out, _fingerprint(found, options), ranks, overwrite=options.overwrite) as job:

            def write(number: int, shard: list[_Part]) -> tuple[Path, Any]:
                errors: dict[str, BlockErrors] = {}
                made = _quantized(shard, plan.quantized, options.block, errors)
                file = job.folder / shard_name(number, len(shards))
                save_tensors(made, file)
                return file, (dict.fromkeys(made, file.name), errors)

            def finish(records: list[tuple[dict[str, str], dict[str, BlockErrors]]]) -> None:
                listing = {name: file for names, _ in records for name, file in names.items()}
                errors = {name: one for _, of_file in records for name, one in of_file.items()}
                write_index(job.folder, listing, sum(totals))
                copy_model_files(found.model, job.folder, None, plan.config)
                _write_errors(job.folder / FP8_ERRORS, errors, options)

            job.run(shards, totals, write, finish)
            if options.verify:
                with HFCheckpoint(job.folder) as back:
                    verify(job, shards, totals, lambda part: _changed(part, back, plan.quantized, options.block))
            job.publish({"to": "fp8", "block": options.block, "keep": options.keep, "verified": options.verify})
    before = sum(tensor.num_bytes for tensor in tensors)
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    return Quantized(out, read_errors(out), shapes, before, sum(totals), len(shards), job.kept, checked)


def read_errors(folder: Path) -> dict[str, BlockErrors]:
    """The errors of each quantised tensor that ``quantize`` has written into its output."""
    return {name: BlockErrors(**one) for name, one in json.loads((folder / FP8_ERRORS).read_text())["tensors"].items()}


@contextmanager
def _opened(source: Path, model: Path | None) -> Iterator[_Source]:
    if not source.is_dir():
        raise CheckpointError(f"{source} is no folder, expected a Hugging Face or Megatron checkpoint")
    if not any(source.glob("*.safetensors")):
        yield _megatron(torch_dist_folder(source), model)
        return
    if model is not None:
        raise ConfigError(f"{source} is a Hugging Face folder, which has its own config; --model goes with Megatron's")
    _require_high_precision(source)
    with HFCheckpoint(source) as hf:
        yield _Source(source, source, hf.files(), [_hf_part(hf, name) for name in hf.in_file_order()])


def _require_high_precision(source: Path) -> None:
    found = read_json(source / "config.json").get("quantization_config")
    if found:
        found = found if isinstance(found, dict) else {"quant_method": found}
        raise ConfigError(
            f"{source} is quantised already ({found.get('quant_method')!r}, blocks {found.get('weight_block_size')}), "
            "expected a model in high precision: quantising twice adds errors"
        )


def _hf_part(hf: HFCheckpoint, name: str) -> _Part:
    return _Part([Tensor(name, hf.shape(name), hf.dtype(name))], lambda: [hf.read(name)])


def _megatron(source: Path, model: Path | None) -> _Source:
    model = model_folder(source, model)
    shape = read_shape(model)
    megatron, shapes = MegatronCheckpoint(source, shape), hf_shapes(shape)

    def part(piece: Any) -> _Part:
        tensors = [Tensor(name, shapes[name], megatron.dtype(piece)) for name in piece.hf]
        return _Part(tensors, lambda: [tensor for _, tensor in hf_tensors(piece, megatron, conversion.Options())])

    parts = [part(piece) for unit in units_of(shape) for piece in unit]
    return _Source(source, model, sorted(source.glob("*.distcp")), parts)


def _fingerprint(source: _Source, options: Options) -> dict[str, Any]:
    """What the output depends on."""
    settings = {"block": options.block, "keep": options.keep, "shard_bytes": options.shard_bytes}
    config = (source.model / "config.json").read_text()
    return {"to": "fp8", "source": describe(source.files), "config": config, **settings}


def _num_bytes(tensor: Tensor, quantized: set[str], options: Options) -> int:
    if tensor.name not in quantized:
        return tensor.num_bytes
    return math.prod(tensor.shape) + torch.float32.itemsize * math.prod(grid_of(tensor.shape, options.block))


def _quantized(
    shard: list[_Part], quantized: set[str], block: tuple[int, int], errors: dict[str, BlockErrors] | None = None
) -> dict[str, torch.Tensor]:
    """The tensors of one file; ``errors`` gets those of the quantised ones."""
    made: dict[str, torch.Tensor] = {}
    for name, tensor in _read(shard):
        if name not in quantized:
            made[name] = tensor.contiguous()
            continue
        total = None if errors is None else ErrorSum(block)
        made[name], made[name + SCALE] = quantize_by_stripes(tensor, block, total)
        if errors is not None and total is not None:
            errors[name] = total.total()
    return made


def _read(shard: list[_Part]) -> Iterator[tuple[str, torch.Tensor]]:
    for part in shard:
        for tensor, content in zip(part.tensors, part.read(), strict=True):
            if content.is_floating_point() and not (finite := content.isfinite()).all():
                raise NumericsError(
                    f"{tensor.name} holds {int((~finite).sum())} values of {content.numel()} that are not finite; the "
                    "source is not worth quantising, and nothing was put in place"
                )
            yield tensor.name, content


def _changed(part: _Part, back: HFCheckpoint, quantized: set[str], block: tuple[int, int]) -> list[str]:
    """Tensors that are not what quantising the source once more gives."""
    made = _quantized([part], quantized, block)
    return [name for name, tensor in made.items() if not same_bits(back.stored(name), tensor)]


def _write_errors(file: Path, errors: dict[str, BlockErrors], options: Options) -> None:
    content = {"block": options.block, "tensors": {name: asdict(one) for name, one in errors.items()}}
    write_atomically(file, json.dumps(content, indent=1).encode())
