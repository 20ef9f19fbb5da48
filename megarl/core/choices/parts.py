"""The record that an algorithm is: which advantage, ratio, weight, mask, denominator and penalty.

Imports no torch, so that a configuration can look at the rows of the table before anything heavy is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any, Literal, get_args, get_type_hints

from megarl.errors import ConfigError

AdvantageName = Literal[
    "group_mean",
    "grpo",
    "rloo",
    "opo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "gdpo",
    "raw",
    "raw_mixed",
    "signed",
    "raft",
    "positive_part",
    "token_level_kl",
    "process",
]
PoolScale = Literal["none", "std", "rate", "root_rate"]
Selection = Literal["all", "mixed_groups", "positive"]
RatioKind = Literal["token", "prefix", "future_mean", "future_product", "sequence_mean", "sequence_product"]
WeightPolicies = Literal["none", "theta_mu", "theta_old", "old_mu"]
WeightFunction = Literal["identity", "power", "upper_clip", "clip", "adaptive_power"]
CappedRatio = Literal["theta_mu", "old_mu"]
MaskKind = Literal["none", "ppo"]
Window = Literal["linear", "log"]
GapPolicies = Literal["none", "old_mu", "theta_mu"]
GapMode = Literal["truncate", "mask", "mask_weight"]
KlPenalty = Literal["none", "k1", "k2", "k3"]
KlPolicy = Literal["old", "theta"]
Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]

TOKEN_ADVANTAGES = ("token_level_kl", "process")
"""Those that differ between the tokens of a response."""

OWN_PARTS = {"advantage": "rewards, groups", "mask": "columns", "weight_fn": "ratios"}
"""Parts that may be functions of the user, and what these are called with."""

MAX_LOG_RATIO = 20.0
"""Largest log_ratio_cap: exp(20) times any sensible advantage is far from the end of fp32."""


@dataclass(frozen=True, slots=True)
class Objective:
    """One row of the table; ``dataclasses.replace`` gives a variant. Raises ConfigError if the parts do not fit."""

    advantage: AdvantageName | Callable
    """How rewards become advantages; see ``megarl.core.advantages``. "gdpo" is of several rewards (``reward.weights``).
    "token_level_kl" and "process" differ between tokens, the latter by the rewards of steps
    (``megarl.core.objectives.step_advantages``). Or a function of rewards and groups."""
    weight: WeightPolicies
    """The policies whose ratio weights a token, numerator first; "none" is weight 1."""
    mask: MaskKind | Callable
    """"ppo" drops a token with A > 0 above the window of theta/old, or A < 0 below it. Or a function of the columns."""
    aggregation: Aggregation
    """The denominator: all tokens | sequences | sequences and each one's tokens | the constant norm_length."""
    ratio: RatioKind = "token"
    """Over which tokens of its sequence a token's ratio is taken: itself, those up to it, those from it on, all."""
    weight_fn: WeightFunction | Callable = "identity"
    """f of the ratio rho: rho | rho^power | min(rho, 1 + eps_high) | clip(rho, 1 - eps_low, 1 + eps_high) |
    rho^q with the largest q in [0, 1] that keeps the effective sample size at ess_target. Or a function of rho."""
    cap: float | None = None
    """Truncated importance sampling: the weight is min(f(rho), cap), not renormalised. None for no cap."""
    tis_on: CappedRatio = "theta_mu"
    """What the cap is on: the whole weight, or (decoupled) only its factor old/mu, times f(theta/old) uncapped."""
    eps_low: float = 0.2
    """Lower clip distance of the window."""
    eps_high: float = 0.2
    """Upper clip distance of the window."""
    std_ddof: int = 1
    """Of the standard deviation in "grpo", "token_level_kl" and "process": 1 unbiased, 0 population."""
    std_eps: float = 1e-6
    """Added to that standard deviation."""
    norm_length: int | None = None
    """Tokens; the constant L of "seq-mean-token-sum-norm", and of no other aggregation."""
    selection: Selection = "all"
    """Which responses train and count in denominators: all | those of groups with contrast | those with A > 0."""
    mask_ratio: RatioKind | None = None
    """Over which tokens the ratio theta/old of mask and dual clip is taken; None for the same as ``ratio``."""
    window: Window = "linear"
    """The window: [1 - eps_low, 1 + eps_high], or [exp(-eps_low t^window_power), exp(eps_high t^window_power)] at the
    t-th generated token of a response, counted from 1."""
    window_power: float = 0.0
    """Exponent of the position in a "log" window; 0 for a window that does not widen."""
    dual_clip: float | None = None
    """Drops a token with A < 0 and theta/old above dual_clip ("linear"), or exp(dual_clip t^window_power) ("log")."""
    prefix_grad: bool = False
    """With a ratio of the prefix or the future: differentiate all of it, as its formula says literally, not only the
    token."""
    log_ratio_cap: float = 20.0
    """Upper bound of the log-ratio of several tokens, before exp."""
    power: float = 0.5
    """q of weight_fn "power": 0 ignores the ratio, 1 is full importance sampling."""
    ess_target: float = 0.5
    """Share of the tokens that weight_fn "adaptive_power" keeps as effective sample size."""
    gap: GapPolicies = "none"
    """The policies of a second factor, against the gap between the engines; "none" for no such factor."""
    gap_ratio: RatioKind = "token"
    """Over which tokens that factor is taken."""
    gap_mode: GapMode = "truncate"
    """Times min(factor, gap_high) | 1 inside [gap_low, gap_high], else 0 | times the factor inside, else 0. A token
    that gets 0, here or by the mask, keeps its place in the denominators."""
    gap_low: float | None = None
    """Lower bound of the factor; None for none."""
    gap_high: float | None = None
    """Upper bound of the factor; None for none."""
    kl: KlPenalty = "none"
    """Estimator of KL[theta || ref] subtracted from the objective and differentiated; needs ref_logprobs."""
    kl_coef: float = 0.0
    """Its factor beta, or the beta of the advantage "token_level_kl"."""
    kl_horizon: int | None = None
    """Tokens; H of "token_level_kl", the same for all responses (unbiased). None for each one's own length."""
    kl_at: KlPolicy = "old"
    """The policy whose KL "token_level_kl" takes; theta costs one more pass per update once weights have moved."""

    def __post_init__(self) -> None:
        _check_types(self)
        _check_weight(self)
        _check_trust(self)
        _check_gap(self)
        _check_kl(self)
        _check_aggregation(self)

    @property
    def needs_ref_logprobs(self) -> bool:
        """Whether advantages or penalty read log pi_ref."""
        return self.kl != "none" or self.advantage == "token_level_kl"

    @property
    def trust_ratio(self) -> RatioKind:
        """mask_ratio with its default resolved."""
        return self.ratio if self.mask_ratio is None else self.mask_ratio

    @property
    def corrected(self) -> WeightPolicies:
        """The policies whose ratio ``weight_fn`` is of: theta/old in the decoupled form, else those of ``weight``."""
        return "theta_old" if self.decoupled else self.weight

    @property
    def decoupled(self) -> bool:
        """Whether the weight theta/mu is the product of a capped old/mu and an uncapped theta/old."""
        return self.weight == "theta_mu" and self.tis_on == "old_mu"


