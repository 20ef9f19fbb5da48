"""The tables about sampling: [sampling], [estimate], [gvm], [credit]."""

from collections.abc import Iterable
from typing import Any, Literal, get_args

from pydantic import Field, PositiveFloat, PositiveInt

from megarl.config.plugs import check_function, load_plug
from megarl.config.tables.base import Count, NonNegative, Row, Table
from megarl.core.choices.credit import Statistics, Weigh, parse_allocation
from megarl.core.choices.parts import PoolScale
from megarl.core.choices.stopping import POSITIVE, Own, SamplingRule, Uniform, ada_seq_balance, ada_seq_pos, pass_tiers
from megarl.errors import ConfigError

Rule = Literal["uniform", "ada_seq_pos", "ada_seq_balance", "tiers", "ada_est", "gvm"]

_SEQUENTIAL = ("ada_seq_pos", "ada_seq_balance", "tiers")


class SamplingConfig(Table):
    """[sampling]: number of responses per prompt, and the selection for training; see docs/sampling.md."""

    rule: str = "uniform"
    """uniform: group_size each; ada_seq_pos, ada_seq_balance: rounds until a prompt has its positives (and
    negatives); tiers: a prompt without enough positives goes to the next of ``tiers`` and keeps its responses;
    ada_est, gvm: by estimates, prompts_per_step * group_size in all (see [estimate] and [gvm]); or your own,
    "package.module:function"."""
    train_size: PositiveInt | None = None
    """Responses to a prompt that train, if more were drawn; default group_size with ada_seq_* and tiers, otherwise
    all."""
    round_size: PositiveInt = 8
    """Responses to a prompt in a round of ada_seq_*."""
    max_samples: PositiveInt = 32
    """Most responses to a prompt. ada_seq_* and your own rule give up after this number; ada_est allots at most this
    number."""
    tiers: list[PositiveInt] = Field(default=[4, 32, 256], min_length=1)
    """Responses to a prompt in all, after each round of rule tiers."""
    positives: Count | None = None
    """Positive responses that end a prompt; default 1, and half of train_size with ada_seq_balance."""
    negatives: Count | None = None
    """Additional negative responses for ada_seq_balance; default the remaining part of train_size."""
    subsample: Literal["balance", "pos", "any"] | None = None
    """Selection for training with a train_size and the rule uniform, ada_est or your own. balance: half positive, half
    negative, as far as available; pos: in the proportion of all drawn, but at least one response per class; any:
    regardless of the reward. Default balance."""
    keep: Literal["first", "random"] = "first"
    """Selection within a class that has too many responses: the first requested, or a random choice by the seed."""
    refill: bool = False
    """DAPO's dynamic sampling: a prompt whose rewards are all equal is replaced by a new prompt."""
    max_prompts: PositiveInt | None = None
    """Most prompts of a step with refill; default 4 * prompts_per_step."""
    spare: Count = 0
    """With refill, prompts drawn ahead. Spare prompts shorten the wait at the end of a step, but may remain unused."""
    advantages: Literal["objective", "credit"] | None = None
    """Source of the advantages: "objective" (statistics over trained responses) or "credit" (over all sampled
    responses); default credit with ada_* and with train_size, otherwise objective. Weights of [credit] go with
    either."""

    @property
    def fixed(self) -> bool:
        """Whether the sampled responses are known before a step, and all train."""
        return self.rule == "uniform" and self.train_size is None and not self.refill

    @property
    def allotted(self) -> bool:
        """Whether counts per prompt are decided from estimates, before a step."""
        return self.rule in ("ada_est", "gvm")

    @property
    def uses_credit(self) -> bool:
        """Whether advantages come from [credit]: ``advantages`` with its default resolved."""
        chosen_by_reward = self.rule in (*_SEQUENTIAL, "ada_est") or self.train_size is not None
        return self.advantages == "credit" or (self.advantages is None and chosen_by_reward)

    def rule_of(self, group_size: int, threshold: float = POSITIVE) -> SamplingRule:
        """Return the sampling rule for this group size; not for rules that allot. A reward above ``threshold`` is
        positive.

        ConfigError if sizes contradict each other.
        """
        train_size = group_size if self.train_size is None else self.train_size
        limits: Any = {"round_size": self.round_size, "max_samples": self.max_samples, "threshold": threshold}
        positives = 1 if self.positives is None else self.positives
        if self.rule == "ada_seq_pos":
            return ada_seq_pos(train_size, positives=positives, **limits)
        if self.rule == "tiers":
            return pass_tiers(train_size, tiers=self.tiers, positives=positives, threshold=threshold)
        if self.rule == "ada_seq_balance":
            return ada_seq_balance(train_size, positives=self.positives, negatives=self.negatives, **limits)
        keep = self.subsample or "balance"
        if self.rule not in get_args(Rule):
            function = load_plug("rule", self.rule, get_args(Rule))
            check_function("rule", self.rule, function, "asked, positives, negatives")
            return Own(function, self.max_samples, self.train_size, keep, threshold)
        assert self.rule == "uniform", "counts of the other rules are made for each step"
        return Uniform(group_size, self.train_size, "any" if self.train_size is None else keep, threshold)

    def rows(self) -> Iterable[Row]:
        if custom := self.rule not in get_args(Rule):
            self.rule_of(1)  # tries it
        sequential, rounds = self.rule in _SEQUENTIAL, self.rule in _SEQUENTIAL[:2]
        counted = custom or self.rule in ("uniform", "ada_est")
        for key, fits in (
            ("positives", sequential),
            ("negatives", self.rule == "ada_seq_balance"),
            ("train_size", self.rule != "gvm"),
            ("subsample", counted and self.train_size is not None),
            ("round_size", rounds),
            ("tiers", self.rule == "tiers"),
            ("max_samples", custom or rounds or self.rule == "ada_est"),
            ("keep", sequential or self.train_size is not None),
        ):
            value = getattr(self, key)
            is_set = value != SamplingConfig.model_fields[key].default
            yield self.row("unused_by_rule", is_set and not fits, key=key, value=value)
        yield from self.only_with("a rule that chooses no prompts before the step", not self.allotted, "refill")
        yield from self.only_with("refill = true", self.refill, "max_prompts", "spare")


