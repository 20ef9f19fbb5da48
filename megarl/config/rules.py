"""The rules between tables: which settings contradict each other, and which bias the gradient.

A table checks its own keys. A message names the key, what was found, what was expected and why.
"""

from megarl.config import megatron_fields
from megarl.config.tables import EstimateConfig, GvmConfig, Tables
from megarl.core.choices.family import family_warning
from megarl.core.choices.parts import GROUP_ADVANTAGES, TOKEN_ADVANTAGES
from megarl.core.replay_blockers import replay_blockers
from megarl.errors import ConfigError

_CREDITED = ("group_mean", "grpo", "rloo", "raft")
"""Advantages in whose place [credit] may stand: rewards less the group's mean, in some scale; and "raft", whose rewards
then get a baseline."""


def check(tables: Tables) -> None:
    """Raise ConfigError for the first rule that the tables break."""
    _check_sizes(tables)
    _check_sampling(tables)
    _check_advantages(tables)
    _check_groups(tables)
    _check_megatron(tables)
    _check_replay(tables)
    _check_old_logprobs(tables)
    _check_engine(tables)
    if (tables.reward.function == "reward_model") != bool(tables.reward_model.urls):
        raise ConfigError(
            f'reward_model.urls: found {tables.reward_model.urls} with reward.function = "{tables.reward.function}"; '
            'name servers, with reward.function = "reward_model"'
        )
    _check_evaluation(tables)


def _check_evaluation(tables: Tables) -> None:
    every, best, sets = tables.eval.every, tables.checkpoint.keep_best, tables.benchmarks
    if every and not sets:
        raise ConfigError(f"eval.every: found {every} without data.heldout; set it, or eval.sets, or eval.every = 0")
    if best is not None and not (every and best in ("pooled", *sets)):
        raise ConfigError(
            f'checkpoint.keep_best: found "{best}" with eval.every = {every}, expected evaluations, and '
            f"{' or '.join(('pooled', *sets))}"
        )
    if (stays := tables.checkpoint.keep_every) and (not tables.checkpoint.every or stays % tables.checkpoint.every):
        raise ConfigError(
            f"checkpoint.keep_every: found {stays}, expected a multiple of checkpoint.every = "
            f"{tables.checkpoint.every}: only saved steps can stay"
        )


def find_warnings(tables: Tables) -> tuple[str, ...]:
    """One sentence for each setting that is allowed but biases the gradient, or hides that something does."""
    top_p, nucleus = tables.rollout.top_p, None
    if tables.rollout.keeps_sets:
        nucleus = (
            f"rollout.top_p: found {top_p:g}: training optimises the policy within the recorded nuclei; what lies "
            "outside of them is never sampled and gets no gradient; evaluate with the same top_p, or set it to 1"
        )
    elif top_p < 1:
        nucleus = (
            f"rollout.top_p: found {top_p:g} with rollout.keep_sampling_mask = false: tokens outside of the nucleus "
            "are never sampled, so their part of the gradient is missing; pi / mu of a sampled token is the mass of "
            f"its nucleus ({top_p:g} to 1), so products over long responses shrink, and rollout/k1 and k3 grow; only "
            "1 is unbiased"
        )
    off = " and ".join(
        f"train.{name}" for name in ("max_k3", "max_native_flip") if getattr(tables.train, name) == "off"
    )
    blind = f'{off}: found "off": responses on which the engines disagree are trained unseen' if off else None
    unwatched, parts = None, tables.train.mini_batches
    if tables.train.old_logprobs == "rollout" and parts > 1:
        unwatched = (
            f'train.old_logprobs: found "rollout" with train.mini_batches = {parts}: tripwires and '
            "train.min_route_agreement look at the first mini-batch of a step, whose update finds the weights unmoved; "
            f"the responses of the other {parts - 1} are trained unseen"
        )
    return tuple(filter(None, (family_warning(tables.train.resolved_objective), nucleus, blind, unwatched)))


