"""The folder that holds the results of an evaluation.

    <out>/eval.json                    scores of all benchmarks, weights, configuration, versions of packages
    <out>/<benchmark>/responses.jsonl  one line per response, by prompt and sample
    <out>/<benchmark>/prompts.jsonl    one line per prompt, with its pass rate
    <out>/<benchmark>/result.json      settings and scores; written last: marks a complete benchmark

Files are written atomically.
"""

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from megarl.data.benchmarks import Benchmark
from megarl.data.prompts import Prompt
from megarl.data.records import read_records, write_jsonl
from megarl.errors import ConfigError, DataError
from megarl.files.foreign_json import read_object
from megarl.files.outputs import write_output
from megarl.ops.evaluate.request import EvalRequest
from megarl.run.inputs import digest_of, fingerprint_files, fingerprint_model
from megarl.trainer.sampling.scores import Samples, score, score_prompts

Json = dict[str, Any]
_TRAINING = {"sampling", "estimate", "gvm", "credit", "train", "optim", "recompute", "checkpoint", "log", "sft"}
"""Tables of the configuration that do not affect an evaluation."""
_COMMON = (
    *("rollout.engine", "rollout.dtype", "sglang.fp8", "rollout.top_p"),
    *("rollout.fp8_rounding", "rollout.fp8_activations", "rollout.fp8_kv_cache"),
    *("rollout.max_response_tokens", "eval.temperature", "reward.threshold", "run.seed"),
)
_PLACES = ("model.path", "checkpoint")
"""Places of weights. Weights are compared by content."""
_CHECKPOINT = ("manifest.json", "conversion.json", ".metadata", "common.pt")
_PACKAGES = ("megarl", "torch", "transformers", "megatron-core", "numpy", "sympy", "datasets")


def common_settings(request: EvalRequest, checkpoint: Path | None) -> Json:
    """Return the settings that all benchmarks of a folder share, by flag: weights, engine, sampling."""
    config = request.config
    prints: dict[str, Any] = {**fingerprint_model(config)}
    if checkpoint is not None:
        prints["checkpoint"] = fingerprint_files(checkpoint, _CHECKPOINT)
    # The precision of training affects only weights that pass through Megatron.
    trained = {} if checkpoint is None else {"model.dtype": config.model.dtype}
    return {
        "model.path": str(Path(config.model.path).resolve()),
        "checkpoint": None if checkpoint is None else str(checkpoint.resolve()),
        "weights": digest_of(prints),
        **trained,
        **{key: attrgetter(key)(config) for key in _COMMON},
        "[environment]": config.environment.model_dump(mode="json"),
    }


def benchmark_settings(request: EvalRequest, benchmark: Benchmark, prompts: Sequence[Prompt]) -> Json:
    """Return the settings of one benchmark. The settings hold a hash of the prompts, because a file may move."""
    model = request.config.reward_model.model_dump(include={"text"})
    reward, arguments = request.config.reward, request.config.data.chat_template_args
    weights = {"reward.weights": reward.weights} if reward.weights and benchmark.reward == reward.function else {}
    texts = json.dumps([(prompt.text, prompt.answer) for prompt in prompts])
    return {
        "samples": request.samples,
        "template": benchmark.template,
        "data.chat_template": request.config.data.chat_template,
        **({"data.chat_template_args": arguments} if arguments else {}),
        "reward": benchmark.reward,
        **({"[reward_model]": model} if benchmark.reward == "reward_model" else {}),
        **weights,
        "number of prompts": len(prompts),
        "sha256 of prompts and answers": hashlib.sha256(texts.encode()).hexdigest(),
    }


def complete_results(out: Path) -> dict[str, Json]:
    return {path.parent.name: _read_json(path) for path in sorted(out.glob("*/result.json"))}


