"""Compares the engines on the same responses, before a long run: docs/gap.md.

    python tools/gap.py CHECKPOINT [--config FILE] [--prompts FILE] [--table.key VALUE ...]

    weights -> training engine (Megatron) -> rollout engine;  prompts -> responses -> old-log-prob passes -> verdict

Each pair of precisions samples once. The training engine computes the log-probabilities of the responses twice: with
native routes, and with the routes of the rollout (R3). A single process does the work; no weight changes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megarl import enable_cpu
from megarl.config import Config, ParallelConfig, process_environment
from megarl.config import file as config_file
from megarl.core.measures import mismatch_metrics
from megarl.core.metrics import finalize
from megarl.core.packing import pack, select
from megarl.core.types import Rollout, TrainBatch
from megarl.data.tokenizer import load_model_tokenizer
from megarl.errors import ConfigError, RolloutError
from megarl.megatron import distributed
from megarl.megatron.frozen import FrozenModel
from megarl.megatron.passes import forward
from megarl.megatron.rollout_routes import check_rollouts, deliver_routes, gather_shared
from megarl.models.fit import can_compare
from megarl.models.shapes import read_shape
from megarl.ops.evaluate.evaluation import find_checkpoint
from megarl.ops.evaluate.request import with_keys
from megarl.ops.exits import run_to_exit
from megarl.routes import Disagreement
from megarl.run.progress import StepProgress
from megarl.text_table import text_table
from megarl.trainer.engines import make_engine
from megarl.trainer.environments import turn_ends
from megarl.trainer.mini_batch import split
from megarl.trainer.sampling.requests import EVALUATE, is_changed, load_run_prompts, make_requests, train_params


@dataclass(frozen=True, slots=True)
class GapLimits:
    """A gap above any of the first four limits is bad."""

    k3: float = 1e-2
    """Of the configured pair: the weights of tokens then vary by about sqrt(2 k3) = 14 %."""
    extreme: float = 1e-2
    """Share of tokens whose probability differs by more than a factor of 2."""
    control_k3: float = 1e-6
    """Both engines in fp32, where only the order of sums differs."""
    control_flip: float = 1e-3
    """Share of (token, layer) pairs with other experts, both engines in fp32."""
    cause: float = 0.5
    """Least share of a gap that a cause must account for to be named."""


GAP = GapLimits()


@dataclass(frozen=True, slots=True)
class Gap:
    """Two engines on the same tokens, with or without replay."""

    k1: float
    """Estimate of KL[rollout || training], nats per token; may be negative."""
    k3: float
    """Estimate of the same divergence, never negative."""
    extreme: float
    """Share of tokens whose probability differs by more than a factor of 2."""


@dataclass(frozen=True, slots=True)
class PairGap:
    """The gaps of a pair of precisions."""

    rollout: str
    """fp32, bf16 or fp8; or the words of the configuration."""
    training: str
    is_configured: bool
    num_tokens: int
    """Response tokens compared."""
    native: Gap
    replayed: Gap | None
    """None without routes: a dense model, or an engine without records."""
    flips: tuple[float, ...] | None
    """By MoE layer, the share of tokens with other experts than the rollout's, without replay."""

    @property
    def flip(self) -> float:
        """Mean of ``flips``; 0 without routes."""
        return sum(self.flips) / len(self.flips) if self.flips else 0.0


@dataclass(frozen=True, slots=True)
class GapReport:
    """All pairs of a model, and the meaning of the gaps."""

    pairs: tuple[PairGap, ...]
    is_healthy: bool
    findings: tuple[str, ...]
    """The first finding is the verdict; further findings give cause and remedy."""
    limits: GapLimits

    def to_json(self) -> dict[str, Any]:
        """Return plain data of everything."""
        gaps = [{**asdict(pair), "flip": pair.flip} for pair in self.pairs]
        return {"healthy": self.is_healthy, "findings": self.findings, "limits": asdict(self.limits), "gaps": gaps}

    def to_text(self) -> str:
        """Return a table of gaps, the disagreement by layer, and the verdict."""
        tables = [_gap_table(self.pairs)]
        if routed := [pair for pair in self.pairs if pair.flips]:
            tables.append(_layer_table(routed))
        return "\n\n".join([*tables, "\n  ".join(self.findings)])


