"""Tripwires: the distance between training engine and sampling engine, by sequence, and the limits.

Three figures of a sequence, all 0 where the engines agree:

- *k3*: the mean of ``rho - 1 - log rho`` over the generated tokens, rho = pi_old / mu. A token counts at most 1, and
  the largest token not at all, because honest ratios have a long tail.
- *native flip*: the share of (token, layer) pairs for which the free training routers and the rollout name different
  experts. Of the shares over all tokens and over generated tokens, the larger share counts.
- *evidence*: for a run of rows of foreign tokens (``foreign_rows``), invisible in the mean over a long response.

Few tokens prove little: each mean also counts FEW agreeing tokens. The limits are in limits.toml.
"""

import math
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megarl.config.tables.train import TrainConfig
from megarl.core.metrics import Stat
from megarl.core.ratios import log_ratio, segment_ids, segment_sum, usable_mask
from megarl.core.types import TrainBatch
from megarl.errors import RolloutError, refusal
from megarl.watch import foreign_rows
from megarl.watch.limits import TRIPWIRES


class Column(IntEnum):
    """The columns of ``gaps``, float64 [S, COLUMNS]: the counts of a sequence."""

    GROUP = 0
    SAMPLE = 1
    LARGEST_K3 = 2
    K3 = 3
    """Sum over the generated tokens."""
    TOKENS = 4
    FLIPS = 5
    ROWS = 6
    """Tokens with a recorded route."""
    GENERATED_FLIPS = 7
    GENERATED_ROWS = 8
    EVIDENCE = 9
    FIRST_ROW = 10
    LAST_ROW = 11
    FOREIGN_ROWS = 12


COLUMNS = len(Column)
FEW = 4.0
LEARNING_STEPS = 8
TAIL = 3.5  # median absolute deviations from the median to about the 0.99 quantile of a normal distribution


