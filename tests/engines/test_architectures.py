"""The local engine on other transformers MoE models: other routers, other checkpoint names, tied and dense ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from local_engines import local_engine
from rollout_oracle import make_requests
from transformers import (
    AutoModelForCausalLM,
    DeepseekV32Config,
    Glm4MoeConfig,
    GptOssConfig,
    HYV3Config,
    MiniMaxM2Config,
    MixtralConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from megarl.engines.local.decode import RouteRecorder
from megarl.engines.protocol import SamplingParams
from megarl.errors import RolloutError, TraceError

SMALL: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
GLM = Glm4MoeConfig(
    **SMALL, n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=16, first_k_dense_replace=1, n_group=1
)
HUNYUAN = HYV3Config(**SMALL, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16)
MINIMAX = MiniMaxM2Config(
    **SMALL,
    num_local_experts=4,
    num_experts_per_tok=2,
    rope_parameters={"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
)
MIXTRAL = MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2)
GPT_OSS = GptOssConfig(**SMALL, num_local_experts=8, num_experts_per_tok=2, sliding_window=3)
SPARSE = DeepseekV32Config(
    **{**SMALL, "num_key_value_heads": 2, "n_routed_experts": 8, "num_experts": 8, "num_experts_per_tok": 4},
    **{"moe_intermediate_size": 16, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "q_lora_rank": 12},
    **{"kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8},
    **{"index_topk": 3, "index_n_heads": 16, "index_head_dim": 8},
)
TIED = Qwen3MoeConfig(
    **SMALL, num_experts=300, num_experts_per_tok=3, moe_intermediate_size=8, tie_word_embeddings=True
)
LINEAR = Qwen3NextConfig(
    **{**SMALL, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    **{"shared_expert_intermediate_size": 16, "full_attention_interval": 2, "linear_key_head_dim": 8},
    **{"linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
)
PARAMS = SamplingParams(max_response_tokens=6)


def save(config: Any, path: Path) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn(buffer.shape))  # zero at first, which would hide a bias that is not synced
    model.save_pretrained(path)
    return model.eval()


@pytest.mark.parametrize(
    ("config", "num_layers"),
    [(GLM, 2), (MIXTRAL, 3), (TIED, 3), (GPT_OSS, 3), (LINEAR, 3), (SPARSE, 2), (HUNYUAN, 2), (MINIMAX, 3)],
    ids=["glm", "mixtral", "tied", "gpt_oss", "linear attention", "sparse", "hunyuan", "minimax"],
)
def test_agrees_with_a_full_forward(config: Any, num_layers: int, tmp_path: Path) -> None:
    model = save(config, tmp_path)
    if config is MINIMAX:  # as published
        file = tmp_path / "config.json"
        rope = {"rope_parameters": None, "rope_theta": 100.0, "rotary_dim": 8}
        file.write_text(json.dumps(json.loads(file.read_text()) | rope))
    called: list[torch.Tensor] = []
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            module.register_forward_pre_hook(lambda m, args: called.append(args[1]))
    for rollout in local_engine(tmp_path).generate(make_requests(5), PARAMS):
        tokens = torch.tensor(rollout.tokens).long()
        called.clear()
        with torch.no_grad():
            logprobs = torch.log_softmax(model(tokens[None], use_cache=False).logits[0], -1)
        expected = logprobs[:-1].gather(1, tokens[1:, None])[:, 0].numpy()
        start = rollout.prompt_length
        np.testing.assert_allclose(rollout.rollout_logprobs[start:], expected[start - 1 :], atol=2e-5)
        routes = torch.stack(called, dim=1).numpy()
        assert routes.shape[1] == num_layers
        assert rollout.routed_experts.dtype == (np.uint16 if config is TIED else np.uint8)
        assert np.array_equal(np.sort(rollout.routed_experts), np.sort(routes))


def test_dense_model_has_no_routes(tmp_path: Path) -> None:
    save(Qwen3Config(**SMALL), tmp_path)
    engine = local_engine(tmp_path)
    with pytest.raises(RolloutError, match="no experts"):
        engine.generate(make_requests(1), PARAMS)
    params = SamplingParams(max_response_tokens=6, return_routed_experts=False)
    assert engine.generate(make_requests(1), params)[0].routed_experts is None


def test_recorder_proves_one_row_per_token(tmp_path: Path) -> None:
    model = save(MIXTRAL, tmp_path)
    recorder = RouteRecorder(model)
    ids = torch.arange(2, 8).view(2, 3)
    with torch.no_grad(), recorder.recording():
        model(ids)
        recorder.end_pass(6)
        with pytest.raises(TraceError, match="routed None, expected"):  # ended already
            recorder.end_pass(6)
        model(ids[:, :1])
        recorder.end_pass(2)
    whole = recorder.take()["routed_experts"]
    assert whole.shape == (8, 3, 2)
    assert len(np.unique(whole)) > 1
    with torch.no_grad(), recorder.recording():
        model(ids)
        with pytest.raises(TraceError, match=r"routed \(6, 2\), expected \[8, top-k\]: one row per token"):
            recorder.end_pass(8)
    with torch.no_grad(), recorder.recording():
        model(ids)
        with pytest.raises(TraceError, match="twice"):
            model(ids)
