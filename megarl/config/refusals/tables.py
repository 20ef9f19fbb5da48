"""Rules between tables, rules on the number of ranks, and sentences on settings that bias the gradient."""

from collections.abc import Iterator

from megarl.config import megatron_fields
from megarl.config.tables import EstimateConfig, GvmConfig, Tables
from megarl.config.tables.base import Row
from megarl.core.choices.credit import Credit
from megarl.core.choices.parts import GROUP_ADVANTAGES, TOKEN_ADVANTAGES
from megarl.core.replay_blockers import replay_blockers
from megarl.errors import ConfigError

_CREDITED = ("group_mean", "grpo", "rloo", "raft")
"""Advantages that [credit] may replace: rewards minus the group's mean in some scale, and "raft", whose rewards get a
baseline."""


def between_tables(config: Tables) -> Iterator[Row]:
    """Yield all rules between tables; ConfigError from what a rule has to resolve."""
    old_logprobs = [_old_logprobs] if config.train.old_logprobs == "rollout" else []
    of_first = [_sizes, _sampling, _advantages, _groups, _megatron, _replay]
    for rules in (*of_first, *old_logprobs, _engine, _judgement):
        yield from rules(config)


def _sizes(config: Tables) -> Iterator[Row]:
    """Sizes that are wrong for any number of ranks; ``for_ranks`` knows the number."""
    tokens, num, prompts = config.train.micro_batch_tokens, config.train.mini_batches, config.rollout.prompts_per_step
    longest, tp = config.longest_sequence, config.parallel.tp
    yield (
        tokens < longest,
        f"train.micro_batch_tokens: found {tokens}, expected at least the longest sequence = {longest}",
        "raise it, or lower data.max_prompt_tokens or rollout.max_response_tokens",
    )
    yield tokens % tp, f"train.micro_batch_tokens: found {tokens}, expected a multiple of parallel.tp = {tp}"
    expected = f"train.mini_batches: found {num}, expected"
    yield (
        config.sampling.fixed and config.responses_per_step % num,
        f"{expected} a divisor of rollout.prompts_per_step * group_size = {config.responses_per_step}",
    )
    yield (
        not config.sampling.fixed and num > prompts,
        f"{expected} at most rollout.prompts_per_step = {prompts}: this sampling makes mini-batches of whole groups",
    )


def _sampling(config: Tables) -> Iterator[Row]:
    sampling, prompts, group_size = config.sampling, config.rollout.prompts_per_step, config.rollout.group_size
    try:
        credit = config.credit_record
        for name in () if sampling.uses_credit else ("statistics", "scale", "ddof", "floor", "rate_eps"):
            yield (
                getattr(credit, name) != getattr(Credit(), name),
                f"sampling: credit.{name}: found {getattr(credit, name)!r}, but advantages are the objective's",
                'set sampling.advantages = "credit", or remove it',
            )
        if not sampling.allotted:
            _ = sampling.rule_of(group_size)
    except ConfigError as error:
        yield True, f"sampling: {error}"
    for table, default, rule in (("estimate", EstimateConfig(), "ada_est"), ("gvm", GvmConfig(), "gvm")):
        yield (
            sampling.rule != rule and getattr(config, table) != default,
            f'{table}: found with sampling.rule = "{sampling.rule}", but only "{rule}" reads this table',
            "remove it",
        )
    yield (
        config.prompts_per_step_at_most < prompts,
        f"sampling.max_prompts: found {sampling.max_prompts}, expected at least rollout.prompts_per_step = {prompts}",
    )
    high = config.gvm.max_samples
    yield (
        high is not None and high < group_size,
        f"gvm.max_samples: found {high}, expected at least rollout.group_size = {group_size}, the mean number",
    )
    low = config.estimate.min_samples
    yield (
        sampling.rule == "ada_est" and not low <= group_size <= sampling.max_samples,
        f"rollout.group_size: found {group_size}, the mean number of responses, expected "
        f"estimate.min_samples = {low} to sampling.max_samples = {sampling.max_samples}",
    )


