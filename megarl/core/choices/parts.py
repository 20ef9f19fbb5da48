"""The record of an algorithm: masks, factors, a gate, penalties, an aggregation and an advantage.

    grad J = sum_t [ prod_k M_k * prod_f F_f * S_t * A_t - sum_j P_j ] * grad log pi_theta(y_t) / D

Imports no torch: a configuration reads the table of algorithms before loading heavy packages.
"""

import itertools
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megarl.core.choices.records import check_types, options_of
from megarl.errors import ConfigError

AdvantageName = Literal[
    "group_mean", "grpo", "rloo", "raft", "token_level_kl", "process", "raw", "raw_mixed", "signed", "positive_part",
    "opo", "reinforce_pp", "reinforce_pp_baseline", "gdpo", "batch_mean",
]  # fmt: skip
PoolScale = Literal["none", "std", "rate", "root_rate"]
Selection = Literal["all", "mixed_groups", "positive"]
Policies = Literal["theta_old", "theta_mu", "old_mu"]
Scope = Literal["token", "prefix", "future_mean", "future_sum", "sequence_mean", "sequence_sum", "sequence_max",
    "prefix_budget", "batch_mean"]  # fmt: skip
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
"""Advantages per token instead of per response."""
GROUP_ADVANTAGES = ("group_mean", "grpo", "rloo", "opo", "gdpo", "reinforce_pp_baseline", "token_level_kl")
"""Advantages relative to a group of responses: exactly 0 in a group of one. ("process" compares steps instead.)"""
BATCH_ADVANTAGES = ("reinforce_pp", "batch_mean")
"""Advantages relative to all responses of a step: exactly 0 in a step of one response."""
NON_NEGATIVE_ADVANTAGES = ("raft", "positive_part")
"""Advantages of 0 or more: a response is accepted or ignored, and never made less likely."""
DIVERGENCE_SCOPES = ("sequence_max", "prefix_budget", "batch_mean")
"""Scopes of a mask over statistics from 0 up. The last two take an upper bound alone."""
RATIOS = ("ratio", "log_ratio")
"""Statistics of the log-ratio over the tokens of a scope; divergences are per token, then summed or averaged."""
TOP_K = ("topk_tv", "topk_kl")
OWN_PARTS = {"advantage": "rewards, groups", "mask": "columns", "fn": "ratios"}
"""Parts that may be functions of the user, and the arguments of the functions."""
MAX_LOG_RATIO = 20.0
"""Largest log_ratio_cap: exp(20) times any sensible advantage is far from the end of fp32."""
LEAST_GATE = 1e-6
"""Least delta and tau: a gate divides by delta."""


@dataclass(frozen=True, slots=True)
class Mask:
    """Drops tokens: ``M = 1[low <= statistic <= high]``, for the advantages that ``sign`` names."""

    policies: Policies
    """The two policies p / q, numerator first."""
    statistic: Statistic = "ratio"
    """p / q | ln(p / q) | p - q | abs(p - q) (total variation of the token against the rest of the vocabulary) |
    KL(q || p) of these two classes | KL(p || q) | the larger KL | ln(p/q)^2 / 2 | p/q - 1 - ln(p/q) | tv and kl with
    the sampler's top K tokens as further classes (needs the column ``topk``)."""
    scope: Scope = "token"
    """Tokens of the response: the token alone, up to the token, from the token on, all. Log-ratios are summed or
    averaged ("sequence_mean" is the geometric mean of ratios), other statistics directly.

    - "prefix_budget", of D_t: ``max(v_t D_t, sum_{k<=t} v_k D_k - budget sum_{k<t} v_k)``, where v falls from 1 at the
      first token to ``last_weight`` at the last.
    - "batch_mean": drops the largest values among the tokens that ``sign`` names, until the mean of the rest over the
      whole mini-batch is at most ``high``. Equal values are dropped together."""
    low: float | None = None
    """Lower bound; None for none."""
    high: float | None = None
    """Upper bound; None for none."""
    sign: MaskSign = "both"
    """Tokens that may be dropped. "outward", PPO's rule: the update moves the ratio further from 1 (A > 0 with a ratio
    above 1, A < 0 with a ratio below 1). "negative": tokens with A < 0. "both": all tokens."""
    strict: bool = False
    """Whether a value equal to a bound is dropped."""
    growth: float = 0.0
    """Bounds are multiplied by ``t^growth`` at the t-th generated token of a response, counted from 1."""
    denominator: InDenominator = "keep"
    """Dropped tokens count in denominators | leave the denominators, with the response if all its tokens are dropped |
    leave the numbers of tokens only."""
    budget: float = 0.015
    """Of "prefix_budget": what a prefix may hold on average."""
    last_weight: float = 0.8
    """Of "prefix_budget": the weight of the last token."""

    def __post_init__(self) -> None:
        check_types(self, "mask")
        _check_mask(self)

    @staticmethod
    def ppo(low: float = 0.8, high: float = 1.2, policies: Policies = "theta_old", scope: Scope = "token") -> "Mask":
        """PPO's mask: A > 0 above the window of the ratio, and A < 0 below it, are dropped."""
        return Mask(policies, scope=scope, low=low, high=high, sign="outward")


