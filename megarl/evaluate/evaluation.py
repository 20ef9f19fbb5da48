"""``megarl eval``: sample benchmarks with the weights of a Hugging Face folder or of a run's checkpoint, and count.

    weights -> engine;  for each benchmark: prompts -> responses -> rewards -> files -> figures

Weights of ``model.path`` are streamed from its files, and no Megatron model is built; those of a checkpoint pass
through Megatron in the configuration's layout. Every rank samples its share of the responses; each response has a seed
of its own, so that what comes out does not depend on the ranks.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megarl.config import Config
from megarl.data import benchmarks
from megarl.data.benchmarks import Benchmark
from megarl.data.prompts import Prompt
from megarl.data.rewards import load_reward
from megarl.errors import ConfigError, MegarlError, RolloutError
from megarl.evaluate import folder
from megarl.evaluate.figures import console_of, print_table
from megarl.evaluate.request import EvalRequest
from megarl.evaluate.sampling import draw_lines
from megarl.megatron import distributed
from megarl.megatron.checkpoints.checkpoint import complete_checkpoints
from megarl.megatron.frozen import FrozenModel
from megarl.models.hf_reader import HFCheckpoint
from megarl.rollout.engine import Engine
from megarl.run.progress import StepProgress
from megarl.train.engines import make_engine
from megarl.train.environments import make_environment

Line = dict[str, Any]
"""Of responses.jsonl."""
_STEP_FOLDER = re.compile(r"step_\d+")


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be drawn; the same on every rank."""

    checkpoint: Path | None
    """A step folder."""
    out: Path
    prompts: dict[str, list[Prompt]]
    """By benchmark, also of those that are complete."""
    shared: dict[str, Any]
    """Settings of all benchmarks."""
    own: dict[str, dict[str, Any]]
    """Settings of each."""
    complete: frozenset[str]
    """Benchmarks that are not drawn again."""


def evaluate(request: EvalRequest, world_size: int, console: Console | None = None) -> Path:
    """Evaluate, print the table, and return the folder with all results; a collective call."""
    config = request.layout(world_size)
    distributed.initialize(config)
    progress = StepProgress(enabled=distributed.is_main_rank())
    plan = distributed.from_main_rank(lambda: _plan(request))
    tokenizer = _tokenizer(config.model.path)
    missing = [benchmark for benchmark in request.benchmarks if benchmark.name not in plan.complete]
    for name in sorted(plan.complete):
        progress.line(f"{name}: complete in {plan.out}, not drawn again")
    if missing:
        # What servers print and need on disk belongs to this evaluation, not to a run that may be under way.
        config = config.model_copy(update={"run": config.run.model_copy(update={"dir": str(plan.out)})})
        engine = make_engine(config, progress.line)
        try:
            give_weights(engine, config, plan.checkpoint)
            for benchmark in missing:
                _draw_benchmark(engine, request, benchmark, plan, tokenizer, progress)
        finally:
            engine.close()
    distributed.from_main_rank(lambda: _conclude(request, plan, console))
    distributed.shutdown()
    return plan.out


def find_checkpoint(path: Path) -> Path:
    """The step folder that is meant: ``path`` itself, or the newest in it or in its folder ``checkpoints``.

    ConfigError if there is none. A folder that is being written has another name, so a found one is complete.
    """
    if not path.is_dir():
        raise ConfigError(f"--checkpoint: {path} is no folder; expected a run's folder, or one of its checkpoints")
    if _STEP_FOLDER.fullmatch(path.resolve().name):
        return path
    found = complete_checkpoints(path) or complete_checkpoints(path / "checkpoints")
    if found:
        return found[-1][1]
    if (path / "config.json").is_file():
        raise ConfigError(
            f"--checkpoint: {path} is a Hugging Face folder; evaluate it with --model.path {path} and no --checkpoint"
        )
    raise ConfigError(
        f"--checkpoint: {path} holds no complete checkpoint; expected step_<number>, or a folder that has some in it "
        "or in its folder checkpoints (checkpoint.every writes them)"
    )


def give_weights(engine: Engine, config: Config, checkpoint: Path | None) -> None:
    """Fill the engine. The version of its weights is the steps that they have seen, 0 from model.path.

    A collective call. The Megatron model of a checkpoint is gone when it returns.
    """
    if checkpoint is None:
        with HFCheckpoint(config.model.path) as source:
            engine.update_weights(_tensors(source), version=0)
    else:
        model = FrozenModel(config, checkpoint)
        engine.update_weights(model.export(), version=model.step)


def _tensors(source: HFCheckpoint) -> Iterator[tuple[str, torch.Tensor]]:
    for name in sorted(source.names()):
        yield name, source.read(name)


