"""``megarl eval``: sample and score benchmarks with the weights of a Hugging Face folder or of a run's checkpoint.

    weights -> engine;  for each benchmark: prompts -> responses and rewards -> files -> scores

Sampling and scoring are shared with runs (``megarl.trainer.sampling.evaluation``); this command brings the weights, the
engine and the folder of results, whose files are written atomically:

    <out>/eval.json                    scores of all benchmarks, weights, configuration
    <out>/<benchmark>/responses.jsonl  one line per response, by prompt and sample
    <out>/<benchmark>/prompts.jsonl    one line per prompt, with its pass rate
"""

import json
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from megarl.config import Config
from megarl.config.file import as_toml
from megarl.core.sampling.collector import Key
from megarl.data import benchmarks
from megarl.data.benchmarks import Benchmark
from megarl.data.judge import load_reward
from megarl.data.prompts import ChatTemplate, Prompt
from megarl.data.records import require_file, write_jsonl
from megarl.data.tokenizer import load_model_tokenizer
from megarl.engines.player import Sample, describe_input
from megarl.engines.protocol import Engine
from megarl.errors import ConfigError, RewardError, printable, refusal, refuse_if, reworded
from megarl.files.outputs import require_own_files, write_output
from megarl.megatron import distributed
from megarl.megatron.checkpoints.checkpoint import FrozenModel
from megarl.megatron.checkpoints.folders import complete_checkpoints
from megarl.models.hf_files import HFCheckpoint, check_tensors, describe_left_out
from megarl.models.names import hf_shapes
from megarl.models.shapes import read_shape
from megarl.ops.evaluate.request import EvalRequest, with_keys
from megarl.run.folder import read_run_id
from megarl.run.progress import StepProgress
from megarl.text_table import text_table
from megarl.trainer.engines import make_engine
from megarl.trainer.sampling import evaluation as shared
from megarl.trainer.sampling.evaluation import PlayedBenchmark, Samples

Json = dict[str, Any]
_STEP_FOLDER = re.compile(r"step_\d+")
_TRAINING = {"sampling", "estimate", "gvm", "credit", "train", "optim", "recompute", "checkpoint", "log", "sft"}
"""Tables of the configuration that do not affect an evaluation."""
_FILES = ("responses.jsonl", "prompts.jsonl")


@dataclass(frozen=True, slots=True)
class Task:
    """What to sample, and where to write the results; the same on every rank."""

    request: EvalRequest
    checkpoint: Path | None
    """A step folder; None: the weights of model.path."""
    out: Path
    prompts: Mapping[str, Sequence[Prompt]]
    """By benchmark."""


def evaluate(request: EvalRequest, world_size: int) -> Path:
    """Evaluate, print the table, and return the folder with all results; a collective call."""
    config = request.layout(world_size)
    for benchmark in request.benchmarks:  # before ranks wait for a result
        require_file(benchmark.source)
    distributed.initialize(config)
    progress = StepProgress(distributed.is_main_rank())
    task = distributed.from_main_rank(lambda: _prepare(request))
    if task.checkpoint is not None and config.parallel != request.config.parallel:
        left_out = as_toml(request.config.parallel.model_dump(exclude_defaults=True))
        progress.line(f"one process loads the whole checkpoint, and leaves out parallel = {left_out}")
    tokenizer = load_model_tokenizer(config.model)
    # Servers write below run.dir. Keep the files out of a run in progress.
    config = with_keys(config, run={"dir": str(task.out)})
    tables: dict[str, Json] = {}
    with closing(make_engine(config, progress.line)) as engine:
        _send_weights(engine, config, task.checkpoint, progress)
        for benchmark in request.benchmarks:
            started, name = time.perf_counter(), benchmark.name
            tables[name] = _draw_benchmark(task, benchmark, engine, tokenizer)
            distributed.from_main_rank(lambda: _write_summary(task, tables))
            total = len(task.prompts[name]) * request.samples
            progress.line(f"{name}: {total} responses in {time.perf_counter() - started:.1f} s")
    distributed.from_main_rank(lambda: _show(task, tables))
    distributed.shutdown()
    return task.out