def count_k3(old_logprobs: Tensor, rollout_logprobs: Tensor, loss_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return float64 [N, 3]: the columns LARGEST_K3, K3 and TOKENS.

    old_logprobs, rollout_logprobs: [T]; loss_mask: bool [T]. Tokens at -inf in rollout_logprobs do not count.
    """
    keep = usable_mask(loss_mask, rollout_logprobs)
    log_rho = log_ratio(old_logprobs, rollout_logprobs, keep).detach().double()
    k3 = (torch.expm1(log_rho) - log_rho).clamp(max=1.0)
    total, tokens = segment_sum(torch.stack([k3, keep.double()]), cu_seqlens)
    largest = torch.zeros_like(total).scatter_reduce(0, segment_ids(cu_seqlens, k3.numel()), k3, "amax")
    return torch.stack([largest, total, tokens], 1)


def count_flips(num_shared: np.ndarray, topk: int, batch: TrainBatch) -> np.ndarray:
    """Return float64 [N, 8]: the columns from FLIPS on.

    num_shared: [T', L], the number of experts that training routers and rollout share, of the T' tokens with a
    recorded route.
    """
    present = batch.routed_mask
    assert present is not None
    ids = segment_ids(batch.cu_seqlens).numpy()[present.numpy()]
    generated = batch.loss_mask.numpy()[present.numpy()]
    flips = (np.asfortranarray(num_shared) < topk).mean(1)  # by layer, as in Disagreement
    weights = (flips, None, flips * generated, generated)
    counts = np.stack([np.bincount(ids, weight, batch.num_sequences) for weight in weights], 1)
    return np.concatenate([counts, foreign_rows.find_foreign(num_shared, topk, batch)], 1)


def usual_means(gaps: np.ndarray) -> list[float]:
    """Return about the 0.99 quantile [2] of k3 and native flip over honest sequences, at least half of all sequences.

    The quantile is the median plus TAIL median absolute deviations, insensitive to wrong sequences.
    """
    means = _means(gaps[gaps[:, Column.TOKENS] > 0])
    if not len(means):
        return [0.0, 0.0]
    median = np.median(means, 0)
    return (median + TAIL * np.median(np.abs(means - median), 0)).tolist()


def learnt_limits(usual: Sequence[Sequence[float]]) -> list[float]:
    """Return the limits [2] of k3 and native flip from the usual means of one or more steps.

    Later steps only tighten the limits that the first step gives.
    """
    k3, flip = np.minimum(usual[0], np.median(usual, 0)).tolist()
    return [TRIPWIRES.max_k3.of(k3), TRIPWIRES.max_native_flip.of(flip)]


def drop_evidence(dropped: int, judged: int) -> float:
    """Return the log-likelihood ratio of a step's drops, in nats: of a lasting fault over chance."""
    usual, faulty = TRIPWIRES.usual_drops, TRIPWIRES.faulty_drops
    return dropped * math.log(faulty / usual) + (judged - dropped) * math.log((1.0 - faulty) / (1.0 - usual))


class Drops:
    """Which sequences of a step are dropped, and why."""

    def __init__(self, gaps: np.ndarray, limits: np.ndarray) -> None:
        """Compare each sequence of the step, float64 [S, COLUMNS], with the limits, float64 [3].

        The limits are of k3, native flip and evidence; infinite where a check is off.
        """
        self.gaps, self.limits = gaps, limits
        self.figures = np.column_stack([_means(gaps), gaps[:, Column.EVIDENCE]])
        """float64 [S, 3]."""
        self.judged = gaps[:, Column.TOKENS] > 0
        """bool [S], True for sequences with a generated token."""
        self.over = (self.figures > limits) & self.judged[:, None]
        """bool [S, 3]. If the pooled mean of the remaining sequences exceeds a limit, all remaining sequences are over
        the limit."""
        remaining = self.judged & ~self.over.any(1)
        self.over[:, :2] |= remaining[:, None] & (_pool(gaps[remaining]) > limits[:2])
        self.dropped = np.asarray(self.over.any(1))
        """bool [S]."""

    @property
    def share(self) -> float:
        """Dropped sequences over judged sequences; above ``most_dropped`` the step itself is bad."""
        return float(self.dropped.sum() / max(1, self.judged.sum()))

    def reasons(self) -> dict[tuple[int, int], str]:
        """Return the reason by dropped (group, sample)."""
        reasons = {}
        for index in np.flatnonzero(self.dropped):
            (k3, flip, _), gap = self.figures[index], self.gaps[index]
            run = f", {_describe_run(gap)}" if self.over[index, 2] else ""
            reasons[int(gap[Column.GROUP]), int(gap[Column.SAMPLE])] = f"k3 {k3:.3g}, native flip {flip:.0%}{run}"
        return reasons

    def metrics(self) -> dict[str, Stat]:
        """Return numbers, equal on all ranks."""
        k3, flip, _ = self.figures[self.judged].max(0, initial=0.0)
        numbers = {
            "dropped": self.dropped.sum(), "dropped_fraction": self.share, "k3_max": k3,
            "k3_limit": self.limits[0], "native_flip_limit": self.limits[1],
        }  # fmt: skip
        if self._has_routes:
            numbers |= {"foreign_runs": self.over[:, 2].sum(), "native_flip_max": flip}
        return {f"tripwires/{key}": Stat.max(float(x)) for key, x in numbers.items() if math.isfinite(x)}

    def describe(self) -> str:
        """Return the step's figures beside their limits, the number of dropped sequences, and a run of foreign rows."""
        (k3, flip), (max_k3, max_native_flip, _) = _pool(self.gaps[self.judged]), self.limits
        routes = "no routes, " if np.isfinite(max_native_flip) else ""
        if self._has_routes:
            routes = f"native flip {flip:.1%} (limit {max_native_flip:.0%}), "
        counts, runs = f"{self.dropped.sum()} of {self.judged.sum()} responses dropped", self.gaps[self.over[:, 2]]
        run = f"; {_describe_run(runs[runs[:, Column.EVIDENCE].argmax()])} of one response" if len(runs) else ""
        return f"k3 {k3:.1e} (limit {max_k3:.2g}), {routes}{counts}{run}"

    @property
    def _has_routes(self) -> bool:
        return bool(self.gaps[:, Column.ROWS].any())


class StepJudge:
    """The limits of a run, what the first steps have taught, and the drops of the latest step."""

    def __init__(self, train: TrainConfig) -> None:
        self.say: Callable[[str], None] = lambda _: None
        self.verdict: Drops | None = None
        """Of the latest step; None if the limits are off."""
        self.state: dict[str, Any] = {"usual_by_step": [], "bad_steps": 0, "drop_evidence": 0.0}
        """For checkpoints, plain and equal on all ranks: the usual means of the first steps, bad steps in a row, and
        the evidence for lasting drops."""
        self._settings, self._is_tested = train, False
        self._mistake = ""

    @property
    def judges_routes(self) -> bool:
        return self._settings.max_native_flip != "off"

    @property
    def is_off(self) -> bool:
        return self._settings.max_k3 == "off" and not self.judges_routes

    def judge_step(self, gaps: np.ndarray, mistake: str = "") -> Drops:
        """Judge the sequences of a step, float64 [S, COLUMNS], and learn from them.

        mistake: the error of replay about the routes of the step. An error selects the lowest limits.
        """
        usual = usual_means(gaps)
        steps = [[0.0, 0.0]] if mistake else [*self.state["usual_by_step"], usual][:LEARNING_STEPS]
        self._mistake, self.verdict = mistake, Drops(gaps, self._limits(steps))
        self.learn(self.verdict, usual)
        return self.verdict

    def announce(self, drops: Drops) -> None:
        """Say what was dropped. The first step that is judged after a start is the self-test of the run.

        RolloutError with the figures if the self-test fails.
        """
        is_test = not self._is_tested and bool(drops.judged.any())
        if is_test or drops.dropped.any():
            self.say(f"{'self-test' if is_test else 'tripwires'}: {drops.describe()}")
        self._is_tested |= is_test
        if is_test and self._settings.max_bad_steps and self.state["bad_steps"]:
            raise self._error("the self-test of the engines has failed, no weight has changed")

    def stop_if_bad(self) -> None:
        """RolloutError, on all ranks, if ``train.max_bad_steps`` steps in a row were bad, or if drops persist."""
        limit, bad_steps = self._settings.max_bad_steps, self.state["bad_steps"]
        if not limit or (bad_steps < limit and self.state["drop_evidence"] < TRIPWIRES.evidence):
            return
        self.state["drop_evidence"] = 0.0  # the checkpoint that follows is continued with a new engine
        lasting = "responses are dropped in step after step"
        raise self._error(f"{bad_steps} bad steps in a row" if bad_steps >= limit else lasting)

    def learn(self, drops: Drops, usual: list[float]) -> None:
        """Update ``state`` with the drops of a step and its usual means [2]."""
        is_bad, state = drops.share > TRIPWIRES.most_dropped, self.state
        state["bad_steps"] = state["bad_steps"] + 1 if is_bad else 0
        # The evidence of a step is at most the evidence of a bad step among ``max_bad_steps``.
        at_most = TRIPWIRES.evidence / max(1, self._settings.max_bad_steps) + 1e-9
        evidence = drop_evidence(int(drops.dropped.sum()), int(drops.judged.sum()))
        total = state["drop_evidence"] + min(evidence, at_most)
        state["drop_evidence"] = min(max(total, 0.0), TRIPWIRES.evidence)
        if not is_bad and len(state["usual_by_step"]) < LEARNING_STEPS and drops.judged.any():
            state["usual_by_step"] = [*state["usual_by_step"], usual]

    def _limits(self, usual: Sequence[Sequence[float]]) -> np.ndarray:
        """float64 [3], of k3, native flip and evidence; infinite if off."""
        k3, flip = learnt_limits(usual)
        means = _resolve(self._settings.max_k3, k3), _resolve(self._settings.max_native_flip, flip)
        return np.array([*means, TRIPWIRES.evidence if self.judges_routes else math.inf])

    def _error(self, problem: str) -> RolloutError:
        assert self.verdict is not None
        facts = {"verdict": self.verdict.describe(), "mistake": f" ({self._mistake})" if self._mistake else ""}
        return RolloutError(refusal("engines_disagree", problem=problem, **facts))


def _resolve(setting: float | str, learnt: float) -> float:
    return {"off": math.inf, "learn": learnt}[setting] if isinstance(setting, str) else setting


def _describe_run(gap: np.ndarray) -> str:
    first, last, foreign = gap[Column.FIRST_ROW :].astype(int)
    return f"rows {first} to {last} are of other tokens ({foreign} of {int(gap[Column.ROWS])} rows are foreign)"


def _means(gaps: np.ndarray) -> np.ndarray:
    """float64 [S, 2]: k3 and native flip."""
    k3 = (gaps[:, Column.K3] - gaps[:, Column.LARGEST_K3]) / (gaps[:, Column.TOKENS] + FEW)
    flip = gaps[:, Column.FLIPS] / (gaps[:, Column.ROWS] + FEW)
    generated = gaps[:, Column.GENERATED_FLIPS] / (gaps[:, Column.GENERATED_ROWS] + FEW)
    return np.stack([k3, np.maximum(flip, generated)], 1)


def _pool(gaps: np.ndarray) -> np.ndarray:
    """float64 [2]: the means over all tokens of the sequences."""
    total = gaps.sum(0, keepdims=True)
    total[:, Column.LARGEST_K3] = 0.0
    return _means(total)[0]
