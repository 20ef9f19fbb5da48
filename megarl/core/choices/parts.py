"""The record that an algorithm is: masks, factors, a gate, penalties, an aggregation and an advantage.

    grad J = sum_t [ prod_k M_k * prod_f F_f * S_t * A_t - sum_j P_j ] * grad log pi_theta(y_t) / D

Imports no torch, so that a configuration can look at the rows of the table before anything heavy is loaded.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megarl.core.choices.records import check_types, options_of
from megarl.errors import ConfigError

AdvantageName = Literal[
    "group_mean", "grpo", "rloo", "raft", "token_level_kl", "process", "raw", "raw_mixed", "signed", "positive_part",
    "opo", "reinforce_pp", "reinforce_pp_baseline", "gdpo",
]  # fmt: skip
PoolScale = Literal["none", "std", "rate", "root_rate"]
Selection = Literal["all", "mixed_groups", "positive"]
Policies = Literal["theta_old", "theta_mu", "old_mu"]
Scope = Literal["token", "prefix", "future_mean", "future_sum", "sequence_mean", "sequence_sum", "sequence_max"]
Statistic = Literal[
    "ratio", "log_ratio", "difference", "tv", "kl", "kl_rev", "kl_sym", "k2", "k3", "topk_tv", "topk_kl"
]
MaskSign = Literal["outward", "both", "negative"]
FactorSign = Literal["both", "positive", "negative"]
InDenominator = Literal["keep", "leave", "leave_tokens"]
FactorFunction = Literal["identity", "power", "adaptive_power", "vespo"]
GateKind = Literal["drpo", "sapo", "ce_gppo"]
Estimator = Literal["k1", "k2", "k3", "unbiased"]
PenaltyPolicy = Literal["ref", "mu", "old"]
KlPolicy = Literal["old", "theta"]
Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]

TOKEN_ADVANTAGES = ("token_level_kl", "process")
"""Those that differ between the tokens of a response."""
GROUP_ADVANTAGES = ("group_mean", "grpo", "rloo", "opo", "gdpo", "reinforce_pp_baseline", "token_level_kl")
"""Those that compare the responses of a group: exactly 0 in a group of one. (One of several steps is a group of its
own to "process".)"""
NON_NEGATIVE_ADVANTAGES = ("raft", "positive_part")
"""Those that accept or ignore a response, but never make it less likely."""
RATIOS = ("ratio", "log_ratio")
"""Statistics of the log-ratio over the tokens of a scope; all others are of single tokens, then summed or averaged."""
TOP_K = ("topk_tv", "topk_kl")
OWN_PARTS = {"advantage": "rewards, groups", "mask": "columns", "fn": "ratios"}
"""Parts that may be functions of the user, and what these are called with."""
MAX_LOG_RATIO = 20.0
"""Largest log_ratio_cap: exp(20) times any sensible advantage is far from the end of fp32."""
LEAST_GATE = 1e-6
"""Least delta and tau: a gate divides by delta."""


@dataclass(frozen=True, slots=True)
class Mask:
    """Drops tokens: ``M = 1[low <= statistic <= high]``, for the advantages that ``sign`` names."""

    policies: Policies
    """The two policies that are compared, numerator first: p / q."""
    statistic: Statistic = "ratio"
    """p / q | its logarithm | p - q | its size (total variation of the token against the rest) | KL(q || p) of the same
    two classes | KL(p || q) | the larger of both | ln(p/q)^2 / 2 | p/q - 1 - ln(p/q) | as tv and kl with the sampler's
    top K tokens as classes of their own (needs the column ``topk``)."""
    scope: Scope = "token"
    """Over which tokens of a response: the token, those up to it, those from it on, all. Of ratios the logarithms are
    summed or averaged, so that "sequence_mean" is the geometric mean; of any other statistic its own values."""
    low: float | None = None
    """Lower bound; None for none."""
    high: float | None = None
    """Upper bound; None for none."""
    sign: MaskSign = "both"
    """Which tokens it may drop. "outward", PPO's rule: those whose update moves the ratio further from 1, so A > 0 with
    a ratio above 1, and A < 0 with one below. "negative": those with A < 0. "both": all."""
    strict: bool = False
    """Whether a value equal to a bound is dropped too."""
    growth: float = 0.0
    """Bounds are multiplied by ``t^growth`` at the t-th generated token of a response, counted from 1."""
    denominator: InDenominator = "keep"
    """Whether dropped tokens count in denominators | leave them, and a response of which none is left too | leave the
    numbers of tokens only."""

    def __post_init__(self) -> None:
        check_types(self, "mask")
        _check_mask(self)

    @staticmethod
    def ppo(low: float = 0.8, high: float = 1.2, policies: Policies = "theta_old", scope: Scope = "token") -> Mask:
        """PPO's mask: A > 0 above the window of the ratio, and A < 0 below it, are dropped."""
        return Mask(policies, scope=scope, low=low, high=high, sign="outward")