def _send_weights(engine: Engine, config: Config, checkpoint: Path | None, progress: StepProgress) -> None:
    if checkpoint is not None:
        model = FrozenModel(config, checkpoint)
        return engine.update_weights(model.export(engine.receives_weights), version=model.step)
    with HFCheckpoint(config.model.path) as source:
        expected = hf_shapes(read_shape(config.model.path))
        if left_out := describe_left_out(check_tensors(source, expected)):
            progress.line(left_out)
        names = sorted(expected) if engine.receives_weights else []  # streamed, without a Megatron model
        engine.update_weights(((name, source.read(name)) for name in names), version=0)


def find_checkpoint(path: Path) -> Path:
    """Return a step folder: ``path``, or the newest in ``path`` or ``path/checkpoints``.

    ConfigError without a checkpoint. The name is final: folders under construction have a different name.
    """
    refuse_if(not path.is_dir(), ConfigError, "no_folder_to_evaluate", path=path)
    if _STEP_FOLDER.fullmatch(path.resolve().name):
        return path
    if checkpoints := complete_checkpoints(path) or complete_checkpoints(path / "checkpoints"):
        return checkpoints[-1][1]
    raise ConfigError(refusal("no_complete_checkpoint", path=path))


def _prepare(request: EvalRequest) -> Task:
    """Find, load and check everything before anything is sampled; on the main rank."""
    config = request.config
    checkpoint = None if request.checkpoint is None else find_checkpoint(request.checkpoint).resolve()
    if checkpoint is None:
        with HFCheckpoint(config.model.path):  # raises without weights
            pass
    run, name = config.run_dir, "model" if checkpoint is None else checkpoint.name
    if checkpoint is not None and checkpoint.parent.name == "checkpoints" and read_run_id(checkpoint.parent.parent):
        run = checkpoint.parent.parent
    out = request.out or run / "eval" / name
    tokenizer = load_model_tokenizer(config.model)
    for benchmark in request.benchmarks:
        load_reward(benchmark.reward, config.reward_model)
    shared.make_environment(config.environment, ChatTemplate(tokenizer, {}))
    prompts = {benchmark.name: benchmarks.load(benchmark, tokenizer, config) for benchmark in request.benchmarks}
    require_own_files(out / "eval.json", *(out / name / file for name in prompts for file in _FILES))
    with reworded(OSError, ConfigError, f"--out: {out} cannot be made: "):
        out.mkdir(parents=True, exist_ok=True)
    return Task(request, checkpoint, out, prompts)


def _draw_benchmark(task: Task, benchmark: Benchmark, engine: Engine, tokenizer: PreTrainedTokenizerBase) -> Json:
    """Sample, judge and save one benchmark, and return the result; a collective call."""
    config, name, prompts = task.request.config, benchmark.name, task.prompts[benchmark.name]
    parts = benchmark, prompts, config, tokenizer
    played = distributed.run_together(f"the evaluation on {name}", lambda: PlayedBenchmark.of(*parts))
    with closing(played.player):
        samples = shared.draw(config, engine, played, task.request.samples, shared.turn_ends(config, tokenizer))
    gathered = distributed.gather_on_main_rank([_line(key, sample, tokenizer) for key, sample in samples.items()])
    lines = [line for of_rank in gathered or () for line in of_rank]
    return distributed.from_main_rank(lambda: _save(task, benchmark, lines, engine.weight_version))


def _line(key: Key, sample: Sample, tokenizer: PreTrainedTokenizerBase) -> Json:
    """Return a line. ``length`` counts the model's tokens; ``response`` includes tokens of the environment."""
    rollout = sample.rollout
    return {
        "prompt": key[0],
        "sample": key[1],
        "reward": sample.reward,
        "error": sample.failure and sample.failure.error,
        "finish_reason": "abort" if rollout is None else rollout.finish_reason,
        "length": 0 if rollout is None else int(rollout.loss_mask.sum()),
        "turns": sample.turns,
        "response": "" if rollout is None else tokenizer.decode(rollout.response_tokens, skip_special_tokens=True),
    }


