"""``megarl gap``: both engines on the same responses, before a long run.

    weights -> training engine (Megatron) -> rollout engine;  prompts -> responses -> old-log-prob passes -> verdict

Each pair of precisions samples once. The training engine then computes the log-probabilities of these responses twice:
with its own routes, and with those of the rollout (R3). One process alone; nothing is trained.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megarl.config import Config, ParallelConfig
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
from megarl.ops.evaluate import command
from megarl.ops.evaluate.evaluation import find_checkpoint
from megarl.ops.evaluate.request import with_keys
from megarl.replay import RoutingReplay
from megarl.routes import Disagreement
from megarl.run.progress import StepProgress
from megarl.trainer.engines import make_engine
from megarl.trainer.environments import turn_ends
from megarl.trainer.mini_batch import split
from megarl.trainer.sampling.requests import is_changed, load_run_prompts, make_requests, train_params
from megarl.trainer.sampling.seeds import EVALUATE
from megarl.watch.gap_verdict import Extreme, Gap, Limits, Measured, Verdict, judge, to_json, to_text

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {"dtype": "fp32", "fp8_rounding": False, "fp8_activations": False, "fp8_kv_cache": False},
    "bf16": {"dtype": "bf16", "fp8_rounding": False, "fp8_activations": False, "fp8_kv_cache": False},
    "fp8": {"dtype": "bf16", "fp8_rounding": True, "fp8_activations": True, "fp8_kv_cache": False},
}
"""Rollouts of the local engine; fp8 rounds weights and what they multiply."""
NUM_EXTREMES = 5
WITHOUT_RUN: dict[str, Any] = {
    "run": {"steps": 1},
    "rollout": {"prompts_per_step": 1, "group_size": 2, "max_response_tokens": 1024},
    "optim": {"lr": 1e-6},
}
"""What a configuration needs, for a model without one: the local engine, bf16."""


@dataclass(frozen=True, slots=True)
class GapRequest:
    """What to compare."""

    config: Config
    checkpoint: Path | None
    """A step folder; None: the weights in model.path."""
    responses: int
    tokens: int
    """Longest response."""


def gap_request(asked: command.Gap, overrides: dict[str, Any]) -> GapRequest:
    """Find weights and configuration of a Hugging Face folder, a run's folder or its checkpoint; ConfigError."""
    path, file, checkpoint = asked.checkpoint, asked.config, None
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("megarl gap runs in one process: start it without torchrun")
    if min(asked.responses, asked.tokens) < 1:
        raise ConfigError(f"--responses {asked.responses} --tokens {asked.tokens}: expected at least 1 of each")
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
    if asked.prompts is not None:
        overrides = {**overrides, "data.train": asked.prompts}
    if file is not None:
        config = config_file.load(file, overrides, trust=asked.trust)
    elif asked.prompts is None:
        raise ConfigError(f"{path} is a model without a run: give --prompts FILE, or --config FILE")
    else:
        config = config_file.parse(WITHOUT_RUN, overrides, source="megarl gap")
    return GapRequest(config, checkpoint, asked.responses, asked.tokens)


def measure_and_show(request: GapRequest, limits: Limits, as_json: bool) -> int:
    """Measure, print, and return the exit code: 0 for a healthy gap, 1 for a bad one."""
    rows, verdict = measure(request, limits)
    print(json.dumps(to_json(rows, verdict, limits), indent=2) if as_json else to_text(rows, verdict))
    return 0 if verdict.is_healthy else 1


def measure(request: GapRequest, limits: Limits) -> tuple[list[Measured], Verdict]:
    """Return one row for each pair of precisions, and what they mean."""
    config = _alone(request)
    distributed.initialize(config)
    try:
        rows = list(_measure_all(request, config))
    finally:
        distributed.shutdown()
    return rows, judge(rows, request.config.train.replay, limits)


def _alone(request: GapRequest) -> Config:
    """The configuration for one process that trains nothing; its servers record routes, and write to <run.dir>/gap."""
    config = request.config
    longest = min(request.tokens, config.rollout.max_response_tokens)
    rollout = {"prompts_per_step": 1, "group_size": 1, "max_response_tokens": longest}
    room = max(config.train.micro_batch_tokens, (config.data.max_prompt_tokens or 0) + longest)
    train: dict[str, Any] = {"mini_batches": 1, "micro_batch_tokens": room}
    if can_compare(config, read_shape(config.model.path)):
        train["replay"] = "r3"
    alone = config.model_copy(update={"parallel": ParallelConfig()})
    return with_keys(alone, run={"dir": str(config.run_dir / "gap")}, rollout=rollout, train=train)


def _measure_all(request: GapRequest, config: Config) -> Iterator[Measured]:
    """By training precision, so that one model is in memory at a time."""
    pairs = _pairs(config)
    for training in dict.fromkeys(of_training for _, of_training, _ in pairs):
        of_dtype = with_keys(config, model={"dtype": training})
        model = TrainingEngine(of_dtype, request.checkpoint)
        for rollout, of_training, is_configured in pairs:
            if of_training == training:
                precision = {} if is_configured else PRECISIONS[rollout]
                rollouts = draw(with_keys(of_dtype, rollout=precision), model, request.responses)
                yield model.compare(rollouts, rollout, is_configured)
        del model


