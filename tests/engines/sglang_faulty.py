"""What tests of failing servers share: work in the background, a kill, and the check that nothing was lost."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from megarl.core.types import Rollout, SampleRequest
from megarl.engines.sglang.server import Server


def check_complete(requests: Sequence[SampleRequest], rollouts: Sequence[Rollout], finished: Sequence[int]) -> None:
    assert [(r.group, r.sample) for r in rollouts] == [(r.group, r.sample) for r in requests]
    assert all(
        np.array_equal(rollout.tokens[: len(request.prompt_tokens)], request.prompt_tokens)
        for request, rollout in zip(requests, rollouts, strict=True)
    )
    assert [number for number in finished if number] == [1] * len(requests)


def in_background(work: Callable[[], Any]) -> Callable[[], Any]:
    """Start ``work`` in a thread; the returned function waits for its result or raises its error."""
    result: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            result.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def wait() -> Any:
        thread.join()
        if errors:
            raise errors[0]
        return result[0]

    return wait


def kill_9(server: Server, named: str = "") -> None:
    """The server's processes with this in their command line, all by default, but not the reaper."""
    killed = [p for p in server.members() if p.pid != server.pid and named in " ".join(p.cmdline())]
    assert killed
    for process in killed:
        process.kill()
