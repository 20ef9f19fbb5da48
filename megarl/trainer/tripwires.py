"""The tripwires over all ranks: gathers the gaps of a step, has them judged, and masks the dropped sequences.

All ranks come to the same verdict (``megarl.watch.tripwires``). A dropped sequence has no loss token any more, while
the denominators stay: the sequence is masked as by a trust mask.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from megatron.core import parallel_state

from megarl.core.metrics import merge
from megarl.errors import AgreementError
from megarl.megatron import distributed
from megarl.trainer.mini_batch import FirstPass, MiniBatch
from megarl.watch.tripwires import StepJudge


class Tripwires(StepJudge):
    """``StepJudge`` for the mini-batches of a rank."""

    def judge(self, minis: Sequence[MiniBatch]) -> tuple[list[MiniBatch], bool]:
        """Drop sequences of the mini-batches of a step, each of which had its first pass.

        Returns the mini-batches without the dropped sequences, and whether any rank drops one. A collective call.
        RolloutError with the likely cause if the step is the first after a start and is bad; AgreementError if replay
        found routes that agree too little, and the dropped sequences do not explain them.
        """
        if self.is_off:
            return list(minis), False
        firsts = [mini.first for mini in minis if mini.first is not None]
        mistake = next((str(first.mistake) for first in firsts if first.mistake is not None), None)
        is_suspect = distributed.largest(int(mistake is not None)) > 0
        begin, gaps = _gather(firsts)
        mistakes = distributed.gather_objects(mistake) if is_suspect else []
        drops = self.judge_step(gaps, next(filter(None, mistakes), ""))
        unexplained, judged = None, list[MiniBatch]()
        for mini in minis:
            rows = slice(begin, begin := begin + len(mini.keys))
            unexplained = unexplained or _unexplained(mini, drops.dropped[rows], drops.judged[rows])
            judged.append(mini.without(drops.dropped[rows]))
        judged[0] = replace(judged[0], metrics=merge([judged[0].metrics, drops.metrics()]))
        if is_suspect:
            distributed.fail_together(unexplained, "replay")
        self.announce(drops)
        return judged, bool(drops.dropped.any())


def _unexplained(mini: MiniBatch, dropped: np.ndarray, judged: np.ndarray) -> AgreementError | None:
    """Return what replay found in a mini-batch, unless a sequence is dropped wherever routes agree too little.

    Where no sequence trains any more, nothing is left to explain. dropped, judged: bool [n].
    """
    mistake = None if mini.first is None else mini.first.mistake
    if mistake is None:
        return None
    suspects = [list(mini.micro_batches[index].sequences) for index in mistake.micro_batches]
    trains = judged & ~dropped
    is_explained = all(dropped[rows].any() or not trains[rows].any() for rows in suspects)
    return None if is_explained and (suspects or not trains.any()) else mistake


def _gather(firsts: Sequence[FirstPass]) -> tuple[int, np.ndarray]:
    """Return the first row of this model copy, and the gaps of all copies, float64 [S, COLUMNS]; a collective call."""
    gaps_here = np.concatenate([first.gaps for first in firsts])
    # One rank of a copy speaks for the whole copy, so that its ranks agree to the last bit.
    gaps = torch.from_numpy(gaps_here if distributed.holds_outputs() else np.zeros_like(gaps_here))
    gaps = distributed.all_sum(gaps.to(torch.cuda.current_device()), distributed.model_group())
    copies = distributed.all_gather(gaps, parallel_state.get_data_parallel_group())
    return distributed.dp_rank() * len(gaps_here), copies.flatten(0, 1).cpu().numpy()
