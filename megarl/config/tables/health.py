"""The table about what a healthy run looks like: [health]."""

from typing import Literal, Self

from pydantic import PositiveInt, model_validator

from megarl.config.tables.base import Table

Limits = Literal["off"] | list[float]
FALLING = ("contrast_share", "solved_share", "pass_rate_ratio", "entropy_fall_ratio", "ess_share")
"""Checks of what must not become small; all others are of what must not become large."""


class HealthConfig(Table):
    """[health]: from which values on a run is not healthy, see docs/health.md.

    A check has two limits, [warning, alarm], or [warning] alone, or is "off". A value at a limit is beyond it.
    """

    patience_steps: PositiveInt = 3
    """Steps in a row that must be beyond a limit until there is a verdict, and within it until the verdict ends."""
    start_steps: PositiveInt = 5
    """Steps whose median is the run's own start. Checks named *_ratio say nothing before; spikes wait as long."""
    zero_reward_steps: Literal["off"] | list[PositiveInt] = [3, 8]
    """Steps in a row in which every reward is 0."""
    contrast_share: Limits = [0.05, 0.0]
    """Share of prompts whose responses differ in reward, while less than 90 % of the responses pass; of 48 prompts at
    least, in as many steps as they take."""
    solved_share: Limits = [0.02]
    """The same share from a pass rate of 90 % on."""
    reward_error_share: Limits = [0.05, 0.3]
    """Share of responses without a reward, or of episodes that failed."""
    pass_rate_ratio: Limits = [0.5, 0.2]
    """Mean pass rate of the latest start_steps steps over the best such mean, if noise does not explain the fall."""
    entropy_fall_ratio: Limits = [0.2, 0.05]
    """Entropy over that of the start, while less than 90 % of the responses pass."""
    entropy_rise_ratio: Limits = [3.0, 10.0]
    """Entropy over that of the start, or over 0.2 nats per token if that is larger."""
    k3_nats: Limits = [0.05, 0.3]
    """k3 between the engine that samples and the one that trains; nats per token."""
    k3_ratio: Limits = [5.0, 20.0]
    """k3 over that of the start, or over 0.002 nats per token if that is larger."""
    ess_share: Limits = [0.5, 0.2]
    """Effective sample size of the weights between the engines, or of the loss, over the number of tokens."""
    clipped_share: Limits = [0.6, 0.9]
    """Share of tokens that masks stop (clip/*), mean of a step's mini-batches."""
    capped_share: Limits = [0.2, 0.5]
    """Share of tokens whose importance weight is cut off (tis/truncated), mean of a step's mini-batches."""
    flip_share: Limits = [0.3, 0.5]
    """Share of (token, layer) pairs with other experts in training than in sampling, the routers' own choice."""
    flip_ratio: Limits = [2.0, 4.0]
    """That share over that of the start, or over 0.03 if that is larger."""
    missing_rows_share: Limits = [0.05, 0.2]
    """Share of tokens without a recorded route; one for each response, its last token, does not count."""
    stale_rows_share: Limits = [0.05, 0.25]
    """Share of routes that other weights have chosen than those that sampled their token."""
    length_ratio: Limits = [2.0, 4.0]
    """Mean response length over its median in the last 50 calm steps, or over 8 tokens if that is larger."""
    truncated_share: Limits = [0.3, 0.7]
    """Share of responses that the token limit cuts off."""
    gradient_ratio: Limits = [10.0, 100.0]
    """Largest gradient norm of a step over its median in the last 50 calm steps. One step is enough for a verdict; it
    stays for 20 steps."""
    idle_share: Limits = [0.9]
    """Share of a step's time in which the trainer computes nothing: it waits for responses, weights or files."""

    @model_validator(mode="after")
    def _are_limits(self) -> Self:
        for name in type(self).model_fields:
            limits = getattr(self, name)
            if not isinstance(limits, list):
                continue
            if len(limits) not in (1, 2) or min(limits) < 0:
                raise ValueError(
                    f'{name}: found {limits}, expected "off", [warning] or [warning, alarm], none negative'
                )
            if limits != sorted(limits, reverse=name in FALLING):
                order = "at most" if name in FALLING else "at least"
                raise ValueError(f"{name}: found {limits}, expected an alarm of {order} the warning")
        return self
