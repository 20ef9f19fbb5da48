"""The machine: packages, Megatron-Core and the replay hook, devices, SGLang."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import os
import platform
import re
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, redirect_stdout
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from megarl import enable_cpu
from megarl.config import Config, SGLangConfig, megatron_fields
from megarl.engines.sglang.versions import NEWEST, dotted, installed_release
from megarl.errors import ConfigError, MegarlError, describe
from megarl.files.texts import read_table
from megarl.ops.doctor.inputs import check_gpus
from megarl.ops.doctor.report import Finding, find
from megarl.ops.patching.patch import PatchError, find_installed

Names = Collection[str]
"""Of findings."""
_PACKAGES: dict[str, list[str]] = read_table(__file__)
_TRAIN = _PACKAGES["train"]
"""What the extra ``train`` installs, beside Megatron-Core."""
_TE_FITS_0_16 = r"2\.(9|10|11)\b"


def versions() -> dict[str, str | None]:
    """Return the release of Python and of each needed or usable package; None for an absent package."""
    return {"python": platform.python_version(), **{name: _version(name) for name in (*_TRAIN, *_PACKAGES["optional"])}}


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:  # it may have been built in place
        return "unknown" if importlib.util.find_spec(distribution.replace("-", "_")) else None


def check_machine(config: Config | None, releases: dict[str, str | None], failed: Names = ()) -> list[Finding]:
    """Check the machine. ``failed``: inputs that need not be tried."""
    missing = sorted(name for name in _TRAIN if releases[name] is None)
    checks = [Finding("Python", "ok", platform.python_version()), *(find("no_package", package=lib) for lib in missing)]
    checks += _check_megatron(releases["megatron-core"], config is None or config.train.replay != "none")
    facts: dict[str, Any] = {}
    if "torch" not in missing:
        absent = {name.replace("-", "_") for name in (*missing, *(c.name for c in checks if c.status == "failed"))}
        tried, facts = run_trial(config, absent | ({"megatron"} if "megatron_core" in absent else set()), failed)
        checks += tried
    if "torch" in facts:
        device = "gpus" if facts["gpus"] else "unusable_gpu" if has_gpu() else "cpu"
        checks += [find(device, cores=os.cpu_count(), **facts), *(check_gpus(config, facts["gpus"]) if config else ())]
    checks += [_check_te(releases["transformer-engine"], facts)]
    if config is None or (config.rollout.engine_kind.server and not config.sglang.urls):
        checks.append(_check_sglang(config, releases["sglang"]))
    if config is None or "python" in config.environment.tools:
        checks += _check_bubblewrap(is_needed=config is not None)
    return checks


def has_gpu() -> bool:
    """Whether the driver shows a GPU of NVIDIA, whatever torch can do."""
    return any(Path("/dev").glob("nvidia[0-9]*"))


def _check_megatron(release: str | None, replays: bool) -> list[Finding]:
    """Check Megatron-Core and the replay hook in the source, without an import."""
    try:
        root = find_installed() / "megatron" / "core"
    except PatchError:
        newer = " (0.17 and later need Python 3.12)" if sys.version_info < (3, 12) else ""
        return [find("no_megatron", releases=f"{megatron_fields.RELEASES}{newer}")]
    moe = root / "transformer" / "moe"
    checks = [Finding("megatron-core", "ok", release or f"source at {root}")]
    # The router must hold a replay object, and the top-k function must call it.
    hook = {"moe_utils.py": ".get_replay_topk(", "router.py": "self.router_replay"}
    if all((moe / file).is_file() and words in (moe / file).read_text() for file, words in hook.items()):
        checks.append(find("replay_hook"))
    else:
        checks.append(find("no_replay_hook" if replays else "unneeded_replay_hook"))
    if (moe / "paged_stash.py").is_file() and importlib.util.find_spec("triton") is None:
        checks.append(find("no_triton"))
    return checks


def _check_te(release: str | None, facts: dict[str, Any]) -> Finding:
    if facts.get("te_problem"):
        return find("broken_te", release=release, problem=facts["te_problem"])
    if release is None:
        return find("no_te_on_gpu" if has_gpu() else "no_te")
    is_old = (_version("megatron-core") or "").startswith("0.16.")
    return find("other_te" if is_old and not re.match(_TE_FITS_0_16, release) else "te", release=release)


def _check_sglang(config: Config | None, release: str | None) -> Finding:
    """Find SGLang in the environment of sglang.python."""
    python = Path((config.sglang if config else SGLangConfig()).python)
    try:
        return Finding("sglang", "ok", f"{installed_release(python)} in {python}")
    except ConfigError as error:
        problem = f"{release} in this environment; {error}" if release else str(error)
    return find("no_sglang" if config else "unneeded_sglang", problem=problem, newest=dotted(NEWEST))


def _check_bubblewrap(*, is_needed: bool) -> list[Finding]:
    """Start bubblewrap once: on some hosts an installed bubblewrap may not run."""
    try:
        from megarl.engines.tools.python_tool import PythonTool

        return [find("bubblewrap", limits=PythonTool().describe_limits())]
    except ImportError:  # psutil, which is named as missing
        return []
    except MegarlError as error:
        return [Finding("bubblewrap", "failed" if is_needed else "optional", f"the Python tool cannot run: {error}")]


Attempt = Callable[[], object]
"""Raises the problem; a returned dictionary holds facts, and a text for a finding "ok" or "warning"."""


def run_trial(config: Config | None, absent: set[str], failed: Names = ()) -> tuple[list[Finding], dict[str, Any]]:
    """Return (checks, facts about torch and the devices).

    Missing modules in ``absent`` are not reported again; inputs with a ``failed`` check are not tried.
    """
    checks: list[Finding] = []
    facts: dict[str, Any] = {}
    with redirect_stdout(sys.stderr):  # the report has stdout for itself
        for name, attempt in attempts(config, failed):
            try:
                result = attempt()
                facts |= result if isinstance(result, dict) else {}
                for status in ("ok", "warning"):
                    if text := facts.pop(status, ""):
                        checks.append(Finding(name, status, text))
            except MegarlError as error:
                checks.append(Finding(name, "failed", " ".join(str(error).split())))
            except Exception as error:  # a broken package fails with whatever its shared libraries raise
                module = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else None
                if module not in absent:
                    checks.append(find("broken_module", module=name, error=describe(error)))
    return checks, facts


def attempts(config: Config | None, failed: Names) -> Iterator[tuple[str, Attempt]]:
    """Yield (name, attempt) for the imports and the trainer's work before the first step, without work on inputs in
    ``failed``."""
    yield "torch", _torch
    for name in _PACKAGES["modules"]:
        yield name, lambda name=name: importlib.import_module(name)
    yield "the trainer", _trainer
    yield "attention of transformer-engine", _attend
    if config is None or "model.path" in failed:
        return
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


def _attend() -> dict[str, Any]:
    """Attend to packed tokens with Transformer Engine on a GPU, as training does; name the copies of cuDNN."""
    import torch

    from megarl.stand_ins import te

    if not te.find_te()[0]:  # which also needs a GPU
        return {}
    engine: Any = importlib.import_module("transformer_engine.pytorch")
    tokens = torch.zeros(16, 2, 64, dtype=torch.bfloat16, device="cuda")
    bounds = torch.tensor([0, 16], dtype=torch.int32, device="cuda")
    packed: dict[str, Any] = {"qkv_format": "thd", "attn_mask_type": "padding_causal", "max_seqlen_q": 16}
    packed |= {"max_seqlen_kv": 16, "cu_seqlens_q": bounds, "cu_seqlens_kv": bounds}
    try:
        engine.DotProductAttention(2, 64)(tokens, tokens, tokens, **packed).sum().item()
    except Exception as error:  # whatever the shared libraries raise
        raise ConfigError(f"{describe(error)}; {_cudnn_copies()}") from error
    return {"ok": f"works; {_cudnn_copies()}"}


def _cudnn_copies() -> str:
    """Name the folders whose cuDNN this process has loaded: two mix their parts."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    folders = sorted({str(Path(line.split(maxsplit=5)[5]).parent) for line in lines if "libcudnn" in line})
    advice = "; expected one: unset LD_LIBRARY_PATH, or remove the system's cuDNN from it" if len(folders) > 1 else ""
    return f"cuDNN of {', '.join(folders) or 'no folder'}{advice}"


