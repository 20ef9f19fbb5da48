"""Rules between tables, rules on the number of ranks, and sentences on settings that bias the gradient."""

from collections.abc import Iterator
from math import lcm

from megarl.config import megatron_fields
from megarl.config.tables import Tables
from megarl.config.tables.base import Row
from megarl.core.choices.credit import Credit
from megarl.core.choices.parts import BATCH_ADVANTAGES, GROUP_ADVANTAGES, TOKEN_ADVANTAGES
from megarl.core.replay_blockers import replay_blockers
from megarl.errors import ConfigError

_CREDITED = ("group_mean", "grpo", "rloo", "raft")
"""Advantages that [credit] may replace: rewards minus the group's mean in some scale, and "raft", whose rewards get a
baseline."""


def between_tables(config: Tables) -> Iterator[Row]:
    """Yield all rules between tables; ConfigError from what a rule has to resolve."""
    old_logprobs = [_old_logprobs] if config.train.old_logprobs == "rollout" else []
    for rules in (_sizes, _sampling, _advantages, _groups, _megatron, _replay, *old_logprobs, _engine, _judgement):
        yield from rules(config)


def _sizes(config: Tables) -> Iterator[Row]:
    """Sizes that are wrong for any number of ranks; ``for_ranks`` knows the number."""
    tokens, num, longest = config.train.micro_batch_tokens, config.train.mini_batches, config.longest_sequence
    responses, is_fixed = config.responses_per_step, config.sampling.fixed
    yield config.row("tokens_below_longest", tokens < longest, longest=longest)
    yield config.row("tokens_of_tp", tokens % config.parallel.tp)
    yield config.row("mini_batches_of_responses", is_fixed and responses % num, responses=responses)
    yield config.row("mini_batches_of_prompts", not is_fixed and num > config.rollout.prompts_per_step)


def _sampling(config: Tables) -> Iterator[Row]:
    sampling, group_size = config.sampling, config.rollout.group_size
    try:
        credit = config.credit_record
        for key in () if sampling.uses_credit else ("statistics", "scale", "ddof", "floor", "rate_eps"):
            value = getattr(credit, key)
            yield config.row("unread_credit", value != getattr(Credit(), key), key=key, value=value)
        if not sampling.allotted:
            _ = sampling.rule_of(group_size)
    except ConfigError as error:
        yield True, f"sampling: {error}"
    for table, rule in (("estimate", "ada_est"), ("gvm", "gvm")):
        is_set = getattr(config, table) != Tables.model_fields[table].default
        yield config.row("unread_table", sampling.rule != rule and is_set, table=table, rule=rule)
    yield config.row("max_prompts", config.prompts_per_step_at_most < config.rollout.prompts_per_step)
    high, fits = config.gvm.max_samples, config.estimate.min_samples <= group_size <= sampling.max_samples
    yield config.row("gvm_max_samples", high is not None and high < group_size)
    yield config.row("group_size_of_ada_est", sampling.rule == "ada_est" and not fits)


def _advantages(config: Tables) -> Iterator[Row]:
    objective, sampling, credit = config.train.resolved_objective, config.sampling, config.credit
    name, by_token = objective.advantage, objective.advantage in TOKEN_ADVANTAGES
    is_other = isinstance(name, str) and name not in (*_CREDITED, *TOKEN_ADVANTAGES)
    yield config.row("topk", objective.needs_topk)
    yield config.row("gdpo", name == "gdpo" and not config.reward.weights)
    yield config.row("credit_with_advantage", sampling.uses_credit and is_other, advantage=name)
    yield config.row("credit_by_token", sampling.uses_credit and (by_token or callable(name)))
    is_weighted = credit.objective is not None or credit.weigh != "sample"
    yield config.row("credit_weights_by_token", by_token and is_weighted)
    remainder = config.rollout.prompts_per_step % config.train.mini_batches
    yield config.row("kl_at_theta", objective.kl_at == "theta" and sampling.fixed and remainder)