@dataclass(frozen=True, slots=True)
class Factor:
    """A factor of the importance weight: ``F = min(max(f(rho), low), high)``, without gradient."""

    policies: Policies
    """The two policies of the ratio rho = p / q, numerator first."""
    scope: Scope = "token"
    """Tokens of the response whose ratios are multiplied, or averaged geometrically."""
    fn: FactorFunction | Callable = "identity"
    """f: rho | rho^power | rho^q with the largest q in [0, 1] that keeps the effective sample size at ess_target |
    rho^k e^(l (1 - rho)) with VESPO's (k, l). Or a function of rho. Powers and VESPO's are at most e^40."""
    low: float | None = None
    """Lower clamp; None for none."""
    high: float | None = None
    """Upper clamp (truncated importance sampling), not renormalised; None for none."""
    sign: FactorSign = "both"
    """Advantages to which the factor applies: all | A > 0 | A < 0. Otherwise the factor is 1."""
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
    """Bound c of outward clipping of single log-ratios before the mean or product (GMPO): at most c where A > 0, at
    least -c where A < 0."""
    batch_normalize: bool = False
    """Whether to divide by the mean of the factor over the mini-batch: over tokens or, by scope, over responses."""

    def __post_init__(self) -> None:
        check_types(self, "factor")
        _check_factor(self)

    @property
    def needs_batch(self) -> bool:
        """Whether the factor depends on all tokens of the mini-batch."""
        return self.fn == "adaptive_power" or self.batch_normalize


@dataclass(frozen=True, slots=True)
class Gate:
    """A factor S of the weighted advantage by the sign of A, specific to an algorithm."""

    kind: GateKind
    """- "drpo": ``S = 1 - sign(A) (pi_theta - mu) / delta``
    - "sapo": ``S = 4 p (1 - p)``, ``p = sigmoid(tau (r - 1))``, r = theta/old
    - "ce_gppo": beta times the clipped ratio in the place of r, outward of [1 - eps, 1 + eps]; else 1"""
    positive: float
    """delta, tau or beta where A > 0."""
    negative: float
    """delta, tau or beta where A <= 0."""
    eps: float = 0.2
    """Of "ce_gppo"."""

    def __post_init__(self) -> None:
        check_types(self, "gate")
        least = 0.0 if self.kind == "ce_gppo" else LEAST_GATE
        are_wrong = min(self.positive, self.negative) < least or not 0 < self.eps < 1
        _refuse(self, {"bounds": are_wrong}, least=least)


@dataclass(frozen=True, slots=True)
class Penalty:
    """An estimator of KL[theta || other], subtracted from the objective and differentiated."""

    estimator: Estimator
    """With d = ln theta/other: d | d^2 / 2 | e^-d + d - 1 | u (e^-d + d - 1) with u = theta/behaviour also
    differentiated: gradient u d grad log pi (DeepSeek-V3.2)."""
    to: PenaltyPolicy = "ref"
    """The second policy of the KL."""
    coef: float = 0.0
    """The factor beta; 0 switches the penalty off, and no reference policy is needed."""
    behaviour: Literal["old", "mu"] = "old"
    """The sampling policy, for "unbiased"."""
    max: float | None = None
    """Tokens with a larger absolute estimate have no gradient, like clamps elsewhere; None for no bound."""

    def __post_init__(self) -> None:
        check_types(self, "penalty")
        _refuse(self, {"bounds": self.coef < 0 or (self.max is not None and not self.max > 0)})


