"""A trial of the trainer's first imports and, with a configuration, of all reads and checks before the first step.

Everything is tried in this process. A broken package becomes one line, unless the package ends the process.
"""

import asyncio
import importlib
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from megarl import enable_cpu
from megarl.config import Config
from megarl.errors import ConfigError, MegarlError, describe
from megarl.ops.doctor.report import Finding

Attempt = Callable[[], object]
"""Raises the problem; a returned dictionary holds facts, such as a note."""
_SINGLE = ("psutil", "safetensors", "transformers", "datasets", "math_verify", "pebble", "torch.utils.tensorboard")
"""Modules that the trainer imports late, or behind another module; each is tried alone."""


def run_trial(
    config: Config | None, absent: set[str], failed: Collection[str] = ()
) -> tuple[list[Finding], dict[str, Any]]:
    """Return (checks, facts about torch and the devices).

    Missing modules in ``absent`` are not reported again; inputs with a ``failed`` check are not tried.
    """
    checks: list[Finding] = []
    facts: dict[str, Any] = {}
    with redirect_stdout(sys.stderr):  # the report has stdout for itself
        for name, attempt in _all_attempts(config, failed):
            try:
                found = attempt()
                facts |= found if isinstance(found, dict) else {}
                if note := facts.pop("note", ""):
                    checks.append(Finding(name, "ok", note))
            except MegarlError as error:
                checks.append(Finding(name, "failed", " ".join(str(error).split())))
            except Exception as error:  # a broken package fails with whatever its shared libraries raise
                module = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else None
                if module not in absent:
                    problem = f"cannot be used ({describe(error)})"
                    checks.append(Finding(name, "failed", problem, advice="install a release that fits the others"))
    return checks, facts


def _all_attempts(config: Config | None, failed: Collection[str]) -> Iterator[tuple[str, Attempt]]:
    yield "torch", _torch
    for name in _SINGLE:
        yield name, lambda name=name: importlib.import_module(name)
    yield "the trainer", _trainer
    if config is not None and "model.path" not in failed:
        yield from attempts(config, failed)


def _torch() -> dict[str, Any]:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    name = torch.cuda.get_device_name(0) if count else None
    return {"gpus": count, "gpu": name, "torch": torch.__version__, "cuda": torch.version.cuda}


def _trainer() -> dict[str, Any]:
    enable_cpu()
    import megarl.trainer.loop  # noqa: F401
    from megarl.stand_ins import te

    return {"te_problem": te.find_te()[1]}


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
