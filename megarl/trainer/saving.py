"""Checkpoints of a run, what is saved before a run ends early, and the record of how it ends."""

import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megarl.config import Config
from megarl.errors import DamageError, MegarlError, PeerError, RolloutError, SaveError, StopError, WeightSyncError
from megarl.megatron import distributed
from megarl.megatron.checkpoints import checkpoint, folders
from megarl.megatron.checkpoints.saver import Saver
from megarl.megatron.policy import Policy
from megarl.run.folder import read_run_id
from megarl.run.metrics_log import read_metrics
from megarl.run.status import describe_ranks, read_signs
from megarl.run.stop_request import StopRequest
from megarl.run.vitals import Vitals

ERRORS_ON_ALL_RANKS = (RolloutError, WeightSyncError, StopError)
"""If one rank raises one of these, all ranks do. So all of them can save together."""
_SIGNS_ARE_OLD_S = 6.0
"""After this time the signs of a rank that has died are old enough to show it."""


class RunCheckpoints:
    """Saves a run, also before it ends early: when it is asked to stop, or when the engine fails on all ranks.

    All methods are collective calls.
    """

    def __init__(
        self,
        config: Config,
        policy: Policy,
        stop: StopRequest,
        save_run: Callable[[int, dict[str, Any] | None], None],
        say: Callable[[str], None],
    ) -> None:
        """``save_run(done, sampling)`` calls ``save`` with the state of the run; see ``save_on_failure``."""
        self.folder = config.run_dir / "checkpoints"
        self._run = distributed.from_main_rank(lambda: read_run_id(config.run_dir))
        self.saver = Saver(self.folder, config.checkpoint.keep, self._run, self._find_lasting)
        self._config, self._policy, self._stop, self._save_run, self._say = config, policy, stop, save_run, say
        self._log_bytes, self._found = 0, dict[int, float]()

    def newest(self) -> tuple[int, Path] | None:
        """Return (finished steps, folder) of the newest complete checkpoint."""
        # Only the main rank looks: file systems may show different folders to different nodes for a while.
        found = distributed.from_main_rank(lambda: folders.complete_checkpoints(self.folder))
        return found[-1] if found else None

    def newest_intact(self) -> tuple[int, Path] | None:
        """Return (finished steps, folder) of the newest checkpoint that is as it was saved.

        Damaged ones that are newer are named and set aside. DamageError if all are damaged; they stay as they are.
        """
        limit, faults = self._config.checkpoint.verify_gib, dict[Path, str]()
        for step, path in reversed(distributed.from_main_rank(lambda: folders.complete_checkpoints(self.folder))):
            fault, read = checkpoint.find_damage(path, limit, self._run)
            if fault is None:
                for why in faults.values():
                    self._say(f"warning: {why}; step {step} is used instead, the damaged one is renamed to *.damaged")
                distributed.from_main_rank(lambda: folders.set_aside(faults))
                self._say(f"verified {path}: {read}")
                return step, path
            faults[path] = fault
        if faults:
            raise DamageError(
                f"no checkpoint is intact: {'; '.join(faults.values())}. Put an intact copy back, or remove "
                f"{self.folder} to go on from step 0"
            )
        return None

    def save(self, done: int, state: dict[str, Any]) -> None:
        """Save the policy and ``state`` after ``done`` steps, in the background if ``checkpoint.asynchronous``."""
        self.poll(wait=True)
        self.saver.begin(done, self._policy, state)
        self.poll(wait=not self._config.checkpoint.asynchronous)

    def is_best(self, done: int) -> bool:
        """Whether ``checkpoint.keep_best`` wants this step saved: no earlier evaluation was as good."""
        return distributed.from_main_rank(lambda: bool(scores := self._scores()) and _find_best(scores) == done)

    def _scores(self) -> dict[int, float]:
        """Return the pass rate by step that ``checkpoint.keep_best`` means, from the log: it outlives a restart."""
        best, names = self._config.checkpoint.keep_best, self._config.benchmarks
        key = "eval/pass_rate" if best == "pooled" or len(names) == 1 else f"eval/{best}/pass_rate"
        log = self._config.run_dir / "metrics.jsonl"
        if best is not None and log.exists():
            begin, self._log_bytes = self._log_bytes, log.stat().st_size  # what is appended since the last call
            records = read_metrics(log, begin)
            self._found |= {r["step"]: r[key] for r in records if r["kind"] == "eval" and r["step"] and key in r}
        return self._found

    def _find_lasting(self, steps: Sequence[int]) -> set[int]:
        """Return which of the complete checkpoints stay: on the disk, the best one has no successor yet."""
        every, scores = self._config.checkpoint.keep_every, self._scores()
        lasting = {step for step in steps if every and step % every == 0}
        here = {step: scores[step] for step in steps if step in scores}
        return lasting | ({_find_best(here)} if here else set())

    def poll(self, *, wait: bool = False) -> None:
        """Finish the save in the background if it is written; ``wait`` until it is."""
        if path := self.saver.poll(wait=wait):
            self._say(f"saved {path}")

    @contextmanager
    def save_on_failure(self, done: int, sampling: dict[str, Any] | None = None) -> Iterator[None]:
        """If the block fails on all ranks, save ``done`` steps; StopError if the reason is a request to stop.

        sampling: the sampler's state after these steps. None: its present state.
        """
        try:
            yield
        except ERRORS_ON_ALL_RANKS:
            self._end(done, sampling)
            raise

    def end_if_asked(self, done: int) -> None:
        """Save ``done`` steps and raise StopError if any rank was asked to stop before the last step."""
        if done < self._config.run.steps and self._stop.agree():
            self._end(done, None)

    def raise_if_asked(self) -> None:
        """Raise StopError if any rank was asked to stop, so that the samples just drawn are drawn again.

        They may be wrong: the signal may have reached the reward workers too.
        """
        if self._stop.agree():
            raise StopError("asked to stop")

    def _end(self, done: int, sampling: dict[str, Any] | None) -> None:
        asked = self._stop.agree()
        try:
            self.poll(wait=True)
        except SaveError as error:
            if not error.on_all_ranks:
                raise
            self._say(f"warning: {error}")  # continue: the disk may have room again
        wanted = asked or self._config.checkpoint.every or self._config.checkpoint.at_end
        if wanted and done and (self.newest() or (0,))[0] < done:
            self._save_run(done, sampling)
            self.poll(wait=True)
        kept = f"step {done} is saved in {self.folder}" if done else "no step was finished"
        if asked:
            raise StopError(f"asked to stop; {kept}, start the run again to continue")
        if wanted:
            self._say(f"sampling cannot go on; {kept}" + ("; the next start continues from there" if done else ""))