def _save(task: Task, benchmark: Benchmark, lines: list[Json], version: int) -> Json:
    """Save a benchmark, and return the result; on the main rank. RewardError without any reward."""
    lines.sort(key=lambda line: (line["prompt"], line["sample"]))
    name, prompts = benchmark.name, task.prompts[benchmark.name]
    first_error = None
    if (failed := next((line for line in lines if line["error"] is not None), None)) is not None:
        prompt = prompts[failed["prompt"]]
        about = describe_input(prompt=prompt.text, response=failed["response"], answer=prompt.answer)
        first_error = f"{failed['error']}; {about}"
    write_jsonl(task.out / name / "responses.jsonl", lines)
    samples = _to_samples(lines, (len(prompts), task.request.samples), benchmark.threshold)
    pairs = zip(prompts, shared.score_prompts(samples), strict=True)
    rows = ({"prompt": p.index, "source": p.source, "answer": p.answer, **row, "text": p.text} for p, row in pairs)
    write_jsonl(task.out / name / "prompts.jsonl", rows)
    if not samples.num_judged.any():
        raise RewardError(refusal("no_rewards", name=name, reward=benchmark.reward, error=first_error))
    place = {key: getattr(benchmark, key) for key in ("source", "split", "template", "reward")}
    facts = {"weights_version": version, "first_error": first_error}
    return {**place, **facts, "figures": shared.score(samples, task.request.ks)}


def _to_samples(lines: Sequence[Json], shape: tuple[int, int], threshold: float) -> Samples:
    """Return the sorted responses as arrays [P, S]."""
    rewards = np.array([np.nan if line["reward"] is None else line["reward"] for line in lines], dtype=np.float64)
    lengths = np.array([line["length"] for line in lines], dtype=np.int64)
    truncated = np.array([line["finish_reason"] == "length" for line in lines], dtype=bool)
    return Samples(rewards.reshape(shape), lengths.reshape(shape), truncated.reshape(shape), threshold)


def _write_summary(task: Task, tables: Mapping[str, Json]) -> None:
    """Write eval.json: the results so far, weights and configuration."""
    summary = {
        "checkpoint": None if task.checkpoint is None else str(task.checkpoint),
        "samples": task.request.samples,
        "benchmarks": tables,
        "config": task.request.config.model_dump(mode="json", exclude=_TRAINING),
    }
    text = json.dumps(summary, indent=2, ensure_ascii=False, allow_nan=False)
    write_output(task.out / "eval.json", f"{text}\n".encode())


def _show(task: Task, tables: Mapping[str, Json]) -> None:
    """Print the table; on the main rank."""
    config = task.request.config
    weights = config.model.path if task.checkpoint is None else task.checkpoint
    engine, temperature = config.rollout.engine, config.eval.temperature
    print(printable(f"{weights}, engine {engine}, temperature {temperature:g}"), "", to_text(tables), sep="\n")
    print(printable(f"eval: {task.out / 'eval.json'}"))


def to_text(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a table with a row per score of each benchmark, and the remarks below."""
    headings = ("benchmark", "score", "value", "95 %, other prompts", "prompts")
    rows, remarks = list[Sequence[str]](), list[str]()
    for name, result in results.items():
        figures = result["figures"]
        scores = {f"avg@{figures['samples']}": figures["avg"]} | {f"pass@{k}": e for k, e in figures["pass"].items()}
        for index, (label, entry) in enumerate(scores.items()):
            ends = entry["other_prompts"]
            shown = f"{entry['value']:.1%}", f"{ends[0]:.1%} to {ends[1]:.1%}" if ends else "", str(entry["prompts"])
            rows.append(("" if index else name, label, *shown))
        judged = f"{figures['judged']} of {figures['responses']}"
        last = {"judged": judged, "length": f"{figures['length_mean']:.1f}", "truncated": f"{figures['truncated']:.1%}"}
        rows += [*(("", label, value, "", "") for label, value in last.items()), ()]
        if figures["judged"] != figures["responses"]:
            counts = f"{name}: {judged} responses judged, the others count as not correct"
            remarks.append(printable(f"{counts}; first failure: {result['first_error']}"))
    return "\n".join([text_table(rows, headings, words=2), *remarks])
