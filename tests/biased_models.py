"""Models whose routers have expert biases as published ones have them, and what a router with such a bias chooses."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tiny_families import YARN, write_family

from megarl.core.types import Rollout, SampleRequest

SERVABLE: dict[str, dict[str, Any]] = {
    "glm4_moe": {},
    "deepseek_v3": {"rope_parameters": YARN, "moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
}
"""What SGLang's models ask of a config beside; on a CPU, those with latent attention know YaRN alone."""


def write_biased(folder: Path, family: str) -> Path:
    """160 experts with biases of 6.8 to 7.1, DeepSeek's in 8 groups; bf16 holds every other tensor exactly."""
    groups = {"n_group": 8, "topk_group": 4} if family == "deepseek_v3" else {}
    write_family(folder, family, n_routed_experts=160, num_experts_per_tok=8, **groups, **SERVABLE[family])
    source = torch.Generator().manual_seed(0)
    tensors = {name: tensor.bfloat16().float() for name, tensor in load_file(folder / "model.safetensors").items()}
    for name, tensor in tensors.items():
        if name.endswith("e_score_correction_bias"):
            tensor.uniform_(6.8, 7.1, generator=source)
        elif name.endswith("mlp.gate.weight"):  # scores that differ by as much as the biases
            tensor.copy_((0.2 * torch.randn(tensor.shape, generator=source)).bfloat16())
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


TIE = 1e-5
"""Of a router's logits: ten times what two float32 computations differ by."""


def clear_tokens(model: Any, tokens: np.ndarray) -> int:
    """How many tokens come before the first for which rounding could decide between two experts, in transformers."""
    blocks = [module for module in model.modules() if hasattr(module, "route_tokens_to_experts")]
    tied = torch.zeros(len(tokens), dtype=torch.bool)
    source = torch.Generator().manual_seed(0)

    def compare(block: Any, logits: torch.Tensor) -> None:
        chosen = block.route_tokens_to_experts(logits)[0].sort(-1).values
        for _ in range(8):
            noise = TIE * torch.randn(logits.shape, generator=source)
            tied.logical_or_((block.route_tokens_to_experts(logits + noise)[0].sort(-1).values != chosen).any(-1))

    handles = [b.gate.register_forward_hook(lambda _m, _a, out, b=b: compare(b, out)) for b in blocks]
    with torch.no_grad():
        model(torch.as_tensor(tokens.astype(np.int64))[None], use_cache=False)
    for handle in handles:
        handle.remove()
    return int(tied.nonzero()[0]) if tied.any() else len(tokens)


def requests() -> list[SampleRequest]:
    source = np.random.default_rng(0)
    prompts = [source.integers(2, 30, 8, dtype=np.int32) for _ in range(16)]
    return [SampleRequest(prompt_tokens=prompt, group=i, sample=0, seed=i) for i, prompt in enumerate(prompts)]


def compare_routes(rollouts: Sequence[Rollout], policy: Any, settings: Any, oracle: Any) -> float:
    """Share of (token, layer) rows where engine and policy choose the same experts, of those before the first tie of a
    sequence in transformers; one rank."""
    from tiny_world import TEMPERATURE, batch_of, experts_of, micro_batches

    from megarl.megatron.passes import forward
    from megarl.megatron.passes.micro_batches import router_tokens

    micros = micro_batches(settings, batch_of(rollouts))
    with policy.replay.record() as recording:
        forward.run(policy.chunks, micros, temperature=TEMPERATURE, vocab_size=policy.shape.vocab_size)
    equal = []
    for micro, native in zip(micros, recording.routes, strict=True):
        token = router_tokens(micro.batch.cu_seqlens, micro.num_slots, (1, 0), (1, 0))
        ours = native.experts[token >= 0][token[token >= 0].argsort()].long().sort(-1).values
        same = (ours == experts_of(micro.batch).long().sort(-1).values).all(-1)
        for first, last in itertools.pairwise(micro.batch.cu_seqlens.tolist()):
            clear = clear_tokens(oracle, micro.batch.tokens[first:last].numpy())
            equal.append(same[first : min(first + clear, last - 1)])  # the last token has no routes
    rows = torch.cat(equal)
    assert rows.numel() > 500
    return float(rows.float().mean())
