"""Converts Hugging Face checkpoints into Megatron's ``torch_dist`` format and back, without building a model.

Memory: one parameter at a time towards Megatron, one file of ``shard_bytes`` towards Hugging Face. Under torchrun the
ranks divide the files.
"""

import math
from argparse import Namespace
from dataclasses import asdict, dataclass, field
from itertools import chain, compress
from pathlib import Path
from typing import Any

import torch

from megarl.convert.job import ConversionJob, Ranks, fingerprint, require_unchanged, same_bits
from megarl.convert.megatron_files import (
    HF_FOLDER,
    Keys,
    Layers,
    MegatronCheckpoint,
    Piece,
    model_folder,
    parameter_shape,
    torch_dist_folder,
    units_of,
)
from megarl.convert.torch_dist import Chunk, write_file, write_metadata
from megarl.errors import CheckpointError, ConfigError, NumericsError
from megarl.files.outputs import require_apart
from megarl.models.hf_files import HFCheckpoint, check_tensors, copy_model_files, pack_shards
from megarl.models.names import LAYOUTS, hf_shapes, is_fp32
from megarl.models.shapes import ModelShape, read_shape

_MODEL_ARGUMENTS = ("num_layers", "hidden_size", "ffn_hidden_size", "moe_ffn_hidden_size", "num_attention_heads")
"""Arguments that Megatron-LM compares with a checkpoint or takes from it."""


@dataclass(frozen=True, slots=True)
class Options:
    dtype: torch.dtype | None = None
    """Of the output, except for what ``is_fp32``; None keeps each tensor's own."""
    layers: Layers = "te"  # whose names a Megatron checkpoint gets; a source's names are recognised
    stack_layers: bool = False  # one tensor for all layers, Megatron's default with ``--moe-layer-freq 1``
    drop: tuple[str, ...] = ()  # globs of tensors of the source to leave out, such as those of prediction layers
    verify: bool = True  # read everything back, invert it, and compare bit for bit
    overwrite: bool = False
    shard_bytes: int = 2 << 30  # largest safetensors file, unless one parameter is larger

    def dtype_of(self, piece: Piece, stored: torch.dtype) -> torch.dtype:
        if self.dtype is None or not stored.is_floating_point:
            return stored
        return torch.float32 if is_fp32(piece.rule.hf[0]) else self.dtype

    def of_output(self) -> dict[str, Any]:
        """The options that change the output, as plain data."""
        kept = {key: value for key, value in asdict(self).items() if key not in ("verify", "overwrite")}
        return {**kept, "dtype": str(self.dtype)}


@dataclass(frozen=True, slots=True)
class Converted:
    out: Path
    num_parameters: int
    num_bytes: int
    num_files: int
    num_kept: int  # files of this rank that an interrupted conversion had finished
    dropped: list[str]
    source_checksums: bool  # whether the source had checksums of an earlier conversion, and they were compared
    keys: Keys
    shape: ModelShape = field(repr=False)
    num_padded_rows: int = 0  # of the source's vocabulary, left out


def to_megatron(source: Path, out: Path, options: Options, ranks: Ranks) -> Converted:
    """Convert a Hugging Face folder into a ``torch_dist`` checkpoint, on all ranks alike.

    ConfigError for an unknown model, CheckpointError for an incomplete source or disk; ``out`` is then unchanged.
    """
    require_apart(out, source)
    shape = read_shape(source)
    keys = Keys.of_megatron(shape, options.layers, options.stack_layers)
    if keys.stacked and len(shape.moe_layers) not in (0, shape.num_layers):
        raise ConfigError("--stack-layers needs layers of one kind; this model has dense and MoE layers")
    units = units_of(shape)
    with HFCheckpoint(source) as hf:
        dropped = check_tensors(hf, hf_shapes(shape), options.drop)
        checked = options.verify and require_unchanged(source, ranks)
        chunks = [[_chunk(piece, keys, shape, hf, options) for piece in unit] for unit in units]
        states = [sorted({name for piece in unit for name in keys.extra_states(piece, shape)}) for unit in units]
        sizes = [sum(math.prod(chunk.shape) * chunk.dtype.itemsize for chunk in unit) for unit in chunks]
        identity = fingerprint(hf.files(), source, **options.of_output())
        with ConversionJob(out, identity, ranks, overwrite=options.overwrite, model=source) as job:

            def write_unit(number: int, unit: list[Chunk]) -> tuple[Path, Any]:
                return job.folder / f"__{number}_0.distcp", write_file(job.folder, number, unit, states[number])

            def finish(results: list[Any]) -> None:
                write_metadata(job.folder, chain(*chunks), chain(*states), results)
                torch.save(_common_state(shape, keys), job.folder / "common.pt")
                (job.folder / HF_FOLDER).mkdir(exist_ok=True)
                copy_model_files(source, job.folder / HF_FOLDER, options.dtype)

            job.write(chunks, sizes, write_unit, finish)
            if options.verify:
                back = MegatronCheckpoint(job.folder, shape)
                job.verify(units, sizes, lambda piece: _changed_tensors(piece, hf, back, options))
            job.publish(_describe("megatron", shape, keys, options, dropped))
    count = sum(map(len, units))
    return Converted(out, count, sum(sizes), len(units), job.kept, dropped, checked, keys, shape)