def _find_best(scores: Mapping[int, float]) -> int:
    """Return the first of the steps with the highest score."""
    return max(scores, key=lambda step: (scores[step], -step))


@contextmanager
def record_ending(vitals: Vitals, folder: Path, rank: int, ranks: int) -> Iterator[None]:
    """Record in ``vitals`` how the block ends. A failed collective call becomes a PeerError."""
    try:
        yield
    except StopError:
        vitals.end("stopped")
        raise
    except BaseException as error:
        is_own = ranks == 1 or isinstance(error, MegarlError) or not isinstance(error, Exception)
        if is_own or not distributed.is_collective_error(error):
            vitals.end("failed", error)
            raise
        status, traced = vitals.status, "".join(traceback.format_exception(error))
        (folder / "ranks" / f"{rank:05d}.error.txt").write_text(traced)
        time.sleep(_SIGNS_ARE_OLD_S)
        where = describe_ranks([sign for sign in read_signs(folder, ranks) if sign["rank"] != rank], time.time())
        lost = PeerError(
            f"rank {rank} lost the others in phase {status.phase} after step {status.step}: "
            f"{str(error).splitlines()[0][:200]}; {where}; the run continues from its newest checkpoint when it is "
            "started again"
        )
        vitals.end("failed", lost)
        raise lost from error
    vitals.end("finished")