def _advantages(config: Tables) -> Iterator[Row]:
    objective, sampling = config.train.resolved_objective, config.sampling
    name, by_token = objective.advantage, objective.advantage in TOKEN_ADVANTAGES
    credit = f'sampling.advantages: found "credit" (the default with rule = "{sampling.rule}") with'
    set_objective = 'set sampling.advantages = "objective"'
    prompts, num = config.rollout.prompts_per_step, config.train.mini_batches
    yield (
        objective.needs_topk,
        f'train.objective: found "{config.train.objective}": no engine records the top K tokens that its mask needs',
        "use dppo_tv or dppo_kl, whose masks need the sampled token alone",
    )
    yield (
        name == "gdpo" and not config.reward.weights,
        "reward.weights: found none with advantage 'gdpo', which standardises several rewards one by one",
        "name them with their weights, and have reward.function return a reward for each",
    )
    yield (
        sampling.uses_credit and isinstance(name, str) and name not in (*_CREDITED, *TOKEN_ADVANTAGES),
        f"{credit} advantage {name!r}, but [credit] subtracts the mean of the prompt's pool instead",
        set_objective,
    )
    yield (
        sampling.uses_credit and (by_token or callable(name)),
        f"{credit} an objective whose advantages differ between tokens, or are your own",
        set_objective,
    )
    yield (
        by_token and (config.credit.objective is not None or config.credit.weigh != "sample"),
        "credit: its weights do not go with an objective whose advantages differ between tokens",
    )
    yield (
        objective.kl_at == "theta" and sampling.fixed and prompts % num,
        f"train.objective_overrides: found kl_at = 'theta' with rollout.prompts_per_step = {prompts}, expected a "
        f"multiple of train.mini_batches = {num}: each update computes the advantages of whole groups",
    )


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
    elif objective.advantage == "reinforce_pp" and config.rollout.prompts_per_step == 1:
        of_trained = "the advantage 'reinforce_pp' and rollout.prompts_per_step = 1"
    trained, draws_one = config.train_size, size == 1
    if not sampling.allotted:
        rule = sampling.rule_of(size)
        trained, again = rule.train_size or 0, (rule.next_samples(0, 1, *counts) for counts in ((1, 0), (0, 1)))
        draws_one = rule.next_samples(0, 0, 0, 0) == 1 and not any(again)
    reason = of_trained or (of_drawn if draws_one else None)
    key = "sampling.train_size" if sampling.train_size == 1 else "rollout.group_size"
    if draws_one and not (sampling.allotted or sampling.rule == "uniform"):
        key = "sampling." + ("tiers" if sampling.rule == "tiers" else "max_samples")
    yield (
        reason and (draws_one or trained == 1),
        f"{key}: found 1 response to a prompt with {reason}, which compares several: every gradient would be 0",
        "set 2 or more, or an advantage without a group, such as train.objective_overrides = "
        '{advantage = "reinforce_pp"}',
    )


_MEGATRON_NUMBERS = (
    "moe_expert_capacity_factor",
    "mlp_chunks_for_training",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
)
"""Fields that megarl itself reads, before Megatron does."""


def _megatron(config: Tables) -> Iterator[Row]:
    settings = config.megatron
    for key in settings:
        megarl_key = megatron_fields.DERIVED.get(key)
        yield megarl_key, f"megatron.{key}: megarl sets this itself", f"use {megarl_key} instead"
    for key in _MEGATRON_NUMBERS:
        value = settings.get(key)
        no_number = value is not None and type(value) not in (int, float)
        yield no_number, f"megatron.{key}: found {value!r}, expected a number", "write it without quotes"
    for key in ("hidden_dropout", "attention_dropout"):
        dropout = settings.get(key)
        yield (
            dropout,
            f"megatron.{key}: found {dropout!r}, expected 0: the old-log-prob pass and the update must "
            "compute the same",
        )
    yield (
        settings.get("overlap_param_gather") and not config.parallel.distributed_optimizer,
        "megatron.overlap_param_gather: found true without distributed optimizer, so there are no weights to gather",
        "remove it, or set parallel.distributed_optimizer = true",
    )