def to_hf(source: Path, out: Path, model: Path | None, options: Options, ranks: Ranks) -> Converted:
    """Convert a ``torch_dist`` checkpoint into a Hugging Face folder, as ``to_megatron`` does.

    ``model`` is a folder with config and tokenizer, by default the one inside a converted checkpoint.
    """
    source = torch_dist_folder(source)
    model = model_folder(source, model)
    require_apart(out, source, model)
    shape = read_shape(model)
    megatron = MegatronCheckpoint(source, shape, options.drop)
    checked = options.verify and require_unchanged(source, ranks)
    pieces = list(chain(*units_of(shape)))
    dtypes = [options.dtype_of(piece, megatron.dtype(piece)) for piece in pieces]
    may_be_cast = [not is_fp32(piece.rule.hf[0]) for piece in pieces]
    common = set(compress(dtypes, may_be_cast))  # the config names one dtype, or none
    counts = [math.prod(parameter_shape(piece, shape)) for piece in pieces]
    lengths = [count * dtype.itemsize for count, dtype in zip(counts, dtypes, strict=True)]
    shards, sizes = pack_shards(pieces, lengths, options.shard_bytes)
    identity = fingerprint(source.glob("*.distcp"), model, **options.of_output())
    with ConversionJob(out, identity, ranks, overwrite=options.overwrite, model=model) as job:
        job.write_shards(
            shards,
            sizes,
            encode=lambda piece: (dict(hf_tensors(piece, megatron, options)), None),
            finish=lambda _: copy_model_files(model, job.folder, common.pop() if len(common) == 1 else None),
        )
        if options.verify:
            with HFCheckpoint(job.folder) as hf:
                check_tensors(hf, hf_shapes(shape))
                job.verify(shards, sizes, lambda piece: _changed_parameter(piece, hf, megatron, options))
        job.publish(_describe("hf", shape, megatron.keys, options, megatron.dropped))
    found = (megatron.dropped, checked, megatron.keys, shape, megatron.num_padded_rows)
    return Converted(out, len(pieces), sum(sizes), len(shards), job.kept, *found)


def _chunk(piece: Piece, keys: Keys, shape: ModelShape, hf: HFCheckpoint, options: Options) -> Chunk:
    (place,) = keys.places(piece, shape)
    dtypes = {options.dtype_of(piece, hf.dtype(name)) for name in piece.hf}
    if len(dtypes) > 1:
        names = ", ".join(piece.hf)
        raise CheckpointError(f"{hf.path}: {names} are one parameter, but have dtypes {dtypes}; ask for --dtype")
    (dtype,) = dtypes

    def make() -> torch.Tensor:
        return LAYOUTS[piece.rule.layout].cut([_cast(name, hf.read(name), dtype) for name in piece.hf], 0, 1, shape)

    return Chunk(place, parameter_shape(piece, shape), dtype, make)


def hf_tensors(piece: Piece, megatron: MegatronCheckpoint, options: Options) -> list[tuple[str, torch.Tensor]]:
    """(name, tensor) of the Hugging Face tensors in a parameter."""
    parameter = megatron.read(piece)
    dtype = options.dtype_of(piece, parameter.dtype)
    tensors = LAYOUTS[piece.rule.layout].join([parameter], megatron.shape)
    return [(name, _cast(name, tensor, dtype).contiguous()) for name, tensor in zip(piece.hf, tensors, strict=True)]


def _cast(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    cast = tensor.to(dtype)
    if cast is not tensor and torch.isinf(cast).sum() > torch.isinf(tensor).sum():
        largest = float(tensor[torch.isfinite(tensor)].abs().max())
        raise NumericsError(f"{name} has values up to {largest:g}, which {dtype} cannot hold; choose another --dtype")
    return cast


def _changed_tensors(piece: Piece, hf: HFCheckpoint, written: MegatronCheckpoint, options: Options) -> list[str]:
    """Names of source tensors that the written parameter, converted back, does not equal."""
    back = LAYOUTS[piece.rule.layout].join([written.read(piece)], written.shape)
    wanted = (tensor.to(options.dtype_of(piece, tensor.dtype)) for tensor in map(hf.read, piece.hf))
    return [name for name, *pair in zip(piece.hf, back, wanted, strict=True) if not same_bits(*pair)]


def _changed_parameter(piece: Piece, written: HFCheckpoint, source: MegatronCheckpoint, options: Options) -> list[str]:
    """The key of the source's parameter if the written tensors, converted back, do not equal it, padding apart."""
    back = LAYOUTS[piece.rule.layout].cut([written.read(name) for name in piece.hf], 0, 1, source.shape)
    wanted = source.read(piece)
    wanted = wanted[: source.shape.vocab_size] if piece.rule.layout == "vocab" else wanted
    same = same_bits(back, wanted.to(options.dtype_of(piece, wanted.dtype)))
    return [] if same else [source.keys.places(piece, source.shape)[0].key]


def _common_state(shape: ModelShape, keys: Keys) -> dict[str, Any]:
    """What Megatron-LM and megarl read beside the weights: the layout that wrote them, and the model."""
    return {
        "args": Namespace(
            tensor_model_parallel_size=1,
            pipeline_model_parallel_size=1,
            num_experts=shape.num_experts or None,
            **{name: shape.fields.get(name) for name in _MODEL_ARGUMENTS},
        ),
        "checkpoint_version": 3.0,
        "iteration": 0,
        "content_metadata": {"non_homogeneous_layers": not keys.stacked, "singleton_local_shards": False},
        "loop": {"step": 0, "world_size": 0, "layout": "converted", "model": shape.describe()},
    }


def _describe(to: str, shape: ModelShape, keys: Keys, options: Options, dropped: list[str]) -> dict[str, Any]:
    return {"to": to, "family": shape.family, "keys": asdict(keys), "verified": options.verify, "dropped": dropped}
