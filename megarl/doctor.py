"""``megarl doctor``: what is installed, what that enables, and what would silently disable routing replay."""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import platform
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megarl.config import Config, SGLangConfig, megatron_fields
from megarl.config import file as config_file
from megarl.config.megatron_fields import REPLAY_BLOCKERS
from megarl.errors import ConfigError, MegarlError
from megarl.rollout.sglang.versions import CAPABILITIES, FAULTS, NEWEST, OLDEST, dotted, installed_release


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the table: a thing that megarl needs or can use."""

    name: str
    found: str | None
    """Version or short description; None if it is absent."""
    required: bool
    note: str
    """What it enables, or what to do about its absence."""

    @property
    def ok(self) -> bool:
        return self.found is not None or not self.required


_PACKAGES = (
    # distribution, required, what it enables
    ("transformers", True, "Hugging Face configurations, tokenizers, the local sampling engine"),
    ("safetensors", True, "reading and writing checkpoints"),
    ("datasets", True, "Parquet files and hub data sets"),
    ("math-verify", True, "the math_verify reward"),
    ("pebble", True, "rewards in worker processes"),
    ("psutil", True, "Megatron checkpoints (saving hangs without it)"),
    ("tensorboard", True, "TensorBoard event files"),
    ("transformer-engine", False, "fused attention and norms, FP8, the fast layer spec: pip install 'megarl[gpu]'"),
    ("apex", False, "fused gradient accumulation: build from source, github.com/NVIDIA/apex"),
    ("grouped_gemm", False, "Megatron's legacy grouped expert GEMM: pip install grouped_gemm"),
    ("wandb", False, "log.wandb_project: pip install wandb"),
)


def findings() -> list[Finding]:
    """Look at everything; never raises because something is absent or broken."""
    return [
        Finding("Python", platform.python_version() if sys.version_info >= (3, 11) else None, True, "3.11 or later"),
        _torch(),
        _megatron(),
        _replay_hook(),
        *(_package(*package) for package in _PACKAGES),
        _sglang(Path(SGLangConfig().python)),
        _bubblewrap(),
    ]


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _package(distribution: str, required: bool, note: str) -> Finding:
    module = distribution.replace("-", "_")
    found = _version(distribution)
    if found is None and importlib.util.find_spec(module) is not None:
        found = "installed, version unknown"  # built in place
    return Finding(distribution, found, required, note)


def _torch() -> Finding:
    try:
        torch = importlib.import_module("torch")
        cuda = torch.cuda.is_available()
        device = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}" if cuda else "no CUDA device"
    except Exception as error:  # a broken installation fails with whatever its shared libraries raise
        reason = " ".join(str(error).split()) or type(error).__name__
        return Finding("torch", None, True, f"cannot be used: {reason}; pip install 'megarl[cpu]'")
    note = "trains over NCCL" if cuda else "trains on the CPU over gloo, through megarl.megatron.cpu"
    return Finding("torch", f"{torch.__version__}, {device}", True, note)


def _megatron() -> Finding:
    found = _version("megatron-core")
    if found is None:
        try:
            found = f"source at {megatron_fields.source_root()}"
        except ConfigError:
            return Finding("megatron-core", None, True, "the trainer: pip install megatron-core==0.16.1")
    return Finding("megatron-core", found, True, "the trainer; tested with 0.16.1, and with 0.12.3 to 0.16.0")


def _replay_hook() -> Finding:
    """Read, not imported: the router must hold a replay object and the top-k function must ask it."""
    name = "replay hook"
    try:
        moe = megatron_fields.source_root() / "transformer" / "moe"
        asks = ".get_replay_topk(" in (moe / "moe_utils.py").read_text()
        holds = "self.router_replay" in (moe / "router.py").read_text()
    except (ConfigError, OSError):
        return Finding(name, None, True, "needs megatron-core, 0.12.3 or later")
    if asks and holds:
        return Finding(name, "present", True, 'routing replay: train.replay = "r2" and "r3"')
    return Finding(name, None, True, "this Megatron-Core cannot replay routes: run `python tools/patch.py apply`")


def _sglang(python: Path) -> Finding:
    """In the environment that `make sglang-cpu` makes, or in this one."""
    note = (
        'rollout.engine = "sglang": run `make sglang-cpu`, or name the Python of another environment in sglang.python'
    )
    found = _version("sglang")
    if python.exists():
        try:
            found = f"{installed_release(python)} in {python}"
        except ConfigError as error:
            note = str(error)
    return Finding("sglang", found, False, note)


def _bubblewrap() -> Finding:
    """Tried, not only looked for: some hosts have it and do not let it work."""
    from megarl.rollout.tools.python_tool import PythonTool

    try:
        PythonTool()
    except MegarlError as error:
        return Finding("bubblewrap", None, False, f"the Python tool: {error}")
    return Finding("bubblewrap", "works", False, 'the Python tool: environment.tools = ["python"]')


def doctor(path: Path | None = None, overrides: Mapping[str, Any] | None = None, console: Console | None = None) -> int:
    """Print the tables; with a configuration also its layout and the replay blockers that it hits.

    Returns 0, or 1 if something required is missing or a run would refuse its SGLang servers. Raises ConfigError, after
    the tables, if the configuration is wrong.
    """
    console = console or Console()
    results = findings()
    console.print(_installed_table(results))
    console.print(_blockers_table(_raw_megatron(path, overrides)))
    missing = [finding.name for finding in results if not finding.ok]
    if missing:
        console.print(f"Missing: {', '.join(missing)}.", style="bold red")
    else:
        console.print("Everything that is required is here.", style="green")
    if path is None:
        console.print(_releases_table())
        return 1 if missing else 0
    config = config_file.load(path, overrides)
    _print_config(console, config)
    usable = not config.rollout.engine_kind.server or _print_servers(console, config)
    return 1 if missing or not usable else 0


def _installed_table(results: list[Finding]) -> Table:
    table = Table(title="Installed", box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
    for heading in ("", "what", "found", "enables"):
        table.add_column(heading, overflow="fold")
    for finding in results:
        mark = "[green]yes[/]" if finding.found else "[red]MISSING[/]" if finding.required else "[yellow]no[/]"
        table.add_row(mark, finding.name, escape(finding.found or "-"), escape(finding.note))
    return table


def _blockers_table(settings: Mapping[str, Any] | None) -> Table:
    title = 'Megatron settings that replay cannot live with (refused unless train.replay = "none")'
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
    table.add_column(escape("[megatron]") + " key", no_wrap=True)
    table.add_column("because", overflow="fold")
    if settings is not None:
        table.add_column("this file", no_wrap=True)
    for blocker in REPLAY_BLOCKERS:
        row = [blocker.setting, blocker.reason]
        if settings is not None:
            row.append("[red]HIT[/]" if blocker.hit(settings) else "[green]free[/]")
        table.add_row(*row)
    return table


def _releases_table() -> Table:
    title = f"SGLang releases that megarl samples with: {dotted(OLDEST)} to {dotted(NEWEST)}"
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
    table.add_column("releases", no_wrap=True)
    table.add_column("what", no_wrap=True)
    table.add_column("meaning", overflow="fold")
    for entry in CAPABILITIES:
        table.add_row(f"from {dotted(entry.since)}", entry.name, escape(entry.meaning))
    for fault in FAULTS:
        table.add_row(
            f"to {dotted(fault.last)}" if fault.last else "all", fault.name, escape(f"refused: {fault.meaning}")
        )
    return table


def _print_servers(console: Console, config: Config) -> bool:
    """Whether a run would accept all its SGLang servers."""
    from megarl.rollout.sglang.check import examine  # needs psutil and httpx, whose absence is told above

    table = Table(title="SGLang servers", box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
    for heading in ("", "where", "release", "can"):
        table.add_column(heading, overflow="fold")
    examined = examine(config)
    for server in examined:
        mark = "[green]yes[/]" if server.problem is None else "[red]REFUSED[/]"
        table.add_row(mark, escape(server.where), server.release or "-", ", ".join(server.able) or "-")
    console.print(table)
    for server in examined:
        for warning in server.warnings:
            console.print(f"warning: {server.where}: {warning}", style="yellow", markup=False)
        if server.problem is not None:
            console.print(f"SGLang: {server.problem}", style="bold red", markup=False)
    return all(server.problem is None for server in examined)


def _raw_megatron(path: Path | None, overrides: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The [megatron] table of a file that may be wrong elsewhere; None without a readable one."""
    if path is None:
        return None
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8")).get("megatron", {})
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        return None  # config_file.load explains it below the tables
    below = {key.partition(".")[2]: value for key, value in (overrides or {}).items() if key.startswith("megatron.")}
    return {**table, **below} if isinstance(table, dict) else None


