"""``megarl convert`` and ``megarl quantize``."""

import os
from pathlib import Path
from typing import Literal

import pydantic

from megarl import enable_cpu
from megarl.config.command import Overrides, Positional, command
from megarl.config.process_environment import compile_caches


@command
class _Rewrite:
    """A checkpoint that is written as another one."""

    source: Positional[Path]
    """The folder of a checkpoint."""
    out: Positional[Path]
    """The folder to write; it appears when it is complete."""
    shard_gib: float = pydantic.Field(2.0, gt=0, allow_inf_nan=False)
    """Size of a safetensors file."""
    json: bool = False
    """Print what was written as JSON: docs/commands.md."""
    overwrite: bool = False
    """Replace OUT if it exists, at the end and in one step."""

    @property
    def shard_bytes(self) -> int:
        return int(self.shard_gib * 2**30)


@command
class Convert(_Rewrite):
    """Convert a Hugging Face checkpoint into Megatron's torch_dist format, or back."""

    model: Path | None = None
    """For a Megatron source, a folder with config and tokenizer; a converted checkpoint has its own."""
    dtype: Literal["keep", "fp32", "bf16", "fp16"] = "keep"
    """Of the output."""
    layers: Literal["installed", "local", "te"] = "installed"
    """Whose names Megatron will look for: those of its local layers or of Transformer Engine's."""
    drop: tuple[str, ...] = ()
    """Globs of tensors that the model does not have and that may be left out (prediction layers)."""

    def run(self, overrides: Overrides) -> None:
        enable_cpu()
        from megarl.convert.conversion import DTYPES, convert
        from megarl.convert.job import Options
        from megarl.stand_ins.te import find_te

        os.environ.update(compile_caches(os.environ))
        layers = ("te" if find_te()[0] else "local") if self.layers == "installed" else self.layers
        options = Options(DTYPES[self.dtype], layers, self.drop, overwrite=self.overwrite, shard_bytes=self.shard_bytes)
        convert(self.source, self.out, self.model, options, self.json)


@command
class Quantize(_Rewrite):
    """Write a checkpoint with FP8 weights, as SGLang and transformers read it: docs/fp8.md."""

    block: tuple[pydantic.PositiveInt, pydantic.PositiveInt] = (128, 128)
    """Rows and columns that share a scale."""

    def run(self, overrides: Overrides) -> None:
        enable_cpu()
        from megarl.convert.job import Options
        from megarl.convert.quantization import quantize

        options = Options(block=self.block, overwrite=self.overwrite, shard_bytes=self.shard_bytes)
        quantize(self.source, self.out, options, self.json)