def _replay(config: Tables) -> Iterator[Row]:
    train, engine, replay = config.train, config.rollout.engine, config.train.replay
    yield (
        train.replay_reference and (replay == "none" or not train.resolved_objective.needs_ref_logprobs),
        f'train.replay_reference: found true with train.replay = "{replay}" and objective "{train.objective}", '
        'expected "r2" or "r3", and an objective with a KL to a reference',
    )
    yield (
        replay == "r3" and not config.rollout.engine_kind.routes,
        f'train.replay: found "r3" with rollout.engine = "{engine}", which returns no routes',
        'set train.replay = "r2" or "none"',
    )
    for blocker in replay_blockers(config.megatron) if replay != "none" else ():
        value = config.megatron.get(blocker.setting)
        yield (
            True,
            f'megatron.{blocker.setting}: found {value!r} with train.replay = "{replay}", which cannot hold: '
            f"{blocker.reason}",
            'remove it or set train.replay = "none"',
        )


def _old_logprobs(config: Tables) -> Iterator[Row]:
    """Refuse what needs a pass before the first update, or has no effect where old is mu."""
    train, objective, every = config.train, config.train.resolved_objective, config.log.traces_every
    begin, recompute = 'train.old_logprobs: found "rollout" with', 'train.old_logprobs = "recomputed"'
    yield (
        train.replay == "r2",
        f'{begin} train.replay = "r2", which replays what the old-log-prob pass records, and there is none',
        f'set train.replay = "r3" or "none", or {recompute}',
    )
    yield (
        objective.advantage == "token_level_kl",
        f'{begin} the advantage "token_level_kl", which needs log-probabilities before the first update',
        f"set {recompute}",
    )
    yield (
        "old_mu" in objective.pairs,
        f'{begin} objective "{train.objective}", which uses old/mu: the ratio is 1, with nothing to correct',
        f"use theta/mu in its place, or set {recompute}",
    )
    yield (
        every and train.mini_batches > 1,
        f"{begin} log.traces_every = {every} and train.mini_batches = {train.mini_batches}: the files are of the "
        "weights before the first update, with which only the first mini-batch is computed",
        "set log.traces_every = 0, or one mini-batch",
    )


def _engine(config: Tables) -> Iterator[Row]:
    rollout, launch, sglang = config.rollout, config.launch, config.sglang
    served, layout = rollout.engine_kind.server, f'launch.layout = "{launch.layout}"'
    yield (
        launch.apart and not served,
        f'launch.layout: found "{launch.layout}" with rollout.engine = "{rollout.engine}", which has no servers',
        'set rollout.engine = "sglang", or layout = "colocated"',
    )
    yield (
        sglang.sync == "ipc" and (sglang.urls or launch.apart),
        f'sglang.sync: found "ipc" with {f"sglang.urls = {sglang.urls}" if sglang.urls else layout}, expected servers '
        "that megarl starts beside the trainer, as they open its memory",
        'set sglang.sync = "distributed"',
    )
    yield (
        sglang.sync == "distributed" and config.servers_share_gpus and 0 in sglang.gpus,
        'sglang.sync: found "distributed" with servers on the trainer\'s GPUs: NCCL refuses two ranks on one GPU',
        'set sglang.sync = "auto"',
    )
    yield (
        sglang.release_memory and (not served or rollout.one_step_off or launch.apart),
        "sglang.release_memory: found true, expected servers that share the trainer's GPUs and rest while it trains: "
        'rollout.engine = "sglang", rollout.one_step_off = false, launch.layout "colocated" or "local"',
    )
    yield (
        sglang.release_memory and config.sampling.allotted,
        f'sglang.release_memory: found true with rule = "{config.sampling.rule}", whose estimates need the policy',
        "set it to false, or choose another rule",
    )
    yield (
        sglang.fp8 and rollout.dtype != "bf16",
        f'rollout.dtype: found "{rollout.dtype}" with sglang.fp8 = true, whose kernels compute in bf16 only',
        'set rollout.dtype = "bf16"',
    )
    yield (
        sglang.fp8 and rollout.fp8_rounding,
        "rollout.fp8_rounding: found true together with sglang.fp8 = true, whose weights are in FP8 already",
        "set one of them",
    )


