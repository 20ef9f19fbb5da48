"""Does what the trainer does first, in a process of its own: imports, and with a configuration reads tokenizer, first
prompt and weights. So a broken package becomes one line, even if it ends the process or never returns.

Run as ``python -m megarl.doctor.trial``, with JSON on stdin: the configuration as JSON (null: none), what has failed.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from megarl.config import Config
from megarl.config.trust import safe_environment
from megarl.doctor.report import Check
from megarl.errors import MegarlError, describe

TIME_LIMIT_S = 180.0
_MARK = "megarl-trial "
_SINGLE = ("psutil", "safetensors", "transformers", "datasets", "math_verify", "pebble", "torch.utils.tensorboard")
"""Modules that the trainer imports late, or that others hide; each is tried by itself."""


def run_trial(
    config: Config | None, absent: set[str], failed: Collection[str] = ()
) -> tuple[list[Check], dict[str, Any]]:
    """Return (checks, facts about torch and its devices).

    Missing modules of ``absent`` are not reported again; inputs whose check has ``failed`` are not tried.
    """
    environment = safe_environment() | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    words = [sys.executable, "-W", "ignore", "-m", "megarl.doctor.trial"]
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
        facts |= told.get("facts", {})
        begun = told.get("begin", begun)
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
    importlib.import_module("megarl.train.loop")
    te = importlib.import_module("megarl.megatron.stand_ins.te")
    return {"has_te": te.HAVE_TE, "te_problem": te.PROBLEM}


def _read_prompt(config: Config, failed: Collection[str]) -> None:
    """Read the tokenizer, and with it the first prompt of a file that can be read."""
    from megarl.data.prompts import load_prompts
    from megarl.data.tokenizer import load_model_tokenizer

    tokenizer = load_model_tokenizer(config.model)
    data = config.data
    if Path(data.train).is_file() and "data.train" not in failed:
        keys = {"prompt_field", "answer_field", "chat_template", "chat_template_args", "max_prompt_tokens"}
        settings = data.model_dump(include=keys)
        load_prompts(data.train, tokenizer=tokenizer, limit=1, **settings)


def _read_weights(folder: str) -> None:
    """Open each file, and compare names and shapes with the index and with config.json."""
    from megarl.models.hf_files import HFCheckpoint, check_tensors
    from megarl.models.names import hf_shapes
    from megarl.models.shapes import read_shape

    with HFCheckpoint(folder) as checkpoint:
        check_tensors(checkpoint, hf_shapes(read_shape(folder)))


def _try(name: str, attempt: Callable[[], dict[str, Any] | None]) -> None:
    _tell(begin=name)
    try:
        _tell(facts=attempt() or {})
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
        _try(name, lambda name=name: importlib.import_module(name) and None)
    _try("the trainer", _trainer)
    if config is not None and (Path(config.model.path) / "config.json").is_file():
        if "tokenizer" not in failed:
            _try("tokenizer and first prompt", lambda: _read_prompt(config, failed))
        if "weights" not in failed:
            _try("weights", lambda: _read_weights(config.model.path))
        if config.train.resolved_objective.needs_ref_logprobs and config.reference_path != config.model.path:
            _try("model.reference", lambda: _read_weights(config.reference_path))


if __name__ == "__main__":
    _ANSWERS = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what packages print is no answer
    main()
