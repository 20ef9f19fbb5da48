"""One update at the layer shapes of a real model: replay, none, plain Megatron, and replay watched, paired in one run.

    python tools/bench_update.py [--layers 4] [--vocab 2048] [--tokens 16384] [--micros 2] [--length 2048] [--repeats 6]
                                 [--dtype bf16] [--shape qwen3_30b] [--profile] [--json FILE] [any --table.key value]

The model has random weights, and no checkpoint is written: the figures are those of shapes, not of a trained model. An
update is forward, backward and optimizer step over ``--micros`` micro-batches of ``--tokens`` tokens, in sequences of
``--length`` tokens whose routes are random. "plain" is Megatron's own schedule, loss and optimizer without a hook on
the routers (`bench_plain.py`). "watched" is r3 inside a RoutingWatch, with its report. All take turns; a round in
which each was once warms up.

Printed for each: milliseconds, tokens per second, TFLOP/s of the model (6 per active parameter and token, and causal
attention), peak memory on a GPU, and the places where the host waits for the GPU. ``--profile`` adds the kernels that
take the longest.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

import megarl
from megarl.config import Config
from megarl.config.file import parse, split_overrides
from megarl.core.types import Rollout
from megarl.megatron import distributed
from megarl.megatron import policy as policy_module
from megarl.megatron.policy import Policy, schedule_of
from megarl.replay import RoutingReplay
from megarl.trainer.step import TrainStep
from megarl.verify import RoutingWatch

sys.path.insert(0, str(Path(__file__).parent))
from bench_plain import Update, megarl_update, megatron_update, mini_batch, read_clock
from bench_rows import finish, ratio_row, take_json

ON_GPU = torch.cuda.is_available()
PROMPT_TOKENS = 16
SHAPES: Mapping[str, dict[str, int]] = {
    "qwen3_30b": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    },
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 16,
        "num_experts_per_tok": 2,
    },
}
"""Widths of a Qwen3 MoE layer."""


def arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {
        "layers": 4,
        "vocab": 2048,
        "tokens": 16384,
        "micros": 2,
        "length": 2048,
        "repeats": 6,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3_30b")
    parser.add_argument("--profile", action="store_true")
    parsed = parser.parse_args(words)
    if parsed.tokens * parsed.micros // parsed.length % 2 or parsed.tokens % parsed.length:
        parser.error("--tokens must hold whole sequences of --length tokens, and their number over all must be even")
    return parsed


def hf_config(options: argparse.Namespace) -> dict[str, Any]:
    """The config.json of a Qwen3 MoE model of these shapes."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_hidden_layers": options.layers,
        "vocab_size": options.vocab,
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": 40960,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "router_aux_loss_coef": 0.001,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **SHAPES[options.shape],
    }


def configuration(options: argparse.Namespace, folder: Path, overrides: dict[str, Any]) -> Config:
    (folder / "config.json").write_text(json.dumps(hf_config(options)))
    (folder / "prompts.jsonl").write_text('{"prompt": "1=", "answer": "1"}\n')
    table = {
        "run": {"name": "bench", "steps": 1, "dir": str(folder / "run")},
        "model": {"path": str(folder), "dtype": options.dtype},
        "data": {"train": str(folder / "prompts.jsonl"), "max_prompt_tokens": PROMPT_TOKENS},
        "rollout": {
            "prompts_per_step": options.tokens * options.micros // options.length // 2,
            "group_size": 2,
            "max_response_tokens": options.length - PROMPT_TOKENS,
            "dtype": "fp32",
        },
        "train": {
            "mini_batches": 1,
            "micro_batch_tokens": options.tokens,
            "replay": "r3",
            "min_route_agreement": 0.0,  # the routes are random, and the tripwires would drop all of them
            "max_native_flip": "off",
            "max_k3": "off",
        },
        "optim": {"lr": 1e-12},
        "log": {"sinks": []},
    }
    return parse(table, overrides)