def _judgement(config: Tables) -> Iterator[Row]:
    function, urls = config.reward.function, config.reward_model.urls
    every, sets, saved = config.eval.every, config.benchmarks, config.checkpoint
    yield (
        (function == "reward_model") != bool(urls),
        f'reward_model.urls: found {urls} with reward.function = "{function}"',
        'name servers, with reward.function = "reward_model"',
    )
    yield (
        every and not sets,
        f"eval.every: found {every} without data.heldout",
        "set it, or eval.sets, or eval.every = 0",
    )
    yield (
        saved.keep_every and (not saved.every or saved.keep_every % saved.every),
        f"checkpoint.keep_every: found {saved.keep_every}, expected a multiple of checkpoint.every = {saved.every}: "
        "only saved steps can stay",
    )


def for_ranks(config: Tables, world_size: int) -> Iterator[Row]:
    """Yield the rules for ``world_size`` ranks."""
    p, num = config.parallel, config.train.mini_batches
    dense, expert = p.tp * p.pp * p.cp, p.ep * p.expert_tp * p.pp
    for names, sizes, product in (
        ("tp * pp * cp", f"{p.tp} * {p.pp} * {p.cp}", dense),
        ("ep * etp * pp", f"{p.ep} * {p.expert_tp} * {p.pp}", expert),
    ):
        yield (
            world_size % product,
            f"parallel: found {world_size} ranks, expected a multiple of {names} = {sizes} = {product}",
            "start another number of processes or change the layout",
        )
    dp = world_size // dense
    shares, prompts = f"train.mini_batches * dp = {num} * {dp} = {num * dp}", config.rollout.prompts_per_step
    yield (
        not config.sampling.fixed and prompts < num * dp,
        f"rollout: found prompts_per_step = {prompts}, expected at least {shares}: each rank trains on whole groups",
    )
    yield (
        config.sampling.fixed and config.responses_per_step % (num * dp),
        f"rollout: found prompts_per_step * group_size = {config.responses_per_step} responses, expected a multiple of "
        f"{shares}",
        "change one of them",
    )
    size = config.sft.batch_size if config.sft else 0
    yield size % dp, f"sft.batch_size: found {size}, expected a multiple of dp = {dp}"


def find_warnings(config: Tables) -> tuple[str, ...]:
    """Return one sentence for each allowed setting that biases the gradient, or hides a bias."""
    top_p, num = config.rollout.top_p, config.train.mini_batches
    is_off = [f"train.{name}" for name in ("max_k3", "max_native_flip") if getattr(config.train, name) == "off"]
    rows = (
        (
            config.rollout.keeps_sets,
            f"rollout.top_p: found {top_p:g}: training optimises the policy within the recorded nuclei; what lies "
            "outside of them is never sampled and gets no gradient; evaluate with the same top_p, or set it to 1",
        ),
        (
            top_p < 1 and not config.rollout.keeps_sets,
            f"rollout.top_p: found {top_p:g} with rollout.keep_sampling_mask = false: tokens outside of the nucleus "
            "are never sampled, so their part of the gradient is missing; pi / mu of a sampled token is the mass of "
            f"its nucleus ({top_p:g} to 1), so products over long responses shrink, and rollout/k1 and k3 grow; only "
            "1 is unbiased",
        ),
        (is_off, f'{" and ".join(is_off)}: found "off": responses on which the engines disagree are trained unseen'),
        (
            config.train.old_logprobs == "rollout" and num > 1,
            f'train.old_logprobs: found "rollout" with train.mini_batches = {num}: tripwires and '
            "train.min_route_agreement look at the first mini-batch of a step, whose update finds the weights unmoved; "
            f"the responses of the other {num - 1} are trained unseen",
        ),
    )
    return tuple(sentence for applies, sentence in rows if applies)
