"""How many samples a prompt gets: rules that are asked once all samples of the previous round have arrived.

A rule sees the counts of one prompt only: samples asked for, positive ones, negative ones. So no prompt waits for
another, the order in which responses finish does not matter, and ``megarl.core.sampling.stopping_law`` computes the
exact law from the rule object itself. Imports neither torch nor numpy, so that a configuration can make a rule.
"""

import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from megarl.core.choices.own import call_own, name_of
from megarl.errors import ConfigError

Keep = Literal["balance", "pos", "any"]
"""Which samples train where not all do; see ``megarl.core.sampling.subsampling``."""

POSITIVE = 0.7
"""A reward above this is positive (as in the released code of Reinforce-Ada); rewards need not be 0 and 1."""


class SamplingRule:
    """What ``megarl.core.sampling.collector`` drives; frozen and hashable. A rule that looks for nothing keeps the
    answers given here."""

    __slots__ = ()
    threshold: float
    """A reward above this is positive."""
    train_size: int | None
    """Samples of a prompt that train, where it has as many; None for all."""
    keep: Keep
    """Which ones; see ``megarl.core.sampling.subsampling``."""

    def next_samples(self, prompt: int, asked: int, positives: int, negatives: int) -> int:
        """Return how many more samples the prompt gets; 0 ends it.

        asked: samples so far, all of which have arrived; positives + negatives is less where some failed.
        """
        raise NotImplementedError

    def resolved(self, positives: int, negatives: int) -> bool:
        """Return whether a prompt that ended with these counts has what the rule looked for."""
        return True

    def keeps(self, positives: int, negatives: int) -> Keep:
        """Return which samples of a prompt that ended with these counts train, where ``train_size`` is less."""
        return self.keep


@dataclass(frozen=True, slots=True)
class Uniform(SamplingRule):
    """The same number of samples for each prompt; with ``train_size`` fewer of them train."""

    num_samples: int
    """Samples per prompt."""
    train_size: int | None = None
    keep: Keep = "any"
    threshold: float = POSITIVE

    def __post_init__(self) -> None:
        _check_counts("Uniform", num_samples=self.num_samples)
        _check_train_size("Uniform", self.train_size, self.num_samples, self.keep)

    def next_samples(self, prompt: int, asked: int, positives: int, negatives: int) -> int:
        return self.num_samples if asked == 0 else 0


@dataclass(frozen=True, slots=True)
class Allotted(SamplingRule):
    """A number of samples per prompt that was decided before, from estimates (Ada-Est, GVM).

    Groups then differ in size, and one of a single sample has no contrast: its advantage is 0, not its reward. (verl
    gives such a group the mean 0 and the standard deviation 1.)
    """

    counts: tuple[int, ...]
    """Samples of each prompt, 0 for none; see ``megarl.core.sampling.allocation``."""
    threshold: float = POSITIVE
    train_size: int | None = None
    keep: Keep = "any"
    more: tuple[tuple[int, ...], ...] = ()
    """If the counts only probe: samples that follow, by prompt and by the number of positives among the first."""

    def __post_init__(self) -> None:
        if (least := min([0, *self.counts, *(count for row in self.more for count in row)])) < 0:
            raise ConfigError(f"Allotted: a count is {least}, expected 0 or more")
        if self.more and [len(row) for row in self.more] != [count + 1 for count in self.counts]:
            raise ConfigError("Allotted: expected what follows each prompt's probe for each number of positives in it")

    def next_samples(self, prompt: int, asked: int, positives: int, negatives: int) -> int:
        if not 0 <= prompt < len(self.counts):
            raise ValueError(f"prompt {prompt} has no count, there are {len(self.counts)}: allot to all prompts")
        if self.more and asked == self.counts[prompt]:
            return self.more[prompt][positives]
        return self.counts[prompt] if asked == 0 else 0


@dataclass(frozen=True, slots=True)
class Sequential(SamplingRule):
    """Rounds of ``round_size`` samples until there are enough of each class, or ``max_samples``.

    A whole round is drawn and pooled before the exit is tested. A prompt with pass rate 0 or 1 never exits, so the cap
    is no option. Source: Reinforce-Ada (arXiv 2510.04996), "Ada-Seq"; ``ada_seq_pos`` and ``ada_seq_balance`` are its
    two variants.
    """

    positives: int
    """Positive samples needed to exit."""
    negatives: int
    """Negative samples needed to exit; 0 for none."""
    round_size: int = 8
    """Samples M of a round; the last one is shorter where the cap says so."""
    max_samples: int = 32
    """Samples after which an unresolved prompt gives up."""
    train_size: int | None = 4
    fallback: Keep = "balance"
    """Which samples train where the prompt gave up; where it exited they are balanced."""
    threshold: float = POSITIVE
    tiers: tuple[int, ...] = ()
    """Samples in all after each round, in place of rounds of equal size; the last one is ``max_samples``."""

    def __post_init__(self) -> None:
        if self.tiers and sorted({0, self.max_samples, *self.tiers}) != [0, *self.tiers]:
            raise ConfigError(f"Sequential: tiers are {self.tiers}, expected to rise from 1 or more to max_samples")
        _check_counts("Sequential", round_size=self.round_size, max_samples=self.max_samples)
        if min(self.positives, self.negatives) < 0 or not 1 <= self.positives + self.negatives <= self.max_samples:
            raise ConfigError(
                f"Sequential: {self.positives} positives and {self.negatives} negatives to exit, expected at least one "
                f"and at most max_samples = {self.max_samples} of them together"
            )
        _check_train_size("Sequential", self.train_size, self.max_samples, self.fallback)

    def next_samples(self, prompt: int, asked: int, positives: int, negatives: int) -> int:
        if self.resolved(positives, negatives):
            return 0
        ends = self.tiers or (asked + self.round_size,)
        return min(next((end for end in ends if end > asked), asked), self.max_samples) - asked

    def resolved(self, positives: int, negatives: int) -> bool:
        return positives >= self.positives and negatives >= self.negatives

    def keeps(self, positives: int, negatives: int) -> Keep:
        return "balance" if self.resolved(positives, negatives) else self.fallback