def random_rollouts(options: argparse.Namespace) -> list[Rollout]:
    """Responses of one length with random tokens and routes; the last row of routes is missing, as an engine's is."""
    rng, length, shape = np.random.default_rng(0), options.length, SHAPES[options.shape]
    rollouts = []
    for index in range(options.tokens * options.micros // length):
        scores = rng.random((length, options.layers, shape["num_experts"]), dtype=np.float32)
        loss_mask = np.arange(length) >= PROMPT_TOKENS
        rollouts.append(
            Rollout(
                group=index // 2,
                sample=index % 2,
                tokens=rng.integers(2, options.vocab, length).astype(np.int32),
                loss_mask=loss_mask,
                rollout_logprobs=np.where(loss_mask, -np.log(options.vocab), 0).astype(np.float32),
                routed_experts=np.argsort(scores, -1)[..., : shape["num_experts_per_tok"]].astype(np.uint8),
                routed_mask=np.arange(length) < length - 1,
                weight_versions=np.zeros(length, np.int32),
                finish_reason="length",
            )
        )
    return rollouts


def model_flops(options: argparse.Namespace) -> float:
    """Operations of an update: 6 per active parameter and token, and 6 per token, head width and position of causal
    attention.
    """
    shape = SHAPES[options.shape]
    hidden, heads = shape["hidden_size"], shape["num_attention_heads"] * shape["head_dim"]
    keys = shape["num_key_value_heads"] * shape["head_dim"]
    experts = shape["num_experts_per_tok"] * 3 * hidden * shape["moe_intermediate_size"]
    layer = 2 * hidden * (heads + keys) + experts + hidden * shape["num_experts"]
    active = options.layers * layer + hidden * options.vocab
    tokens = options.tokens * options.micros
    return 6.0 * tokens * (active + options.layers * options.length * heads)


class Bench:
    """The updates that are compared, and their times."""

    def __init__(self, config: Config, options: argparse.Namespace) -> None:
        with patch.object(policy_module, "load_hf", return_value=""):  # Megatron's own initial weights stay
            self.policy = Policy(config, schedule_of(config))
        self.rollouts = random_rollouts(options)
        self.advantages = np.random.default_rng(1).normal(size=len(self.rollouts))
        none = config.model_copy(update={"train": config.train.model_copy(update={"replay": "none"})})
        self.steps = {
            name: TrainStep(of, self.policy, config.train.resolved_objective)
            for name, of in (("r3", config), ("none", none))
        }
        minis = {name: mini_batch(step, self.rollouts, self.advantages) for name, step in self.steps.items()}
        self.updates: dict[str, Update] = {name: megarl_update(step, minis[name]) for name, step in self.steps.items()}
        self.updates["plain"] = megatron_update(self.policy, minis["none"])
        self.routes = minis["r3"].routes
        self.updates["watched"] = self.update_watched
        self.seconds: dict[str, list[float]] = {name: [] for name in self.updates}
        self.peak_gib: dict[str, float] = dict.fromkeys(self.updates, 0.0)

    def run(self, name: str) -> float:
        """Update once; return the seconds."""
        is_plain = name == "plain" and self.policy.replay is not None
        if is_plain:
            assert self.policy.replay is not None
            self.policy.replay.detach()
        if ON_GPU:
            torch.cuda.reset_peak_memory_stats()
        started = read_clock()
        self.updates[name]()
        seconds = read_clock() - started
        if ON_GPU:
            self.peak_gib[name] = max(self.peak_gib[name], torch.cuda.max_memory_allocated() / 2**30)
        if is_plain:
            self.policy.replay = RoutingReplay(self.policy.chunks)
        return seconds

    def update_watched(self) -> None:
        assert self.routes is not None
        with RoutingWatch(self.policy.chunks) as watch:
            self.updates["r3"]()
        watch.report(self.routes).require()

    def measure(self, repeats: int) -> None:
        names = list(self.updates)
        for repeat in range(-1, repeats):
            for shift in range(len(names)):
                name = names[(repeat + shift) % len(names)]
                seconds = self.run(name)
                if repeat >= 0:
                    self.seconds[name].append(seconds)

    def waits(self, name: str) -> Counter[str]:
        """How often the host waits for the GPU in an update, by place."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self.updates[name]()  # functions may be compiled anew after another variant
            torch.cuda.set_sync_debug_mode("warn")
            self.updates[name]()
            torch.cuda.set_sync_debug_mode("default")
        waits = [warning for warning in caught if "called a synchronizing" in str(warning.message)]
        places = [(Path(wait.filename), wait.lineno) for wait in waits]  # the null GPU's own copies do not count
        return Counter(f"{file.name}:{line}" for file, line in places if "null_gpu" not in file.parts)

    def kernels(self, name: str, count: int = 14) -> list[str]:
        """The kernels that take the longest in an update."""
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            self.run(name)
        events = sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total)
        return [
            f"{event.self_device_time_total / 1e3:9.2f} ms  x {event.count:<6} {event.key[:100]}"
            for event in events[:count]
            if event.self_device_time_total
        ]


def main() -> int:
    words, file = take_json(sys.argv[1:])
    flags, overrides = split_overrides(words)
    options = arguments(flags)
    if not ON_GPU:
        megarl.enable_cpu()
        torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        config = configuration(options, Path(folder), overrides)
        distributed.initialize(config)
        bench = Bench(config, options)
        bench.measure(options.repeats)
    tokens, flops = options.tokens * options.micros, model_flops(options)
    for name, values in bench.seconds.items():
        seconds = statistics.median(values)
        print(
            f"{name:>6}: {1e3 * seconds:9.1f} ms  {tokens / seconds:9.0f} tokens/s  "
            f"{flops / seconds / 1e12:6.1f} TFLOP/s  peak {bench.peak_gib[name]:5.1f} GiB"
        )
    rows = []
    for name, base in (("none", "plain"), ("r3", "none"), ("r3", "plain"), ("watched", "r3")):
        ratios = [a / b for a, b in zip(bench.seconds[name], bench.seconds[base], strict=True)]
        what = f"{options.layers} layers {options.shape}, vocabulary {options.vocab}, {tokens} tokens"
        rows.append(ratio_row(f"update, {name} / {base}", what, ratios))
        print(f"{rows[-1].name}: {rows[-1].value:.3f} ({rows[-1].low:.3f} to {rows[-1].high:.3f})")
    for name in bench.updates if ON_GPU else ():
        places = bench.waits(name)
        print(f"waits of {name}: {sum(places.values())} {dict(places.most_common(12))}")
    for name in bench.updates if ON_GPU and options.profile else ():
        print(f"kernels of {name}:", *bench.kernels(name), sep="\n")
    return finish(rows, file)


if __name__ == "__main__":
    sys.exit(main())
