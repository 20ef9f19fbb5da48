"""``megarl doctor``: what is installed, what that enables, and what would silently disable routing replay."""

import importlib
import importlib.util
import math
import os
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megarl.config import Config, SGLangConfig, gpu_defaults, megatron_fields
from megarl.config import file as config_file
from megarl.core.megatron_facts import REPLAY_BLOCKERS
from megarl.errors import ConfigError, MegarlError, printable
from megarl.models.fit import check_fit, wants_routes
from megarl.models.shapes import ModelShape, read_shape
from megarl.rollout.sglang.versions import CAPABILITIES, FAULTS, NEWEST, OLDEST, dotted, installed_release


@dataclass(frozen=True, slots=True)
class Finding:
    """A package or program that megarl needs or can use."""

    name: str
    found: str | None
    """Version or short description; None if it is absent."""
    required: bool
    note: str
    """What it enables, or how to get it."""


_PACKAGES = (
    # distribution, required, what it enables
    ("transformers", True, "Hugging Face configurations, tokenizers, the local sampling engine"),
    ("safetensors", True, "reading and writing checkpoints"),
    ("datasets", True, "Parquet files and hub data sets"),
    ("math-verify", True, "the math_verify reward"),
    ("pebble", True, "rewards in worker processes"),
    ("psutil", True, "Megatron checkpoints (saving hangs without it)"),
    ("tensorboard", True, "TensorBoard event files"),
    ("apex", False, "fused Adam without Transformer Engine: build from source, github.com/NVIDIA/apex"),
    ("grouped_gemm", False, "Megatron's legacy grouped expert GEMM: pip install grouped_gemm"),
    ("wandb", False, "log.wandb_project: pip install wandb"),
)


def findings() -> list[Finding]:
    """Check everything; never raises because something is absent or broken."""
    return [
        Finding("Python", platform.python_version(), True, "3.11 or later"),
        _torch(),
        *_megatron(),
        *(Finding(name, _version(name), required, note) for name, required, note in _PACKAGES),
        _transformer_engine(),
        _sglang(Path(SGLangConfig().python)),
        _bubblewrap(),
    ]


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:  # it may have been built in place
        return "installed, version unknown" if importlib.util.find_spec(distribution.replace("-", "_")) else None


def _torch() -> Finding:
    try:
        torch = importlib.import_module("torch")
        cuda = torch.cuda.is_available()
        device = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}" if cuda else "no CUDA device"
    except Exception as error:  # a broken installation fails with whatever its shared libraries raise
        return Finding("torch", None, True, f"cannot be used: {_reason(error)}; pip install 'megarl[cpu]'")
    note = "trains over NCCL" if cuda else "trains on the CPU over gloo, through megarl.megatron.cpu"
    return Finding("torch", f"{torch.__version__}, {device}", True, note)


def _reason(error: Exception) -> str:
    """What an import failed with, on one line."""
    return " ".join(str(error).split()) or type(error).__name__


def _megatron() -> list[Finding]:
    """Megatron, and the replay hook: read from its source, which is not imported."""
    try:
        root = megatron_fields.source_root()
    except ConfigError:
        return [
            Finding("megatron-core", None, True, "the trainer: pip install megatron-core==0.16.1"),
            Finding("replay hook", None, True, "needs megatron-core, 0.12.3 or later"),
        ]
    moe = root / "transformer" / "moe"
    # The router must hold a replay object, and the top-k function must call it.
    hook = {"moe_utils.py": ".get_replay_topk(", "router.py": "self.router_replay"}
    has_hook = all((moe / file).is_file() and words in (moe / file).read_text() for file, words in hook.items())
    note = 'routing replay: train.replay = "r2" and "r3"'
    if not has_hook:
        note = "this Megatron-Core cannot replay routes: run `python tools/patch.py apply`"
    trainer = "the trainer; tested with 0.16.1, and with 0.12.3 to 0.19.2"
    found = [
        Finding("megatron-core", _version("megatron-core") or f"source at {root}", True, trainer),
        Finding("replay hook", "present" if has_hook else None, True, note),
    ]
    if (moe / "paged_stash.py").is_file():
        triton = "present" if importlib.util.find_spec("triton") else None
        found.append(Finding("triton", triton, True, "Megatron imports it from 0.18 on undeclared: pip install triton"))
    return found


