"""Which parameters SGLang's models hold in fp32: ``python sglang_dtypes.py FOLDER...``, in SGLang's environment.

Prints one line of JSON: a list of names for each folder, of the model that a server in bf16 makes of its config.
"""

import json
import sys
from pathlib import Path

import torch
from sglang.srt.configs.model_config import ModelConfig  # pyright: ignore[reportMissingImports]
from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel  # pyright: ignore
from sglang.srt.model_loader.utils import get_model_architecture, set_default_torch_dtype  # pyright: ignore
from sglang.srt.runtime_context import SpawnRanks, publish  # pyright: ignore[reportMissingImports]
from sglang.srt.server_args import ServerArgs  # pyright: ignore[reportMissingImports]


def fp32_of(folder: str) -> list[str]:
    """Without weights: on the meta device."""
    settings = {"device": "cpu", "dtype": "bfloat16", "attention_backend": "intel_amx"}  # the one on CPUs with sinks
    publish(ServerArgs(model_path=folder, **settings), role="scheduler", ranks=SpawnRanks(0))
    if not torch.distributed.is_initialized():
        init_distributed_environment(1, 0, f"file://{Path(folder).absolute()}/store", 0, backend="gloo")
        initialize_model_parallel()
    model = ModelConfig(folder, dtype="bfloat16")
    with set_default_torch_dtype(torch.bfloat16), torch.device("meta"):
        built = get_model_architecture(model)[0](config=model.hf_config, quant_config=None)
    return [name for name, parameter in built.named_parameters() if parameter.dtype == torch.float32]


if __name__ == "__main__":
    print(json.dumps([fp32_of(folder) for folder in sys.argv[1:]]))