def _tokenizer(model_path: str) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(model_path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {model_path} holds no tokenizer that transformers can read: {error}") from error


def _plan(request: EvalRequest) -> Plan:
    """On the main rank: find, load and compare everything that can be wrong before anything is sampled."""
    config = request.config
    if not (Path(config.model.path) / "config.json").is_file():
        raise ConfigError(
            f"model.path: {config.model.path} holds no config.json; expected a Hugging Face checkpoint folder"
        )
    checkpoint = None if request.checkpoint is None else find_checkpoint(request.checkpoint)
    if checkpoint is None:
        with HFCheckpoint(config.model.path):  # says so if there are no weights
            pass
    default = config.run_dir / "eval" / ("model" if checkpoint is None else checkpoint.resolve().name)
    out = request.out or default
    tokenizer = _tokenizer(config.model.path)
    for benchmark in request.benchmarks:
        load_reward(benchmark.reward)
    make_environment(config.environment)
    prompts = {
        benchmark.name: benchmarks.load(
            benchmark,
            tokenizer,
            chat_template=config.data.chat_template,
            max_prompt_tokens=config.data.max_prompt_tokens,
            limit=config.eval.max_prompts,
        )
        for benchmark in request.benchmarks
    }
    shared = folder.settings_of(request, checkpoint)
    own = {b.name: folder.settings_of_benchmark(request, b, prompts[b.name]) for b in request.benchmarks}
    found = folder.complete_results(out)
    folder.refuse_other_settings(out, found, shared, own)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out: {out} cannot be made: {error}") from error
    return Plan(checkpoint, out, prompts, shared, own, frozenset(found) & frozenset(prompts))


def _draw_benchmark(
    engine: Engine,
    request: EvalRequest,
    benchmark: Benchmark,
    plan: Plan,
    tokenizer: PreTrainedTokenizerBase,
    progress: StepProgress,
) -> None:
    """Sample, judge and save one benchmark; a collective call."""
    started = time.perf_counter()
    prompts = plan.prompts[benchmark.name]
    total = len(prompts) * request.samples
    mine = [divmod(index, request.samples) for index in range(dist.get_rank(), total, dist.get_world_size())]
    lines: list[Line] = []
    failure: MegarlError | None = None
    try:
        with progress.bar(benchmark.name, len(mine)) as advance:
            lines = draw_lines(engine, request.config, benchmark, prompts, mine, tokenizer, advance)
    except MegarlError as error:
        failure = error
    distributed.fail_together(failure, f"the evaluation on {benchmark.name}")
    gathered: list[Any] | None = [None] * dist.get_world_size() if distributed.is_main_rank() else None
    dist.gather_object(lines, gathered)
    distributed.from_main_rank(lambda: _save(request, benchmark, plan, gathered or [], engine.weight_version))
    progress.line(f"{benchmark.name}: {total} responses in {time.perf_counter() - started:.1f} s")


def _save(
    request: EvalRequest,
    benchmark: Benchmark,
    plan: Plan,
    gathered: Sequence[list[Line]],
    version: int,
) -> None:
    """On the main rank. Responses are kept even if no reward could be had, but the benchmark is then not complete."""
    lines = sorted((line for part in gathered for line in part), key=lambda line: (line["prompt"], line["sample"]))
    first_error = next((line["error"] for line in lines if line["error"] is not None), None)
    threshold = request.config.reward.threshold
    samples = folder.write_benchmark(plan.out, benchmark, plan.prompts[benchmark.name], lines, threshold)
    if not samples.num_valid.any():
        raise RolloutError(
            f"{benchmark.name}: no response has a reward, {benchmark.reward} or the environment failed; first: "
            f"{first_error}"
        )
    known = {"weights_version": version, "first_error": first_error}
    settings = plan.shared | plan.own[benchmark.name]
    folder.write_result(plan.out, benchmark, settings, known, samples, request.ks)


def _conclude(request: EvalRequest, plan: Plan, console: Console | None) -> None:
    """On the main rank: figures for the k of this call, eval.json, the table."""
    results: dict[str, Mapping[str, Any]] = {}
    threshold = request.config.reward.threshold
    before = folder.complete_results(plan.out)
    for benchmark in request.benchmarks:
        name = benchmark.name
        known = {key: before[name][key] for key in ("weights_version", "first_error")}
        samples = folder.read_samples(plan.out, name, len(plan.prompts[name]), request.samples, threshold)
        settings = plan.shared | plan.own[name]
        results[name] = folder.write_result(plan.out, benchmark, settings, known, samples, request.ks)
    folder.write_summary(plan.out, request, plan.shared)
    shown = console_of(console)
    weights = request.config.model.path if plan.checkpoint is None else plan.checkpoint
    engine, temperature = request.config.rollout.engine, request.config.eval.temperature
    shown.print(
        f"{weights}, engine {engine}, temperature {temperature:g}", highlight=False, markup=False, soft_wrap=True
    )
    print_table(results, shown)
    shown.print(f"eval: {plan.out / 'eval.json'}", highlight=False, markup=False, soft_wrap=True)