@dataclass(frozen=True, slots=True)
class Factor:
    """A factor of the importance weight: ``F = min(max(f(rho), low), high)``, without gradient."""

    policies: Policies
    """The two policies of the ratio rho = p / q, numerator first."""
    scope: Scope = "token"
    """Over which tokens of a response the ratio is taken: the product of theirs, or its geometric mean."""
    fn: FactorFunction | Callable = "identity"
    """f: rho | rho^power | rho^q with the largest q in [0, 1] that keeps the effective sample size at ess_target |
    rho^k e^(l (1 - rho)) with VESPO's (k, l). Or a function of rho. Powers and VESPO's are at most e^40."""
    low: float | None = None
    """Lower clamp; None for none."""
    high: float | None = None
    """Upper clamp (truncated importance sampling), not renormalised; None for none."""
    sign: FactorSign = "both"
    """For which advantages: all | A > 0 | A < 0. For the others the factor is 1."""
    power: float = 0.5
    """Exponent of fn "power": 0 ignores the ratio, 1 is full importance sampling."""
    ess_target: float = 0.5
    """Share of the tokens that fn "adaptive_power" keeps as effective sample size."""
    vespo_positive: tuple[float, ...] = (2.0, 3.0)
    """(k, l) of fn "vespo" where A >= 0."""
    vespo_negative: tuple[float, ...] = (3.0, 2.0)
    """(k, l) of fn "vespo" where A < 0."""
    log_ratio_cap: float = 20.0
    """Upper bound of the log-ratio of several tokens, before exp."""
    token_clip: float | None = None
    """Log-ratios of single tokens are clipped outward before they are put together (GMPO): at most this where A > 0,
    at least minus this where A < 0."""
    batch_normalize: bool = False
    """Whether the factor is divided by its mean over the mini-batch: over tokens, or over responses if its scope is a
    response."""

    def __post_init__(self) -> None:
        check_types(self, "factor")
        _check_factor(self)

    @property
    def needs_batch(self) -> bool:
        """Whether it depends on all tokens of the mini-batch."""
        return self.fn == "adaptive_power" or self.batch_normalize


@dataclass(frozen=True, slots=True)
class Gate:
    """A factor S of the weighted advantage that depends on the sign of A, part of the formula of one algorithm."""

    kind: GateKind
    """- "drpo": ``S = 1 - sign(A) (pi_theta - mu) / delta``
    - "sapo": ``S = 4 p (1 - p)``, ``p = sigmoid(tau (r - 1))``, r = theta/old
    - "ce_gppo": beta times the clipped ratio in the place of r, outward of [1 - eps, 1 + eps]; else 1"""
    positive: float
    """delta, tau or beta where A > 0."""
    negative: float
    """The same where A <= 0."""
    eps: float = 0.2
    """Of "ce_gppo"."""

    def __post_init__(self) -> None:
        check_types(self, "gate")
        if min(self.positive, self.negative) < LEAST_GATE and self.kind != "ce_gppo":
            raise ConfigError(
                f"gate: positive {self.positive}, negative {self.negative}; expected above 0, at least {LEAST_GATE:g}"
            )
        if self.positive < 0 or self.negative < 0 or not 0 < self.eps < 1:
            raise ConfigError(
                f"gate: positive {self.positive}, negative {self.negative}, eps {self.eps}; expected 0 or more, and "
                "eps between 0 and 1"
            )