def _transformer_engine() -> Finding:
    """Import it: one that was built for another torch is installed, but cannot be used."""
    note = "fused attention and norms, FP8, grouped experts on GPUs: pip install 'megarl[gpu]'"
    found = _version("transformer-engine")
    if found is not None:
        try:
            importlib.import_module("transformer_engine.pytorch")
        except Exception as error:  # of any kind, as for torch
            unusable = f"found {found}, which cannot be imported ({_reason(error)})"
            slower = "GPUs train with the slower local layers"
            return Finding("transformer-engine", None, False, f"{unusable}: {slower}; {note}")
        if not re.match(r"2\.(9|10|11)\b", found):
            note = f"megatron-core 0.16.1 supports 2.9 to 2.11: {note}"
    return Finding("transformer-engine", found, False, note)


def _sglang(python: Path) -> Finding:
    """In the environment that `make sglang-cpu` makes, or in this one."""
    note = 'rollout.engine = "sglang": run `make sglang-cpu`, or set sglang.python to the Python of another environment'
    found = _version("sglang")
    if python.exists():
        try:
            found = f"{installed_release(python)} in {python}"
        except ConfigError as error:
            note = str(error)
    return Finding("sglang", found, False, note)


def _bubblewrap() -> Finding:
    """Try it: on some hosts it is installed but may not run."""
    from megarl.rollout.tools.python_tool import PythonTool

    try:
        limits = PythonTool().describe_limits()
    except MegarlError as error:
        return Finding("bubblewrap", None, False, f"the Python tool: {error}")
    return Finding("bubblewrap", f"works; {limits}", False, 'the Python tool: environment.tools = ["python"]')


def doctor(
    path: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    console: Console | None = None,
    *,
    trust: bool = False,
) -> int:
    """Print the tables; with a configuration also its layout and the replay blockers that it hits.

    Returns 0, or 1 if something required is missing or a run would refuse its SGLang servers. A wrong configuration
    raises ConfigError after the tables.
    """
    console = console or Console()
    results = findings()
    rows = []
    for each in results:
        mark = "[green]yes[/]" if each.found else "[red]MISSING[/]" if each.required else "[yellow]no[/]"
        rows.append([mark, each.name, escape(each.found or "-"), escape(each.note)])
    _print_table(console, "Installed", ["", "what", "found", "enables"], rows)
    _print_blockers(console, _raw_megatron(path, overrides))
    missing = [finding.name for finding in results if finding.required and finding.found is None]
    if missing:
        console.print(f"Missing: {', '.join(missing)}.", style="bold red")
    else:
        console.print("Everything that is required is here.", style="green")
    if path is None:
        _print_releases(console)
        return 1 if missing else 0
    config = config_file.load(path, overrides, trust=trust)
    shape = read_shape(config.model.path) if (Path(config.model.path) / "config.json").is_file() else None
    _print_config(console, config, shape)
    has_te = any(each.name == "transformer-engine" and each.found for each in results)
    _print_switches(console, config, has_te and not (shape is not None and shape.norm_over_heads))
    if shape is not None:
        check_fit(config, shape)
    usable = not config.rollout.engine_kind.server or _print_servers(console, config)
    return 1 if missing or not usable else 0