def judge(pairs: Sequence[PairGap], replay: str, limits: GapLimits = GAP) -> GapReport:
    """Judge all pairs of a model, the configured pair included. replay: train.replay of the configuration."""
    (configured,) = (pair for pair in pairs if pair.is_configured)
    native, replayed = configured.native, configured.replayed
    used = replayed if replay == "r3" and replayed is not None else native
    for control in (pair for pair in pairs if pair.rollout == pair.training == "fp32"):
        if control.native.k3 > limits.control_k3 or control.flip > limits.control_flip:
            findings = (
                f"BAD: the engines disagree even in fp32: k3 {control.native.k3:.1e} (limit {limits.control_k3:.0e}), "
                f"{control.flip:.2%} other experts (limit {limits.control_flip:.1%}). Something is wrong",
                "neither replay nor precision mends this: compare weights, config.json (rope, norms, top-k "
                "normalisation, shared experts) and the chat template of the two engines before you train",
            )
            return GapReport(tuple(pairs), False, findings, limits)
    causes = list(_causes(pairs, configured, replay, limits))
    size = f"k3 {used.k3:.1e} (limit {limits.k3:.0e}), {used.extreme:.2%} extreme tokens (limit {limits.extreme:.0%})"
    setting = f'{configured.rollout} rollouts, {configured.training} training, replay = "{replay}"'
    if is_healthy := _is_within(used, limits):
        return GapReport(tuple(pairs), is_healthy, (f"healthy: {size}, with {setting}", *causes), limits)
    if used is native and replayed is not None and _is_within(replayed, limits):
        causes.insert(0, f'within the limits with train.replay = "r3": k3 {replayed.k3:.1e}')
    unexplained = (
        "neither replay nor the rollout's precision explains it: suspect other weights, or settings of the engine "
        "(sampling, rope, an FP8 checkpoint); both in fp32 tells"
    )
    verdict = f"BAD: the gap is too large: {size}, with {setting}"
    return GapReport(tuple(pairs), is_healthy, (verdict, *(causes or [unexplained])), limits)


def _is_within(gap: Gap, limits: GapLimits) -> bool:
    return gap.k3 <= limits.k3 and gap.extreme <= limits.extreme


def _causes(pairs: Sequence[PairGap], configured: PairGap, replay: str, limits: GapLimits) -> Iterator[str]:
    """Yield the causes of most of the configured gap."""
    k3 = configured.native.k3
    if not k3 > 0:
        return
    if configured.replayed is not None and (removed := 1 - configured.replayed.k3 / k3) >= limits.cause:
        todo = "" if replay == "r3" else ': set train.replay = "r3"'
        yield f"replay of the rollout's routes removes {removed:.0%} of the gap{todo}"
    for pair in pairs:
        is_exact = pair.rollout == "fp32" and pair.training == configured.training and not pair.is_configured
        if is_exact and (explained := 1 - pair.native.k3 / k3) >= limits.cause:
            yield (
                f"rollout precision explains {explained:.0%} of the gap: it is {pair.native.k3:.1e} with fp32 rollouts"
            )


def _gap_table(pairs: Sequence[PairGap]) -> str:
    rows = []
    for pair in pairs:
        name = f"{pair.rollout} *" if pair.is_configured else pair.rollout
        for replay, gap in (("none", pair.native), ("r3", pair.replayed)):
            if gap is not None:
                flip = "-" if pair.flips is None or replay == "r3" else f"{pair.flip:.2%}"
                numbers = f"{gap.k1:.1e}", f"{gap.k3:.1e}", f"{gap.extreme:.2%}", flip, str(pair.num_tokens)
                rows.append((name, pair.training, replay, *numbers))
    heads = ("rollouts", "training", "replay", "KL (k1)", "k3", "extreme", "other experts", "tokens")
    return text_table(rows, heads, words=3) + "\n* as configured; KL[rollout || training] in nats per token"


def _layer_table(pairs: Sequence[PairGap]) -> str:
    heads = ("MoE layer", *(f"{pair.rollout}/{pair.training}" for pair in pairs))
    by_layer = zip(*(pair.flips or () for pair in pairs), strict=True)
    rows = [(str(index), *(f"{flip:.2%}" for flip in flips)) for index, flips in enumerate(by_layer)]
    return "Tokens with other experts, by layer, without replay:\n" + text_table(rows, heads, words=1)


PRECISIONS: dict[str, dict[str, Any]] = {
    name: {"dtype": dtype, "fp8_rounding": fp8, "fp8_activations": fp8, "fp8_kv_cache": False}
    for name, dtype, fp8 in (("fp32", "fp32", False), ("bf16", "bf16", False), ("fp8", "bf16", True))
}
"""Rollouts of the local engine; fp8 rounds weights and activations."""
WITHOUT_RUN: dict[str, Any] = {
    "run": {"steps": 1},
    "rollout": {"prompts_per_step": 1, "group_size": 2, "max_response_tokens": 1024},
    "optim": {"lr": 1e-6},
}
"""The minimal configuration, for a bare model: the local engine, bf16."""