def refuse_other_settings(out: Path, results: Mapping[str, Json], common: Json, settings: Mapping[str, Json]) -> None:
    """Raise ConfigError if the folder holds results of other weights or settings: results must not be mixed."""
    for name, result in results.items():
        expected = common | settings.get(name, {})
        stored = result["settings"]
        differing = [key for key in expected if stored.get(key) != expected[key] and key not in _PLACES]
        if differing:
            first, *further = differing
            others_text = f" (and {len(further)} more: {', '.join(further)})" if further else ""
            outdated = out / name if set(differing) <= set(settings.get(name, ())) else out
            raise ConfigError(
                f"{out} holds {name} evaluated with {first} = {stored.get(first)!r}, this call has "
                f"{expected[first]!r}{others_text}; choose another --out, or remove {outdated}"
            )


def write_benchmark(
    out: Path, request: EvalRequest, name: str, prompts: Sequence[Prompt], responses: Sequence[Json]
) -> Samples:
    folder = out / name
    write_jsonl(folder / "responses.jsonl", responses)
    samples = _to_samples(responses, len(prompts), request, name)
    rows = (
        {"prompt": p.index, "source": p.source, "answer": p.answer, **row, "text": p.text}
        for p, row in zip(prompts, score_prompts(samples), strict=True)
    )
    write_jsonl(folder / "prompts.jsonl", rows)
    return samples


def read_samples(out: Path, request: EvalRequest, name: str, num_prompts: int) -> Samples:
    """Return the samples of a complete benchmark. Raises DataError if responses are missing."""
    path = out / name / "responses.jsonl"
    try:
        return _to_samples([record for _, record in read_records(path)], num_prompts, request, name)
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise DataError(f"{path}: {type(error).__name__}: {error}; remove {path.parent} to sample it again") from error


def write_result(
    out: Path, benchmark: Benchmark, settings: Json, facts: Json, samples: Samples, ks: Sequence[int]
) -> Json:
    """Compute the scores and mark the benchmark as complete. known: weights version and first error of the run."""
    place = {"source": benchmark.source, "split": benchmark.split}
    result = {**place, **facts, "settings": settings, "figures": score(samples, ks)}
    write_output(out / benchmark.name / "result.json", _json(result))
    return result


def write_summary(out: Path, request: EvalRequest, common: Json) -> None:
    """Write eval.json: the results of all benchmarks in the folder, with settings and package versions."""
    results = complete_results(out)
    for result in results.values():
        result["settings"] = {key: value for key, value in result["settings"].items() if key not in common}
    versions: dict[str, str] = {}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    summary = {
        "settings": common,
        "benchmarks": results,
        "config": request.config.model_dump(mode="json", exclude=_TRAINING),
        "packages": versions | {"python": platform.python_version()},
    }
    write_output(out / "eval.json", _json(summary))


def _to_samples(responses: Sequence[Json], num_prompts: int, request: EvalRequest, name: str) -> Samples:
    """Return the responses as [P, S] arrays. ValueError unless the lines are complete and in order."""
    shape = (num_prompts, request.samples)
    if [(line["prompt"], line["sample"]) for line in responses] != list(np.ndindex(shape)):
        expected = f"{num_prompts} prompts * {request.samples} samples in this order"
        raise ValueError(f"found {len(responses)} responses, expected {expected}")
    rewards = np.array([np.nan if line["reward"] is None else line["reward"] for line in responses], dtype=np.float64)
    lengths = np.array([line["length"] for line in responses], dtype=np.int64)
    truncated = np.array([line["finish_reason"] == "length" for line in responses], dtype=bool)
    (threshold,) = (benchmark.threshold for benchmark in request.benchmarks if benchmark.name == name)
    return Samples(rewards.reshape(shape), lengths.reshape(shape), truncated.reshape(shape), threshold)


def _read_json(path: Path) -> Json:
    try:
        table = read_object(path)
    except DataError as error:
        raise DataError(f"{error}; remove {path.parent} to sample it again") from error
    if not isinstance(table.get("settings"), dict) or not isinstance(table.get("figures"), dict):
        raise DataError(f"{path}: expected settings and figures of an evaluation; choose another --out")
    return table


def _json(value: Json) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()
