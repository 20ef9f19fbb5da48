"""The local engine in FP8, against transformers' modules with the rounding written by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from local_engines import local_engine
from rollout_oracle import Oracle, make_requests
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, DeepseekV3Config, GPT2Config, MixtralConfig, Qwen2MoeConfig
from transformers.models.qwen3_moe import modeling_qwen3_moe
from transformers.models.qwen3_moe.modeling_qwen3_moe import eager_attention_forward

from megarl.core.fp8 import round_through_fp8
from megarl.core.fp8_names import is_fp8_weight
from megarl.core.types import Rollout
from megarl.data.tiny import write_tiny_model
from megarl.engines.local.engine import FP8Products, LocalEngine
from megarl.engines.protocol import SamplingParams
from megarl.errors import RolloutError

PARAMS = SamplingParams(max_response_tokens=6, stop_token_ids=(1,))
SIZES = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.3}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Channels in one whole group and a part of one, everywhere; the second layer is dense."""
    sizes: dict[str, Any] = {"num_layers": 2, "dense_layers": (1,), "num_experts": 6, "initializer_range": 0.15}
    folder = tmp_path_factory.mktemp("wide") / "model"
    return write_tiny_model(folder, hidden_size=160, expert_width=144, **sizes)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Group by group, float32."""
    groups = []
    for part in x.float().split(128, dim=-1):
        scale = part.abs().amax(-1, keepdim=True).clamp_min(1e-10) / 448
        groups.append((part / scale).to(torch.float8_e4m3fn).float() * scale)
    return torch.cat(groups, -1)


def linear_in_fp8(module: nn.Linear) -> Callable[[torch.Tensor], torch.Tensor]:
    weight = round_through_fp8(module.weight.detach())
    return lambda x: F.linear(rounded(x), weight)


def experts_in_fp8(module: Any) -> Callable[..., torch.Tensor]:
    """One token and one expert at a time."""
    width = module.gate_up_proj.shape[1] // 2
    matrices = [
        [round_through_fp8(part) for part in (both[:width], both[width:], down)]
        for both, down in zip(module.gate_up_proj.detach(), module.down_proj.detach(), strict=True)
    ]

    def forward(hidden: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        results = torch.zeros_like(hidden)
        for token, (experts, weights) in enumerate(zip(chosen.tolist(), shares, strict=True)):
            for expert, share in zip(experts, weights, strict=True):
                gate, up, down = matrices[expert]
                inner = F.silu(rounded(hidden[token]) @ gate.T) * (rounded(hidden[token]) @ up.T)
                results[token] += share * (rounded(inner) @ down.T)
        return results

    return forward


def fp8_oracle(path: Path, without: str = "none of them", attention: str = "eager") -> Oracle:
    """``without``: leaves out modules whose name ends so, whose weights alone are rounded."""
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation=attention, experts_implementation="eager")
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            if name.endswith(without):
                module.weight.data = round_through_fp8(module.weight.data)
            else:
                module.forward = linear_in_fp8(module)
        elif name.endswith(".experts"):
            module.forward = experts_in_fp8(module)
    return Oracle(model.eval())


def equal_share(rollouts: Iterable[Rollout], oracle: Oracle) -> float:
    """Share of log-probabilities within 1e-4. Float noise at a boundary of e4m3 may change one by 1e-2."""
    found = []
    for rollout in rollouts:
        logprobs = oracle.logits(rollout.tokens).float().log_softmax(-1)[:-1]
        expected = logprobs.gather(1, torch.tensor(rollout.tokens[1:, None]).long())[:, 0].numpy()
        found.append(np.abs(rollout.rollout_logprobs[1:] - expected)[rollout.prompt_length - 1 :])
    return float((np.concatenate(found) < 1e-4).mean())


@pytest.mark.parametrize("experts", ["eager", "grouped_mm", None])
def test_the_engine_computes_what_is_written_by_hand(wide: Path, experts: str | None) -> None:
    engine = local_engine(wide, fp8_rounding=True, fp8_activations=True, experts_implementation=experts)
    rollouts = engine.generate(make_requests(4, copies=2), PARAMS)
    oracle = fp8_oracle(wide)
    assert equal_share(rollouts, oracle) > 0.95
    same = [(rollout.routed_experts == oracle.routes(rollout.tokens)).mean() for rollout in rollouts]
    assert np.mean(same) > 0.98  # routers read what is not rounded
    engine.update_weights(load_file(wide / "model.safetensors").items(), 3)  # the memory that is recognised stays
    assert equal_share(engine.generate(make_requests(4), PARAMS), oracle) > 0.95


@pytest.mark.parametrize("without", ["q_proj", "o_proj", "gate_proj", "mlp.down_proj"])
def test_every_projection_counts(wide: Path, without: str) -> None:
    """The test above would notice a single projection whose activations are not rounded."""
    engine = local_engine(wide, fp8_rounding=True, fp8_activations=True)
    assert equal_share(engine.generate(make_requests(4), PARAMS), fp8_oracle(wide, without)) < 0.5


def test_products_are_summed_in_float32_and_rounded_once_to_the_dtype() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(200, 40).bfloat16()
    layer.weight.data = round_through_fp8(layer.weight.data.float())  # as ``hold_in_fp32`` and an update leave it
    x = torch.randn(3, 5, 200).bfloat16()
    with FP8Products({"model.layers.0.self_attn.q_proj.weight": layer.weight}, torch.bfloat16), torch.no_grad():
        found = layer(x)
    exact = (rounded(x).double() @ layer.weight.double().T).float().bfloat16() + layer.bias
    assert found.dtype == torch.bfloat16
    assert (found != exact).float().mean() < 0.01  # float32 sums may differ from float64 ones at a boundary
    torch.testing.assert_close(found, exact)


@pytest.mark.parametrize(
    "use",
    [
        lambda x, w: w @ x.T,
        lambda x, w: F.linear(x, w * 1),
        lambda x, w: torch.bmm(x[None], w.T[None]),
    ],
)
def test_another_use_of_an_fp8_weight_is_an_error(use: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    weight = torch.randn(24, 160)
    with (
        FP8Products({"a.up_proj.weight": weight}, torch.float32),
        pytest.raises(RolloutError, match=r"the model uses a\.up_proj\.weight in"),
    ):
        use(torch.randn(7, 160), weight)


DEEPSEEK = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
DEEPSEEK |= {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_routed_experts": 4, "num_experts_per_tok": 2}
DEEPSEEK |= {"moe_intermediate_size": 16, "num_key_value_heads": 4}


@pytest.mark.parametrize(
    "config",
    [
        MixtralConfig(**SIZES, num_local_experts=4),
        Qwen2MoeConfig(**SIZES, num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=16),
        DeepseekV3Config(**SIZES | DEEPSEEK),
    ],
    ids=lambda config: config.model_type,
)
def test_other_families(config: Any, tmp_path: Path) -> None:
    """Their projections, biases and shared experts, module by module."""
    torch.manual_seed(0)
    config.eos_token_id = config.bos_token_id = config.pad_token_id = None
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    engine = local_engine(tmp_path, fp8_rounding=True, fp8_activations=True)
    seen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for name, module in engine._model.named_modules():
        if isinstance(module, nn.Linear) or name.endswith(".experts"):
            module.register_forward_hook(lambda _, given, made, name=name: seen.update({name: (given, made)}))
    engine.generate(make_requests(1, lengths=(5, 5)), SamplingParams(max_response_tokens=1))
    checked = 0
    for name, (given, made) in seen.items():
        module = engine._model.get_submodule(name)
        if name.endswith(".experts"):
            expected = experts_in_fp8(module)(*given)
        else:
            fp8 = is_fp8_weight(f"{name}.weight")
            assert fp8 == (not name.endswith(("lm_head", "gate")))
            expected = F.linear(rounded(given[0]) if fp8 else given[0], module.weight, module.bias)
        torch.testing.assert_close(made, expected, atol=1e-5, rtol=1e-5)
        checked += 1
    assert checked >= 2 * 5 + 1


def rounded_keys_and_values(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
    key, value = (part.to(torch.float8_e4m3fn).to(part.dtype) for part in (key, value))
    return eager_attention_forward(module, query, key, value, mask, **options)


@pytest.mark.parametrize("fp8", [False, True], ids=["cache alone", "with FP8 products"])
def test_the_cache_holds_rounded_keys_and_values(wide: Path, fp8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = local_engine(wide, fp8_rounding=fp8, fp8_activations=fp8, fp8_kv_cache=True)
    rollouts = engine.generate(make_requests(5, copies=2), PARAMS)
    plain = Oracle(AutoModelForCausalLM.from_pretrained(wide, attn_implementation="eager").eval())
    oracle = fp8_oracle(wide) if fp8 else plain
    assert equal_share(rollouts, oracle) < 0.2
    monkeypatch.setattr(modeling_qwen3_moe, "eager_attention_forward", rounded_keys_and_values)
    assert equal_share(rollouts, oracle) > 0.95


def test_what_cannot_be_in_fp8_is_refused(wide: Path) -> None:
    with pytest.raises(RolloutError, match="fp8_activations without fp8_rounding"):
        local_engine(wide, fp8_activations=True)
    with pytest.raises(RolloutError, match="latents"):
        LocalEngine(DeepseekV3Config(**SIZES | DEEPSEEK), fp8_kv_cache=True)
    with pytest.raises(RolloutError, match=r"such as transformer\.wte"):
        LocalEngine(GPT2Config(vocab_size=32, n_embd=32, n_layer=1, n_head=4), fp8_rounding=True)
