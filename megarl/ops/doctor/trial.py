"""A trial of the trainer's first imports and, with a configuration, of all reads and checks before the first step, in a
separate process. A broken package becomes one line, even if the package ends the process or never returns.

Run as ``python -m megarl.ops.doctor.trial``, with JSON on stdin: the configuration as JSON (null: no configuration),
and the names of failed inputs.
"""

import asyncio
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from megarl import enable_cpu
from megarl.config import Config
from megarl.config.trust import safe_environment
from megarl.errors import ConfigError, MegarlError, describe
from megarl.ops.doctor.report import Finding

TIME_LIMIT_S = 900.0
"""Mostly for prompts: a node tokenizes some thousand in a second."""
_MARK = "megarl-trial "
Attempt = Callable[[], object]
"""Raises the problem; a returned dictionary holds facts, such as a note."""
_SINGLE = ("psutil", "safetensors", "transformers", "datasets", "sympy", "pebble", "torch.utils.tensorboard")
"""Modules that the trainer imports late, or behind another module; each is tried alone."""


def run_trial(
    config: Config | None, absent: set[str], failed: Collection[str] = ()
) -> tuple[list[Finding], dict[str, Any]]:
    """Return (checks, facts about torch and the devices).

    Missing modules in ``absent`` are not reported again; inputs with a ``failed`` check are not tried.
    """
    environment = safe_environment() | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    words = [sys.executable, "-W", "ignore", "-m", "megarl.ops.doctor.trial"]
    config_json = None if config is None else config.model_dump_json()
    request = json.dumps({"config": config_json, "failed": sorted(failed)})
    try:
        ended = subprocess.run(
            words, input=request.encode(), capture_output=True, timeout=TIME_LIMIT_S, env=environment
        )
        output, code = ended.stdout, ended.returncode
        errors = ended.stderr.decode(errors="replace").strip().splitlines()
    except subprocess.TimeoutExpired as error:
        output, code, errors = error.stdout or b"", None, []
    checks, facts, attempt = [], {}, "Python"
    for line in output.decode(errors="replace").splitlines():
        message = json.loads(line.removeprefix(_MARK)) if line.startswith(_MARK) else {}
        attempt = message.get("begin", attempt)
        facts |= message.get("facts", {})
        if note := facts.pop("note", ""):
            checks.append(Finding(attempt, "ok", note))
        if "error" in message and message["module"] not in absent:
            checks.append(Finding(attempt, "failed", message["error"], advice=message["advice"]))
    if code != 0:
        ending = f"takes longer than {TIME_LIMIT_S:.0f} s" if code is None else _how_it_ended(code, errors)
        checks.append(Finding(attempt, "failed", f"trying it {ending}", advice=_advice(attempt)))
    return checks, facts


def _how_it_ended(code: int, errors: list[str]) -> str:
    if code < 0:
        return f"ends the process by {signal.Signals(-code).name}"
    return f"ends the process with exit code {code} ({errors[-1] if errors else 'no message'})"


def _advice(name: str) -> str:
    return "" if "." in name and not name.startswith("torch.") else "install a release that fits the others"


def _torch() -> dict[str, Any]:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    name = torch.cuda.get_device_name(0) if count else None
    return {"gpus": count, "gpu": name, "torch": torch.__version__, "cuda": torch.version.cuda}


def _trainer() -> dict[str, Any]:
    enable_cpu()
    import megarl.trainer.loop  # noqa: F401
    from megarl.stand_ins import te

    has_te, problem = te.find_te()
    return {"has_te": has_te, "te_problem": problem}