PARTS: Mapping[str, tuple[Any, ...]] = {
    name: tuple(x for option in get_args(hint) or (hint,) for x in (get_args(option) or (option,)))
    for name, hint in get_type_hints(Objective).items()
}
"""Part -> what it may be: types, and the strings of a Literal; in the order of the record."""


def _check_types(o: Objective) -> None:
    """Refuse a value that is not of its field's type: a configuration file may hold anything."""
    for name, options in PARTS.items():
        value = getattr(o, name)
        if not _fits(value, options):
            raise ConfigError(f"objective: {name} is {value!r}, expected {_describe(options)}")


def _fits(value: object, options: tuple[Any, ...]) -> bool:
    """A whole number is a number too; true and false are not."""
    if isinstance(value, str):
        return value in options
    if callable(value):
        return Callable in options
    if value is None or isinstance(value, bool):
        return type(value) in options
    if isinstance(value, int):
        return int in options or float in options
    return isinstance(value, float) and math.isfinite(value) and float in options


def _describe(options: tuple[Any, ...]) -> str:
    words = {Callable: "a function", bool: "true or false", int: "a whole number", float: "a finite number"}
    words[NoneType] = 'None ("off")'
    named = [repr(option) for option in options if isinstance(option, str)]
    parts = [f"one of {', '.join(named)}"] if named else []
    return " or ".join(parts + [words[option] for option in options if not isinstance(option, str)])


def _check_weight(o: Objective) -> None:
    if o.cap is not None and not o.cap > 0:
        raise ConfigError(f"objective: cap is {o.cap}, expected a positive number, or None for no cap")
    if o.cap is not None and o.weight == "none":
        raise ConfigError(f"objective: cap {o.cap} without a weight has nothing to cap; set cap to None")
    if o.tis_on == "old_mu" and o.weight not in ("theta_mu", "old_mu"):
        raise ConfigError(f"objective: tis_on is 'old_mu', but the weight {o.weight!r} has no factor old/mu")
    if o.weight_fn != "identity" and o.weight == "none":
        raise ConfigError(f"objective: weight_fn {o.weight_fn!r} without a weight has no ratio; set a weight")
    if o.power < 0:
        raise ConfigError(f"objective: power is {o.power}, expected 0 (weight 1) to 1 (rho), or more")
    if not 0 < o.ess_target <= 1:
        raise ConfigError(f"objective: ess_target is {o.ess_target}, expected a share above 0 and at most 1")
    if not 0 < o.log_ratio_cap <= MAX_LOG_RATIO:
        raise ConfigError(f"objective: log_ratio_cap is {o.log_ratio_cap}, expected above 0, at most {MAX_LOG_RATIO}")
    plain = o.weight_fn == "identity" and o.cap is None and o.weight in ("theta_old", "theta_mu") and not o.decoupled
    if o.prefix_grad and not (o.ratio in ("prefix", "future_mean", "future_product") and plain):
        raise ConfigError(
            "objective: prefix_grad is the derivative of an uncapped ratio of theta over the prefix or the future, but "
            f"ratio is {o.ratio!r}, weight {o.weight!r}, weight_fn {o.weight_fn!r}, cap {o.cap}, tis_on {o.tis_on!r}"
        )