def _pairs(config: Config) -> list[tuple[str, str, bool]]:
    """(rollouts, training, whether configured); the configured pair is first."""
    training, settings = config.model.dtype, config.rollout.model_dump()
    same = (name for name, wanted in PRECISIONS.items() if wanted.items() <= settings.items())
    own = next(same, config.rollout.dtype + ("+fp8" if config.rollout.fp8_rounding else ""))
    if config.sglang.fp8 and config.rollout.engine == "sglang":
        own = "sglang fp8"
    found = [(own, training, True)]
    if config.rollout.engine_kind.fp8_arithmetic:
        found += [(name, training, False) for name in PRECISIONS if name != own]
        if ("fp32", "fp32") not in [pair[:2] for pair in found]:
            found.append(("fp32", "fp32", False))
    return found


def draw(config: Config, model: TrainingEngine, responses: int) -> list[Rollout]:
    """Sample with the rollout engine of a configuration, which gets the model's weights."""
    progress = StepProgress(enabled=False)
    tokenizer = load_model_tokenizer(config.model)
    prompts = load_run_prompts(config, tokenizer)
    request_of = make_requests(config.run.seed, EVALUATE, 0, prompts)
    requests = [request_of(index % len(prompts), index // len(prompts))[0] for index in range(responses)]
    params = train_params(config, turn_ends(config, tokenizer), routes=model.replay is not None)
    engine = make_engine(config, progress.line)
    try:
        engine.update_weights(model.export(engine.receives_weights), version=0)
        rollouts = engine.generate(requests, params)
        if is_changed(engine):
            raise RolloutError("somebody else has changed the weights of a server meanwhile; use servers of your own")
    finally:
        engine.close()
    return rollouts


class TrainingEngine:
    """The model in Megatron, as the old-log-prob pass of a run has it; without an optimizer."""

    def __init__(self, config: Config, checkpoint: Path | None) -> None:
        self.config = config
        self._model = FrozenModel(config, checkpoint)
        self.shape = self._model.shape
        compares = can_compare(config, self.shape)
        self.replay = RoutingReplay(self._model.chunks) if compares else None
        self._tokenizer = load_model_tokenizer(config.model)

    def export(self, receive: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """All weights under their Hugging Face names."""
        return self._model.export(receive)

    def compare(self, rollouts: Sequence[Rollout], name: str, is_configured: bool) -> Measured:
        """Compare rollouts with two passes over them. TraceError if their routes are not of this model."""
        whole = pack(rollouts, np.zeros(len(rollouts)), routes=False)
        micros = split(self.config, whole)
        order = [sequence for micro in micros for sequence in micro.sequences]
        batch = select(whole, order)
        run = partial(
            forward.run,
            self._model.chunks,
            micros,
            temperature=self.config.rollout.temperature,
            vocab_size=self.shape.vocab_size,
        )
        shared: np.ndarray | None = None
        replayed = None
        if self.replay is None:
            native = _logprobs(run())
        else:
            check_rollouts(rollouts, self.shape)
            routes = deliver_routes(rollouts, micros, self.replay.layers, self.shape)
            with self.replay.record(keep=False, compared=routes) as seen:
                native = _logprobs(run())
            shared = np.concatenate(gather_shared([seen.shared], micros, self.replay.layers))[..., 0]
            with self.replay.replay(routes, min_agreement=0.0):  # the disagreement is what is measured
                replayed = _logprobs(run())
        flips = None if shared is None else Disagreement.of(shared, self.shape.topk).per_layer_flip
        return Measured(
            rollout=name,
            training=self.config.model.dtype,
            is_configured=is_configured,
            num_tokens=int(batch.loss_mask.sum()),
            native=_gap(batch, native),
            replayed=None if replayed is None else _gap(batch, replayed),
            flips=None if flips is None else tuple(flips.tolist()),
            extremes=self._extremes(batch, [rollouts[index].group for index in order], native, replayed, shared),
        )

    def _extremes(
        self,
        batch: TrainBatch,
        groups: Sequence[int],
        native: torch.Tensor,
        replayed: torch.Tensor | None,
        shared: np.ndarray | None,
    ) -> tuple[Extreme, ...]:
        """The tokens with the largest differences, without those that are equal to the last bit."""
        gaps = torch.where(batch.loss_mask, (native - batch.rollout_logprobs).abs(), 0.0)
        flipped = np.full(len(gaps), -1)
        if shared is not None and batch.routed_mask is not None:
            flipped[batch.routed_mask.numpy()] = (shared < self.shape.topk).sum(1)
        owner = torch.searchsorted(batch.cu_seqlens, torch.arange(len(gaps)), right=True) - 1
        found = []
        for place in gaps.topk(min(NUM_EXTREMES, len(gaps))).indices.tolist():
            if not gaps[place] > 0:
                break
            sequence = int(owner[place])
            found.append(
                Extreme(
                    group=groups[sequence],
                    position=place - int(batch.cu_seqlens[sequence]),
                    token=_escape(str(self._tokenizer.decode([int(batch.tokens[place])]))),
                    rollout_logprob=float(batch.rollout_logprobs[place]),
                    native_logprob=float(native[place]),
                    replay_logprob=None if replayed is None else float(replayed[place]),
                    flipped_layers=None if flipped[place - 1] < 0 else int(flipped[place - 1]),
                )
            )
        return tuple(found)


def _logprobs(outputs: Sequence[forward.MicroOutput]) -> torch.Tensor:
    return torch.cat([output.logprobs for output in outputs]).float().cpu()


def _gap(batch: TrainBatch, logprobs: torch.Tensor) -> Gap:
    found = finalize(mismatch_metrics(logprobs, batch.rollout_logprobs, batch.loss_mask, batch.cu_seqlens))
    return Gap(found["rollout/k1"], found["rollout/k3"], found["rollout/extreme_2"])


def _escape(text: str) -> str:
    """In quotes, with spaces visible and everything else that does not print escaped."""
    return json.dumps(text, ensure_ascii=False) if text.isprintable() else repr(text)
