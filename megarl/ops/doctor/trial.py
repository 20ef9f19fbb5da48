"""Does what the trainer does first, with the trainer's own functions, in a process of its own: imports, and with a
configuration all that is read and checked before the first step. So a broken package becomes one line, even if it ends
the process or never returns.

Run as ``python -m megarl.ops.doctor.trial``, with JSON on stdin: the configuration as JSON (null: none), what has
failed.
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
from megarl.ops.doctor.report import Check

TIME_LIMIT_S = 900.0
"""Most of it is for prompts: a node tokenizes some thousand in a second."""
_MARK = "megarl-trial "
Attempt = Callable[[], object]
"""Raises what is wrong; a dictionary that it returns is facts, such as a note."""
_SINGLE = ("psutil", "safetensors", "transformers", "datasets", "math_verify", "pebble", "torch.utils.tensorboard")
"""Modules that the trainer imports late, or that others hide; each is tried by itself."""


def run_trial(
    config: Config | None, absent: set[str], failed: Collection[str] = ()
) -> tuple[list[Check], dict[str, Any]]:
    """Return (checks, facts about torch and its devices).

    Missing modules of ``absent`` are not reported again; inputs whose check has ``failed`` are not tried.
    """
    environment = safe_environment() | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    words = [sys.executable, "-W", "ignore", "-m", "megarl.ops.doctor.trial"]
    asked = None if config is None else config.model_dump_json()
    request = json.dumps({"config": asked, "failed": sorted(failed)})
    try:
        ended = subprocess.run(
            words, input=request.encode(), capture_output=True, timeout=TIME_LIMIT_S, env=environment
        )
        output, code = ended.stdout, ended.returncode
        errors = ended.stderr.decode(errors="replace").strip().splitlines()
    except subprocess.TimeoutExpired as error:
        output, code, errors = error.stdout or b"", None, []
    checks, facts, begun = [], {}, "Python"
    for line in output.decode(errors="replace").splitlines():
        told = json.loads(line.removeprefix(_MARK)) if line.startswith(_MARK) else {}
        begun = told.get("begin", begun)
        facts |= told.get("facts", {})
        if note := facts.pop("note", ""):
            checks.append(Check(begun, "ok", note))
        if "error" in told and told["module"] not in absent:
            checks.append(Check(begun, "failed", told["error"], advice=told["advice"]))
    if code != 0:
        how = f"takes longer than {TIME_LIMIT_S:.0f} s" if code is None else _how_it_ended(code, errors)
        checks.append(Check(begun, "failed", f"trying it {how}", advice=_advice(begun)))
    return checks, facts


def _how_it_ended(code: int, errors: list[str]) -> str:
    if code < 0:
        return f"ends the process by {signal.Signals(-code).name}"
    return f"ends the process with exit code {code} ({errors[-1] if errors else 'no message'})"


def _advice(name: str) -> str:
    return "" if "." in name and not name.startswith("torch.") else "install a release that fits the others"


def _torch() -> dict[str, Any]:
    torch = importlib.import_module("torch")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    name = torch.cuda.get_device_name(0) if count else None
    return {"gpus": count, "gpu": name, "torch": torch.__version__, "cuda": torch.version.cuda}


def _trainer() -> dict[str, Any]:
    enable_cpu()
    importlib.import_module("megarl.trainer.loop")
    has_te, problem = importlib.import_module("megarl.stand_ins.te").find_te()
    return {"has_te": has_te, "te_problem": problem}


def attempts(config: Config, failed: Collection[str]) -> Iterator[tuple[str, Attempt]]:
    """Yield what the trainer does before its first step, by name, without what needs an input that has ``failed``."""
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
    """Read what a run reads, as far as it is here, and judge the first prompt's answer as if it were a response."""
    from megarl.data.tokenizer import load_model_tokenizer
    from megarl.trainer.sampling.inputs import read_inputs

    data, sets = config.data, {name: source for name, source in config.eval.sets.items() if Path(source).exists()}
    if not Path(data.train).exists() or any(name.startswith(("data.", "eval.", "reward.")) for name in failed):
        load_model_tokenizer(config.model)
        return
    is_here = data.heldout is not None and Path(data.heldout).exists()
    here = {"data": data.model_copy(update={} if is_here else {"heldout": None})}
    inputs = read_inputs(config.model_copy(update=here | {"eval": config.eval.model_copy(update={"sets": sets})}))
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
        found = attempt()
        _tell(facts=found if isinstance(found, dict) else {})
    except MegarlError as error:
        _tell(error=" ".join(str(error).split()), module=None, advice="")
    except Exception as error:  # a broken package fails with whatever its shared libraries raise
        module = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else None
        _tell(error=f"cannot be used ({describe(error)})", module=module, advice=_advice(name))


def _tell(**words: Any) -> None:
    print(f"\n{_MARK}{json.dumps(words)}", file=_ANSWERS, flush=True)


def main() -> None:
    """Try everything in turn, and tell before and after each."""
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