def _groups(config: Tables) -> Iterator[Row]:
    """Refuse groups of 1 where advantages compare the responses of a group: all advantages would be 0.

    Allotted counts differ between prompts. A prompt may get 1, which ``sampling/lone_prompts`` counts.
    """
    objective, sampling, size = config.train.resolved_objective, config.sampling, config.rollout.group_size
    of_drawn = "sampling.refill = true" if sampling.refill else None
    of_trained = 'the selection "mixed_groups"' if objective.selection == "mixed_groups" else None
    if sampling.uses_credit and config.credit.statistics == "pool":
        of_drawn = "advantages of [credit]"
    elif sampling.uses_credit:
        of_trained = 'credit.statistics = "trained"'
    elif objective.advantage in GROUP_ADVANTAGES:
        of_trained = f"the advantage {objective.advantage!r}"
    elif objective.advantage in BATCH_ADVANTAGES and config.rollout.prompts_per_step == 1:
        of_trained = f"the advantage {objective.advantage!r} and rollout.prompts_per_step = 1"
    trained, draws_one = config.train_size, size == 1
    if not sampling.allotted:
        rule = sampling.rule_of(size)
        trained, again = rule.train_size or 0, (rule.next_samples(0, 1, *counts) for counts in ((1, 0), (0, 1)))
        draws_one = rule.next_samples(0, 0, 0, 0) == 1 and not any(again)
    reason = of_trained or (of_drawn if draws_one else None)
    key = "sampling.train_size" if sampling.train_size == 1 else "rollout.group_size"
    if draws_one and not (sampling.allotted or sampling.rule == "uniform"):
        key = "sampling." + ("tiers" if sampling.rule == "tiers" else "max_samples")
    yield config.row("group_of_1", reason and (draws_one or trained == 1), key=key, reason=reason)


_STAGES = (f"num_layers_in_{end}_pipeline_stage" for end in ("first", "last"))
_MEGATRON_NUMBERS = ("moe_expert_capacity_factor", "mlp_chunks_for_training", *_STAGES)
"""Fields that megarl itself reads, before Megatron does."""


def _megatron(config: Tables) -> Iterator[Row]:
    for field, value in config.megatron.items():
        instead = megatron_fields.DERIVED.get(field)
        yield config.row("megarl_sets", instead, field=field, instead=instead)
        is_number = value is None or type(value) in (int, float)
        yield config.row("megatron_number", field in _MEGATRON_NUMBERS and not is_number, field=field, value=value)
        is_dropout = field in ("hidden_dropout", "attention_dropout")
        yield config.row("dropout", is_dropout and value, field=field, value=value)
    gathers = config.megatron.get("overlap_param_gather")
    yield config.row("overlap_param_gather", gathers and not config.parallel.distributed_optimizer)


def _replay(config: Tables) -> Iterator[Row]:
    train, replay = config.train, config.train.replay
    has_reference = replay != "none" and train.resolved_objective.needs_ref_logprobs
    yield config.row("replay_reference", train.replay_reference and not has_reference)
    yield config.row("replay_min_score", train.replay_min_score and replay == "none")
    kind = config.rollout.engine_kind
    yield config.row("gates_of_engine", train.replay_gates and not kind.gates)
    yield config.row("indexer_of_engine", train.replay_indexer and not kind.indexer)
    yield config.row("r3_of_engine", replay == "r3" and not config.rollout.engine_kind.routes)
    reads_scores = train.resolved_objective.router_shift_floor is not None
    for blocker in replay_blockers(config.megatron) if replay != "none" or reads_scores else ():
        field, reason = blocker.setting, blocker.reason
        yield config.row("replay_blocker", True, field=field, value=config.megatron.get(field), reason=reason)


def _old_logprobs(config: Tables) -> Iterator[Row]:
    """Refuse what needs a pass before the first update, or has no effect where old is mu."""
    train, objective = config.train, config.train.resolved_objective
    yield config.row("old_mu_with_r2", train.replay == "r2")
    yield config.row("old_mu_with_token_kl", objective.advantage == "token_level_kl")
    yield config.row("old_mu_with_its_ratio", "old_mu" in objective.pairs)
    yield config.row("old_mu_with_router_shift", objective.router_shift_floor)
    yield config.row("old_mu_with_traces", config.log.traces_every and train.mini_batches > 1)


