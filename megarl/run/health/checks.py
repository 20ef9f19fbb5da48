"""The checks of a run's health: what each one reads of a step, and what its verdict says."""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Literal

Step = Mapping[str, float]
"""Metrics of a step: those of its own record, and means over its mini-batches; of gradient norms, the largest."""

SOLVED = 0.9
"""From this pass rate on, few prompts with contrast and a low entropy are what success looks like."""


def largest(values: Collection[float]) -> float:
    """Return the largest value, or one that is not finite."""
    return next((value for value in values if not math.isfinite(value)), max(values))


def _largest(step: Step) -> float:
    return largest(step.values())


def _smallest(step: Step) -> float:
    return -largest([-value for value in step.values()])


def _total(step: Step) -> float:
    return sum(step.values())


def _are_zero(step: Step) -> float | None:
    """Return 1 if every reward is 0, else 0; a mean of 0 alone may be one of rewards that cancel out."""
    if len(step) < 3:
        return None
    return next((value for value in step.values() if not math.isfinite(value)), float(not any(step.values())))


def _contrast(step: Step, solved: bool = False) -> float | None:
    """Return the share of prompts with contrast, if the step is (not) ``solved``; None if no prompt can have any."""
    rate, mean = step.get("reward/pass_rate", 0.0), step.get("reward/mean", math.nan)
    share = step.get("prompts/effective_ratio")
    is_single = step.get("sampling/samples_per_prompt", math.inf) <= 1
    is_zero = not (rate or mean or share)  # which is a check of its own
    return None if is_single or is_zero or solved != (rate >= SOLVED) else share


def _unsolved_entropy(step: Step) -> float | None:
    return None if step.get("reward/pass_rate", 0.0) >= SOLVED else step.get("rollout/entropy")


def _flip(step: Step) -> float:
    """Under r3 the experts in use agree by construction; the routers' own choice does not."""
    return step.get("router/native/flip", step.get("router/flip", math.nan))


def _missing_rows(step: Step) -> float | None:
    """Return the share beyond one token for each response: no engine processes the last one."""
    if (share := step.get("rollout/missing_rows_fraction")) is None or not math.isfinite(share):
        return share
    tokens = step.get("sampling/tokens", 0.0)
    return max(0.0, share - (step.get("sampling/samples", 0.0) / tokens if tokens > 0 else 0.0))


def _idle(step: Step) -> float | None:
    whole = step.get("time/step_s", 0.0)
    if "time/train_s" not in step or whole <= 0:
        return None
    return 1.0 - sum(value for name, value in step.items() if name != "time/step_s") / whole


@dataclass(frozen=True, slots=True)
class Check:
    """A check. Its limits are those of the same name in [health]."""

    name: str
    metrics: tuple[str, ...]
    """What it reads; a step without any of them says nothing."""
    what: str
    """What it looks at, in the words of a verdict."""
    cause: str
    advice: str
    read: Callable[[Step], float | None] = _largest
    """Gets those of its metrics that a step has; returns None if they say nothing."""
    form: str = "{:.1%}"
    against: Literal["limits", "start", "calm", "spikes", "best", "streak"] = "limits"
    """What is compared with the limits.

    - limits: the value itself;
    - start: the value over its median in the first steps;
    - calm, spikes: the value over its median in recent steps within the limits; of spikes, one step is enough;
    - best: the mean of the latest steps over the best such mean, if noise does not explain the difference;
    - streak: the number of steps in a row in which the value is not 0.
    """
    least: float = 0.0
    """The smallest median that counts."""

    @property
    def score_form(self) -> str:
        """How a limit is written."""
        return {"limits": self.form, "streak": "{:.0f} steps"}.get(self.against, "{:.3g} x")


_REWARDS = ("reward/mean", "reward/pass_rate", "prompts/effective_ratio")
_SAMPLES = ("sampling/samples", "sampling/samples_per_prompt")
_NATS = "{:.2g} nats"
_COMPUTES = tuple(f"time/{phase}_s" for phase in ("prepare", "old_logprobs", "ref_logprobs", "advantages", "train"))