def _check_trust(o: Objective) -> None:
    if not (o.eps_low >= 0 and o.eps_high >= 0):
        raise ConfigError(f"objective: eps_low {o.eps_low} and eps_high {o.eps_high} must not be negative")
    if o.window_power < 0:
        raise ConfigError(f"objective: window_power is {o.window_power}, expected 0 or more")
    if o.window_power and o.window != "log":
        raise ConfigError(f"objective: window_power {o.window_power} widens only a 'log' window; set window to 'log'")
    least = 1 if o.window == "linear" else 0
    if o.dual_clip is not None and not o.dual_clip > least:
        raise ConfigError(
            f"objective: dual_clip is {o.dual_clip}, expected more than {least} in a {o.window!r} window, or None"
        )


def _check_gap(o: Objective) -> None:
    bounds = [bound for bound in (o.gap_low, o.gap_high) if bound is not None]
    if o.gap == "none":
        if bounds:
            raise ConfigError(f"objective: gap is 'none', but gap_low is {o.gap_low}, gap_high {o.gap_high}; set gap")
        return
    if any(not bound > 0 for bound in bounds) or bounds != sorted(bounds):
        raise ConfigError(f"objective: gap_low {o.gap_low} and gap_high {o.gap_high} must be positive and in order")
    if o.gap_mode == "truncate" and (o.gap_high is None or o.gap_low is not None):
        raise ConfigError("objective: gap_mode 'truncate' needs gap_high and takes no gap_low")
    if o.gap_mode != "truncate" and not bounds:
        raise ConfigError(f"objective: gap_mode {o.gap_mode!r} needs gap_low, gap_high or both")
    if o.gap_mode != "mask" and o.weight in ("theta_mu", "old_mu"):
        raise ConfigError(
            f"objective: the weight {o.weight!r} already holds old/mu, which gap {o.gap!r} would count again; "
            f"use weight 'theta_old' or 'none', or gap_mode 'mask'"
        )
    if o.gap_mode != "mask" and o.gap == "theta_mu" and o.weight == "theta_old":
        raise ConfigError("objective: weight 'theta_old' times gap 'theta_mu' counts theta/old twice; use gap 'old_mu'")


def _check_kl(o: Objective) -> None:
    if o.kl_coef < 0:
        raise ConfigError(f"objective: kl_coef is {o.kl_coef}, expected 0 or more")
    if o.kl != "none" and o.advantage == "token_level_kl":
        raise ConfigError(f"objective: 'token_level_kl' has a KL in its advantages; kl is {o.kl!r}, expected 'none'")
    if o.needs_ref_logprobs and not o.kl_coef > 0:
        raise ConfigError(f"objective: kl {o.kl!r}, advantage {o.advantage!r} need a kl_coef above 0, such as 0.001")
    if not o.needs_ref_logprobs and o.kl_coef:
        raise ConfigError(f"objective: kl_coef is {o.kl_coef}, but kl is 'none'; set kl to 'k1', 'k2' or 'k3'")
    if o.selection == "positive" and o.advantage in TOKEN_ADVANTAGES:
        raise ConfigError(
            f"objective: selection 'positive' needs one advantage per response, but those of {o.advantage!r} differ "
            "between its tokens; use 'all' or 'mixed_groups'"
        )
    if o.kl_horizon is not None and (o.advantage != "token_level_kl" or o.kl_horizon < 1):
        raise ConfigError(f"objective: kl_horizon is {o.kl_horizon}; it is the tokens H of 'token_level_kl', 1 or more")
    if o.kl_at != "old" and o.advantage != "token_level_kl":
        raise ConfigError(f"objective: kl_at is {o.kl_at!r}, but it is for 'token_level_kl'; any other KL is of theta")
    if o.std_ddof not in (0, 1) or not o.std_eps >= 0:
        raise ConfigError(f"objective: std_ddof {o.std_ddof}, std_eps {o.std_eps}; expected 0 or 1, and 0 or more")


def _check_aggregation(o: Objective) -> None:
    if (o.norm_length is not None) != (o.aggregation == "seq-mean-token-sum-norm"):
        raise ConfigError(
            f"objective: aggregation {o.aggregation!r} with norm_length {o.norm_length}; "
            f"seq-mean-token-sum-norm needs a norm_length in tokens, the others take none"
        )
    if o.norm_length is not None and o.norm_length < 1:
        raise ConfigError(f"objective: norm_length is {o.norm_length}, expected at least 1 token")