def attempts(config: Config, failed: Collection[str]) -> Iterator[tuple[str, Attempt]]:
    """Yield (name, attempt) for the trainer's work before the first step, without work on inputs in ``failed``."""
    import torch

    from megarl.core.objectives import try_functions
    from megarl.megatron.policy import check_settings
    from megarl.models.fit import check_reference
    from megarl.models.shapes import read_shape
    from megarl.trainer.engines import load_factory
    from megarl.trainer.sft import read_demonstrations

    shape, objective, reference = read_shape(config.model.path), config.train.resolved_objective, config.reference_path
    if "tokenizer" not in failed:
        yield "tokenizer, prompts, reward", lambda: _read_inputs(config, failed)
        if config.sft is not None and "sft.data" not in failed:
            yield "sft.data", lambda: read_demonstrations(config)
    if "weights" not in failed:
        yield "weights", lambda: _read_weights(config.model.path)
    function, device = config.train.objective_function, "cuda" if torch.cuda.is_available() else "cpu"
    yield "train.objective", lambda: try_functions(objective, function, device, config.train_size)
    yield "[megatron]", lambda: check_settings(config, shape)
    yield "rollout.engine", lambda: load_factory(config)
    if objective.needs_ref_logprobs and reference != config.model.path:
        yield "model.reference", lambda: check_reference(reference, shape)
        yield "weights of model.reference", lambda: _read_weights(reference)


def _read_inputs(config: Config, failed: Collection[str]) -> None:
    """Read the inputs present on this machine, and judge the first prompt's answer as a response."""
    from megarl.data.tokenizer import load_model_tokenizer
    from megarl.trainer.sampling.evaluation import read_inputs

    data, sets = config.data, {name: source for name, source in config.eval.sets.items() if Path(source).exists()}
    if not Path(data.train).exists() or any(name.startswith(("data.", "eval.", "reward.")) for name in failed):
        load_model_tokenizer(config.model)
        return
    is_here = data.heldout is not None and Path(data.heldout).exists()
    present = {"data": data.model_copy(update={} if is_here else {"heldout": None})}
    inputs = read_inputs(config.model_copy(update=present | {"eval": config.eval.model_copy(update={"sets": sets})}))
    try:
        if config.reward.function != "reward_model":  # whose servers may start later
            first = inputs.prompts[0]
            judged = inputs.judge.score(prompt=first.text, response=first.answer, answer=first.answer)
            if (error := asyncio.run(judged).error) is not None:
                raise ConfigError(f"reward.function: with the answer of {first.source} as response: {error}")
    finally:
        inputs.close()


def _read_weights(folder: str) -> dict[str, Any]:
    """Open each file, and compare names and shapes with the index and with config.json."""
    from megarl.models.hf_files import HFCheckpoint, check_tensors, describe_left_out
    from megarl.models.names import hf_shapes
    from megarl.models.shapes import read_shape

    with HFCheckpoint(folder) as checkpoint:
        return {"note": describe_left_out(check_tensors(checkpoint, hf_shapes(read_shape(folder))))}


def _try(name: str, attempt: Attempt) -> None:
    _tell(begin=name)
    try:
        facts = attempt()
        _tell(facts=facts if isinstance(facts, dict) else {})
    except MegarlError as error:
        _tell(error=" ".join(str(error).split()), module=None, advice="")
    except Exception as error:  # a broken package fails with whatever its shared libraries raise
        module = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else None
        _tell(error=f"cannot be used ({describe(error)})", module=module, advice=_advice(name))


def _tell(**words: Any) -> None:
    print(f"\n{_MARK}{json.dumps(words)}", file=_ANSWERS, flush=True)


def main() -> None:
    """Try everything in turn; write a line before and after each attempt."""
    request = json.load(sys.stdin)
    failed = request["failed"]
    config = None if request["config"] is None else Config.model_validate_json(request["config"])
    _try("torch", _torch)
    for name in _SINGLE:
        _try(name, lambda name=name: importlib.import_module(name))
    _try("the trainer", _trainer)
    if config is not None and "model.path" not in failed:
        for name, attempt in attempts(config, failed):
            _try(name, attempt)


if __name__ == "__main__":
    _ANSWERS = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what packages print is no answer
    main()
