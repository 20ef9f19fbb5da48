"""``megarl quantize``: write a Hugging Face or Megatron checkpoint as a Hugging Face folder with FP8 blocks.

Memory: a file of ``shard_bytes``, and a parameter. Under torchrun the ranks divide the files.
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

from megarl.convert.conversion import hf_tensors
from megarl.convert.fp8_selection import Tensor, is_misread, select_tensors
from megarl.convert.job import ConversionJob, Options, Ranks, require_unchanged, same_bits
from megarl.convert.megatron_files import MegatronCheckpoint, Piece, model_folder, torch_dist_folder, units_of
from megarl.core.fp8 import SCALE, BlockErrors, ErrorSum, grid_of, quantize_by_stripes
from megarl.errors import CheckpointError, ConfigError, NumericsError, some
from megarl.files.hf_config import find_quantization
from megarl.files.writing import write_atomically
from megarl.models.hf_files import FP8_ERRORS, HFCheckpoint, copy_model_files, pack_shards
from megarl.models.hf_folder import read_json
from megarl.models.names import hf_shapes
from megarl.models.shapes import read_shape

NUM_WORST = 5
HEADER = ("rel. error", "max error", "of block", "underflow", "zero blocks", "saturated")


@dataclass(frozen=True, slots=True)
class Quantized:
    """Result of a quantisation."""

    out: Path
    errors: dict[str, BlockErrors]
    """Errors of each quantised tensor."""
    shapes: dict[str, tuple[int, ...]]
    """Shapes of all tensors."""
    bytes_before: int
    bytes_after: int
    num_files: int
    num_resumed: int
    """Files of this rank that an interrupted start had finished."""


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
    source, model, files, groups = _open_hf(source, model) if is_hf else _open_megatron(source, model)
    job = ConversionJob.start("fp8", out, source, model, files, options, ranks)
    if options.verify:
        require_unchanged(source, ranks)
    tensors = [tensor for group in groups for tensor in group.tensors]
    quantized, config = select_tensors(tensors, options.keep, options.block)
    encode = partial(_encode, quantized=quantized, block=options.block)
    sizes = [sum(_num_bytes(tensor, quantized, options.block) for tensor in group.tensors) for group in groups]
    shards, totals = pack_shards(groups, sizes, options.shard_bytes)
    with job:

        def finish(notes: list[dict[str, dict[str, Any]]]) -> None:
            copy_model_files(model, job.folder, None, config, predicts=is_hf)
            errors = {name: figures for by_name in notes for name, figures in by_name.items()}
            content = {"block": options.block, "tensors": errors}
            write_atomically(job.folder / FP8_ERRORS, json.dumps(content, indent=1).encode())

        job.write_shards(shards, totals, encode, finish)
        if options.verify:
            with HFCheckpoint(job.folder) as written:

                def find_changed(group: _Group) -> list[str]:
                    expected = encode(group, measure=False)[0].items()
                    return [name for name, tensor in expected if not same_bits(written.stored(name), tensor)]

                job.verify(shards, totals, find_changed)
        job.publish(to="fp8", block=options.block, keep=options.keep, verified=options.verify)
    bytes_before = sum(tensor.num_bytes for tensor in tensors)
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    return Quantized(out, read_errors(out), shapes, bytes_before, sum(totals), len(shards), job.num_kept)


def read_errors(folder: Path) -> dict[str, BlockErrors]:
    """Return the errors of each quantised tensor of an FP8 folder."""
    tables = json.loads((folder / FP8_ERRORS).read_text())["tensors"]
    return {name: BlockErrors(**figures) for name, figures in tables.items()}


def _open_hf(source: Path, model: Path | None) -> tuple[Path, Path, list[Path], list[_Group]]:
    if model is not None:
        raise ConfigError(f"{source} is a Hugging Face folder, which has its own config; --model goes with Megatron's")
    if (table := find_quantization(read_json(source / "config.json"))) is not None:
        raise ConfigError(
            f"{source} is quantised already ({table.get('quant_method')!r}, blocks {table.get('weight_block_size')}), "
            "expected a model in high precision: quantising twice adds errors"
        )
    hf = HFCheckpoint(source)
    tensors = [Tensor(name, hf.shape(name), hf.dtype(name)) for name in hf.names()]
    return source, source, hf.files(), [_Group([t], lambda name=t.name: [hf.read(name)]) for t in tensors]


def _open_megatron(source: Path, model: Path | None) -> tuple[Path, Path, list[Path], list[_Group]]:
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
    return source, model, sorted(source.glob("*.distcp")), groups


def _num_bytes(tensor: Tensor, quantized: set[str], block: tuple[int, int]) -> int:
    if tensor.name not in quantized:
        return tensor.num_bytes
    return math.prod(tensor.shape) + torch.float32.itemsize * math.prod(grid_of(tensor.shape, block))


def _encode(
    group: _Group, quantized: set[str], block: tuple[int, int], measure: bool = True
) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, Any]]]:
    """Return the tensors of a group as stored, and with ``measure`` the errors of the quantised tensors."""
    stored: dict[str, torch.Tensor] = {}
    errors: dict[str, dict[str, Any]] = {}
    for tensor, content in zip(group.tensors, group.read(), strict=True):
        name = tensor.name
        if content.is_floating_point() and not (finite := content.isfinite()).all():
            raise NumericsError(
                f"{name} holds {int((~finite).sum())} values of {content.numel()} that are not finite; the source is "
                "not worth quantising, and nothing was put in place"
            )
        if name not in quantized:
            stored[name] = content.contiguous()
            continue
        total = ErrorSum(block) if measure else None
        stored[name], stored[name + SCALE] = quantize_by_stripes(content, block, total)
        if total is not None:
            errors[name] = asdict(total.total())
    return stored, errors


def quantize_and_show(source: Path, out: Path, model: Path | None, options: Options, as_json: bool = False) -> None:
    """Run ``quantize`` on all ranks; rank 0 prints what was written, and the tensors with the largest errors."""
    ranks = Ranks()
    result = quantize(source, out, model, options, ranks)
    if ranks.rank == 0:
        print(json.dumps(_as_json(result, options), indent=1) if as_json else _summarise(result, options))


def _as_json(result: Quantized, options: Options) -> dict[str, Any]:
    counts = {name: getattr(result, name) for name in ("bytes_before", "bytes_after", "num_files", "num_resumed")}
    about = {"out": str(result.out), "block": options.block, "verified": options.verify}
    errors = {name: asdict(figures) for name, figures in result.errors.items()}
    return {**about, "num_tensors": len(result.shapes), **counts, "errors": errors}


def _summarise(result: Quantized, options: Options) -> str:
    files = f"{result.num_files} file" + "s" * (result.num_files > 1)
    if result.num_resumed:
        files += f", {result.num_resumed} of them from an interrupted start"
    sizes = f"{decimal(result.bytes_before)} -> {decimal(result.bytes_after)}"
    lines = [
        f"{len(result.errors)} of {len(result.shapes)} tensors in FP8, blocks of {options.block[0]} x "
        f"{options.block[1]}; {sizes} in {files}; {'verified' if options.verify else 'not verified'}",
        " ".join([*(f"{word:>11}" for word in HEADER), " tensor"]),
    ]
    errors = result.errors.values()
    for name, e in sorted(result.errors.items(), key=lambda item: -item[1].relative_error)[:NUM_WORST]:
        figures = f"{e.relative_error:11.5f} {e.max_error:11.3g} {e.max_error_of_block:11.5f}"
        lines.append(f"{figures} {e.underflow:11.3g} {e.num_zero_blocks:11d} {e.num_saturated:11d}  {name}")
    median = statistics.median(e.relative_error for e in errors)
    zeros, saturated = sum(e.num_zero_blocks for e in errors), sum(e.num_saturated for e in errors)
    totals = f"{zeros} blocks of zeros, {saturated} saturated values"
    lines.append(f"{median:11.5f} median; {totals}; all in {result.out / FP8_ERRORS}")
    if ragged := [name for name in result.errors if is_misread(result.shapes[name], options.block)]:
        lines.append(
            f"note: {some(ragged)} are no whole number of blocks; transformers 5.12 refuses or misreads such weights "
            "where it dequantises, and SGLang refuses some of them"
        )
    return "\n".join(lines)
