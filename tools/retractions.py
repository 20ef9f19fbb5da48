"""How routes and log-probabilities of a second reading differ from the first: a real SGLang server with a full memory.

    python tools/retractions.py --out FOLDER [--dtype bfloat16] [--rounds 2]

A tiny MoE on a server of this machine's CPUs (``make sglang-cpu``), which admits more requests than it has memory for.
Each response is compared with a prefill of all its tokens, which is what a server does after a retraction:

- calm: responses that were sampled alone. Their rows are of decoding, and differ from the prefill's.
- retracted: up to the last retraction, their rows are the prefill's, and their log-probabilities of the first pass.

pairs: share of (token, layer) rows of generated tokens with other experts; nats: mean and largest difference of a
log-probability; k3 of the two passes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import httpx
import numpy as np
import torch
from safetensors.torch import load_file, save_file

from megarl.config.tables.rollout import SGLangConfig
from megarl.core.types import Rollout, SampleRequest
from megarl.data.tiny import EOS_ID, write_tiny_model
from megarl.engines.protocol import SamplingParams
from megarl.engines.sglang.engine import SGLangEngine
from megarl.engines.sglang.fleet import Fleet
from megarl.engines.sglang.spec import ServerSpec
from megarl.engines.weights import WeightForm
from megarl.files.hf_config import MoeShape
from megarl.routes.answers import decode_routes

PROMPT = np.arange(2, 14, dtype=np.int32)
PARAMS = SamplingParams(max_response_tokens=150, stop_token_ids=(EOS_ID,))
MEMORY = 400


def write_model(folder: Path) -> dict[str, torch.Tensor]:
    """Write a model that hardly ever draws its end token, and return its tensors."""
    write_tiny_model(folder, hidden_size=64, num_experts=8, expert_width=32, initializer_range=0.3)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] *= 2.5
    tensors["lm_head.weight"][EOS_ID] = 0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


def prefill(url: str, tokens: np.ndarray, shape: MoeShape) -> tuple[np.ndarray, np.ndarray]:
    """Return sorted experts [T, L, K] and log-probabilities [T] of a sequence that is read at once."""
    httpx.post(f"{url}/flush_cache").raise_for_status()
    body = {"input_ids": tokens.tolist(), "sampling_params": {"max_new_tokens": 1, "ignore_eos": True}}
    body |= {"return_logprob": True, "logprob_start_len": 0, "return_routed_experts": True}
    meta = httpx.post(f"{url}/generate", json=body, timeout=600.0).raise_for_status().json()["meta_info"]
    rows = decode_routes(meta["routed_experts"], len(tokens), shape, "the prefill").experts
    logprobs = [entry[0] or 0.0 for entry in meta["input_token_logprobs"]]
    return np.sort(rows.astype(int), -1), np.array(logprobs)


def compare(name: str, rollouts: Sequence[Rollout], url: str, shape: MoeShape) -> None:
    differs, gaps = [], []
    for rollout in rollouts:
        rows, logprobs = prefill(url, rollout.tokens, shape)
        assert rollout.routed_experts is not None
        differ = (np.sort(rollout.routed_experts.astype(int), -1) != rows)[:-1].any(-1)
        differs.append(differ[rollout.loss_mask[:-1]])
        gaps.append((logprobs - rollout.rollout_logprobs)[rollout.loss_mask])
    pairs, gap = np.concatenate(differs), np.concatenate(gaps)
    print(
        f"{name}: {len(rollouts)} responses, {len(gap)} tokens; pairs {pairs.mean():.2%}, tokens "
        f"{pairs.any(-1).mean():.2%}; nats {np.abs(gap).mean():.1e}, {np.abs(gap).max():.1e}; "
        f"k3 {np.mean(np.expm1(gap) - gap):.1e}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a new folder")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    options.out.mkdir(parents=True)
    model = options.out / "model"
    tensors = write_model(model)
    python, reserve = Path(".venv-sglang/bin/python").absolute(), ("--schedule-conservativeness", "0.1")
    spec = ServerSpec(model, python, options.dtype, options.out / "log", max_total_tokens=MEMORY, extra_args=reserve)
    settings = SGLangConfig(start_deadline_s=1200.0)
    fleet = Fleet(specs=[spec], settings=settings)
    form, config = WeightForm(getattr(torch, options.dtype)), json.loads((model / "config.json").read_text())
    (url,) = fleet.start()
    engine, shape = SGLangEngine([url], config, fleet=fleet, settings=settings, form=form), MoeShape.of(config)
    try:
        engine.update_weights(tensors.items(), 0)
        calm = [engine.generate([SampleRequest(PROMPT + g, g, 0, 0)], PARAMS)[0] for g in range(options.rounds)]
        compare("calm", calm, url, shape)
        requests = [SampleRequest(PROMPT + g, g, 0, 0) for g in range(5)]
        drawn = [rollout for _ in range(options.rounds) for rollout in engine.generate(requests, PARAMS)]
        print(f"{engine.answer_counts['retractions']} retractions of {len(drawn)} responses")
        compare("retracted", [rollout for rollout in drawn if rollout.reread_mask is not None], url, shape)
    finally:
        engine.close()


if __name__ == "__main__":
    main()