@dataclass(frozen=True, slots=True)
class Objective:
    """A row of the table; ``dataclasses.replace`` gives a variant. Raises ConfigError if the parts do not fit."""

    advantage: AdvantageName | Callable
    """How rewards become advantages (``megarl.core.advantages``). "gdpo" needs several rewards (``reward.weights``).
    "token_level_kl" and "process" differ between tokens; "process" needs rewards of steps
    (``megarl.core.objectives.step_advantages``). Or a function of rewards and groups."""
    aggregation: Aggregation
    """The denominator: all tokens | sequences | sequences times their tokens | sequences times norm_length."""
    masks: tuple[Mask | Callable, ...] = ()
    """A token trains if all masks keep the token. A mask may be a function of the columns."""
    factors: tuple[Factor, ...] = ()
    """The importance weight is their product, 1 without factors."""
    gate: Gate | None = None
    """A factor that depends on the sign of the advantage; None for none."""
    penalties: tuple[Penalty, ...] = ()
    """Subtracted on every token that trains, also on masked tokens."""
    entropy_coef: float = 0.0
    """Factor of the entropy of each token, added to the objective: a second stream of coefficients."""
    norm_length: int | None = None
    """Tokens; the constant L of "seq-mean-token-sum-norm" alone."""
    selection: Selection = "all"
    """Responses that train and count in denominators: all | of groups with contrast | with A > 0."""
    std_ddof: int = 1
    """Of the standard deviation in "grpo", "token_level_kl" and "process": 1 unbiased, 0 population."""
    std_eps: float = 1e-6
    """Added to the standard deviation."""
    router_shift_floor: float | None = None
    """RSPO's factor of every ratio theta/old of a token, before clips and means: ``max(e^-D, router_shift_floor)``
    without gradient, with D the mean over layers and old experts of ``|ln r_theta - ln r_old|`` (r: the router's
    probabilities; column ``router_drift``). None: 1."""
    prefix_grad: bool = False
    """With a factor over the prefix or the future: differentiate all tokens of the factor, as the formula literally
    says, instead of the current token."""
    kl_coef: float = 0.0
    """beta of the advantage "token_level_kl"."""
    kl_horizon: int | None = None
    """Tokens; H of "token_level_kl", constant for all responses (unbiased). None: the length of the response."""
    kl_at: KlPolicy = "old"
    """The policy of the KL in "token_level_kl"; theta costs a further pass per update once weights have moved."""

    def __post_init__(self) -> None:
        check_types(self, "objective")
        _check_product(self)
        _check_advantage(self)

    @property
    def records(self) -> tuple[Mask, ...]:
        """The masks without functions of the user."""
        return tuple(mask for mask in self.masks if isinstance(mask, Mask))

    @property
    def leaves(self) -> bool:
        """Whether a mask takes tokens out of denominators."""
        return any(mask.denominator != "keep" for mask in self.records)

    @property
    def pairs(self) -> frozenset[str]:
        """The pairs of policies read by masks, factors and gate. Functions of the user may read more."""
        of_gate = set() if self.gate is None else {"theta_mu" if self.gate.kind == "drpo" else "theta_old"}
        return frozenset({record.policies for record in (*self.records, *self.factors)} | of_gate)

    @property
    def beforehand(self) -> frozenset[Policies]:
        """The pairs of policies with ratios needed for the whole mini-batch before the update."""
        readers: list[Mask | Factor] = [factor for factor in self.factors if factor.needs_batch]
        readers += [mask for mask in self.records if mask.denominator != "keep" or mask.scope == "batch_mean"]
        return frozenset(record.policies for record in readers)

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
    def own_functions(self) -> bool:
        """Whether masks or factors are functions of the user."""
        return len(self.records) < len(self.masks) or any(callable(factor.fn) for factor in self.factors)


PARTS: Mapping[str, tuple[Any, ...]] = options_of(Objective)
"""Part -> valid values."""


_REFUSALS: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_name("refusals.toml").read_text("utf-8"))
"""Record -> rule -> text."""


def refuse(subject: str, problems: Mapping[str, object]) -> None:
    """Raise ConfigError with the first message whose value is true, behind ``subject``."""
    if message := next((message for message, is_wrong in problems.items() if is_wrong), None):
        raise ConfigError(subject + message)


def _refuse(record: Any, rules: Mapping[str, object], **facts: object) -> None:
    """Raise ConfigError with the text of the first rule whose value is true."""
    label = type(record).__name__.lower()
    for rule, is_broken in rules.items():
        if is_broken:
            values = {name: getattr(record, name) for name in options_of(type(record))}
            raise ConfigError(f"{label}: {_REFUSALS[label][rule].format(**values, **facts)}")


