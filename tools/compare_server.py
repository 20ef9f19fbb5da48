"""A real SGLang server against transformers on the same device: log-probabilities and experts of its responses.

    python tools/compare_server.py MODEL --prompts FILE.jsonl [--responses 16] [--tokens 128] [--json FILE]
                                   [any --table.key value]

The server gets the weights of the Hugging Face folder MODEL as a run's engine gets the trainer's, twice, and then
samples. transformers reads the same tokens in one pass, with the weights rounded as the server's: `--sglang.fp8 true`
takes weights and activations through FP8 blocks. The mean difference of a log-probability, and the share of (token,
layer) pairs with the same set of experts, must keep the limits of ``LIMITS``; otherwise the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch

import megarl
from megarl.config import Config
from megarl.config.file import parse, split_overrides
from megarl.core.types import Rollout
from megarl.data.prompts import load_prompts
from megarl.data.tokenizer import load_model_tokenizer
from megarl.engines.local.decode import sampling_logprobs
from megarl.engines.local.engine import LocalEngine
from megarl.engines.protocol import SamplingParams
from megarl.engines.weights import read_model_config
from megarl.errors import MegarlError
from megarl.megatron import distributed
from megarl.megatron.policy import DTYPES
from megarl.models.hf_files import HFCheckpoint
from megarl.trainer.engines import make_engine
from megarl.trainer.sampling.requests import EVALUATE, make_requests

sys.path.insert(0, str(Path(__file__).parent))
from bench_rows import take_json

LIMITS = {"fp32": (1e-4, 0.999), "bf16": (0.02, 0.9), "fp8": (0.05, 0.8)}
"""Precision -> (largest mean difference of a log-probability, least share of equal sets). A CPU's server had 1.1e-7 and
100 % in fp32, 1.4e-3 and 98.6 % in bf16; the limits of FP8 are estimates."""


def configuration(options: argparse.Namespace, folder: Path, overrides: dict[str, Any]) -> Config:
    table = {
        "run": {"steps": 1, "dir": str(folder)},
        "model": {"path": str(options.model), "dtype": "fp32"},
        "data": {"train": str(options.prompts), "max_prompt_tokens": 64},
        "rollout": {
            "engine": "sglang",
            "dtype": "bf16",
            "prompts_per_step": 1,
            "group_size": 2,
            "max_response_tokens": options.tokens,
        },
        "train": {"micro_batch_tokens": 64 + options.tokens, "replay": "r3"},
        "optim": {"lr": 1e-6},
    }
    return parse(table, overrides)


def sample(config: Config, num_responses: int) -> tuple[list[Rollout], list[float]]:
    """Responses of the server, and the seconds of the two updates of its weights."""
    seconds = []
    with closing(make_engine(config, print)) as engine, HFCheckpoint(config.model.path) as checkpoint:
        for version in (0, 1):
            started = time.perf_counter()
            engine.update_weights(((name, checkpoint.read(name)) for name in checkpoint.names()), version)
            seconds.append(time.perf_counter() - started)
        prompts = load_prompts(config.data, load_model_tokenizer(config.model))
        request_of = make_requests(config.run.seed, EVALUATE, 0, prompts.__getitem__)
        requests = [request_of(index % len(prompts), index // len(prompts))[0] for index in range(num_responses)]
        params = SamplingParams(max_response_tokens=config.rollout.max_response_tokens, return_routed_experts=True)
        return engine.generate(requests, params), seconds


def differences(config: Config, rollouts: list[Rollout]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """By response: |difference| of each response token's log-probability, and whether each (token, layer)'s set is
    that of transformers.
    """
    fp8 = config.sglang.fp8
    local = LocalEngine(
        read_model_config(config.model.path),
        dtype=DTYPES[config.rollout.dtype],
        device="cuda" if torch.cuda.is_available() else "cpu",
        fp8_rounding=fp8,
        fp8_activations=fp8,
    )
    with HFCheckpoint(config.model.path) as checkpoint:
        local.update_weights(((name, checkpoint.read(name)) for name in checkpoint.names_of_text()), 0)
    model, recorder = local._model, local._recorder
    for rollout in rollouts:
        assert rollout.routed_experts is not None
        assert rollout.routed_mask is not None
        tokens = torch.from_numpy(rollout.tokens.astype(np.int64)).to(model.device)
        with torch.no_grad(), local._arithmetic, recorder.recording():
            logits = model(tokens[None], use_cache=False).logits[0]
            recorder.end_pass(len(tokens))
            experts = recorder.take()["routed_experts"]
        logprobs = sampling_logprobs(logits, config.rollout.temperature, 1.0)[:-1].gather(1, tokens[1:, None])[:, 0]
        own, mask = logprobs.float().cpu().numpy(), rollout.loss_mask[1:]
        rows = np.sort(experts, -1) == np.sort(rollout.routed_experts, -1)
        yield np.abs(own - rollout.rollout_logprobs[1:])[mask], rows.all(-1)[rollout.routed_mask].ravel()


def main() -> int:
    words, file = take_json(sys.argv[1:])
    flags, overrides = split_overrides(words)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--responses", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    options = parser.parse_args(flags)
    if not torch.cuda.is_available():
        megarl.enable_cpu()
    with tempfile.TemporaryDirectory() as folder:
        config = configuration(options, Path(folder), overrides)
        distributed.initialize(config)
        try:
            rollouts, seconds = sample(config, options.responses)
        except MegarlError as error:
            print(f"compare_server: {error}", file=sys.stderr)
            return 2
        finally:
            distributed.shutdown()
        found = list(differences(config, rollouts))
    precision = "fp8" if config.sglang.fp8 else config.rollout.dtype
    errors, is_same = (np.concatenate(column) for column in zip(*found, strict=True))
    largest, least = LIMITS[precision]
    passed = bool(errors.mean() <= largest and is_same.mean() >= least)
    print(
        f"{precision}: {errors.size} tokens; log-probabilities differ by {errors.mean():.2e} on average (limit "
        f"{largest:g}) and {errors.max():.2e} at most; {is_same.mean():.2%} of the sets of experts are equal (limit "
        f"{least:.1%}); updates took {seconds[0]:.2f} and {seconds[1]:.2f} s"
    )
    if file is not None:
        figures = {"mean": float(errors.mean()), "max": float(errors.max()), "same_sets": float(is_same.mean())}
        file.write_text(json.dumps({"precision": precision, "tokens": errors.size, "seconds": seconds, **figures}))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