def _read_inputs(config: Config, failed: Names) -> dict[str, Any]:
    """Read the inputs present on this machine, and judge the first prompt's answer as a response."""
    from megarl.data.tokenizer import load_model_tokenizer
    from megarl.trainer.sampling.evaluation import read_inputs

    data, sets = config.data, {name: source for name, source in config.eval.sets.items() if Path(source).exists()}
    if not Path(data.train).exists() or any(name.startswith(("data.", "eval.", "reward.")) for name in failed):
        load_model_tokenizer(config.model)
        return {}
    is_here = data.heldout is not None and Path(data.heldout).exists()
    present: dict[str, Any] = {"data": data.model_copy(update={} if is_here else {"heldout": None})}
    present["eval"] = config.eval.model_copy(update={"sets": sets})
    with closing(read_inputs(config.model_copy(update=present))) as inputs:
        if config.reward.function != "reward_model":  # whose servers may start later
            first = inputs.prompts[0]
            judged = inputs.judge.score(prompt=first.text, response=first.answer, answer=first.answer)
            if (error := asyncio.run(judged).error) is not None:
                raise ConfigError(f"reward.function: with the answer of {first.source} as response: {error}")
        return {"warning": "; ".join(inputs.warnings())}


def _read_weights(folder: str) -> dict[str, Any]:
    """Open each file, and compare names and shapes with the index and with config.json."""
    from megarl.models.hf_files import HFCheckpoint, check_tensors, describe_left_out
    from megarl.models.names import hf_shapes
    from megarl.models.shapes import read_shape

    with HFCheckpoint(folder) as checkpoint:
        return {"ok": describe_left_out(check_tensors(checkpoint, hf_shapes(read_shape(folder))))}