def _check_mask(m: Mask) -> None:
    bounds = [bound for bound in (m.low, m.high) if bound is not None]
    is_two_sided = m.statistic in (*RATIOS, "difference")
    middle = 1 if m.statistic == "ratio" else 0
    is_around_middle = (m.low is None or m.low <= middle) and (m.high is None or m.high >= middle)
    may_be_negative = m.statistic in ("log_ratio", "difference")
    rules = {
        "bounds": not bounds or bounds != sorted(bounds),
        "drops_all": m.statistic == "ratio" and m.high is not None and not m.high > 0,
        "below_0": not may_be_negative and any(bound < 0 for bound in bounds),
        "outward": m.sign == "outward" and is_two_sided and not is_around_middle,
        "growth": m.growth < 0 or (m.growth and m.statistic != "log_ratio"),
        "divergence_scope": m.scope in DIVERGENCE_SCOPES and is_two_sided,
        "high_alone": m.scope in DIVERGENCE_SCOPES[1:] and (m.high is None or m.low is not None or m.strict),
        "budget": m.budget < 0 or not 0 < m.last_weight <= 1,
        "topk": m.statistic in TOP_K and m.policies != "theta_mu",
    }
    _refuse(m, rules, middle=middle)


def _check_factor(f: Factor) -> None:
    clamps = [bound for bound in (f.low, f.high) if bound is not None]
    can_be_averaged = f.scope in ("token", "sequence_mean", "sequence_sum") and f.fn != "vespo"
    rules = {
        "divergence_scope": f.scope in DIVERGENCE_SCOPES,
        "clamps": any(not bound > 0 for bound in clamps) or clamps != sorted(clamps),
        "power": f.power < 0,
        "ess_target": not 0 < f.ess_target <= 1,
        "log_ratio_cap": not 0 < f.log_ratio_cap <= MAX_LOG_RATIO,
        "vespo": any(len(pair) != 2 or min(pair) < 0 for pair in (f.vespo_positive, f.vespo_negative)),
        "token_clip": f.token_clip is not None and not f.token_clip > 0,
        "batch_normalize": f.batch_normalize and not can_be_averaged,
    }
    _refuse(f, rules, most=MAX_LOG_RATIO)


def _check_product(o: Objective) -> None:
    """No policy may stand twice in the weight of a token: the same gap would be corrected twice."""
    for sign in ("positive", "negative"):
        policies = [factor.policies for factor in o.factors if factor.sign in ("both", sign)]
        for first, second in itertools.combinations(policies, 2):
            is_same = any(map(str.__eq__, first.split("_"), second.split("_")))
            _refuse(o, {"same_policy": is_same}, first=first, second=second)
    plain = [
        f for f in o.factors if (f.fn, f.low, f.high, f.token_clip, f.sign) == ("identity", None, None, None, "both")
        and f.scope in ("prefix", "future_mean", "future_sum") and f.policies != "old_mu"
    ]  # fmt: skip
    _refuse(o, {"prefix_grad": o.prefix_grad and not len(o.factors) == len(plain) == 1})


def _check_advantage(o: Objective) -> None:
    by_token, length = o.advantage == "token_level_kl", o.norm_length
    floor = o.router_shift_floor
    mixed = [m for m in o.records if m.policies == "theta_old" and m.statistic not in RATIOS]
    is_read = "theta_old" in {factor.policies for factor in o.factors}
    rules = {
        "router_shift_floor": floor is not None and (not 0 < floor <= 1 or mixed or not is_read),
        "kl_coef": by_token != (o.kl_coef > 0),
        "two_kls": by_token and o.penalties,
        "positive": o.selection == "positive" and o.advantage in TOKEN_ADVANTAGES,
        "kl_horizon": o.kl_horizon is not None and (not by_token or o.kl_horizon < 1),
        "kl_at": o.kl_at != "old" and not by_token,
        "std": o.std_ddof not in (0, 1) or not o.std_eps >= 0,
        "entropy_coef": o.entropy_coef < 0,
        "norm_length": (length is not None) != (o.aggregation == "seq-mean-token-sum-norm"),
        "norm_length_of_0": length is not None and length < 1,
    }
    _refuse(o, rules)