def _check_sizes(tables: Tables) -> None:
    train = tables.train
    longest = tables.data.max_prompt_tokens + tables.rollout.max_response_tokens
    if train.micro_batch_tokens < longest:
        raise ConfigError(
            f"train.micro_batch_tokens: found {train.micro_batch_tokens}, expected at least "
            f"data.max_prompt_tokens + rollout.max_response_tokens = {longest}; raise it or lower one of those"
        )
    if train.micro_batch_tokens % tables.parallel.tp:
        raise ConfigError(
            f"train.micro_batch_tokens: found {train.micro_batch_tokens}, expected a multiple of parallel.tp = "
            f"{tables.parallel.tp}"
        )
    # With the number of ranks known, Config.check_world_size refuses more. These hold for any number of them.
    if tables.sampling.fixed and tables.responses_per_step % train.mini_batches:
        raise ConfigError(
            f"train.mini_batches: found {train.mini_batches}, expected a divisor of "
            f"rollout.prompts_per_step * group_size = {tables.responses_per_step}"
        )
    prompts = tables.rollout.prompts_per_step
    if not tables.sampling.fixed and train.mini_batches > prompts:
        raise ConfigError(
            f"train.mini_batches: found {train.mini_batches}, expected at most rollout.prompts_per_step = {prompts}: "
            "this sampling makes mini-batches of whole groups"
        )


def _check_sampling(tables: Tables) -> None:
    sampling, prompts, group_size = tables.sampling, tables.rollout.prompts_per_step, tables.rollout.group_size
    try:
        sampling.check_credit(tables.credit_record, group_size)
        if not sampling.allotted:
            _ = sampling.rule_of(group_size)
    except ConfigError as error:
        raise ConfigError(f"sampling: {error}") from error
    if sampling.rule == "gvm" and tables.gvm.block == "output_layer" and tables.rollout.keeps_sets:
        raise ConfigError(
            'gvm.block: found "output_layer" with rollout.keep_sampling_mask, top_p below 1, where gradient norms of '
            'single responses are not computed; use gvm.block = "embedding"'
        )
    for table, default, rule in (("estimate", EstimateConfig(), "ada_est"), ("gvm", GvmConfig(), "gvm")):
        if sampling.rule != rule and getattr(tables, table) != default:
            raise ConfigError(
                f'{table}: found with sampling.rule = "{sampling.rule}", but only "{rule}" reads this table; remove it'
            )
    if tables.prompts_per_step_at_most < prompts:
        raise ConfigError(
            f"sampling.max_prompts: found {sampling.max_prompts}, expected at least rollout.prompts_per_step = "
            f"{prompts}"
        )
    if (most := tables.gvm.max_samples) is not None and most < group_size:
        raise ConfigError(
            f"gvm.max_samples: found {most}, expected at least rollout.group_size = {group_size}, the mean number of "
            "responses"
        )
    key = max("min_samples", "probe", key=lambda name: getattr(tables.estimate, name))
    least, most = getattr(tables.estimate, key), sampling.max_samples
    if sampling.rule == "ada_est" and not least <= group_size <= most:
        raise ConfigError(
            f"rollout.group_size: found {group_size}, the mean number of responses, expected estimate.{key} = "
            f"{least} to sampling.max_samples = {most}"
        )


def _check_advantages(tables: Tables) -> None:
    objective, sampling = tables.train.resolved_objective, tables.sampling
    name = objective.advantage
    if objective.needs_topk:
        raise ConfigError(
            f'train.objective: found "{tables.train.objective}" with a mask of the sampler\'s top K tokens, which no '
            "engine of megarl records; use dppo_tv or dppo_kl, whose masks need the sampled token alone"
        )
    if name == "gdpo" and not tables.reward.weights:
        raise ConfigError(
            "reward.weights: found none with advantage 'gdpo', which standardises several rewards one by one; name "
            "them with their weights, and have reward.function return a reward for each"
        )
    if sampling.uses_credit and isinstance(name, str) and name not in (*_CREDITED, *TOKEN_ADVANTAGES):
        raise ConfigError(
            f'sampling.advantages: found "credit" (the default with rule = "{sampling.rule}") with advantage {name!r}, '
            'but [credit] subtracts the mean of the prompt\'s pool instead; set sampling.advantages = "objective"'
        )
    by_token = objective.advantage in TOKEN_ADVANTAGES
    if tables.log.variance_every and by_token:
        raise ConfigError("log.variance_every: expected 0 with an objective whose advantages differ between tokens")
    if sampling.uses_credit and (by_token or callable(objective.advantage)):
        raise ConfigError(
            f'sampling.advantages: found "credit" (the default with rule = "{sampling.rule}") with an objective whose '
            'advantages differ between tokens, or are your own; set sampling.advantages = "objective"'
        )
    if by_token and (tables.credit.objective is not None or tables.credit.weigh != "sample"):
        raise ConfigError("credit: its weights do not go with an objective whose advantages differ between tokens")
    prompts, parts = tables.rollout.prompts_per_step, tables.train.mini_batches
    if objective.kl_at == "theta" and sampling.fixed and prompts % parts:
        raise ConfigError(
            f"train.objective_overrides: found kl_at = 'theta' with rollout.prompts_per_step = {prompts}, expected a "
            f"multiple of train.mini_batches = {parts}: each update computes the advantages of whole groups"
        )


