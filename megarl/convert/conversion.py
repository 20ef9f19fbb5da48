"""``megarl convert``: Hugging Face checkpoints into Megatron's ``torch_dist`` format and back, without a model.

Memory: a parameter at a time towards Megatron, a file of ``shard_bytes`` towards Hugging Face.
"""

import math
import os
from argparse import Namespace
from dataclasses import asdict
from functools import partial
from itertools import accumulate, chain, compress
from pathlib import Path
from typing import Any

import torch

from megarl.config.command import show
from megarl.config.file import RUN_ID, find_saved
from megarl.convert import megatron_files
from megarl.convert.job import ConversionJob, Options, require_unchanged, same_bits, shown
from megarl.convert.megatron_files import HF_FOLDER, Keys, MegatronCheckpoint, Piece, parameter_shape
from megarl.convert.torch_dist import Chunk, write_file, write_metadata
from megarl.errors import CheckpointError, ConfigError, NumericsError, refusal, refuse_if, some
from megarl.files.hf_config import family_entry
from megarl.models.hf_files import HFCheckpoint, check_tensors, copy_model_files, describe_left_out, pack_shards
from megarl.models.hf_folder import read_json
from megarl.models.layouts import LAYOUTS
from megarl.models.names import hf_shapes, is_fp32
from megarl.models.shapes import ModelShape, read_shape

_MODEL_ARGUMENTS = ("num_layers", "hidden_size", "ffn_hidden_size", "moe_ffn_hidden_size", "num_attention_heads")
"""Arguments that Megatron-LM compares with a checkpoint, or takes from a checkpoint."""


def to_megatron(source: Path, out: Path, options: Options) -> dict[str, Any]:
    """Convert a Hugging Face folder into a ``torch_dist`` checkpoint; return its manifest.

    ConfigError for an unknown model, CheckpointError for an incomplete source or a full disk; ``out`` then stays.
    """
    shape = read_shape(source)
    keys = Keys.of_megatron(shape, options.layers)
    units = megatron_files.units_of(shape)
    with HFCheckpoint(source) as hf:
        dropped = check_tensors(hf, hf_shapes(shape), options.drop)
        require_unchanged(source)
        chunks = [[chunk for piece in unit for chunk in _chunks(piece, keys, shape, hf, options)] for unit in units]
        states = [sorted({name for piece in unit for name in keys.extra_states(piece, shape)}) for unit in units]
        num_bytes = sum(math.prod(chunk.shape) * chunk.dtype.itemsize for chunk in chain(*chunks))
        job = ConversionJob(out, source, source, options)
        with job.writing():
            parts = enumerate(zip(shown("converting", chunks), states, strict=True))
            results = [write_file(job.folder, number, *part) for number, part in parts]
            write_metadata(job.folder, chain(*chunks), chain(*states), results)
            torch.save(_common_state(shape, keys), job.folder / "common.pt")
            (job.folder / HF_FOLDER).mkdir(exist_ok=True)
            copy_model_files(source, job.folder / HF_FOLDER, options.dtype)
        written = MegatronCheckpoint(job.folder, shape)
        job.verify(units, lambda piece: _changed_tensors(piece, hf, written, options))
        _verify_beside(job, source, job.folder / HF_FOLDER)
        about = {"family": shape.family, "keys": asdict(keys), "dropped": dropped}
        return job.publish(to="megatron", bytes=num_bytes, **about)


def to_hf(source: Path, out: Path, model: Path | None, options: Options) -> dict[str, Any]:
    """Convert a ``torch_dist`` checkpoint into a Hugging Face folder; result as of ``to_megatron``.

    model: a folder with config and tokenizer; None for the folder inside a converted checkpoint, or model.path of the
    run that wrote the checkpoint. ConfigError without its config.json, and as ``to_megatron``.
    """
    source = megatron_files.torch_dist_folder(source)
    if model is None and not (model := source / HF_FOLDER).exists():
        model = Path(find_saved(source, "give --model, a folder with the config and tokenizer")[1]["model.path"])
    refuse_if(not (model / "config.json").is_file(), ConfigError, "no_config_of_megatron", source=source, model=model)
    shape = read_shape(model)
    megatron = MegatronCheckpoint(source, shape, options.drop)
    require_unchanged(source)
    pieces = list(chain(*megatron_files.units_of(shape)))
    dtypes = [options.dtype_of(piece.rule.hf[0], megatron.dtype(piece)) for piece in pieces]
    cast_dtypes = set(compress(dtypes, (not is_fp32(piece.rule.hf[0]) for piece in pieces)))
    config_dtype = cast_dtypes.pop() if len(cast_dtypes) == 1 else None  # a config names a single dtype, or no dtype
    num_values = (math.prod(parameter_shape(piece, shape)) for piece in pieces)
    lengths = [count * dtype.itemsize for count, dtype in zip(num_values, dtypes, strict=True)]
    shards = pack_shards(pieces, lengths, options.shard_bytes)
    job = ConversionJob(out, source, model, options)
    copy = partial(copy_model_files, model, job.folder, config_dtype)
    job.write_shards(shards, sum(lengths), lambda piece: dict(hf_tensors(piece, megatron, options)), copy)
    with HFCheckpoint(job.folder) as hf:
        check_tensors(hf, hf_shapes(shape))
        job.verify(shards, lambda piece: _changed_parameter(piece, hf, megatron, options))
        _verify_beside(job, model, job.folder)
    about = {"family": shape.family, "keys": asdict(megatron.keys), "dropped": megatron.dropped}
    return job.publish(to="hf", bytes=sum(lengths), **about)