CHECKS = (
    Check(
        "zero_reward_steps",
        _REWARDS,
        "every reward is 0:",
        "since the first step: the reward function never matches (answer column or format, chat template), the token "
        "limit cuts answers off, or the task is too hard; since later: the policy has collapsed",
        "judge a few responses by hand with the reward function; more rollout.max_response_tokens, easier prompts, a "
        "cold start (megarl sft); after a collapse, an earlier checkpoint with a smaller optim.lr",
        _are_zero,
        against="streak",
    ),
    Check(
        "contrast_share",
        (*_REWARDS, *_SAMPLES),
        "share of prompts whose responses differ in reward:",
        "all responses to a prompt get the same reward: prompts are too hard or too easy, the policy has collapsed to "
        "one answer, or the reward does not tell answers apart",
        "use prompts of medium difficulty, a larger rollout.group_size or sampling.refill; if it came suddenly, begin "
        "from an earlier checkpoint with a smaller optim.lr",
        _contrast,
    ),
    Check(
        "solved_share",
        (*_REWARDS, *_SAMPLES),
        "nearly every response passes; share of prompts whose responses still differ in reward:",
        "the prompts are solved, and teach nothing more",
        "end the run, or go on with harder prompts",
        lambda step: _contrast(step, solved=True),
    ),
    Check(
        "pass_rate_ratio",
        ("reward/pass_rate",),
        "pass rate",
        "the policy forgets: learning rate too high, too many updates per step, engines that differ; or prompts have "
        "become harder",
        "look at held-out figures and responses; begin from an earlier checkpoint with a smaller optim.lr or fewer "
        "train.mini_batches",
        against="best",
    ),
    Check(
        "reward_error_share",
        ("reward/error_fraction", "episode/failed_fraction"),
        "share of responses without a reward, or of episodes that failed:",
        "the reward function or environment raises, or takes too long; the log names the first error of each step",
        "repair what the log names; raise reward.timeout_s or reward.workers if rewards are late",
    ),
    Check(
        "entropy_fall_ratio",
        ("rollout/entropy", "reward/pass_rate"),
        "entropy",
        "the policy has become nearly deterministic before it solves the task: learning rate too high, too many "
        "updates per step, or clipping that stops rare tokens first",
        "try a smaller optim.lr, fewer train.mini_batches, a wider upper clip (objective dapo) or an entropy bonus "
        "(train.objective_overrides, entropy_coef); begin from an earlier checkpoint",
        _unsolved_entropy,
        _NATS,
        "start",
    ),
    Check(
        "entropy_rise_ratio",
        ("rollout/entropy",),
        "entropy",
        "the policy loses its form: learning rate too high, wrong rollouts, an entropy bonus that is too large, or "
        "negative advantages without a trust mask",
        "look at responses; try a smaller optim.lr, an objective with a trust mask, a smaller entropy_coef; begin "
        "from an earlier checkpoint",
        form=_NATS,
        against="start",
        least=0.2,
    ),
    Check(
        "k3_nats",
        ("rollout/k3",),
        "k3 between the engines is",
        "the engines differ in precision, weights, temperature or experts",
        "check train.replay, the engine's precision and rollout.top_p; docs/tripwires.md says what k3 and flips mean "
        "together",
        form=_NATS,
    ),
    Check(
        "k3_ratio",
        ("rollout/k3",),
        "k3 between the engines is",
        "the engines drift apart: stale or wrong weights in the engine, experts that change more often, or a policy "
        "that rare tokens dominate",
        "compare with the router's flips; try replay r3, a more precise engine, fewer updates per step or a smaller "
        "optim.lr",
        form=_NATS,
        against="start",
        least=0.002,
    ),
    Check(
        "ess_share",
        ("rollout/ess/fraction", "tis/ess/fraction"),
        "effective sample size over tokens:",
        "few tokens carry most of the importance weight: the engines differ, or the policy moves too far within a step",
        "see k3; try fewer train.mini_batches, a smaller optim.lr, a lower cap of the weight",
        _smallest,
    ),
    Check(
        "clipped_share",
        ("clip/high", "clip/low", "clip/both", "clip/negative", "clip/own"),
        "share of tokens that the trust masks stop:",
        "the policy moves too far within a step for the bounds of the objective",
        "try a smaller optim.lr or fewer train.mini_batches, or wider bounds",
        _total,
    ),
    Check(
        "capped_share",
        ("tis/truncated",),
        "share of tokens whose importance weight is cut off:",
        "the engines differ, or the policy moves too far within a step; the gradient is then biased",
        "see k3; try replay r3, fewer train.mini_batches, a smaller optim.lr",
    ),
    Check(
        "flip_share",
        ("router/native/flip", "router/flip"),
        "share of experts that training and sampling choose differently:",
        "routes of other tokens, other weights in the engine, or an engine of low precision",
        "keep replay r3; compare precision and weights of the engines (megarl trace diff, docs/tripwires.md)",
        _flip,
    ),
    Check(
        "flip_ratio",
        ("router/native/flip", "router/flip"),
        "share of experts that training and sampling choose differently:",
        "routing has become less certain than at the start, or the engine's weights are stale",
        "see k3; keep replay r3, check weight updates, try a smaller optim.lr",
        _flip,
        against="start",
        least=0.03,
    ),
    Check(
        "missing_rows_share",
        ("rollout/missing_rows_fraction", "sampling/samples", "sampling/tokens"),
        "share of tokens without a recorded route:",
        "the engine aborts and resumes requests, or its cache returns no routes",
        "look at the engine's log, see docs/replay.md; such tokens are routed natively",
        _missing_rows,
    ),
    Check(
        "stale_rows_share",
        ("routes/stale_rows_fraction",),
        "share of routes that other weights have chosen than those of their token:",
        "the engine takes new weights while responses are under way, and computes their beginning again",
        'let it finish or abort them (train.mixed_versions = "refuse" shows where it happens)',
    ),
    Check(
        "length_ratio",
        ("response/length_mean",),
        "mean response length",
        "the policy repeats itself or no longer ends: end token not trained, learning rate too high, or a reward that "
        "likes length",
        "look at responses; check the chat template's end token; try a smaller optim.lr",
        form="{:.0f} tokens",
        against="calm",
        least=8.0,
    ),
    Check(
        "truncated_share",
        ("response/truncated_fraction",),
        "share of responses that the token limit cuts off:",
        "rollout.max_response_tokens is too small for the task, or the model does not end its answers",
        "raise rollout.max_response_tokens, or look at responses: they may repeat themselves",
    ),
    Check(
        "gradient_ratio",
        ("grad_norm",),
        "largest gradient norm",
        "one batch with extreme tokens or ratios, wrong rollouts, or a learning rate at the edge of stability",
        "see k3 and clipping of that step; check that optim.clip_grad is on; try a smaller optim.lr",
        form="{:.3g}",
        against="spikes",
    ),
    Check(
        "idle_share",
        (
            "time/step_s",
            *(f"time/{name}_s" for name in ("prepare", "old_logprobs", "ref_logprobs", "advantages", "train")),
        ),
        "share of the time in which the trainer computes nothing:",
        "it waits for the engine: few or slow servers, a few very long responses, slow rewards; or for weights",
        "try more servers, and with them rollout.one_step_off; look at the report's figure of times and megarl plan",
        _idle,
    ),
)
"""In the order of the table in docs/health.md."""

METRICS = frozenset(name for check in CHECKS for name in check.metrics)
