"""Rules for the number of samples of a prompt, called after all samples of the previous round have arrived.

A rule sees only counts of the prompt: samples requested, positives, negatives. Prompts do not wait for each other, the
order of arrival does not matter, and ``tools/simulate.py`` computes the exact law of a rule by calling the rule.
Imports neither torch nor numpy: a configuration makes rules.
"""

import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megarl.core.choices.records import call_own, name_of
from megarl.errors import ConfigError, refusal

Keep = Literal["balance", "pos", "any"]
"""Choice of the samples that train; see ``megarl.core.sampling.subsampling``."""

POSITIVE = 0.7
"""A reward above this is positive (as in the released code of Reinforce-Ada); rewards need not be 0 and 1."""


class SamplingRule:
    """A rule for ``megarl.core.sampling.collector``; frozen and hashable. A rule without a goal inherits ``resolved``
    and ``keeps``. Numbers alone are within the bounds of the table [sampling], which checks them."""

    __slots__ = ()
    threshold: float
    """Rewards above the threshold are positive."""
    train_size: int | None
    """Largest number of samples of a prompt that train; None for all."""
    keep: Keep
    """Choice of the samples that train; see ``megarl.core.sampling.subsampling``."""

    def next_samples(self, prompt: int, num_asked: int, positives: int, negatives: int) -> int:
        """Return the number of further samples of the prompt; 0 ends the prompt.

        num_asked: samples so far, all arrived; positives + negatives is smaller if samples failed.
        """
        raise NotImplementedError

    def resolved(self, positives: int, negatives: int) -> bool:
        """Return whether the counts of a finished prompt reach the goal of the rule."""
        return True

    def keeps(self, positives: int, negatives: int) -> Keep:
        """Return the choice of trained samples for a finished prompt with more than ``train_size`` samples."""
        return self.keep


@dataclass(frozen=True, slots=True)
class Uniform(SamplingRule):
    """The same number of samples for all prompts; ``train_size`` limits the trained samples."""

    num_samples: int
    """Samples per prompt."""
    train_size: int | None = None
    keep: Keep = "any"
    threshold: float = POSITIVE

    def __post_init__(self) -> None:
        _check_train_size("Uniform", self.train_size, self.num_samples)

    def next_samples(self, prompt: int, num_asked: int, positives: int, negatives: int) -> int:
        return self.num_samples if num_asked == 0 else 0


@dataclass(frozen=True, slots=True)
class Allotted(SamplingRule):
    """A number of samples per prompt computed beforehand from estimates (Ada-Est, GVM).

    Groups differ in size. A group of a single sample has no contrast and the advantage 0. (verl uses the mean 0 and
    the standard deviation 1 for a single sample.)
    """

    counts: tuple[int, ...]
    """Samples by prompt; see ``megarl.core.sampling.allocation``."""
    threshold: float = POSITIVE
    train_size: int | None = None
    keep: Keep = "any"

    def next_samples(self, prompt: int, num_asked: int, positives: int, negatives: int) -> int:
        return self.counts[prompt] if num_asked == 0 else 0


@dataclass(frozen=True, slots=True)
class Sequential(SamplingRule):
    """Rounds of ``round_size`` samples until both classes have enough samples, or ``max_samples``.

    The exit is tested after a whole round. A prompt with pass rate 0 or 1 never exits: the cap is necessary.
    Source: Reinforce-Ada (arXiv 2510.04996), "Ada-Seq"; variants: ``ada_seq_pos`` and ``ada_seq_balance``.
    """

    positives: int
    """Positive samples needed to exit."""
    negatives: int
    """Negative samples needed to exit; 0 for none."""
    round_size: int = 8
    """Samples M of a round; ``max_samples`` may cut the last round."""
    max_samples: int = 32
    """Samples after which an unresolved prompt ends."""
    train_size: int | None = 4
    fallback: Keep = "balance"
    """Choice of trained samples for unresolved prompts; for resolved prompts "balance"."""
    threshold: float = POSITIVE
    tiers: tuple[int, ...] = ()
    """Cumulative samples after each round, instead of rounds of equal size; ends with ``max_samples``."""

    def __post_init__(self) -> None:
        if self.tiers and sorted({0, self.max_samples, *self.tiers}) != [0, *self.tiers]:
            raise ConfigError(f"Sequential: tiers are {self.tiers}, expected to rise from 1 or more to max_samples")
        if min(self.positives, self.negatives) < 0 or not 1 <= self.positives + self.negatives <= self.max_samples:
            raise ConfigError(refusal("counts_to_exit", rule=self))
        _check_train_size("Sequential", self.train_size, self.max_samples)

    def next_samples(self, prompt: int, num_asked: int, positives: int, negatives: int) -> int:
        if self.resolved(positives, negatives):
            return 0
        ends = self.tiers or (num_asked + self.round_size,)
        return min(next((end for end in ends if end > num_asked), num_asked), self.max_samples) - num_asked

    def resolved(self, positives: int, negatives: int) -> bool:
        return positives >= self.positives and negatives >= self.negatives

    def keeps(self, positives: int, negatives: int) -> Keep:
        return "balance" if self.resolved(positives, negatives) else self.fallback