def _check_groups(tables: Tables) -> None:
    """Refuse groups of one where advantages compare the responses of a group: they would all be 0.

    Allotted counts differ between prompts: some may be 1, which ``sampling/lone_prompts`` counts.
    """
    objective, sampling, size = tables.train.resolved_objective, tables.sampling, tables.rollout.group_size
    of_drawn = "sampling.refill = true" if sampling.refill else None
    of_trained = 'the selection "mixed_groups"' if objective.selection == "mixed_groups" else None
    if sampling.uses_credit and tables.credit.statistics == "pool":
        of_drawn = "advantages of [credit]"
    elif sampling.uses_credit:
        of_trained = 'credit.statistics = "trained"'
    elif objective.advantage in GROUP_ADVANTAGES:
        of_trained = f"the advantage {objective.advantage!r}"
    elif objective.advantage == "reinforce_pp" and tables.rollout.prompts_per_step == 1:
        of_trained = "the advantage 'reinforce_pp' and rollout.prompts_per_step = 1"
    trained, draws_one = tables.train_size, size == 1
    if not sampling.allotted:
        rule = sampling.rule_of(size)
        trained, more = rule.train_size or 0, (rule.next_samples(0, 1, *counts) for counts in ((1, 0), (0, 1)))
        draws_one = rule.next_samples(0, 0, 0, 0) == 1 and not any(more)
    if not (reason := of_trained or (of_drawn if draws_one else None)) or not (draws_one or trained == 1):
        return
    key = "sampling.train_size" if sampling.train_size == 1 else "rollout.group_size"
    if draws_one and not (sampling.allotted or sampling.rule == "uniform"):
        key = "sampling." + ("tiers" if sampling.rule == "tiers" else "max_samples")
    raise ConfigError(
        f"{key}: found 1 response to a prompt with {reason}, which compares several: every gradient would be 0; set 2 "
        'or more, or an advantage without a group, such as train.objective_overrides = {advantage = "reinforce_pp"}'
    )


def _check_megatron(tables: Tables) -> None:
    settings = tables.megatron
    for key in settings:
        if key in megatron_fields.DERIVED:
            raise ConfigError(f"megatron.{key}: megarl sets this itself; use {megatron_fields.DERIVED[key]} instead")
    megatron_fields.check(settings)
    for key in ("hidden_dropout", "attention_dropout"):
        if settings.get(key):
            raise ConfigError(
                f"megatron.{key}: found {settings[key]!r}, expected 0: the old-log-prob pass and the update must "
                "compute the same"
            )
    if settings.get("overlap_param_gather") and not tables.parallel.distributed_optimizer:
        raise ConfigError(
            "megatron.overlap_param_gather: found true with parallel.distributed_optimizer = false, which has no "
            "weights to gather; remove it, or set parallel.distributed_optimizer = true"
        )


def _check_replay(tables: Tables) -> None:
    train, engine = tables.train, tables.rollout.engine
    replay = train.replay
    if train.replay_bias_every and (replay == "none" or (replay == "r2" and train.mini_batches == 1)):
        same = "nothing is replayed" if replay == "none" else "the only update replays what the routers choose anyway"
        raise ConfigError(
            f'train.replay_bias_every: found {train.replay_bias_every} with train.replay = "{replay}" and '
            f"train.mini_batches = {train.mini_batches}, where the replay bias is 0 by definition, because {same}; "
            'set it to 0, or train.replay = "r3"'
        )
    if train.replay_reference and (replay == "none" or not train.resolved_objective.needs_ref_logprobs):
        raise ConfigError(
            f'train.replay_reference: found true with train.replay = "{replay}" and objective "{train.objective}", '
            'expected "r2" or "r3", and an objective with a KL to a reference'
        )
    if replay == "none":
        return
    if replay == "r3" and not tables.rollout.engine_kind.routes:
        raise ConfigError(
            f'train.replay: found "r3" with rollout.engine = "{engine}", which returns no routes; set train.replay = '
            '"r2" or "none"'
        )
    for blocker in replay_blockers(tables.megatron):
        found = tables.megatron.get(blocker.setting)
        raise ConfigError(
            f'megatron.{blocker.setting}: found {found!r} with train.replay = "{replay}", which cannot hold: '
            f'{blocker.reason}; remove it or set train.replay = "none"'
        )


