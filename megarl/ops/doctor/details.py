"""The tables below the verdict."""

import math
import os

from megarl.config import Config, Layout, gpu_defaults
from megarl.core.replay_blockers import REPLAY_BLOCKERS
from megarl.engines.sglang.versions import CAPABILITIES, FAULTS, NEWEST, OLDEST, dotted
from megarl.models.fit import wants_routes
from megarl.models.shapes import ModelShape
from megarl.ops.doctor.report import Details, Finding


def blockers() -> Details:
    title = 'Keys of [megatron] that prevent routing replay (refused unless train.replay = "none")'
    return Details(title, ("key", "because"), [(blocker.setting, blocker.reason) for blocker in REPLAY_BLOCKERS])


def releases() -> Details:
    rows = [(f"from {dotted(entry.since)}", entry.name, entry.meaning) for entry in CAPABILITIES]
    rows += [
        (f"to {dotted(fault.last)}" if fault.last else "all", fault.name, f"refused: {fault.meaning}")
        for fault in FAULTS
    ]
    title = f"SGLang releases that megarl samples with: {dotted(OLDEST)} to {dotted(NEWEST)}"
    return Details(title, ("releases", "name", "meaning"), rows)


def servers(config: Config) -> tuple[list[Finding], Details]:
    """Return checks whether a run would accept its SGLang servers, and a table of the servers' capabilities."""
    from megarl.engines.sglang.check import examine  # needs httpx and aiohttp

    checks, rows = [], []
    for server in examine(config):
        rows.append((server.where, server.release or "-", ", ".join(server.able) or "-"))
        checks += [Finding(f"server {server.where}", "warning", warning) for warning in server.warnings]
        if server.problem is not None:
            checks.append(Finding(f"server {server.where}", "failed", server.problem))
    return checks, Details("SGLang servers", ("where", "release", "can"), rows)


def layout_of(config: Config) -> Layout:
    """Return the layout under torchrun, or of [launch], or the smallest layout. ConfigError if sizes do not divide."""
    p = config.parallel
    smallest = math.lcm(p.tp * p.pp * p.cp, p.ep * p.expert_tp * p.pp)
    ranks = config.launch.ranks if "launch" in config.model_fields_set else smallest
    return config.check_world_size(int(os.environ.get("WORLD_SIZE", ranks)))


def resolved(config: Config, layout: Layout, shape: ModelShape | None) -> Details:
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


def switches(config: Config, has_te: bool) -> Details:
    decided = gpu_defaults.switches(config, on_gpu=True, has_te=has_te)
    rows = [(switch.field, "on" if switch.on else "off", switch.reason) for switch in decided]
    return Details("Keys of [megatron] for speed", ("key", "on GPUs", "because"), rows)
