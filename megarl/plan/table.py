"""Prints a plan: as aligned text, or as JSON."""

import json
from collections.abc import Iterator
from dataclasses import asdict

from megarl.config import Config
from megarl.plan.plan import Plan

Row = tuple[str, str, str]
"""(what, how much, note)."""


def to_json(found: Plan) -> str:
    """All numbers of a plan; bytes, counts and fractions under the names of the records."""
    totals = {"training": found.memory.training, "peak": found.memory.peak}
    return json.dumps({**asdict(found), "worst_rank": {"stage": found.memory.stage, **totals}}, indent=2)


def to_text(found: Plan, config: Config) -> str:
    """Sections of aligned lines."""
    sections = [
        ("model", _model(found)),
        ("layout", _layout(found, config)),
        (f"memory of the trainer's fullest rank (stage {found.memory.stage})", _memory(found)),
        ("engine", _engine(found, config)),
        ("GPU", _gpu(found, config)),
        ("batches", _batches(found, config)),
        ("routes", _routes(found)),
        ("bytes moved, at most", _traffic(found)),
    ]
    lines = [f"plan of {config.run.name}: {found.family}, shape from {found.model_path}"]
    for title, rows in sections:
        lines += ["", title, *(f"  {what:<34} {amount:>14}  {note}".rstrip() for what, amount, note in rows)]
    return "\n".join(lines)