def _check_old_logprobs(tables: Tables) -> None:
    """Refuse what needs a pass before the first update, or has nothing to do where old is mu."""
    train, objective = tables.train, tables.train.resolved_objective
    if train.old_logprobs == "recomputed":
        return
    found = 'train.old_logprobs: found "rollout" with '
    if train.replay == "r2":
        raise ConfigError(
            f'{found}train.replay = "r2", which replays what the old-log-prob pass records, and there is none; set '
            'train.replay = "r3" or "none", or train.old_logprobs = "recomputed"'
        )
    if objective.advantage == "token_level_kl":
        raise ConfigError(
            f'{found}the advantage "token_level_kl", which needs log-probabilities of the training engine before the '
            'first update; set train.old_logprobs = "recomputed"'
        )
    if "old_mu" in objective.pairs:
        raise ConfigError(
            f'{found}objective "{train.objective}", of which a weight, factor or mask is of old/mu: old is mu, so this '
            "ratio is 1 and there is nothing to correct; use theta/mu in its place, or set train.old_logprobs = "
            '"recomputed"'
        )
    if tables.log.traces_every and train.mini_batches > 1:
        raise ConfigError(
            f"{found}log.traces_every = {tables.log.traces_every} and train.mini_batches = {train.mini_batches}: the "
            "files are of the weights before the first update, with which only the first mini-batch is computed; set "
            "log.traces_every = 0, or one mini-batch"
        )


def _check_engine(tables: Tables) -> None:
    rollout, launch, sglang = tables.rollout, tables.launch, tables.sglang
    served = rollout.engine_kind.server
    if launch.apart and not served:
        raise ConfigError(
            f'launch.layout: found "{launch.layout}" with rollout.engine = "{rollout.engine}", which has no servers; '
            'set rollout.engine = "sglang", or layout = "colocated"'
        )
    if sglang.sync == "ipc" and (sglang.urls or launch.apart):
        where = f"sglang.urls = {sglang.urls}" if sglang.urls else f'launch.layout = "{launch.layout}"'
        raise ConfigError(
            f'sglang.sync: found "ipc" with {where}, expected servers that megarl starts beside the trainer, as '
            'they open its memory; set sglang.sync = "distributed"'
        )
    if sglang.sync == "distributed" and tables.servers_share_gpus and 0 in sglang.gpus:
        raise ConfigError(
            'sglang.sync: found "distributed" with servers on the trainer\'s GPUs, expected "ipc", as NCCL refuses two '
            'ranks on one GPU; set sglang.sync = "auto"'
        )
    if sglang.release_memory and (not served or rollout.one_step_off or launch.apart):
        raise ConfigError(
            "sglang.release_memory: found true, expected servers that share the trainer's GPUs and rest while it "
            'trains: rollout.engine = "sglang", rollout.one_step_off = false, launch.layout "colocated" or "local"'
        )
    if sglang.release_memory and tables.sampling.allotted:
        raise ConfigError(
            f'sglang.release_memory: found true with sampling.rule = "{tables.sampling.rule}", whose estimates need '
            "the policy while servers sample; set it to false, or choose another rule"
        )
    if sglang.fp8 and rollout.dtype != "bf16":
        raise ConfigError(
            f'rollout.dtype: found "{rollout.dtype}" with sglang.fp8 = true, whose kernels compute in bf16 only; set '
            'rollout.dtype = "bf16"'
        )
    if sglang.fp8 and rollout.fp8_rounding:
        raise ConfigError(
            "rollout.fp8_rounding: found true together with sglang.fp8 = true, whose weights are in FP8 already; set "
            "one of them"
        )
