"""Checkpoints of a run, and what is saved before a run ends early."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megarl.config import Config
from megarl.errors import RolloutError, SaveError, StopError, WeightSyncError
from megarl.megatron import distributed
from megarl.megatron.checkpoints import checkpoint
from megarl.megatron.checkpoints.background_saver import BackgroundSaver
from megarl.megatron.policy import Policy
from megarl.run.folder import checkpoint_folder
from megarl.run.stop_request import StopRequest

ERRORS_ON_ALL_RANKS = (RolloutError, WeightSyncError, StopError)
"""If one rank raises one of these, all ranks do. So all of them can save together."""


class RunCheckpoints:
    """Loads and saves the checkpoints of a run; all methods but ``close`` are collective calls."""

    def __init__(self, config: Config, policy: Policy, say: Callable[[str], None]) -> None:
        self.folder = checkpoint_folder(config)
        self.saver = BackgroundSaver(self.folder, config.checkpoint.keep)
        self._settings, self._policy, self._say = config.checkpoint, policy, say

    def newest(self) -> tuple[int, Path] | None:
        """Return (finished steps, folder) of the newest complete checkpoint."""
        # Only the main rank looks: file systems may show different folders to different nodes for a while.
        found = distributed.from_main_rank(lambda: checkpoint.complete_checkpoints(self.folder))
        return found[-1] if found else None

    def save(self, done: int, state: dict[str, Any]) -> None:
        """Save the policy and ``state`` after ``done`` steps, in the background if ``checkpoint.asynchronous``."""
        if self._settings.asynchronous:
            self.poll(wait=True)
            self.saver.begin(done, self._policy, state)
        else:
            self._report(checkpoint.save(self.folder, done, self._policy, state, self._settings.keep))

    def poll(self, *, wait: bool = False) -> None:
        """Finish the save in the background if it is written; ``wait`` until it is."""
        self._report(self.saver.poll(wait=wait))

    def close(self) -> None:
        """Abandon a save in the background."""
        self.saver.abandon()

    def _report(self, path: Path | None) -> None:
        if path is not None:
            self._say(f"saved {path}")


class EarlyEnd:
    """Ends a run before its last step, and first saves the steps that are finished.

    A run ends early if it is asked to stop, or if the engine fails on all ranks. Its methods are collective calls.
    """

    def __init__(
        self,
        config: Config,
        stop: StopRequest,
        checkpoints: RunCheckpoints,
        save: Callable[[int, dict[str, Any] | None], None],
        say: Callable[[str], None],
    ) -> None:
        """``save(done, sampling)`` saves the run after ``done`` steps; see ``save_on_failure``."""
        self._config, self._stop, self._checkpoints, self._save, self._say = config, stop, checkpoints, save, say

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
        self._finish_background_save()
        settings = self._config.checkpoint
        wanted = asked or settings.every or settings.at_end
        if wanted and not self._is_saved(done):
            self._save(done, sampling)
            self._checkpoints.poll(wait=True)
        kept = f"step {done} is saved in {self._checkpoints.folder}" if done else "no step was finished"
        if asked:
            raise StopError(f"asked to stop; {kept}, start the run again to continue")
        if wanted:
            self._say(f"the engine cannot go on; {kept}, start the run again to continue")

    def _finish_background_save(self) -> None:
        try:
            self._checkpoints.poll(wait=True)
        except SaveError as error:
            if not error.on_all_ranks:
                raise
            self._say(f"warning: {error}")  # continue: the disk may have room again

    def _is_saved(self, done: int) -> bool:
        newest = self._checkpoints.newest()
        return done == 0 or (newest is not None and int(newest[0]) >= done)