def _print_config(console: Console, config: Config) -> None:
    p = config.parallel
    smallest = math.lcm(p.tp * p.pp * p.cp, p.ep * p.expert_tp * p.pp)
    world_size = int(os.environ.get("WORLD_SIZE", smallest))
    layout = config.check_world_size(world_size)
    table = Table(title=escape(f"Configuration of run {config.run.name!r}"), box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("what")
    table.add_column("resolved", overflow="fold")
    vpp = f" (vpp {layout.vpp})" if layout.vpp else ""
    table.add_row("ranks", f"{world_size}; must be a multiple of {smallest}")
    table.add_row("dense weights", f"tp {layout.tp} x pp {layout.pp}{vpp} x cp {layout.cp} x dp {layout.dp}")
    table.add_row("expert weights", f"etp {layout.etp} x ep {layout.ep} x pp {layout.pp} x dp {layout.edp}")
    table.add_row("sequence parallel", "on" if p.uses_sequence_parallel else "off")
    table.add_row(
        "a step",
        f"{config.rollout.prompts_per_step} prompts x {config.rollout.group_size} responses in "
        f"{config.train.mini_batches} mini-batches, {layout.sequences_per_rank} sequences per rank and mini-batch",
    )
    able = ", ".join(config.rollout.engine_kind.capabilities) or "nothing that is optional"
    table.add_row("engine", escape(f"{config.rollout.engine}; can: {able}"))
    if not config.sampling.fixed:
        refill = f", refilled from up to {config.prompts_per_step_at_most} prompts" if config.sampling.refill else ""
        credited = "from all that is drawn" if config.sampling.uses_credit else "the objective's"
        table.add_row("sampling", f"{config.sampling.rule}{refill}; advantages {credited}")
    if config.environment.function is not None:
        tools = ", ".join(config.environment.tools) or config.environment.function
        table.add_row("environment", escape(f"{tools}, up to {config.environment.max_turns} turns"))
    table.add_row("objective, replay", f"{config.train.objective}, {config.train.replay}")
    if config.train.resolved_objective.needs_ref_logprobs:
        table.add_row("reference policy", escape(config.reference_path))
    table.add_row("run folder", escape(str(config.run_dir)))
    console.print(table)
    for warning in config.warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False)
