"""The servers in an operation of a fleet: an update, a proof, or a rest."""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from megarl.engines.sglang.member import Member
from megarl.engines.sglang.transports.deadlines import GoneError, HangError, await_most
from megarl.engines.sglang.transports.sender import WeightSender
from megarl.engines.sglang.transports.threads import in_thread
from megarl.errors import WeightSyncError


class Participants:
    """Members of a fleet whose locks the fleet holds: no keeper talks to the servers."""

    def __init__(self, members: Sequence[Member], shares_gpu: bool, tell: Callable[[str], None]) -> None:
        """shares_gpu: whether servers open GPU memory of the trainer. A late server must then be killed."""
        self.present: list[Member] = []
        self.resting: Collection[Member] = ()
        """Members without memory, since a rest."""
        self._tell = tell
        self._members, self._shares_gpu = members, shares_gpu
        self._refusals: list[Callable[[], None]] = []
        """A call waits for the end of a server that has refused a step, or raises the refusal."""

    @property
    def senders(self) -> list[WeightSender]:
        """The senders of all present members."""
        return [member.sender for member in self.present]

    def tell(self, line: str, /) -> None:
        """See ``Receivers.tell``."""
        self._tell(line)

    @contextmanager
    def take(self, is_wanted: Callable[[Member], bool], wait_s: float = 0.0) -> Iterator[None]:
        """Hold the locks of wanted members, except where a keeper keeps the lock for longer than ``wait_s``."""
        until = time.monotonic() + wait_s
        self._refusals.clear()
        try:
            for member in self._members:
                while is_wanted(member) and member not in self.present:
                    if member.lock.acquire(timeout=0.05):
                        self.present.append(member)
                    elif time.monotonic() > until:
                        break
            for member in [member for member in self.present if not is_wanted(member)]:  # lost by the keeper meanwhile
                self._release(member)
            yield
        finally:
            while self.present:
                self.present.pop().lock.release()

    def each(self, step: Callable[[WeightSender], object], *, daemon: bool = True) -> list[WeightSender]:
        """See ``Receivers.each``."""
        return [member.sender for member in self.each_member(lambda member: step(member.sender), daemon=daemon)]

    def each_member(
        self, step: Callable[[Member], object], among: Collection[Member] | None = None, *, daemon: bool = True
    ) -> list[Member]:
        """Run a step for all present members at once; return the members that have done the step.

        The remaining members leave: they are late, hang, have gone, or refuse the step (``raise_refusals``).
        """
        members = [member for member in self.present if among is None or member in among]
        steps = {member: in_thread(partial(step, member), daemon) for member in members}
        await_most(steps.values(), max((member.leniency for member in steps), default=1))
        for member, running in steps.items():
            is_late = not running.done()
            error = None if is_late else running.exception()
            if error is not None and not isinstance(error, WeightSyncError):
                raise error
            if is_late or isinstance(error, HangError | GoneError):
                self.present.remove(member)
                member.leave_update(error, must_end=self._shares_gpu or bool(self.resting) or not daemon)
            elif error is not None:
                self._refusals.append(partial(member.await_death, error, time.monotonic(), member.restarts))
                self._release(member)  # its keeper need not wait for the end of the update
        if not self.present:
            self.raise_refusals()
        return [member for member in steps if member in self.present]

    def raise_refusals(self) -> None:
        """Raise the first refusal of a server that lives. A dying server has gone by now, or soon."""
        while self._refusals:
            self._refusals.pop(0)()

    def _release(self, member: Member) -> None:
        self.present.remove(member)
        member.lock.release()
