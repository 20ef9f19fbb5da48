"""Checkpoints of a run, saves before an early end, and the record of the ending."""

import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.config import Config
from megarl.errors import (
    DamageError,
    MegarlError,
    PeerError,
    RolloutError,
    SaveError,
    StopError,
    WeightSyncError,
    refusal,
)
from megarl.megatron import distributed
from megarl.megatron.checkpoints import checkpoint, folders
from megarl.megatron.checkpoints.saver import Saver
from megarl.megatron.checkpoints.state import describe_layout
from megarl.megatron.policy import Policy
from megarl.run.folder import read_run_id
from megarl.run.status import describe_ranks, read_signs
from megarl.run.stop_request import StopRequest
from megarl.run.vitals import Vitals
from megarl.trainer.records import Monitor
from megarl.trainer.sampling.sampler import Sampler
from megarl.trainer.step import Tripwires

ERRORS_ON_ALL_RANKS = (RolloutError, WeightSyncError, StopError)
"""Errors that all ranks raise together, and after which all ranks can save."""
_SIGNS_ARE_OLD_S = 6.0
"""After so many seconds, old signs show a rank's death."""


@dataclass(eq=False)
class RunCheckpoints:
    """Saves and restores a run: policy, sampler, tripwires, and whether the evaluation of the step is still due.

    A run also saves before it ends early: on request, or when the engine fails on all ranks. Methods are collective.
    """

    config: Config
    policy: Policy
    sampler: Sampler
    tripwires: Tripwires
    monitor: Monitor
    stop: StopRequest
    eval_is_due: bool = False
    """Saved too: a run that ends before an evaluation makes up for the evaluation."""

    def __post_init__(self) -> None:
        settings, self.folder = self.config.checkpoint, self.config.run_dir / "checkpoints"
        self._run = distributed.from_main_rank(lambda: read_run_id(self.config.run_dir))
        self.saver = Saver(self.folder, settings.keep, self._run, settings.keep_every)

    def newest(self) -> tuple[int, Path] | None:
        """Return (finished steps, folder) of the newest complete checkpoint."""
        return (self._complete() or [None])[-1]

    def _complete(self) -> list[tuple[int, Path]]:
        # Only the main rank looks: file systems may show different folders to different nodes for a while.
        return distributed.from_main_rank(lambda: folders.complete_checkpoints(self.folder))

    def resume(self) -> int | None:
        """Load the newest intact checkpoint, and drop later records of the log.

        Returns the number of steps, None without a checkpoint. DamageError if all checkpoints are damaged.
        """
        with self.monitor.phase("verify"):
            intact = self._find_intact()
        if intact is None:
            return None
        with self.monitor.phase("load"):
            state = checkpoint.load(intact[1], self.policy)
        self.eval_is_due = bool(state.get("eval_is_due"))
        self.sampler.load_state_dict({**state.get("sampler", {}), "untrained": state.get("untrained")})
        self.tripwires.state |= state.get("tripwires", {})  # of an earlier megarl: learn again
        done, say = int(state["step"]), self.monitor.say
        num_dropped = self.monitor.log.truncate_after(done, evaluated=not self.eval_is_due)
        say(f"resumed from {intact[1]} after step {done}; dropped {num_dropped} later records")
        if state["layout"] != (layout := describe_layout(self.policy)):
            say(f"the layout was {state['layout']} and is {layout}; random generators begin with run.seed")
        return done

    def _find_intact(self) -> tuple[int, Path] | None:
        """Return (finished steps, folder) of the newest undamaged checkpoint.

        Damaged newer checkpoints are named and set aside. DamageError if all are damaged; all stay unchanged.
        """
        say, faults = self.monitor.say, dict[Path, str]()
        for step, path in reversed(self._complete()):
            fault = checkpoint.find_damage(path, self._run)
            if fault is None:
                for damage in faults.values():
                    say(f"warning: {damage}; step {step} is used instead, the damaged one is renamed to *.damaged")
                distributed.from_main_rank(lambda: folders.set_aside(faults))
                say(f"verified {path}")
                return step, path
            faults[path] = fault
        if faults:
            raise DamageError(refusal("no_intact_checkpoint", faults="; ".join(faults.values()), folder=self.folder))
        return None

    def save(self, done: int, sampling: dict[str, Any] | None = None) -> None:
        """Save the run after ``done`` steps, in the background if ``checkpoint.asynchronous``.

        sampling: see ``save_on_failure``. SaveError if the disk refuses the save or the save before.
        """
        self.monitor.log.sync()  # the records of these steps must be on disk before the checkpoint is
        with self.monitor.phase("checkpoint"):
            sampling = dict(self.sampler.state_dict() if sampling is None else sampling)
            state = {
                "untrained": sampling.pop("untrained", None),
                "sampler": sampling,
                "tripwires": dict(self.tripwires.state),
                "eval_is_due": self.eval_is_due,
            }
            self.poll(wait=True)
            self.saver.begin(done, self.policy, state)
            self.poll(wait=not self.config.checkpoint.asynchronous)

    def poll(self, *, wait: bool = False) -> None:
        """Finish the save in the background if it is written; ``wait`` until it is."""
        if path := self.saver.poll(wait=wait):
            self.monitor.say(f"saved {path}")

    @contextmanager
    def save_on_failure(self, done: int, sampling: dict[str, Any] | None = None) -> Iterator[None]:
        """If the block fails on all ranks, save ``done`` steps; StopError if the reason is a request to stop.

        sampling: the sampler's state after these steps, by default the present state.
        """
        try:
            yield
        except ERRORS_ON_ALL_RANKS:
            self._end(done, sampling)
            raise

    def end_if_asked(self, done: int) -> None:
        """Save ``done`` steps and raise StopError if any rank was asked to stop before the last step."""
        if done < self.config.run.steps and self.stop.agree():
            self._end(done)

    def raise_if_asked(self) -> None:
        """StopError if any rank was asked to stop: the latest samples are drawn again.

        They may be wrong: the signal may have reached the reward workers too.
        """
        if self.stop.agree():
            raise StopError("asked to stop")

    def _end(self, done: int, sampling: dict[str, Any] | None = None) -> None:
        """Save ``done`` steps unless they are saved; StopError if the run was asked to stop."""
        is_asked = self.stop.agree()
        try:
            self.poll(wait=True)
        except SaveError as error:
            if not error.on_all_ranks:
                raise
            self.monitor.say(f"warning: {error}")  # continue: the disk may have room again
        saves = is_asked or self.config.checkpoint.every or self.config.checkpoint.at_end
        if saves and done and (self.newest() or (0,))[0] < done:
            self.save(done, sampling)
            self.poll(wait=True)
        if is_asked:
            state = f"step {done} is saved in {self.folder}" if done else "no step was finished"
            raise StopError(f"asked to stop; {state}, start the run again to continue")


@contextmanager
def record_ending(vitals: Vitals, folder: Path, rank: int, ranks: int) -> Iterator[None]:
    """Record in ``vitals`` how the block ends. A failed collective call becomes a PeerError."""
    try:
        yield
    except StopError:
        vitals.end("stopped")
        raise
    except BaseException as error:
        is_local = ranks == 1 or isinstance(error, MegarlError) or not isinstance(error, Exception)
        if is_local or not distributed.is_collective_error(error):
            vitals.end("failed", error)
            raise
        status, trace_text = vitals.status, "".join(traceback.format_exception(error))
        (folder / "ranks" / f"{rank:05d}.error.txt").write_text(trace_text)
        time.sleep(_SIGNS_ARE_OLD_S)
        other_ranks = describe_ranks([sign for sign in read_signs(folder, ranks) if sign["rank"] != rank], time.time())
        facts = {"rank": rank, "status": status, "error": str(error).splitlines()[0][:200], "others": other_ranks}
        lost = PeerError(refusal("others_lost", **facts))
        vitals.end("failed", lost)
        raise lost from error
    vitals.end("finished")
