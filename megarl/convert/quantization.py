"""``megarl quantize``: write a Hugging Face folder as one with FP8 blocks.

Memory: a file of ``shard_bytes``, and a tensor.

transformers and SGLang treat every linear module as FP8, except for the modules in ``modules_to_not_convert`` of the
config. They match the names differently:

- transformers 5.12: a regular expression for the beginning of a module's name, or for the end;
- SGLang 0.5.23: whole components of the name; some earlier releases: any substring.

Both hold the experts of a layer as a single module.
"""

import math
import re
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.filesize import decimal

from megarl.config.command import show
from megarl.convert import megatron_files
from megarl.convert.job import ConversionJob, Options, require_unchanged, same_bits
from megarl.core.fp8 import quantize_fp8
from megarl.core.fp8_names import SCALE, fp8_config, grid_of, is_fp8_weight
from megarl.errors import ConfigError, NumericsError, refusal, refuse_if, some
from megarl.files.hf_config import find_quantization
from megarl.models.hf_files import HFCheckpoint, copy_model_files, pack_shards
from megarl.models.hf_folder import read_json

_WEIGHT = ".weight"
_HIGH = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_EXPERTS = re.compile(r"(.*\.experts)\.")


def _module_of(name: str) -> str:
    """Return the engine's module that holds a tensor."""
    experts = _EXPERTS.match(name)
    return experts[1] if experts else name.removesuffix(_WEIGHT)


def select_tensors(
    tensors: Mapping[str, torch.Tensor], block: tuple[int, int], beside: Collection[str] = ()
) -> tuple[set[str], dict[str, Any]]:
    """Return (names of the tensors that become FP8, ``quantization_config`` of the result); tensors without values.

    Matrices [rows, columns] of projections become FP8, apart from tensors ``beside`` the text model. ConfigError for
    weights that cannot be quantised, and for names that engines would confuse.
    """
    quantized = {name for name, tensor in tensors.items() if tensor.dim() == 2 and is_fp8_weight(name)} - {*beside}
    refuse_if(not quantized, ConfigError, "nothing_to_quantise")
    if integers := [f"{name} ({t.dtype})" for name, t in tensors.items() if name in quantized and t.dtype not in _HIGH]:
        raise ConfigError(f"{some(integers)} are quantised already, expected weights in high precision")
    if fused := [name for name, tensor in tensors.items() if tensor.dim() > 2 and _EXPERTS.match(name)]:
        raise ConfigError(f"{some(fused)} hold all experts of a layer, expected one matrix per expert")
    matrices = (name for name, tensor in tensors.items() if name not in quantized and tensor.dim() > 1)
    kept = (_module_of(name) for name in matrices if name.endswith(_WEIGHT) or _EXPERTS.match(name))
    modules = list(dict.fromkeys(["lm_head", *kept]))  # in model order, and lm_head always: a tied head has no tensor
    converted = list(dict.fromkeys(_module_of(name) for name in tensors if name in quantized))
    for name in modules:
        pattern = re.compile(name)
        if confused := [module for module in converted if pattern.match(module) or name in module]:
            raise ConfigError(refusal("confused_modules", name=name, confused=some(confused)))
    return quantized, fp8_config(modules, block)


def quantize(source: Path, out: Path, options: Options, as_json: bool = False) -> None:
    """Write ``source``, a Hugging Face folder, as an FP8 checkpoint, and print what was written, as text or as JSON.

    ConfigError for a source that is quantised already, CheckpointError for an incomplete source or a full disk,
    NumericsError for a value that is not finite; ``out`` is then unchanged.
    """
    if (megatron_files.torch_dist_folder(source) / "metadata.json").is_file():
        raise ConfigError(refusal("quantize_megatron", source=source))
    if (table := find_quantization(read_json(source / "config.json"))) is not None:
        facts = {"source": source, "method": table.get("quant_method"), "blocks": table.get("weight_block_size")}
        raise ConfigError(refusal("quantised_twice", **facts))
    hf = HFCheckpoint(source)
    require_unchanged(source)
    tensors = {name: torch.empty(hf.shape(name), dtype=hf.dtype(name), device="meta") for name in hf.names()}
    quantized, config = select_tensors(tensors, options.block, hf.names_beside_text())
    scales = {name: math.prod(grid_of(tensors[name].shape, options.block)) for name in quantized}
    sizes = [t.numel() + 4 * scales[name] if name in quantized else t.nbytes for name, t in tensors.items()]
    shards = pack_shards([*tensors], sizes, options.shard_bytes)

    def encode(name: str) -> dict[str, torch.Tensor]:
        content = hf.read(name)
        if content.is_floating_point() and not (finite := content.isfinite()).all():
            raise NumericsError(refusal("not_finite", name=name, bad=int((~finite).sum()), num=content.numel()))
        if name not in quantized:
            return {name: content.contiguous()}
        return dict(zip((name, name + SCALE), quantize_fp8(content, options.block), strict=True))

    job = ConversionJob(out, source, source, options)
    copy = partial(copy_model_files, source, job.folder, None, config, is_whole=True)
    job.write_shards(shards, sum(sizes), encode, copy)
    with HFCheckpoint(job.folder) as written:

        def find_changed(name: str) -> list[str]:
            return [name for name, tensor in encode(name).items() if not same_bits(written.stored(name), tensor)]

        job.verify(shards, find_changed)
    result = {"out": out, **job.publish(to="fp8", block=options.block), "bytes": sum(sizes)}
    result |= {"source_bytes": sum(tensor.nbytes for tensor in tensors.values())}
    result |= {"tensors": len(tensors), "fp8_tensors": len(quantized)}
    blocks = f"{len(quantized)} of {len(tensors)} tensors in FP8, blocks of {options.block[0]} x {options.block[1]}"
    size = f"{decimal(result['source_bytes'])} -> {decimal(result['bytes'])}, {len(shards)} files"
    show(f"{out}: {blocks}; {size}; verified", result, as_json)


def _num_bytes(tensor: torch.Tensor, block: tuple[int, int]) -> int:
    """Return the bytes of a matrix in FP8 with its scales."""
    return tensor.numel() + torch.float32.itemsize * math.prod(grid_of(tensor.shape, block))