@dataclass(frozen=True, slots=True)
class Penalty:
    """An estimator of KL[theta || other], subtracted from the objective and differentiated."""

    estimator: Estimator
    """With d = ln theta/other: d | d^2 / 2 | e^-d + d - 1 | u (e^-d + d - 1) with u = theta/behaviour differentiated
    too, whose gradient is u d grad log pi (DeepSeek-V3.2)."""
    to: PenaltyPolicy = "ref"
    """The other policy."""
    coef: float = 0.0
    """Its factor beta; 0 switches it off, and then no reference policy is needed."""
    behaviour: Literal["old", "mu"] = "old"
    """The policy that sampled, for "unbiased"."""
    max: float | None = None
    """Tokens whose estimate is above this in size have no gradient, as other implementations' clamps have it; None for
    none."""

    def __post_init__(self) -> None:
        check_types(self, "penalty")
        if self.coef < 0 or (self.max is not None and not self.max > 0):
            raise ConfigError(f"penalty: coef {self.coef}, max {self.max}; expected 0 or more, and above 0 or None")


@dataclass(frozen=True, slots=True)
class Objective:
    """One row of the table; ``dataclasses.replace`` gives a variant. Raises ConfigError if the parts do not fit."""

    advantage: AdvantageName | Callable
    """How rewards become advantages; see ``megarl.core.advantages``. "gdpo" is of several rewards (``reward.weights``).
    "token_level_kl" and "process" differ between tokens, the latter by the rewards of steps
    (``megarl.core.objectives.step_advantages``). Or a function of rewards and groups."""
    aggregation: Aggregation
    """The denominator: all tokens | sequences | sequences and each one's tokens | sequences and norm_length."""
    masks: tuple[Mask | Callable, ...] = ()
    """A token trains if it passes all of them. Each may be a function of the columns."""
    factors: tuple[Factor, ...] = ()
    """Their product is the importance weight; without any it is 1."""
    gate: Gate | None = None
    """A factor that depends on the sign of the advantage; None for none."""
    penalties: tuple[Penalty, ...] = ()
    """Subtracted on every token that trains, whatever the masks say."""
    entropy_coef: float = 0.0
    """Times the entropy of each token, added to the objective: a second stream of coefficients."""
    norm_length: int | None = None
    """Tokens; the constant L of "seq-mean-token-sum-norm", and of no other aggregation."""
    selection: Selection = "all"
    """Which responses train and count in denominators: all | those of groups with contrast | those with A > 0."""
    std_ddof: int = 1
    """Of the standard deviation in "grpo", "token_level_kl" and "process": 1 unbiased, 0 population."""
    std_eps: float = 1e-6
    """Added to that standard deviation."""
    prefix_grad: bool = False
    """With a factor over the prefix or the future: differentiate all of it, as its formula says literally, not only the
    token."""
    kl_coef: float = 0.0
    """beta of the advantage "token_level_kl"."""
    kl_horizon: int | None = None
    """Tokens; H of "token_level_kl", the same for all responses (unbiased). None for each one's own length."""
    kl_at: KlPolicy = "old"
    """The policy whose KL "token_level_kl" takes; theta costs one more pass per update once weights have moved."""

    def __post_init__(self) -> None:
        check_types(self, "objective")
        _check_product(self)
        _check_advantage(self)

    @property
    def records(self) -> tuple[Mask, ...]:
        """The masks that are no functions."""
        return tuple(mask for mask in self.masks if isinstance(mask, Mask))

    @property
    def leaves(self) -> bool:
        """Whether a mask takes tokens out of denominators."""
        return any(mask.denominator != "keep" for mask in self.records)

    @property
    def pairs(self) -> frozenset[str]:
        """The pairs of policies whose ratios masks, factors and gate read. Functions of the user may read more."""
        of_gate = set() if self.gate is None else {"theta_mu" if self.gate.kind == "drpo" else "theta_old"}
        return frozenset({part.policies for part in (*self.records, *self.factors)} | of_gate)

    @property
    def beforehand(self) -> frozenset[Policies]:
        """The pairs of policies whose ratios of the whole mini-batch are needed before its update."""
        parts: list[Mask | Factor] = [factor for factor in self.factors if factor.needs_batch]
        parts += [mask for mask in self.records if mask.denominator != "keep"]
        return frozenset(part.policies for part in parts)

    @property
    def needs_ref_logprobs(self) -> bool:
        """Whether advantages or penalties read log pi_ref."""
        penalised = any(penalty.to == "ref" and penalty.coef for penalty in self.penalties)
        return penalised or self.advantage == "token_level_kl"

    @property
    def needs_topk(self) -> bool:
        """Whether a mask reads the sampler's top K tokens."""
        return any(mask.statistic in TOP_K for mask in self.records)

    @property
    def reads_more(self) -> bool:
        """Whether it reads columns that a batch may lack."""
        return self.needs_ref_logprobs or self.needs_topk

    @property
    def own_functions(self) -> bool:
        """Whether masks or factors are functions of the user."""
        return len(self.records) < len(self.masks) or any(callable(factor.fn) for factor in self.factors)