class EstimateConfig(Table):
    """[estimate]: pass rates for sampling.rule = "ada_est", and the resulting counts."""

    objective: str = "ada_est"
    """Allocation of counts: "inverse:A" in proportion to 1 / (p + eps)^A ("ada_est" is A = 0.5), or with least variance
    for the objective "log", "raft", "linear", "arcsin" or "power:A"."""
    eps: PositiveFloat = 1e-3
    """The eps of objectives "ada_est" and "inverse:A"."""
    min_samples: Count = 1
    """Least responses to a prompt; the most are sampling.max_samples."""
    decay: float = Field(default=0.9, ge=0, le=1)
    """Factor on the counts of a prompt at every new draw of the prompt."""
    prior_positives: PositiveFloat = 1.0
    """alpha of the Beta prior: initial number of positive responses of every prompt."""
    prior_negatives: PositiveFloat = 1.0
    """beta of the Beta prior: initial number of negative responses of every prompt."""
    pooled: bool = True
    """The mean of the prior follows the pass rate of all prompts drawn so far."""

    def rows(self) -> Iterable[Row]:
        try:
            parse_allocation(self.objective)
        except ConfigError as error:
            yield True, f'objective: {error}, or "inverse:A", or "ada_est"'


class GvmConfig(Table):
    """[gvm]: the first stage of sampling.rule = "gvm", and the resulting counts."""

    pre_samples: PositiveInt = 8
    """Responses to a prompt in the first stage, which do not train."""
    refresh_every: PositiveInt = 10
    """Steps between first stages; a first stage covers the prompts of all steps up to the next."""
    alpha: NonNegative = 1e-3
    """alpha of n ~ G / sqrt(p + alpha / p^(beta - 1)): the larger, the fewer responses to hard prompts."""
    beta: float = Field(default=2.0, ge=2)
    """beta of the formula of alpha."""
    block: Literal["embedding", "output_layer"] = "embedding"
    """Parameters whose gradient norms count; equal with tied embeddings."""
    max_samples: PositiveInt | None = None
    """Most responses to a prompt, at least rollout.group_size; default 4 rollout.group_size."""


class CreditConfig(Table):
    """[credit]: advantages and weights of adaptively sampled responses; see docs/sampling.md."""

    statistics: Statistics = "pool"
    """Responses for mean and standard deviation: all drawn responses to a prompt, or the trained responses."""
    scale: PoolScale | None = None
    """Divisor of the advantage: none, std, rate or root_rate of the statistics; default root_rate with ada_est,
    otherwise none."""
    ddof: Literal[0, 1] = 1
    """Of the standard deviation: 1 unbiased, 0 population."""
    floor: PositiveFloat = 1e-6
    """Least standard deviation to divide by."""
    rate_eps: NonNegative | None = None
    """Added to a pass rate before a division; default estimate.eps with ada_est, otherwise 0."""
    objective: str | None = None
    """Weight of a prompt with pass rate p: f'(p), for f = "log", "raft", "arcsin" or "power:A". Only for sampling that
    does not already follow f."""
    weigh: Weigh = "sample"
    """Unit of equal weight: a trained response, or a prompt."""