def _print_table(console: Console, title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Names (the headings "key" and "name") stay on one line."""
    table = Table(title=escape(title), box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
    for heading in headings:
        table.add_column(heading, overflow="fold", no_wrap=heading in ("key", "name"))
    for row in rows:
        table.add_row(*map(printable, row))
    console.print(table)


def _print_blockers(console: Console, settings: Mapping[str, Any] | None) -> None:
    title = 'Keys of [megatron] that prevent routing replay (refused unless train.replay = "none")'
    rows = [[blocker.setting, blocker.reason] for blocker in REPLAY_BLOCKERS]
    if settings is None:
        return _print_table(console, title, ["key", "because"], rows)
    marks = ["[red]HIT[/]" if blocker.hit(settings) else "[green]free[/]" for blocker in REPLAY_BLOCKERS]
    rows = [[*row, mark] for row, mark in zip(rows, marks, strict=True)]
    return _print_table(console, title, ["key", "because", "this file"], rows)


def _print_releases(console: Console) -> None:
    title = f"SGLang releases that megarl samples with: {dotted(OLDEST)} to {dotted(NEWEST)}"
    rows = [[f"from {dotted(entry.since)}", entry.name, escape(entry.meaning)] for entry in CAPABILITIES]
    for fault in FAULTS:
        releases = f"to {dotted(fault.last)}" if fault.last else "all"
        rows.append([releases, fault.name, escape(f"refused: {fault.meaning}")])
    _print_table(console, title, ["releases", "name", "meaning"], rows)


def _print_servers(console: Console, config: Config) -> bool:
    """Whether a run would accept all its SGLang servers."""
    from megarl.rollout.sglang.check import examine  # needs psutil and httpx; the table shows whether they are missing

    examined, rows = examine(config), []
    for server in examined:
        mark = "[green]yes[/]" if server.problem is None else "[red]REFUSED[/]"
        rows.append([mark, escape(server.where), server.release or "-", ", ".join(server.able) or "-"])
    _print_table(console, "SGLang servers", ["", "where", "release", "can"], rows)
    for server in examined:
        for warning in server.warnings:
            console.print(printable(f"warning: {server.where}: {warning}"), style="yellow", markup=False)
        if server.problem is not None:
            console.print(printable(f"SGLang: {server.problem}"), style="bold red", markup=False)
    return all(server.problem is None for server in examined)


def _raw_megatron(path: Path | None, overrides: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The [megatron] table of a file that may be wrong elsewhere; None without a readable one."""
    if path is None:
        return None
    try:
        table = config_file.read_toml(path).get("megatron", {})
    except ConfigError:
        return None  # config_file.load reports it after the tables
    below = {key.partition(".")[2]: value for key, value in (overrides or {}).items() if key.startswith("megatron.")}
    return {**table, **below} if isinstance(table, dict) else None


def _print_config(console: Console, config: Config, shape: ModelShape | None) -> None:
    p = config.parallel
    smallest = math.lcm(p.tp * p.pp * p.cp, p.ep * p.expert_tp * p.pp)
    world_size = int(os.environ.get("WORLD_SIZE", smallest))
    layout = config.check_world_size(world_size)
    vpp = f" (vpp {layout.vpp})" if layout.vpp else ""
    able = ", ".join(config.rollout.engine_kind.capabilities) or "nothing that is optional"
    rows = {
        "ranks": f"{world_size}; must be a multiple of {smallest}",
        "dense weights": f"tp {layout.tp} x pp {layout.pp}{vpp} x cp {layout.cp} x dp {layout.dp}",
        "expert weights": f"etp {layout.etp} x ep {layout.ep} x pp {layout.pp} x dp {layout.edp}",
        "sequence parallel": "on" if p.uses_sequence_parallel else "off",
        "a step": f"{config.rollout.prompts_per_step} prompts x {config.rollout.group_size} responses in "
        f"{config.train.mini_batches} mini-batches, {layout.sequences_per_rank} sequences per rank and mini-batch",
        "engine": f"{config.rollout.engine}; can: {able}",
    }
    if config.rollout.engine_kind.server:
        rows["weights to servers"] = f'sglang.sync = "{config.weight_sync}"'
    if not config.sampling.fixed:
        refill = f", refilled from up to {config.prompts_per_step_at_most} prompts" if config.sampling.refill else ""
        credited = "from all that is drawn" if config.sampling.uses_credit else "the objective's"
        rows["sampling"] = f"{config.sampling.rule}{refill}; advantages {credited}"
    if config.environment.function is not None:
        tools = ", ".join(config.environment.tools) or config.environment.function
        rows["environment"] = f"{tools}, up to {config.environment.max_turns} turns"
    rows["objective, replay"] = f"{config.train.objective}, {config.train.replay}"
    rows["model"] = "no config.json in model.path on this machine: what it has experts for is not checked"
    if shape is not None:
        experts = f"top-{shape.topk} of {shape.num_experts} experts" if shape.moe_layers else "dense"
        asked = "asked for" if wants_routes(config, shape) else "not asked for"
        rows["model"] = f"{shape.family}, {experts}; routes are {asked}"
        if shape.norm_over_heads:
            rows["layers"] = "Megatron's local ones: Transformer Engine has no norm over all heads"
    if config.train.resolved_objective.needs_ref_logprobs:
        rows["reference policy"] = config.reference_path
    rows["run folder"] = str(config.run_dir)
    title = f"Configuration of run {config.run.name!r}"
    _print_table(console, title, ["name", "resolved"], [[name, escape(value)] for name, value in rows.items()])
    for warning in config.warnings:
        console.print(printable(f"warning: {warning}"), style="yellow", markup=False)


def _print_switches(console: Console, config: Config, has_te: bool) -> None:
    found = gpu_defaults.switches(config, on_gpu=True, has_te=has_te)
    rows = [[each.field, "[green]on[/]" if each.on else "[yellow]off[/]", escape(each.reason)] for each in found]
    _print_table(console, "Keys of [megatron] for speed", ["key", "on GPUs", "because"], rows)
