"""``megarl gap``: compares the engines on the same responses, before a long run.

    weights -> training engine (Megatron) -> rollout engine;  prompts -> responses -> old-log-prob passes -> verdict

Each pair of precisions samples once. The training engine computes the log-probabilities of the responses twice: with
native routes, and with the routes of the rollout (R3). A single process does the work; no weight changes.
"""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
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
from megarl.data.prompts import load_prompts
from megarl.data.tokenizer import load_model_tokenizer
from megarl.errors import ConfigError, refuse_if
from megarl.files.texts import read_table
from megarl.megatron import distributed
from megarl.megatron.checkpoints.checkpoint import FrozenModel
from megarl.megatron.passes import forward
from megarl.megatron.rollout_routes import check_rollouts, deliver_routes, gather_shared
from megarl.models.fit import can_compare, unknown_precisions
from megarl.models.shapes import read_shape
from megarl.ops.evaluate.evaluation import find_checkpoint
from megarl.ops.evaluate.request import with_keys
from megarl.routes import Disagreement
from megarl.run.progress import StepProgress
from megarl.trainer.engines import make_engine
from megarl.trainer.mini_batch import split
from megarl.trainer.sampling.evaluation import turn_ends
from megarl.trainer.sampling.requests import EVALUATE, make_requests, require_weights, train_params
from megarl.watch.gap_verdict import Gap, GapReport, PairGap, judge
from megarl.watch.limits import GAP

_TABLES = read_table(__file__)
PRECISIONS: dict[str, dict[str, Any]] = _TABLES["precisions"]
"""Keys of [rollout], by name."""
WITHOUT_RUN: dict[str, Any] = _TABLES["without_run"]
"""The minimal configuration, for a bare model: the local engine, bf16."""


def find_weights(
    path: Path, file: Path | None, prompts: str | None, overrides: dict[str, Any], trust: bool
) -> tuple[Config, Path | None]:
    """Return the configuration of a Hugging Face folder, a run's folder or its checkpoint, and the step folder.

    Without a step folder, the weights are in model.path. ConfigError for a folder or flags that do not fit.
    """
    checkpoint = None
    refuse_if(int(os.environ.get("WORLD_SIZE", "1")) > 1, ConfigError, "gap_on_ranks")
    refuse_if(not path.is_dir(), ConfigError, "no_gap_folder", path=path)
    if (path / "config.json").is_file():
        overrides = {**overrides, "model.path": str(path)}
    else:
        checkpoint = find_checkpoint(path).resolve()
        if file is None:
            file, places = config_file.find_saved(checkpoint, "give --config FILE")
            overrides = {**places, **overrides}
    overrides = {**overrides, **({} if prompts is None else {"data.train": prompts})}
    if file is not None:
        config = config_file.load(file, overrides, trust=trust)
    elif prompts is None:
        raise ConfigError(f"{path} is a model without a run: give --prompts FILE, or --config FILE")
    else:
        config = config_file.parse(WITHOUT_RUN, overrides, source="megarl gap")
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
    train |= {"replay": "r3"} if can_compare(config, read_shape(config.model.path)) else {}
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
    configured = "sglang fp8" if config.sglang.fp8 and config.rollout.engine == "sglang" else configured
    pairs = [(configured, training, True)]
    if config.rollout.engine_kind.fp8_arithmetic:
        shape = read_shape(config.model.path)
        is_latent = "multi_latent_attention" in shape.fields  # the local engine has no latents
        key = "fp8_rounding" if unknown_precisions(shape) else "fp8_kv_cache" if is_latent else ""
        names = (name for name, values in PRECISIONS.items() if not values.get(key))
        pairs += [(name, training, False) for name in names if name != configured]
        if ("fp32", "fp32") not in [pair[:2] for pair in pairs]:
            pairs.append(("fp32", "fp32", False))
    return pairs


def draw(config: Config, model: "TrainingEngine", num_responses: int) -> list[Rollout]:
    """Sample with the rollout engine of a configuration, which gets the model's weights.

    RolloutError if a third party changes the weights meanwhile.
    """
    tokenizer = load_model_tokenizer(config.model)
    prompts = load_prompts(config.data, tokenizer)
    request_of = make_requests(config.run.seed, EVALUATE, 0, prompts.__getitem__)
    requests = [request_of(index % len(prompts), index // len(prompts))[0] for index in range(num_responses)]
    params = train_params(config, turn_ends(config, tokenizer), routes=model.replay is not None)
    with closing(make_engine(config, StepProgress(enabled=False).line)) as engine:
        engine.update_weights(model.export(engine.receives_weights), version=0)
        rollouts = engine.generate(requests, params)
        require_weights(engine)
    return rollouts


class TrainingEngine(FrozenModel):
    """The model in Megatron, as the old-log-prob pass of a run has it; without an optimizer."""

    def __init__(self, config: Config, checkpoint: Path | None) -> None:
        super().__init__(config, checkpoint, can_compare(config, read_shape(config.model.path)))

    def compare(self, rollouts: Sequence[Rollout], name: str, is_configured: bool) -> PairGap:
        """Compare rollouts with two passes over them. TraceError for routes of a different model."""
        config, shape = self.config, self.shape
        packed = pack(rollouts, np.zeros(len(rollouts)))
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
    logprobs = torch.cat([output.logprobs for output in forward.run(*chunks_and_micros, **sizes)]).float().cpu()
    metrics = finalize(mismatch_metrics(logprobs, batch.rollout_logprobs, batch.loss_mask, batch.cu_seqlens))
    return Gap(metrics["rollout/k1"], metrics["rollout/k3"], metrics["rollout/extreme_2"])