def find_weights(
    path: Path, file: Path | None, prompts: str | None, overrides: dict[str, Any], trust: bool
) -> tuple[Config, Path | None]:
    """Return the configuration of a Hugging Face folder, a run's folder or its checkpoint, and the step folder.

    Without a step folder, the weights are in model.path. ConfigError for a folder or flags that do not fit.
    """
    checkpoint = None
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("tools/gap.py runs in one process: start it without torchrun")
    if not path.is_dir():
        raise ConfigError(f"{path} is not a folder; expected a Hugging Face folder, a run's folder, or its checkpoint")
    if (path / "config.json").is_file():
        overrides = {**overrides, "model.path": str(path)}
    else:
        checkpoint = find_checkpoint(path).resolve()
        saved = checkpoint.parent.parent / "config.toml"
        file = file or (saved if saved.is_file() else None)
        if file is None:
            raise ConfigError(f"{checkpoint} has no config.toml of a run above it: give --config FILE")
    if prompts is not None:
        overrides = {**overrides, "data.train": prompts}
    if file is not None:
        config = config_file.load(file, overrides, trust=trust)
    elif prompts is None:
        raise ConfigError(f"{path} is a model without a run: give --prompts FILE, or --config FILE")
    else:
        config = config_file.parse(WITHOUT_RUN, overrides, source="tools/gap.py")
    return config, checkpoint


def measure_and_show(
    config: Config, checkpoint: Path | None, responses: int, tokens: int, max_k3: float, as_json: bool
) -> int:
    """Measure, print, and return the exit code: 0 for a healthy gap, 1 for a bad one.

    responses: of each precision; tokens: the longest response.
    """
    alone = _alone(config, tokens)
    distributed.initialize(alone)
    try:
        pairs = list(_measure_all(alone, checkpoint, responses))
    finally:
        distributed.shutdown()
    report: GapReport = judge(pairs, config.train.replay, replace(GAP, k3=max_k3))
    print(json.dumps(report.to_json(), indent=2) if as_json else report.to_text())
    return 0 if report.is_healthy else 1


def _alone(config: Config, tokens: int) -> Config:
    """The configuration for a single process without training; servers record routes, and write to <run.dir>/gap."""
    longest = min(tokens, config.rollout.max_response_tokens)
    rollout = {"prompts_per_step": 1, "group_size": 1, "max_response_tokens": longest}
    room = max(config.train.micro_batch_tokens, (config.data.max_prompt_tokens or 0) + longest)
    train: dict[str, Any] = {"mini_batches": 1, "micro_batch_tokens": room}
    if can_compare(config, read_shape(config.model.path)):
        train["replay"] = "r3"
    one_rank = config.model_copy(update={"parallel": ParallelConfig()})
    return with_keys(one_rank, run={"dir": str(config.run_dir / "gap")}, rollout=rollout, train=train)


def _measure_all(config: Config, checkpoint: Path | None, responses: int) -> Iterator[PairGap]:
    """By training precision, with a single model in memory at a time."""
    pairs = _pairs(config)
    for training in dict.fromkeys(dtype for _, dtype, _ in pairs):
        of_dtype = with_keys(config, model={"dtype": training})
        model = TrainingEngine(of_dtype, checkpoint)
        for rollout, dtype, is_configured in pairs:
            if dtype == training:
                precision = {} if is_configured else PRECISIONS[rollout]
                rollouts = draw(with_keys(of_dtype, rollout=precision), model, responses)
                yield model.compare(rollouts, rollout, is_configured)
        del model


def _pairs(config: Config) -> list[tuple[str, str, bool]]:
    """(rollouts, training, whether configured); the configured pair is first."""
    training, settings = config.model.dtype, config.rollout.model_dump()
    same = (name for name, precision in PRECISIONS.items() if precision.items() <= settings.items())
    configured = next(same, config.rollout.dtype + ("+fp8" if config.rollout.fp8_rounding else ""))
    if config.sglang.fp8 and config.rollout.engine == "sglang":
        configured = "sglang fp8"
    pairs = [(configured, training, True)]
    if config.rollout.engine_kind.fp8_arithmetic:
        pairs += [(name, training, False) for name in PRECISIONS if name != configured]
        if ("fp32", "fp32") not in [pair[:2] for pair in pairs]:
            pairs.append(("fp32", "fp32", False))
    return pairs


