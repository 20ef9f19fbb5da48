"""Judges the sequences of a step before the first update, and drops those on which the engines disagree too much.

All ranks come to the same verdict. A dropped sequence has no loss token any more, while denominators stay: it is
masked as by a trust mask. The verdict of the first step after a start is the self-test of the run.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state

from megarl.config.tables.train import TrainConfig
from megarl.core.metrics import merge
from megarl.core.segments import segment_expand
from megarl.errors import AgreementError, RolloutError
from megarl.megatron import distributed
from megarl.trainer.mini_batch import MiniBatch
from megarl.watch import foreign_rows
from megarl.watch.tripwires import (
    LEARNING_STEPS,
    LIMITS,
    MOST_DROPPED,
    Verdict,
    drop_evidence,
    learnt_limits,
    usual_means,
)


class Tripwires:
    """The limits of a run, what they have learnt, and the verdict of the latest step."""

    def __init__(self, train: TrainConfig) -> None:
        self._settings, self._is_tested = train, False
        self.say: Callable[[str], None] = lambda _: None
        self.verdict: Verdict | None = None
        """None if both limits are off."""
        self._mistake: str | None = None
        """What replay found wrong with the routes of the latest step, on the first rank that found something."""
        self.state: dict[str, Any] = {"usual_by_step": [], "bad_steps": 0, "drop_evidence": 0.0}
        """For checkpoints, plain and equal on all ranks: what was usual in the first steps, bad steps in a row, and the
        evidence that drops persist."""

    @property
    def judges_routes(self) -> bool:
        return self._settings.max_native_flip != "off"

    def _limits(self, usual_by_step: Sequence[Sequence[float]]) -> np.ndarray:
        """float64 [3], of k3, native flip and evidence; infinite if off."""
        learnt = learnt_limits(usual_by_step)
        found = [(getattr(self._settings, name), limit) for name, limit in zip(LIMITS, learnt, strict=True)]
        means = [{"off": math.inf, "learn": limit}.get(setting, setting) for setting, limit in found]
        return np.array([*means, foreign_rows.LIMIT if self.judges_routes else math.inf])

    def judge(self, minis: Sequence[MiniBatch]) -> bool:
        """Drop sequences of the mini-batches of a step, after the first pass over each; return whether any is.

        A collective call. RolloutError with the likely cause if it is the first step after a start and it is bad;
        AgreementError if replay found routes that agree too little, and the sequences that are dropped do not explain
        it.
        """
        if self._settings.max_k3 == "off" and not self.judges_routes:
            return False
        mistake = next((str(mini.mistake) for mini in minis if mini.mistake is not None), None)
        is_suspect = distributed.largest(int(mistake is not None)) > 0
        self._mistake = next(filter(None, distributed.gather_objects(mistake)), None) if is_suspect else None
        first, gaps = _gather(minis)
        known, usual = self.state["usual_by_step"], usual_means(gaps)
        least = [[0.0] * len(LIMITS)]
        limits = self._limits(least if is_suspect else [*known, usual][:LEARNING_STEPS])
        self.verdict = verdict = Verdict.of(gaps, limits)
        any_dropped, unexplained = bool(verdict.dropped.any()), None
        for mini in minis:
            own = slice(first, first := first + len(mini.gaps))
            unexplained = unexplained or _unexplained(mini, verdict.dropped[own], verdict.judged[own])
            if any_dropped:
                _mask(mini, verdict.dropped[own])
        minis[0].metrics = merge([minis[0].metrics, verdict.metrics()])
        self._learn(verdict, usual)
        if is_suspect:
            distributed.fail_together(unexplained, "replay")
        is_test = not self._is_tested and verdict.judged.any()
        if is_test or any_dropped:
            self.say(f"{'self-test' if is_test else 'tripwires'}: {verdict.describe(self._settings.replay == 'r3')}")
        self._is_tested |= is_test
        if is_test and self._settings.max_bad_steps and self.state["bad_steps"]:
            raise self._error("the self-test of the engines has failed, no weight has changed")
        return any_dropped

    def stop_if_bad(self) -> None:
        """RolloutError, on all ranks, if ``train.max_bad_steps`` steps in a row were bad, or if drops persist."""
        most, bad_steps = self._settings.max_bad_steps, self.state["bad_steps"]
        in_a_row = bad_steps >= most
        if most and (in_a_row or self.state["drop_evidence"] >= foreign_rows.LIMIT):
            self.state["drop_evidence"] = 0.0  # the checkpoint that follows is continued with an engine that is new
            raise self._error(
                f"{bad_steps} bad steps in a row" if in_a_row else "responses are dropped in step after step"
            )

    def _learn(self, verdict: Verdict, usual: list[float]) -> None:
        is_bad, known = verdict.share > MOST_DROPPED, self.state["usual_by_step"]
        self.state["bad_steps"] = self.state["bad_steps"] + 1 if is_bad else 0
        # No step proves more than one of ``max_bad_steps`` bad ones.
        most = foreign_rows.LIMIT / max(1, self._settings.max_bad_steps) + 1e-9
        evidence = drop_evidence(int(verdict.dropped.sum()), int(verdict.judged.sum()))
        total = self.state["drop_evidence"] + min(evidence, most)
        self.state["drop_evidence"] = min(max(total, 0.0), foreign_rows.LIMIT)
        if not is_bad and len(known) < LEARNING_STEPS and verdict.judged.any():
            self.state["usual_by_step"] = [*known, usual]

    def _error(self, what: str) -> RolloutError:
        assert self.verdict is not None
        found = self.verdict.describe(self._settings.replay == "r3")
        more = "" if self._mistake is None else f" ({self._mistake})"
        return RolloutError(
            f"{what}: {found}{more}; look at the engine and its log, or, if this is how the engines differ, set "
            "train.max_k3 and train.max_native_flip (docs/tripwires.md)"
        )


def _unexplained(mini: MiniBatch, dropped: np.ndarray, judged: np.ndarray) -> AgreementError | None:
    """Return what replay found in a mini-batch, unless a sequence is dropped wherever routes agree too little.

    Where no sequence trains any more, nothing is left to explain. dropped, judged: bool [n].
    """
    if mini.mistake is None:
        return None
    wrong = [list(mini.micro_batches[index].sequences) for index in mini.mistake.micro_batches]
    trains = judged & ~dropped
    is_explained = all(dropped[rows].any() or not trains[rows].any() for rows in wrong) if wrong else not trains.any()
    return None if is_explained else mini.mistake


def _gather(minis: Sequence[MiniBatch]) -> tuple[int, np.ndarray]:
    """Return where the gaps of this model copy begin in those of all, and those, float64 [S, COLUMNS]; collective."""
    mine = np.concatenate([mini.gaps for mini in minis])
    # One rank of a copy speaks for all of them, so that they agree to the last bit.
    gaps = torch.from_numpy(mine if distributed.holds_outputs() else np.zeros_like(mine))
    gaps = distributed.all_sum(gaps.to(torch.cuda.current_device()), distributed.model_group())
    copies = distributed.all_gather(gaps, parallel_state.get_data_parallel_group())
    return distributed.dp_rank() * len(mine), copies.flatten(0, 1).cpu().numpy()


def _mask(mini: MiniBatch, dropped: np.ndarray) -> None:
    """Take the loss tokens of dropped sequences, bool [n]; the denominators of the mini-batch stay."""
    for index, micro in enumerate(mini.micro_batches):
        batch, kept = micro.batch, torch.from_numpy(~dropped[list(micro.sequences)])
        mask = batch.loss_mask & segment_expand(kept, batch.cu_seqlens)
        mini.micro_batches[index] = replace(micro, batch=replace(batch, loss_mask=mask))
