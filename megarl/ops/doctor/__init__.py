"""``megarl doctor``: whether this machine, or one configuration here, can train; needs only numpy and pydantic.

report   checks, tables, the verdict; as text and as JSON
machine  packages, Megatron-Core, devices, SGLang; a trial of the trainer's first imports and reads
inputs   model, data, keys, disk and [launch] of a configuration
"""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.config import Config, Layout
from megarl.config import file as config_file
from megarl.errors import ConfigError
from megarl.models.fit import check_fit, wants_routes
from megarl.models.shapes import ModelShape
from megarl.ops.doctor import inputs, machine
from megarl.ops.doctor.report import Details, Diagnosis, Finding


def doctor(
    path: Path | None = None, overrides: Mapping[str, Any] | None = None, *, trust: bool = False, json: bool = False
) -> int:
    """Print the verdict, reasons and details; return 0 if ready, otherwise 1. ConfigError for a wrong configuration."""
    report = examine(path, overrides, trust=trust)
    print(report.to_json() if json else report.to_text())
    return 0 if report.ready else 1


def examine(path: Path | None = None, overrides: Mapping[str, Any] | None = None, *, trust: bool = False) -> Diagnosis:
    """Check the machine, and with a path what the configuration names."""
    releases, config, checks = machine.versions(), None, []
    try:
        config = None if path is None else config_file.load(path, overrides, trust=trust)
    except ConfigError as error:
        if "found no megatron-core" not in str(error):
            raise
        checks = [Finding("[megatron]", "failed", "not checked: Megatron-Core, which has its keys, is not installed")]
    if config is None:
        checks += machine.check_machine(None, releases)
        return Diagnosis(None if path is None else str(path), checks, [], releases)
    layout = _layout_of(config)
    of_model, shape = inputs.read_model(config)
    if shape is not None:
        check_fit(config, shape)
    of_inputs = [*of_model, *inputs.check_inputs(config, shape)]
    failed = {check.name for check in of_inputs if check.status == "failed"}
    checks += [*machine.check_machine(config, releases, failed), *of_inputs]
    checks += [Finding("configuration", "warning", warning) for warning in config.warnings]
    tables = [_resolved(config, layout, shape)]
    if config.rollout.engine_kind.server and releases["httpx"] and releases["aiohttp"]:
        of_servers, table = _servers(config)
        checks += of_servers
        tables.append(table)
    return Diagnosis(str(path), checks, tables, releases)


def _servers(config: Config) -> tuple[list[Finding], Details]:
    """Return checks whether a run would accept its SGLang servers, and a table of the servers' releases."""
    from megarl.engines.sglang.server import examine  # needs httpx and aiohttp

    checks, rows = [], []
    for server in examine(config):
        rows.append((server.where, server.release or "-"))
        checks += [Finding(f"server {server.where}", "warning", warning) for warning in server.warnings]
        if server.problem is not None:
            checks.append(Finding(f"server {server.where}", "failed", server.problem))
    return checks, Details("SGLang servers", ("where", "release"), rows)


def _layout_of(config: Config) -> Layout:
    """Return the layout under torchrun, or of [launch], or the smallest layout. ConfigError if sizes do not divide."""
    p = config.parallel
    smallest = math.lcm(p.tp * p.pp * p.cp, p.ep * p.expert_tp * p.pp)
    ranks = config.launch.ranks if "launch" in config.model_fields_set else smallest
    return config.check_world_size(int(os.environ.get("WORLD_SIZE", ranks)))


def _resolved(config: Config, layout: Layout, shape: ModelShape | None) -> Details:
    vpp = f" (vpp {layout.vpp})" if layout.vpp else ""
    able = ", ".join(config.rollout.engine_kind.capabilities) or "nothing that is optional"
    rows = {
        "ranks": str(layout.world_size),
        "dense weights": f"tp {layout.tp} x pp {layout.pp}{vpp} x cp {layout.cp} x dp {layout.dp}",
        "expert weights": f"etp {layout.etp} x ep {layout.ep} x pp {layout.pp} x dp {layout.edp}",
        "sequence parallel": "on" if config.parallel.uses_sequence_parallel else "off",
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
    changed = "".join(f", other {key}" for key in config.train.objective_overrides)
    rows["objective, replay"] = f"{config.train.objective}{changed}; {config.train.replay}"
    if config.train.old_logprobs == "rollout":
        rows["old policy"] = "the engine's (train.old_logprobs)"
    if shape is not None:
        experts = f"top-{shape.topk} of {shape.num_experts} experts" if shape.moe_layers else "dense"
        requested = "asked for" if wants_routes(config, shape) else "not asked for"
        rows["model"] = f"{shape.family}, {experts}; routes are {requested}"
        if shape.norm_over_heads:
            rows["layers"] = "Megatron's local ones: Transformer Engine has no norm over all heads"
    if config.train.resolved_objective.needs_ref_logprobs:
        rows["reference policy"] = config.reference_path
    rows["run folder"] = str(config.run_dir)
    return Details(f"Configuration of run {config.run.name!r}", ("name", "resolved"), list(rows.items()))
