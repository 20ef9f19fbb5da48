"""verl's Megatron engine with its own router replay on a CPU, watched (examples/verl_watch.py).

Prints what the watch says of right routes, and of replay that puts the routes of one layer into the next. The model is
built by megarl: verl's bridge to Hugging Face weights needs Transformer Engine.
"""

# verl has an environment of its own: make verl
# pyright: reportMissingImports=false

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import on_cpu  # noqa: F401 (before Megatron)
import torch
import torch.distributed as dist
import verl  # noqa: F401
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.config import McoreActorConfig, McoreEngineConfig, PolicyLossConfig
from verl.workers.config.engine import EngineRouterReplayConfig
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.megatron import transformer_impl
from verl.workers.utils import losses

from megarl.errors import ReplayError
from megarl.megatron.model import build_model, transformer_config
from megarl.models.shapes import read_shape

CONFIG = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 64, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False, "norm_topk_prob": True,
}  # fmt: skip
LENGTHS, PROMPT, FOLDER = (9, 7, 12, 6), 3, Path(sys.argv[1])


def engine_of(mode: str):
    """verl's constructor, and the model that its bridge would make; no optimizer."""
    hf = SimpleNamespace(**CONFIG)
    model = SimpleNamespace(
        hf_config=hf, model_type="language_model", tokenizer=SimpleNamespace(pad_token_id=0), get=dict(CONFIG).get,
        mtp=SimpleNamespace(enable=False, enable_train=False),
    )  # fmt: skip
    engine_config = McoreEngineConfig(sequence_parallel=False, router_replay=EngineRouterReplayConfig(mode=mode))
    engine = EngineRegistry.new("language_model", "megatron", model, engine_config, None, None)
    shape = read_shape(FOLDER)
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    overrides = {"moe_enable_routing_replay": True, **recompute}
    engine.tf_config = transformer_config(shape, overrides, torch.float32)
    engine.module = build_model(shape, engine.tf_config)
    return engine


def batch_of(num_layers: int, size: int) -> TensorDict:
    random = torch.Generator().manual_seed(0)

    def nested(make) -> torch.Tensor:
        return torch.nested.as_nested_tensor([make(length) for length in LENGTHS], layout=torch.jagged)

    def routes(length: int) -> torch.Tensor:
        scores = torch.rand(length - 1, num_layers, CONFIG["num_experts"], generator=random)
        return scores.argsort(-1)[..., : CONFIG["num_experts_per_tok"]].to(torch.uint8)

    data = TensorDict({
        "input_ids": nested(lambda length: torch.randint(1, 64, (length,), generator=random)),
        "position_ids": nested(torch.arange),
        "loss_mask": nested(lambda length: torch.arange(length) >= PROMPT),
        "prompts": nested(lambda length: torch.ones(PROMPT, dtype=torch.int64)),
        "responses": nested(lambda length: torch.ones(length - PROMPT, dtype=torch.int64)),
        "response_mask": nested(lambda length: torch.ones(length - PROMPT, dtype=torch.int64)),
        "old_log_probs": nested(lambda length: -4.2 + 0.5 * torch.randn(length - PROMPT, generator=random)),
        "advantages": nested(lambda length: torch.randn(1, generator=random).expand(length - PROMPT).clone()),
        "routed_experts": nested(routes),
    }, batch_size=len(LENGTHS))  # fmt: skip
    tu.assign_non_tensor(
        data, use_dynamic_bsz=False, micro_batch_size_per_gpu=size, temperature=1.0, enable_routing_replay=True
    )
    tu.assign_non_tensor(data, global_batch_size=len(LENGTHS))
    return data


def gradient(engine, loss: str, size: int) -> torch.Tensor:
    """Of verl's ppo_loss with this policy loss, in micro-batches of ``size`` sequences."""
    config = McoreActorConfig(
        rollout_n=2, ppo_micro_batch_size_per_gpu=size, clip_ratio_high=0.28, clip_ratio_c=1e9,
        policy_loss=PolicyLossConfig(loss_mode=loss),
    )  # fmt: skip
    engine.module[0].zero_grad()
    data = batch_of(CONFIG["num_hidden_layers"], size)
    engine.forward_backward_batch(data, partial(losses.ppo_loss, config))
    return torch.cat([p.grad.flatten().double() for p in engine.module[0].parameters() if p.grad is not None])


def main() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    (FOLDER / "config.json").write_text(json.dumps(CONFIG))
    engine = engine_of("R3")
    told = {"engine": type(engine).__name__}
    expected = gradient(engine, "vanilla", 2)
    told["right"] = engine.report.metrics()
    for size in (2, 4):
        found = gradient(engine, "megarl_dapo", size)
        told[f"difference of {size}"] = float((found - expected).norm() / expected.norm())
    put_right = transformer_impl.set_router_replay_data

    def put_into_next_layer(routes, *rest, **named):
        shifted = torch.nested.nested_tensor_from_jagged(routes.values().roll(1, 1), routes.offsets())
        put_right(shifted, *rest, **named)

    transformer_impl.set_router_replay_data = put_into_next_layer
    try:
        gradient(engine, "vanilla", 2)
    except ReplayError as error:
        told["wrong"] = str(error)
    transformer_impl.set_router_replay_data = put_right
    engine = engine_of("R2")
    data = batch_of(CONFIG["num_hidden_layers"], 2).exclude("routed_experts")
    data["routed_experts"] = engine.forward_backward_batch(data, None, forward_only=True)["model_output"][
        "routed_experts"
    ]
    engine.forward_backward_batch(data, lambda model_output, **_: (model_output["log_probs"].values().sum(), {}))
    told["R2"] = engine.report.metrics()
    print(json.dumps(told))


if __name__ == "__main__":
    main()
