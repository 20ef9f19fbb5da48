"""The folder of an evaluation: what was asked, what came back, and whether a benchmark in it is complete.

    <out>/eval.json                    figures of all benchmarks, weights, configuration, versions of packages
    <out>/<benchmark>/responses.jsonl  one line per response, by prompt and sample
    <out>/<benchmark>/prompts.jsonl    one line per prompt, with its pass rate
    <out>/<benchmark>/result.json      settings and figures; written last, so with it the benchmark is complete

Every file appears whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from megarl.data.benchmarks import Benchmark
from megarl.data.files import write_atomically
from megarl.data.prompts import Prompt
from megarl.errors import ConfigError, DataError
from megarl.evaluate.figures import Samples, figures, prompt_rows
from megarl.evaluate.request import EvalRequest

Json = dict[str, Any]
_TRAINING = {"sampling", "estimate", "gvm", "credit", "train", "optim", "recompute", "checkpoint", "log", "sft"}
"""Tables that say nothing about an evaluation."""
_PACKAGES = ("megarl", "torch", "transformers", "megatron-core", "numpy", "math-verify", "datasets")


def settings_of(request: EvalRequest, checkpoint: Path | None) -> Json:
    """What all benchmarks of a folder share, by the flag that sets it: weights, engine, sampling."""
    config = request.config
    rollout = config.rollout
    model = Path(config.model.path).resolve()
    # Which training precision the weights passed through says something only where they did.
    trained = {} if checkpoint is None else {"model.dtype": config.model.dtype}
    return {
        "model.path": str(model),
        "checkpoint": None if checkpoint is None else str(checkpoint.resolve()),
        "weights written": _written(model if checkpoint is None else checkpoint),
        **trained,
        "rollout.engine": rollout.engine,
        "rollout.dtype": rollout.dtype,
        "rollout.fp8_rounding": rollout.fp8_rounding,
        "sglang.fp8": config.sglang.fp8,
        "rollout.top_p": rollout.top_p,
        "rollout.max_response_tokens": rollout.max_response_tokens,
        "eval.temperature": config.eval.temperature,
        "reward.threshold": config.reward.threshold,
        "run.seed": config.run.seed,
        "[environment]": config.environment.model_dump(mode="json"),
    }


def settings_of_benchmark(request: EvalRequest, benchmark: Benchmark, prompts: Sequence[Prompt]) -> Json:
    """The same of one benchmark. Prompts are compared by what they say: a file may move."""
    asked = json.dumps([(prompt.text, prompt.answer) for prompt in prompts])
    return {
        "samples": request.samples,
        "template": benchmark.template,
        "data.chat_template": request.config.data.chat_template,
        "reward": benchmark.reward,
        "number of prompts": len(prompts),
        "sha256 of prompts and answers": hashlib.sha256(asked.encode()).hexdigest(),
    }


def _written(folder: Path) -> str:
    """When the newest file with weights was written."""
    files = [path for pattern in ("*.safetensors", "*.distcp") for path in folder.glob(pattern)]
    newest = max((path.stat().st_mtime for path in files), default=0.0)
    return datetime.fromtimestamp(newest, UTC).isoformat(timespec="milliseconds")


def complete_results(out: Path) -> dict[str, Json]:
    """The result of every complete benchmark in a folder, by name."""
    return {path.parent.name: _read_json(path) for path in sorted(out.glob("*/result.json"))}


def refuse_other_settings(out: Path, results: Mapping[str, Json], shared: Json, own: Mapping[str, Json]) -> None:
    """ConfigError if the folder holds results of other weights or settings: old and new figures must not mix."""
    for name, result in results.items():
        wanted = shared | own.get(name, {})
        found = result["settings"]
        differing = [key for key in wanted if found.get(key) != wanted[key]]
        if differing:
            first, rest = differing[0], differing[1:]
            more = f" (and {len(rest)} more: {', '.join(rest)})" if rest else ""
            outdated = out / name if set(differing) <= set(own.get(name, ())) else out
            raise ConfigError(
                f"{out} holds {name} evaluated with {first} = {found.get(first)!r}, this call has "
                f"{wanted[first]!r}{more}; choose another --out, or remove {outdated}"
            )


def write_benchmark(
    out: Path,
    benchmark: Benchmark,
    prompts: Sequence[Prompt],
    responses: Sequence[Json],
    threshold: float,
) -> Samples:
    """Write what was drawn for a benchmark, and return it as arrays. threshold: of a correct response's reward."""
    folder = out / benchmark.name
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "responses.jsonl", _lines(responses))
    samples = _samples(responses, len(prompts), threshold)
    rows = (
        {"prompt": p.index, "source": p.source, "answer": p.answer, **row, "text": p.text}
        for p, row in zip(prompts, prompt_rows(samples), strict=True)
    )
    write_atomically(folder / "prompts.jsonl", _lines(rows))
    return samples