@dataclass(frozen=True, slots=True)
class Own(SamplingRule):
    """A function of the user: ``more = function(asked, positives, negatives)``, 0 to end, up to ``max_samples``.

    Every rank calls the function: it must be deterministic. On construction it is tried on prompts with only positive,
    only negative and alternating samples. ConfigError if the function raises, returns no whole number of 0 or more, or
    returns 0 for a new prompt.
    """

    function: Callable[[int, int, int], int]
    max_samples: int = 32
    """Largest number of samples of a prompt."""
    train_size: int | None = None
    keep: Keep = "any"
    threshold: float = POSITIVE

    def __post_init__(self) -> None:
        _check_train_size("Own", self.train_size, self.max_samples)
        for every in (1, self.max_samples + 1, 2):
            num_asked = 0
            while count := self.next_samples(0, num_asked, num_asked // every, num_asked - num_asked // every):
                num_asked += count
            if not num_asked:
                raise ConfigError(f"rule: the function {name_of(self.function)} returned 0 before the first sample")

    def next_samples(self, prompt: int, num_asked: int, positives: int, negatives: int) -> int:
        return min(self._ask(num_asked, positives, negatives), self.max_samples - num_asked)

    def resolved(self, positives: int, negatives: int) -> bool:
        return not self._ask(positives + negatives, positives, negatives)

    def _ask(self, num_asked: int, positives: int, negatives: int) -> int:
        count: Any = call_own("rule", self.function, num_asked, positives, negatives)
        if isinstance(count, bool) or not isinstance(count, numbers.Integral) or count < 0:
            facts = {"function": name_of(self.function), "count": count, "num_asked": num_asked}
            raise ConfigError(refusal("count_of_rule", positives=positives, negatives=negatives, **facts))
        return int(count)


def ada_seq_pos(
    train_size: int = 4, *, positives: int = 1, round_size: int = 8, max_samples: int = 32, threshold: float = POSITIVE
) -> Sequential:
    """Return Ada-Seq-Pos: sample until ``positives`` positives have arrived.

    Defaults as in the released code. Sources disagree on ``positives``: 1 in the code, K_pos such as 16 (rounds of 16,
    cap of 128) in the paper's third version, "K" in posts. ConfigError if the numbers do not fit.
    """
    return Sequential(positives, 0, round_size, max_samples, train_size, "pos", threshold)


def ada_seq_balance(
    train_size: int = 4, *,
    positives: int | None = None, negatives: int | None = None, round_size: int = 8, max_samples: int = 32,
    threshold: float = POSITIVE,
) -> Sequential:  # fmt: skip
    """Return Ada-Seq-Balance: sample until half of ``train_size`` is positive and the remainder negative.

    Defaults as in the released code: ``train_size // 2`` positives, ``train_size - train_size // 2`` negatives.
    ("Balance-4" is 2 + 2; k = 4 of a post means 4 + 4.) Larger thresholds sharpen the pool's statistics. ConfigError if
    the numbers do not fit.
    """
    positives = train_size // 2 if positives is None else positives
    negatives = train_size - train_size // 2 if negatives is None else negatives
    return Sequential(positives, negatives, round_size, max_samples, train_size, "balance", threshold)


def pass_tiers(
    train_size: int = 4, *, tiers: Sequence[int] = (4, 32, 256), positives: int = 1, threshold: float = POSITIVE
) -> Sequential:
    """Return the tier ladder: a prompt without ``positives`` positives goes to the next tier and keeps its samples.

    Cost: ``sum_i (tier_i - tier_(i-1)) P(unsolved after tier_(i-1))``. With 62.7 %, 16.9 % and 1.7 % of the prompts
    solved in tiers of 4, 32 and 256, and the remainder never: 60.14 samples per prompt. (12.268 in a post leaves out
    unsolved prompts.) ConfigError if the tiers do not rise.
    """
    ends = tuple(tiers)
    return Sequential(positives, 0, ends[0], ends[-1], train_size, "pos", threshold, ends)


def _check_train_size(name: str, train_size: int | None, num_samples: int) -> None:
    if train_size is not None and not 1 <= train_size <= num_samples:
        raise ConfigError(f"{name}: train_size is {train_size}, expected 1 to {num_samples}, the samples of a prompt")