def draw(config: Config, model: TrainingEngine, num_responses: int) -> list[Rollout]:
    """Sample with the rollout engine of a configuration, which gets the model's weights.

    RolloutError if a third party changes the weights meanwhile.
    """
    tokenizer = load_model_tokenizer(config.model)
    prompts = load_run_prompts(config, tokenizer)
    request_of = make_requests(config.run.seed, EVALUATE, 0, prompts)
    requests = [request_of(index % len(prompts), index // len(prompts))[0] for index in range(num_responses)]
    params = train_params(config, turn_ends(config, tokenizer), routes=model.replay is not None)
    engine = make_engine(config, StepProgress(enabled=False).line)
    try:
        engine.update_weights(model.export(engine.receives_weights), version=0)
        rollouts = engine.generate(requests, params)
        if is_changed(engine):
            raise RolloutError("somebody else has changed the weights of a server meanwhile; use servers of your own")
    finally:
        engine.close()
    return rollouts


class TrainingEngine(FrozenModel):
    """The model in Megatron, as the old-log-prob pass of a run has it; without an optimizer."""

    def __init__(self, config: Config, checkpoint: Path | None) -> None:
        super().__init__(config, checkpoint, can_compare(config, read_shape(config.model.path)))

    def compare(self, rollouts: Sequence[Rollout], name: str, is_configured: bool) -> PairGap:
        """Compare rollouts with two passes over them. TraceError for routes of a different model."""
        config, shape = self.config, self.shape
        packed = pack(rollouts, np.zeros(len(rollouts)), routes=False)
        micros = split(config, packed)
        batch = select(packed, [sequence for micro in micros for sequence in micro.sequences])
        sizes = {"temperature": config.rollout.temperature, "vocab_size": shape.vocab_size}
        run = partial(_gap, batch, self.chunks, micros, **sizes)
        num_tokens, training = int(batch.loss_mask.sum()), config.model.dtype
        if self.replay is None:
            return PairGap(name, training, is_configured, num_tokens, run(), None, None)
        check_rollouts(rollouts, shape)
        routes = deliver_routes(rollouts, micros, self.replay.layers, shape)
        with self.replay.record(keep=False, compared=routes) as recording:
            native = run()
        num_shared = np.concatenate(gather_shared([recording.shared], micros, self.replay.layers))[..., 0]
        with self.replay.replay(routes, min_agreement=0.0):  # the disagreement is measured, not refused
            replayed = run()
        flips = tuple(Disagreement.of(num_shared, shape.topk).per_layer_flip.tolist())
        return PairGap(name, training, is_configured, num_tokens, native, replayed, flips)


def _gap(batch: TrainBatch, *chunks_and_micros: Any, **sizes: Any) -> Gap:
    """Run the model, and compare the log-probabilities with the rollouts'."""
    outputs = forward.run(*chunks_and_micros, **sizes)
    logprobs = torch.cat([output.logprobs for output in outputs]).float().cpu()
    metrics = finalize(mismatch_metrics(logprobs, batch.rollout_logprobs, batch.loss_mask, batch.cu_seqlens))
    return Gap(metrics["rollout/k1"], metrics["rollout/k3"], metrics["rollout/extreme_2"])


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit code: 0 for a healthy gap, 1 for a bad one, 2 for bad input."""
    return run_to_exit(["gap"], lambda: _run(list(sys.argv[1:] if argv is None else argv)))


def _run(argv: list[str]) -> int:
    words, overrides = config_file.split_overrides(argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="a Hugging Face folder, a run's folder, or a checkpoint")
    parser.add_argument("--config", type=Path, help="the configuration; default that of the run")
    parser.add_argument("--prompts", help="in the place of data.train; needed for a model without a configuration")
    parser.add_argument("--responses", type=int, default=32, help="of each precision")
    parser.add_argument("--tokens", type=int, default=256, help="longest response")
    parser.add_argument("--max-k3", type=float, default=GAP.k3, help="a larger gap per token, as configured, is bad")
    parser.add_argument("--trust", action="store_true", help="as for megarl train")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    given = parser.parse_args(words)
    for flag, value, least in (
        ("responses", given.responses, 1),
        ("tokens", given.tokens, 1),
        ("max-k3", given.max_k3, 0.0),
    ):
        if value < least:
            raise ConfigError(f"--{flag}: found {value}, expected at least {least}")
    enable_cpu()
    config, checkpoint = find_weights(given.checkpoint, given.config, given.prompts, overrides, given.trust)
    process_environment.apply(config)
    return measure_and_show(config, checkpoint, given.responses, given.tokens, given.max_k3, given.json)


if __name__ == "__main__":
    sys.exit(main())