def _chunks(piece: Piece, keys: Keys, shape: ModelShape, hf: HFCheckpoint, options: Options) -> list[Chunk]:
    dtypes = {options.dtype_of(piece.rule.hf[0], hf.dtype(name)) for name in piece.hf}
    refuse_if(len(dtypes) > 1, CheckpointError, "dtypes_of_parameter", hf=hf, names=some(piece.hf), dtypes=dtypes)
    (dtype,) = dtypes

    def make(first: int, rows: int) -> torch.Tensor:
        tensors = [_cast(name, hf.read(name), dtype) for name in piece.hf]
        return LAYOUTS[piece.rule.layout].cut(tensors, 0, 1, shape)[first : first + rows]

    parts = keys.parts(piece, shape)
    pairs = zip(accumulate((rows for _, (rows, *_) in parts), initial=0), parts, strict=False)
    return [Chunk(place, inner, dtype, partial(make, first, inner[0])) for first, (place, inner) in pairs]


def hf_tensors(piece: Piece, megatron: MegatronCheckpoint, options: Options) -> list[tuple[str, torch.Tensor]]:
    """Return (name, tensor [...]) of a Megatron parameter's Hugging Face tensors. NumericsError for an overflow."""
    parameter = megatron.read(piece)
    dtype = options.dtype_of(piece.rule.hf[0], parameter.dtype)
    tensors = LAYOUTS[piece.rule.layout].join([parameter], megatron.shape)
    return [(name, _cast(name, tensor, dtype).contiguous()) for name, tensor in zip(piece.hf, tensors, strict=True)]


def _cast(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    cast = tensor.to(dtype)
    if cast is not tensor and torch.isinf(cast).sum() > torch.isinf(tensor).sum():
        largest = float(tensor[torch.isfinite(tensor)].abs().max())
        raise NumericsError(f"{name} has values up to {largest:g}, which {dtype} cannot hold; choose another --dtype")
    return cast


def _changed_tensors(piece: Piece, hf: HFCheckpoint, written: MegatronCheckpoint, options: Options) -> list[str]:
    """Return the names of source tensors that differ from the written parameter, converted back."""
    inverted = LAYOUTS[piece.rule.layout].join([written.read(piece)], written.shape)
    expected = (tensor.to(options.dtype_of(piece.rule.hf[0], tensor.dtype)) for tensor in map(hf.read, piece.hf))
    return [name for name, *pair in zip(piece.hf, inverted, expected, strict=True) if not same_bits(*pair)]


def _changed_parameter(piece: Piece, written: HFCheckpoint, source: MegatronCheckpoint, options: Options) -> list[str]:
    """Return the key of the source's parameter if the written tensors, converted back, differ, padding apart."""
    inverted = LAYOUTS[piece.rule.layout].cut([written.read(name) for name in piece.hf], 0, 1, source.shape)
    expected = source.read(piece)
    expected = expected[: source.shape.vocab_size] if piece.rule.layout == "vocab" else expected
    is_same = same_bits(inverted, expected.to(options.dtype_of(piece.rule.hf[0], expected.dtype)))
    return [] if is_same else [source.keys.place(piece, source.shape).key]


def _verify_beside(job: ConversionJob, source: Path, written: Path) -> None:
    """Compare the copied parts beside a text model with the source."""
    if family_entry(str(read_json(source / "config.json").get("model_type")), "beside"):
        with HFCheckpoint(source) as hf, HFCheckpoint(written) as copy:
            names = hf.names_beside_text()
            job.verify([names], lambda name: [] if same_bits(copy.read(name), hf.read(name)) else [name])


def _common_state(shape: ModelShape, keys: Keys) -> dict[str, Any]:
    """Return what Megatron-LM and megarl read beside the weights: the writer's layout, and the model."""
    arguments = {name: shape.fields.get(name) for name in _MODEL_ARGUMENTS} | {"num_experts": shape.num_experts or None}
    return {
        "args": Namespace(**arguments, tensor_model_parallel_size=1, pipeline_model_parallel_size=1),
        "checkpoint_version": 3.0,
        "iteration": 0,
        "content_metadata": {"non_homogeneous_layers": not keys.stacked, "singleton_local_shards": False},
        "loop": {"step": 0, "world_size": 0, "layout": "converted", "model": shape.describe()},
    }


DTYPES = {"keep": None, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def convert(source: Path, out: Path, model: Path | None, options: Options, as_json: bool = False) -> None:
    """Convert a checkpoint into the other format and print a summary; ``as_json``: its manifest.

    ConfigError for a source that is no checkpoint.
    """
    refuse_if(not source.exists(), ConfigError, "no_source", source=source)
    checkpoint = megatron_files.torch_dist_folder(source)
    if checkpoint != source or (checkpoint / "metadata.json").is_file():
        result = to_hf(checkpoint, out, model, options)
    elif os.path.lexists(source / "config.json"):
        refuse_if(model is not None, ConfigError, "model_of_hf_source")
        result = to_megatron(source, out, options)
    elif (source / RUN_ID).is_file():
        raise ConfigError(refusal("run_without_checkpoint", source=source))
    else:
        raise ConfigError(refusal("no_checkpoint_here", source=source))
    names = f"{result['family']}, names of {result['keys']['layers']} layers"
    size = f"{out}: {result['bytes'] / 2**30:.3f} GiB ({names})"
    verified = "read back, inverted and compared with the source: every bit is equal"
    lines = filter(None, [describe_left_out(result["dropped"]), size, verified])
    show("\n".join(lines), {"out": out, **result}, as_json)
