"""``megarl quantize``: writes a Hugging Face or Megatron checkpoint as a Hugging Face folder with FP8 blocks.

Memory: one file of ``shard_bytes``, and one parameter. Under torchrun the ranks divide the files.
"""

import json
import math
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.filesize import decimal

from megarl.convert import conversion
from megarl.convert.conversion import hf_tensors
from megarl.convert.fp8_selection import Tensor, is_misread, select_tensors
from megarl.convert.job import ConversionJob, Ranks, fingerprint, require_unchanged, same_bits
from megarl.convert.megatron_files import MegatronCheckpoint, Piece, model_folder, torch_dist_folder, units_of
from megarl.core.fp8 import BLOCK, SCALE, BlockErrors, ErrorSum, grid_of, quantize_by_stripes
from megarl.errors import CheckpointError, ConfigError, NumericsError, some
from megarl.files.hf_config import find_quantization
from megarl.files.outputs import require_apart
from megarl.files.writing import write_atomically
from megarl.models.hf_files import FP8_ERRORS, HFCheckpoint, copy_model_files, pack_shards
from megarl.models.hf_folder import read_json
from megarl.models.names import hf_shapes
from megarl.models.shapes import read_shape

NUM_WORST = 5
HEADER = ("rel. error", "max error", "of block", "underflow", "zero blocks", "saturated")


@dataclass(frozen=True, slots=True)
class Options:
    block: tuple[int, int] = BLOCK  # rows and columns
    keep: tuple[str, ...] = ()  # globs of further tensors that stay in high precision
    shard_bytes: int = 2 << 30  # largest safetensors file, unless one parameter is larger
    verify: bool = True  # read everything back and compare it, bit for bit, with the source quantised once more
    overwrite: bool = False


@dataclass(frozen=True, slots=True)
class Quantized:
    out: Path
    errors: dict[str, BlockErrors]  # of each quantised tensor
    shapes: dict[str, tuple[int, ...]]  # of all tensors
    bytes_before: int
    bytes_after: int
    num_files: int
    num_resumed: int  # files of this rank that an interrupted start had finished


@dataclass(frozen=True, slots=True)
class _Part:
    """Tensors of the source that are read together."""

    tensors: list[Tensor]
    read: Callable[[], list[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class _Source:
    path: Path
    model: Path  # where config and tokenizer are
    files: list[Path]
    parts: list[_Part]


def quantize(source: Path, out: Path, model: Path | None, options: Options, ranks: Ranks) -> Quantized:
    """Write ``source``, a Hugging Face folder or a ``torch_dist`` checkpoint, as an FP8 checkpoint, on all ranks alike.

    ``model`` is the folder with config and tokenizer of a Megatron checkpoint; a converted one contains it. ConfigError
    for a source that is quantised already, CheckpointError for an incomplete source or disk, NumericsError for a value
    that is not finite; ``out`` is then unchanged.
    """
    found = _open_source(source, model)
    require_apart(out, found.path, found.model)
    if options.verify:
        require_unchanged(found.path, ranks)
    tensors = [tensor for part in found.parts for tensor in part.tensors]
    quantized, config = select_tensors(tensors, options.keep, options.block)
    encode = partial(_encode, quantized=quantized, block=options.block)
    sizes = [sum(_num_bytes(one, quantized, options) for one in part.tensors) for part in found.parts]
    shards, totals = pack_shards(found.parts, sizes, options.shard_bytes)
    settings = {"block": options.block, "keep": options.keep, "shard_bytes": options.shard_bytes}
    identity = fingerprint(found.files, found.model, to="fp8", **settings)
    with ConversionJob(out, identity, ranks, overwrite=options.overwrite, model=found.model) as job:

        def finish(errors: list[dict[str, dict[str, Any]]]) -> None:
            copy_model_files(found.model, job.folder, None, config, predicts=found.path == found.model)
            by_name = {name: one for part in errors for name, one in part.items()}
            content = {"block": options.block, "tensors": by_name}
            write_atomically(job.folder / FP8_ERRORS, json.dumps(content, indent=1).encode())

        job.write_shards(shards, totals, encode, finish)
        if options.verify:
            with HFCheckpoint(job.folder) as back:

                def find_changed(part: _Part) -> list[str]:
                    expected = encode(part, measure=False)[0].items()
                    return [name for name, tensor in expected if not same_bits(back.stored(name), tensor)]

                job.verify(shards, totals, find_changed)
        job.publish({"to": "fp8", "block": options.block, "keep": options.keep, "verified": options.verify})
    before = sum(tensor.num_bytes for tensor in tensors)
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    return Quantized(out, read_errors(out), shapes, before, sum(totals), len(shards), job.kept)


def read_errors(folder: Path) -> dict[str, BlockErrors]:
    return {name: BlockErrors(**one) for name, one in json.loads((folder / FP8_ERRORS).read_text())["tensors"].items()}


def _open_source(source: Path, model: Path | None) -> _Source:
    if not source.is_dir():
        raise CheckpointError(f"{source} is no folder, expected a Hugging Face or Megatron checkpoint")
    if not any(source.glob("*.safetensors")):
        return _megatron(torch_dist_folder(source), model)
    if model is not None:
        raise ConfigError(f"{source} is a Hugging Face folder, which has its own config; --model goes with Megatron's")
    if (found := find_quantization(read_json(source / "config.json"))) is not None:
        raise ConfigError(
            f"{source} is quantised already ({found.get('quant_method')!r}, blocks {found.get('weight_block_size')}), "
            "expected a model in high precision: quantising twice adds errors"
        )
    hf = HFCheckpoint(source)
    tensors = [Tensor(name, hf.shape(name), hf.dtype(name)) for name in hf.names()]
    parts = [_Part([tensor], lambda name=tensor.name: [hf.read(name)]) for tensor in tensors]
    return _Source(source, source, hf.files(), parts)


def _megatron(source: Path, model: Path | None) -> _Source:
    model = model_folder(source, model)
    shape = read_shape(model)
    megatron, shapes = MegatronCheckpoint(source, shape), hf_shapes(shape)

    def part(piece: Piece) -> _Part:
        tensors = [Tensor(name, shapes[name], megatron.dtype(piece)) for name in piece.hf]
        return _Part(tensors, lambda: [tensor for _, tensor in hf_tensors(piece, megatron, conversion.Options())])

    parts = [part(piece) for unit in units_of(shape) for piece in unit]
    return _Source(source, model, sorted(source.glob("*.distcp")), parts)


def _num_bytes(tensor: Tensor, quantized: set[str], options: Options) -> int:
    if tensor.name not in quantized:
        return tensor.num_bytes
    return math.prod(tensor.shape) + torch.float32.itemsize * math.prod(grid_of(tensor.shape, options.block))


def _encode(
    part: _Part, quantized: set[str], block: tuple[int, int], measure: bool = True
) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, Any]]]:
    """The tensors of a part as they are stored; with ``measure`` also the errors of the quantised ones."""
    made: dict[str, torch.Tensor] = {}
    errors: dict[str, dict[str, Any]] = {}
    for tensor, content in zip(part.tensors, part.read(), strict=True):
        name = tensor.name
        if content.is_floating_point() and not (finite := content.isfinite()).all():
            raise NumericsError(
                f"{name} holds {int((~finite).sum())} values of {content.numel()} that are not finite; the source is "
                "not worth quantising, and nothing was put in place"
            )
        if name not in quantized:
            made[name] = content.contiguous()
            continue
        total = ErrorSum(block) if measure else None
        made[name], made[name + SCALE] = quantize_by_stripes(content, block, total)
        if total is not None:
            errors[name] = asdict(total.total())
    return made, errors