def _engine(config: Tables) -> Iterator[Row]:
    rollout, launch, sglang = config.rollout, config.launch, config.sglang
    is_served, is_ipc = rollout.engine_kind.server, sglang.sync == "ipc"
    yield config.row("layout_without_servers", launch.apart and not is_served)
    place = f"sglang.urls = {sglang.urls}" if sglang.urls else f'launch.layout = "{launch.layout}"'
    yield config.row("ipc_elsewhere", is_ipc and (sglang.urls or launch.apart), place=place)
    shares = config.servers_share_gpus and 0 in sglang.gpus
    yield config.row("nccl_on_shared_gpus", sglang.sync == "distributed" and shares)
    cannot = sglang.sync not in ("auto", "tensor") or sglang.spare_weights != "memory"
    yield config.row("deltas", sglang.deltas and (cannot or not is_served))
    can_rest = is_served and not (rollout.one_step_off or rollout.max_staleness or launch.apart)
    yield config.row("release_memory", sglang.release_memory and not can_rest)
    yield config.row("release_memory_with_rule", sglang.release_memory and config.sampling.allotted)
    yield config.row("staleness_of_rule", rollout.max_staleness and not config.sampling.fixed)
    yield config.row("staleness_of_episodes", rollout.max_staleness and config.environment.function)
    yield config.row("fp8_dtype", sglang.fp8 and rollout.dtype != "bf16")
    yield config.row("fp8_twice", sglang.fp8 and rollout.fp8_rounding)


def _judgement(config: Tables) -> Iterator[Row]:
    saved, is_served = config.checkpoint, config.reward.function == "reward_model"
    yield config.row("reward_model_urls", is_served != bool(config.reward_model.urls))
    yield config.row("eval_without_sets", config.eval.every and not config.benchmarks)
    yield config.row("keep_every", saved.keep_every and (not saved.every or saved.keep_every % saved.every))


def for_ranks(config: Tables, world_size: int, start: str) -> Iterator[Row]:
    """Yield the rules for ``world_size`` ranks; ``start``: the command that starts the ranks of [launch]."""
    p, num, sampling = config.parallel, config.train.mini_batches, config.sampling
    dense, expert = p.tp * p.pp * p.cp, p.ep * p.expert_tp * p.pp
    least = lcm(dense, expert)
    start += f" --launch.ranks_per_node {least}" * bool(config.launch.ranks % least)
    for names, sizes, product in (
        ("tp * pp * cp", f"{p.tp} * {p.pp} * {p.cp}", dense),
        ("ep * etp * pp", f"{p.ep} * {p.expert_tp} * {p.pp}", expert),
    ):
        facts = {"ranks": world_size, "names": names, "sizes": sizes, "product": product}
        yield config.row("ranks_of_layout", world_size % product, start=start, least=least, **facts)
    dp, responses = world_size // dense, config.responses_per_step
    facts = {"dp": dp, "shares": num * dp, "responses": responses}
    yield config.row("prompts_of_ranks", not sampling.fixed and config.rollout.prompts_per_step < num * dp, **facts)
    yield config.row("responses_of_ranks", sampling.fixed and responses % (num * dp), **facts)
    uneven = config.rollout.max_staleness and config.rollout.prompts_per_step % (num * dp)
    yield config.row("staleness_of_ranks", uneven, **facts)
    size = config.sft.batch_size if config.sft else 0
    yield config.row("sft_of_ranks", size % dp, size=size, dp=dp)


def find_warnings(config: Tables) -> tuple[str, ...]:
    """Return one sentence for each allowed setting that biases the gradient, or hides a bias."""
    train, keeps_sets, num = config.train, config.rollout.keeps_sets, config.train.mini_batches
    is_off = [f"train.{name}" for name in ("max_k3", "max_native_flip") if getattr(train, name) == "off"]
    rules = (
        config.row("warn_kept_sets", keeps_sets),
        config.row("warn_top_p", config.rollout.top_p < 1 and not keeps_sets),
        config.row("warn_off", is_off, keys=" and ".join(is_off)),
        config.row("warn_old_mu", train.old_logprobs == "rollout" and num > 1, unseen=num - 1),
    )
    return tuple(sentence for applies, sentence in rules if applies)
