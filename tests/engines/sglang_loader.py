"""Loads requests as SGLang's own DeepSeek models do: ``python sglang_loader.py IN OUT``, in SGLang's environment.

IN holds (name -> shape of the model's parameters, updates as lists of requests); OUT gets, for each update,
name -> parameter, zero where no request has changed it.
"""

import sys
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.models.deepseek_common.deepseek_weight_loader import (  # pyright: ignore[reportMissingImports]
    DeepseekV2WeightLoaderMixin,
)


class Model(DeepseekV2WeightLoaderMixin):
    config = SimpleNamespace(q_lora_rank=1, n_routed_experts=8)
    quant_config = None
    num_fused_shared_experts = 0
    pp_group = SimpleNamespace(is_last_rank=True)
    model = SimpleNamespace()

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self.held = {name: torch.zeros(shape) for name, shape in shapes.items()}

    def named_parameters(self) -> Any:
        return self.held.items()

    def post_load_weights(self, **_: Any) -> None:
        """Splits kv_b_proj, which these models lack."""


if __name__ == "__main__":
    shapes, updates = torch.load(sys.argv[1])
    found = []
    for requests in updates:
        model = Model(shapes)
        for request in requests:
            model.do_load_weights(request)
        found.append(model.held)
    torch.save(found, sys.argv[2])