@dataclass(frozen=True, slots=True)
class Own(SamplingRule):
    """A function of the user: ``more = function(asked, positives, negatives)``, 0 to end, up to ``max_samples``.

    Deterministic, for every rank calls it. Tried when the rule is made, on prompts that are always, never and every
    other time positive. ConfigError if it raises, returns no whole number of 0 or more, or 0 for a new prompt.
    """

    function: Callable[[int, int, int], int]
    max_samples: int = 32
    """Most samples of a prompt."""
    train_size: int | None = None
    keep: Keep = "any"
    threshold: float = POSITIVE

    def __post_init__(self) -> None:
        _check_counts("Own", max_samples=self.max_samples)
        _check_train_size("Own", self.train_size, self.max_samples, self.keep)
        for every in (1, self.max_samples + 1, 2):
            asked = 0
            while more := self.next_samples(0, asked, asked // every, asked - asked // every):
                asked += more
            if not asked:
                raise ConfigError(f"rule: the function {name_of(self.function)} returned 0 before the first sample")

    def next_samples(self, prompt: int, asked: int, positives: int, negatives: int) -> int:
        return min(self._ask(asked, positives, negatives), self.max_samples - asked)

    def resolved(self, positives: int, negatives: int) -> bool:
        return not self._ask(positives + negatives, positives, negatives)

    def _ask(self, asked: int, positives: int, negatives: int) -> int:
        more: Any = call_own("rule", self.function, asked, positives, negatives)
        if isinstance(more, bool) or not isinstance(more, numbers.Integral) or more < 0:
            raise ConfigError(
                f"rule: the function {name_of(self.function)} returned {more!r:.80} for asked = {asked}, positives = "
                f"{positives}, negatives = {negatives}; expected a whole number of samples, 0 to end"
            )
        return int(more)


def ada_seq_pos(
    train_size: int = 4, *, positives: int = 1, round_size: int = 8, max_samples: int = 32, threshold: float = POSITIVE
) -> Sequential:
    """Return Ada-Seq-Pos: sample until there are ``positives`` positives.

    The defaults are those of the released code. The sources disagree on ``positives``: the code exits at the first one,
    the paper's third version prints a K_pos such as 16 (with rounds of 16 and a cap of 128), the posts say "K".
    """
    return Sequential(positives, 0, round_size, max_samples, train_size, "pos", threshold)


def ada_seq_balance(
    train_size: int = 4,
    *,
    positives: int | None = None,
    negatives: int | None = None,
    round_size: int = 8,
    max_samples: int = 32,
    threshold: float = POSITIVE,
) -> Sequential:
    """Return Ada-Seq-Balance: sample until half of ``train_size`` is positive and the rest negative.

    The defaults are those of the released code: ``train_size // 2`` positives, and as many negatives as complete
    ``train_size``. ("Balance-4" is 2 + 2; a post's k = 4 means 4 + 4.) Larger thresholds sharpen the pool's statistics.
    """
    positives = train_size // 2 if positives is None else positives
    negatives = train_size - train_size // 2 if negatives is None else negatives
    return Sequential(positives, negatives, round_size, max_samples, train_size, "balance", threshold)


def pass_tiers(
    train_size: int = 4, *, tiers: Sequence[int] = (4, 32, 256), positives: int = 1, threshold: float = POSITIVE
) -> Sequential:
    """Return the tier ladder: a prompt without ``positives`` positives goes to the next tier with the samples it has.

    It costs ``sum_i (tier_i - tier_(i-1)) P(unsolved after tier_(i-1))``: with 62.7 %, 16.9 % and 1.7 % of the prompts
    solved in tiers of 4, 32 and 256, and the rest never, 60.14 samples per prompt. (A post says 12.268: it leaves out
    the prompts that are never solved.)
    """
    ends = tuple(tiers)
    return Sequential(positives, 0, ends[0], ends[-1], train_size, "pos", threshold, ends)


def _check_counts(name: str, **counts: int) -> None:
    for key, count in counts.items():
        if count < 1:
            raise ConfigError(f"{name}: {key} is {count}, expected at least 1")


def _check_train_size(name: str, train_size: int | None, num_samples: int, keep: Keep) -> None:
    if keep not in get_args(Keep):
        raise ConfigError(f"{name}: {keep!r} is no way to choose; expected one of {get_args(Keep)}")
    if train_size is not None and not 1 <= train_size <= num_samples:
        raise ConfigError(f"{name}: train_size is {train_size}, expected 1 to {num_samples}, the samples of a prompt")