def size(amount: float) -> str:
    """Bytes in the largest binary unit that leaves at least 1, three figures."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(amount) < 1024:
            return f"{amount:.4g} {unit}"
        amount /= 1024
    return f"{amount:.4g} TiB"


def _count(number: int) -> str:
    unit, scale = next((each for each in (("B", 1e9), ("M", 1e6), ("k", 1e3)) if number >= each[1]), ("", 0))
    return f"{number / scale:.2f} {unit}" if scale else str(number)


def _model(found: Plan) -> Iterator[Row]:
    model = found.model
    yield "parameters", _count(model.total), f"{_count(model.experts)} of them in routed experts"
    without = f"{_count(model.active - model.embeddings)} without embedding and output layer"
    yield "used by a token", _count(model.active), without


def _layout(found: Plan, config: Config) -> Iterator[Row]:
    sizes, launch = found.layout, config.launch
    yield "ranks", str(sizes.world_size), f"{launch.nodes} x {launch.ranks_per_node}"
    dense = f"tp {sizes.tp}, pp {sizes.pp}" + (f", vpp {sizes.vpp}" if sizes.vpp else "")
    yield "dense weights", f"dp {sizes.dp}", dense + f", cp {sizes.cp}"
    yield "experts", f"edp {sizes.edp}", f"ep {sizes.ep}, etp {sizes.etp}"
    beside = "on the trainer's" if config.servers_share_gpus else "beside the trainer's"
    where = "apart" if launch.apart else beside if config.sglang.gpus else "elsewhere"
    where += f', sync = "{config.weight_sync}"'
    yield "GPUs of servers", str(found.server_gpus), where if config.rollout.engine_kind.server else "no servers"


def _memory(found: Plan) -> Iterator[Row]:
    memory, rank = found.memory, found.rank
    yield "parameters", _count(rank.total), f"{_count(rank.dense)} dense, {_count(rank.expert)} of experts"
    yield "weights", size(memory.weights), ""
    yield "gradients", size(memory.gradients), ""
    yield "optimizer", size(memory.optimizer), "main weights and Adam's moments, sharded"
    if memory.reference:
        yield "reference policy", size(memory.reference), ""
    yield "activations", size(memory.activations), "full micro-batches in flight"
    yield "working space", size(memory.working), "recomputed unit and rows on their way, or the output layer"
    if memory.recorded:
        yield "recorded routes (r2)", size(memory.recorded), "of all mini-batches of a step"
    if memory.compared:
        yield "hidden states compared", size(memory.compared), "of a mini-batch, every train.replay_bias_every steps"
    yield "training", size(memory.training), "sum of these"
    yield "update of the engine", size(memory.states + memory.sync), f"{size(memory.sync)} beside the states"
    if memory.host_routes:
        yield "host: routes", size(memory.host_routes), f"{size(memory.exchange)} on the GPU during an exchange"
    for other in found.stages if len(found.stages) > 1 else ():
        yield f"  stage {other.stage}", size(other.peak), f"weights {size(other.weights)}"
    if found.spare_weights:
        yield "host: spare weights", size(found.spare_weights), "first rank of each node"


def _engine(found: Plan, config: Config) -> Iterator[Row]:
    engine, is_server = found.engine, config.rollout.engine_kind.server
    place = "of a server" if is_server else "of a rank"
    dtype = "FP8 blocks" if is_server and config.sglang.fp8 else config.rollout.dtype
    yield "weights per GPU", size(engine.weights), dtype
    yield "cache per GPU", size(engine.cache), f"{size(engine.cache_per_token)} per token"
    yield "tokens in the cache", f"{engine.tokens:,}", place
    yield "longest sequences at once", str(engine.sequences), place


def _gpu(found: Plan, config: Config) -> Iterator[Row]:
    limit = config.launch.gpu_memory_gib
    of = "no launch.gpu_memory_gib, nothing refused" if limit is None else f"of {limit:g} GiB"
    shared = "shared in turns, " if config.sglang.release_memory else ""
    yield "trainer's GPU, with reserves", size(found.gpu.trainer), shared + of
    if found.gpu.server:
        yield "server's GPU, with reserves", size(found.gpu.server), of


def _batches(found: Plan, config: Config) -> Iterator[Row]:
    batches, train = found.batches, config.train
    yield "responses of a step", str(batches.responses), f"{config.rollout.prompts_per_step} prompts"
    yield "optimizer steps of a step", str(train.mini_batches), f"{batches.mini_batch} responses each"
    share = f"{batches.old_share:.0%} of the arithmetic of all passes"
    yield "old-log-prob passes", f"{batches.old_passes} of {train.mini_batches} mini-batches", share
    yield "sequences of a rank", str(batches.sequences_per_rank), f"per mini-batch, at most {batches.longest} tokens"
    yield "micro-batches", f"{batches.fewest} to {batches.most}", f"of {train.micro_batch_tokens} tokens a rank"
    if found.layout.pp > 1:
        idle = f"{batches.bubble_most:.1%} to {batches.bubble_fewest:.1%}"
        yield "pipeline bubble", idle, "share of the time"
    yield "optimizer steps of the run", str(batches.optimizer_steps), ""


def _routes(found: Plan) -> Iterator[Row]:
    yield "in the trainer", f"{found.trace.memory} B", "per token"
    yield "from servers, short form", f"{found.trace.wire_short} B", "per token"
    yield "from servers, SGLang's own", f"{found.trace.wire_long} B", "per token"


def _traffic(found: Plan) -> Iterator[Row]:
    step, rank, sync = found.step, found.traffic, found.sync
    yield "step: tokens, log-probabilities", size(step.columns), "engine to trainer, before JSON"
    yield "step: routes", size(step.routes), "engine to trainer"
    yield "step: routes", size(step.routes_per_rank), "to one rank's routers"
    yield "step: rollouts", size(step.rollouts_per_rank), "to one rank, from others of its model copy"
    yield "step: rewards", size(step.rewards_per_rank), "to one rank, of all responses"
    yield "optimizer step: gradients", size(rank.gradients), "to one rank"
    yield "optimizer step: weights", size(rank.gathered_weights), "to one rank"
    yield "micro-batch: experts", size(rank.experts), "to one rank, ep and etp"
    yield "micro-batch: tensor-parallel", size(rank.tensor), "to one rank"
    yield "micro-batch: pipeline", size(rank.pipeline), "to one rank"
    yield "micro-batch: context", size(rank.context), "to one rank"
    yield "update: gathered", size(sync.gathered), f"to one rank, {size(sync.tensors_at_once)} at once at most"
    yield "update: sent", size(sync.sent), f"to each server, in at most {sync.buckets} buckets"