PARTS: Mapping[str, tuple[Any, ...]] = options_of(Objective)
"""Part -> what it may be."""


def _refuse(who: str, problems: dict[str, object]) -> None:
    """Raise ConfigError with the first message whose value is true."""
    for message, is_wrong in problems.items():
        if is_wrong:
            raise ConfigError(f"{who}: {message}")


def _check_mask(m: Mask) -> None:
    bounds = [bound for bound in (m.low, m.high) if bound is not None]
    is_two_sided = m.statistic in (*RATIOS, "difference")
    middle = 1 if m.statistic == "ratio" else 0
    is_around_middle = (m.low is None or m.low <= middle) and (m.high is None or m.high >= middle)
    window = f"low {m.low}, high {m.high}"
    _refuse("mask", {
        f"{window}; expected at least one bound, and both in order": not bounds or bounds != sorted(bounds),
        f"high is {m.high}, but a ratio is above 0: this drops every token":
            m.statistic == "ratio" and m.high is not None and not m.high > 0,
        f"{window} of {m.statistic!r}, which is never below 0; bounds of a logarithm need statistic 'log_ratio'":
            m.statistic not in ("log_ratio", "difference") and any(bound < 0 for bound in bounds),
        f"{window} of {m.statistic!r}; an 'outward' mask needs {middle} between them":
            m.sign == "outward" and is_two_sided and not is_around_middle,
        f"growth {m.growth} with statistic {m.statistic!r}; bounds grow with 'log_ratio' only, 0 or more":
            m.growth < 0 or (m.growth and m.statistic != "log_ratio"),
        f"'sequence_max' is for divergences, but the statistic is {m.statistic!r}":
            m.scope == "sequence_max" and is_two_sided,
        f"{m.statistic!r} compares theta with mu, but policies is {m.policies!r}":
            m.statistic in TOP_K and m.policies != "theta_mu",
    })  # fmt: skip