def quantize_and_show(source: Path, out: Path, model: Path | None, options: Options, as_json: bool = False) -> None:
    """``quantize`` on all ranks; the first prints what was written, and the tensors that lost most."""
    ranks = Ranks()
    found = quantize(source, out, model, options, ranks)
    if ranks.rank == 0:
        print(json.dumps(_describe(found, options), indent=1) if as_json else _summarise(found, options))


def _describe(found: Quantized, options: Options) -> dict[str, Any]:
    counts = {name: getattr(found, name) for name in ("bytes_before", "bytes_after", "num_files", "num_resumed")}
    errors = {name: asdict(one) for name, one in found.errors.items()}
    said = {"out": str(found.out), "block": options.block, "verified": options.verify, "num_tensors": len(found.shapes)}
    return {**said, **counts, "errors": errors}


def _summarise(found: Quantized, options: Options) -> str:
    files = f"{found.num_files} file" + "s" * (found.num_files > 1)
    if found.num_resumed:
        files += f", {found.num_resumed} of them from an interrupted start"
    before, after = (decimal(number) for number in (found.bytes_before, found.bytes_after))
    lines = [
        f"{len(found.errors)} of {len(found.shapes)} tensors in FP8, blocks of {options.block[0]} x "
        f"{options.block[1]}; {before} -> {after} in {files}; {'verified' if options.verify else 'not verified'}",
        " ".join([*(f"{word:>11}" for word in HEADER), " tensor"]),
    ]
    for name, one in sorted(found.errors.items(), key=lambda item: -item[1].relative_error)[:NUM_WORST]:
        figures = f"{one.relative_error:11.5f} {one.max_error:11.3g} {one.max_error_of_block:11.5f}"
        lines.append(f"{figures} {one.underflow:11.3g} {one.num_zero_blocks:11d} {one.num_saturated:11d}  {name}")
    median = statistics.median(one.relative_error for one in found.errors.values())
    zeros = sum(one.num_zero_blocks for one in found.errors.values())
    saturated = sum(one.num_saturated for one in found.errors.values())
    totals = f"{zeros} blocks of zeros, {saturated} saturated values"
    lines.append(f"{median:11.5f} median; {totals}; all in {found.out / FP8_ERRORS}")
    ragged = [name for name in found.errors if is_misread(found.shapes[name], options.block)]
    if ragged:
        lines.append(
            f"note: {some(ragged)} are no whole number of blocks; transformers 5.12 refuses or misreads such weights "
            "where it dequantises, and SGLang refuses some of them"
        )
    return "\n".join(lines)