def read_samples(out: Path, name: str, num_prompts: int, num_samples: int, threshold: float) -> Samples:
    """What a complete benchmark was computed from; DataError if its responses are not all there."""
    path = out / name / "responses.jsonl"
    try:
        # Not splitlines, which also cuts at separators that a response may hold.
        responses = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
        found = _samples(responses, num_prompts, threshold)
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise DataError(f"{path}: {type(error).__name__}: {error}; remove {path.parent} to draw it again") from error
    if found.rewards.shape != (num_prompts, num_samples):
        raise DataError(
            f"{path}: found {len(responses)} responses, expected {num_prompts} prompts * {num_samples} samples; remove "
            f"{path.parent} to draw it again"
        )
    return found


def write_result(
    out: Path, benchmark: Benchmark, settings: Json, known: Json, samples: Samples, ks: Sequence[int]
) -> Json:
    """Compute the figures and mark the benchmark as complete. ``known``: what the run said besides its responses."""
    result = {
        "source": benchmark.source,
        "split": benchmark.split,
        **known,
        "settings": settings,
        "figures": figures(samples, ks),
    }
    write_atomically(out / benchmark.name / "result.json", _json(result))
    return result


def write_summary(out: Path, request: EvalRequest, shared: Json) -> Json:
    """Write eval.json: the results of all benchmarks in the folder, and under which circumstances."""
    results = complete_results(out)
    own = {
        name: {key: value for key, value in result["settings"].items() if key not in shared}
        for name, result in results.items()
    }
    versions = {name: found for name in _PACKAGES if (found := _version(name))}
    summary = {
        "settings": shared,
        "benchmarks": {name: result | {"settings": own[name]} for name, result in results.items()},
        "config": request.config.model_dump(mode="json", exclude=_TRAINING),
        "packages": versions | {"python": platform.python_version()},
    }
    write_atomically(out / "eval.json", _json(summary))
    return summary


def _samples(responses: Sequence[Json], num_prompts: int, threshold: float) -> Samples:
    """[P, S] arrays of lines that are in order."""
    shape = (num_prompts, len(responses) // num_prompts)
    order = [(line["prompt"], line["sample"]) for line in responses]
    if order != [(prompt, sample) for prompt in range(shape[0]) for sample in range(shape[1])]:
        raise ValueError("responses are missing, or not in the order of prompts and samples")
    rewards = np.array([np.nan if line["reward"] is None else line["reward"] for line in responses], dtype=np.float64)
    lengths = np.array([line["length"] for line in responses], dtype=np.int64)
    truncated = np.array([line["finish_reason"] == "length" for line in responses], dtype=bool)
    return Samples(rewards.reshape(shape), lengths.reshape(shape), truncated.reshape(shape), threshold)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _read_json(path: Path) -> Json:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read: {error}; remove {path.parent} to draw it again") from error
    if not isinstance(found, dict) or not {"settings", "figures"} <= set(found):
        raise DataError(f"{path}: expected settings and figures of an evaluation; choose another --out")
    return found


def _json(value: Json) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def _lines(rows: Iterable[Json]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows).encode()