def _check_factor(f: Factor) -> None:
    clamps = [bound for bound in (f.low, f.high) if bound is not None]
    _refuse("factor", {
        "'sequence_max' is for masks; a ratio has a mean or a product": f.scope == "sequence_max",
        f"low {f.low}, high {f.high}; expected positive numbers in order, or None":
            any(not bound > 0 for bound in clamps) or clamps != sorted(clamps),
        f"power is {f.power}, expected 0 (weight 1) to 1 (rho), or more": f.power < 0,
        f"ess_target is {f.ess_target}, expected a share above 0 and at most 1": not 0 < f.ess_target <= 1,
        f"log_ratio_cap is {f.log_ratio_cap}, expected above 0, at most {MAX_LOG_RATIO}":
            not 0 < f.log_ratio_cap <= MAX_LOG_RATIO,
        f"vespo {f.vespo_positive}, {f.vespo_negative}; expected two numbers from 0 up each":
            any(len(pair) != 2 or min(pair) < 0 for pair in (f.vespo_positive, f.vespo_negative)),
        f"token_clip is {f.token_clip}, expected above 0 or None": f.token_clip is not None and not f.token_clip > 0,
        "batch_normalize needs the scope of a token or a response, and a function of the ratio alone, but the scope is "
        f"{f.scope!r}, fn {f.fn!r}":
            f.batch_normalize and (f.scope not in ("token", "sequence_mean", "sequence_sum") or f.fn == "vespo"),
    })  # fmt: skip


def _check_product(o: Objective) -> None:
    """No policy may stand twice in the weight of a token: the same gap would be corrected twice."""
    for sign in ("positive", "negative"):
        factors = [factor for factor in o.factors if factor.sign in ("both", sign)]
        for first, second in itertools.combinations(factors, 2):
            if any(map(str.__eq__, first.policies.split("_"), second.policies.split("_"))):
                raise ConfigError(
                    f"objective: the factors {first.policies!r} and {second.policies!r} count the same policy twice; "
                    "'theta_old' and 'old_mu' go together, 'theta_mu' alone holds both"
                )
    plain = [
        f for f in o.factors if (f.fn, f.low, f.high, f.token_clip, f.sign) == ("identity", None, None, None, "both")
        and f.scope in ("prefix", "future_mean", "future_sum") and f.policies != "old_mu"
    ]  # fmt: skip
    _refuse("objective", {
        "prefix_grad is the derivative of one factor of theta over the prefix or the future, without clamps, but the "
        f"factors are {o.factors}": o.prefix_grad and not len(o.factors) == len(plain) == 1,
    })  # fmt: skip


def _check_advantage(o: Objective) -> None:
    by_token = o.advantage == "token_level_kl"
    _refuse("objective", {
        f"kl_coef is {o.kl_coef} with the advantage {o.advantage!r}; it is the beta of 'token_level_kl', which needs "
        "one above 0, such as 0.001. A KL in the loss is a penalty": by_token != (o.kl_coef > 0),
        "'token_level_kl' has a KL in its advantages; expected no penalties beside it": by_token and o.penalties,
        f"selection 'positive' needs one advantage per response, but those of {o.advantage!r} differ between its "
        "tokens; use 'all' or 'mixed_groups'": o.selection == "positive" and o.advantage in TOKEN_ADVANTAGES,
        f"kl_horizon is {o.kl_horizon}; it is the tokens H of 'token_level_kl', 1 or more":
            o.kl_horizon is not None and (not by_token or o.kl_horizon < 1),
        f"kl_at is {o.kl_at!r}, but it is for 'token_level_kl'; any other KL is of theta":
            o.kl_at != "old" and not by_token,
        f"std_ddof {o.std_ddof}, std_eps {o.std_eps}; expected 0 or 1, and 0 or more":
            o.std_ddof not in (0, 1) or not o.std_eps >= 0,
        f"entropy_coef is {o.entropy_coef}, expected 0 or more": o.entropy_coef < 0,
        f"aggregation {o.aggregation!r} with norm_length {o.norm_length}; seq-mean-token-sum-norm needs a norm_length "
        "in tokens, the others take none": (o.norm_length is not None) != (o.aggregation == "seq-mean-token-sum-norm"),
        f"norm_length is {o.norm_length}, expected at least 1 token": o.norm_length is not None and o.norm_length < 1,
    })  # fmt: skip
