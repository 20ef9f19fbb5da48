"""Who is asked for what: groups stay together, nobody has more than allowed, and idle servers help busy ones."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from generate_server import GenerateServer, serving

from megarl.config.tables.rollout import SGLangConfig
from megarl.core.types import Rollout, SampleRequest
from megarl.engines.protocol import sample_each
from megarl.engines.sglang import client as client_module
from megarl.engines.sglang.client import Call, SGLangClient
from megarl.errors import RequestError, RolloutError, StopError
from megarl.files.foreign_json import retry_after

Fault = Callable[[], web.Response]


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "BACKOFF_S", 0.01)


class Counting(GenerateServer):
    """Answers after a while; knows who has asked for what, and how many at a time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.groups: Counter[int] = Counter()
        self.faults: list[Fault] = []
        """Of the next requests, one each."""
        self.always: Fault | None = None
        self.now = self.most = self.awaited = 0
        """How many it answers now, the most so far, and how many it has to have seen at a time before it answers."""
        super().__init__()

    async def generate(self, body: Any) -> web.Response:
        self.now += 1
        self.most = max(self.most, self.now)
        patience = 60_000
        while self.most < self.awaited and (patience := patience - 1):
            await asyncio.sleep(0.01)
        await asyncio.sleep(self.seconds)
        self.now -= 1
        if fault := self.faults.pop(0) if self.faults else self.always:
            return fault()
        self.groups[body["group"]] += 1
        return web.json_response({"group": body["group"]})


def servers(*seconds: float) -> AbstractContextManager[tuple[Counting, ...]]:
    return serving(*map(Counting, seconds))


def requests_of(groups: int, samples: int) -> list[SampleRequest]:
    prompt = np.array([3], np.int32)
    return [SampleRequest(prompt, group, sample, 0) for group in range(groups) for sample in range(samples)]


def decode(request: SampleRequest, answer: Any, rid: str, stopped: bool) -> Rollout:
    assert answer == {"group": request.group}
    return Rollout(
        group=request.group,
        sample=request.sample,
        tokens=np.array([3, 4], np.int32),
        loss_mask=np.array([False, True]),
        rollout_logprobs=np.zeros(2, np.float32),
        routed_experts=None,
        routed_mask=None,
        weight_versions=np.zeros(2, np.int32),
        finish_reason="stop",
    )


def group_of(request: SampleRequest) -> dict[str, Any]:
    return {"group": request.group}


def ask(made: Sequence[Counting], requests: list[SampleRequest], **settings: Any) -> list[tuple[int, int]]:
    client = SGLangClient([server.url for server in made], SGLangConfig(**settings))
    finished: list[int] = []
    found = sample_each(
        lambda begin: client.converse(begin, Call(group_of, decode, finished.append)),
        requests,
    )
    assert [number for number in finished if number] == [1] * len(requests)
    return [(rollout.group, rollout.sample) for rollout in found]


def test_a_group_goes_to_one_server_while_that_has_room():
    requests = requests_of(6, 4)
    with servers(0.02, 0.02) as made:
        assert ask(made, requests, concurrency=64) == [(r.group, r.sample) for r in requests]
        assert [dict(server.groups) for server in made] == [{0: 4, 2: 4, 4: 4}, {1: 4, 3: 4, 5: 4}]


def test_no_server_has_more_than_allowed_and_an_idle_one_helps_a_slow_one():
    with servers(0.01, 2.0) as made:
        quick, slow = made
        quick.awaited = 3
        ask(made, requests_of(4, 8), concurrency=3)
        assert quick.most == slow.most == 3
        assert quick.groups[0] == quick.groups[2] == 8  # its own
        assert quick.groups.total() > 24  # and of the other's 16, which would have taken it 6 turns


def test_a_trainer_that_is_asked_to_stop_ends_the_wait_for_a_long_response():
    ticks: list[int] = []

    def asked(number: int) -> None:
        ticks.append(number)
        if len(ticks) == 2:
            raise StopError("asked to stop")

    with servers(36_000.0) as made:
        client = SGLangClient([made[0].url], SGLangConfig())
        with pytest.raises(StopError):
            sample_each(lambda begin: client.converse(begin, Call(group_of, decode, asked)), requests_of(1, 2))
    assert ticks == [0, 0]


@pytest.mark.parametrize("dead", [0, 1])
def test_a_server_that_is_gone_leaves_its_work_to_the_other(dead: int):
    with servers(0.01, 0.01) as made:
        made[dead].close()
        requests = requests_of(4, 4)
        assert ask(made, requests, start_deadline_s=600.0) == [(r.group, r.sample) for r in requests]
        assert made[1 - dead].groups.total() == 16
        made[1 - dead].close()
        with pytest.raises(RolloutError, match=r"all 2 SGLang servers are down, the last failure: http://127\.0\.0\.1"):
            ask(made, requests_of(2, 2), start_deadline_s=1.0)


def test_a_request_that_nobody_waits_for_is_dropped_and_frees_its_place():
    """Of three episodes one ends the two others: one of them under way, one waiting for its turn."""
    answered: list[int] = []
    with servers(1.5) as made:
        client = SGLangClient([made[0].url], SGLangConfig(concurrency=2))
        requests = requests_of(4, 1)

        def begin(session: Any) -> None:
            async def ask_for(request: SampleRequest) -> None:
                answered.append((await session.sample(request)).group)

            async def ends_others() -> None:
                await asyncio.sleep(0.1)
                for task in doomed:
                    task.cancel()
                await ask_for(requests[3])

            doomed = [session.start(ask_for(request)) for request in requests[:3]]
            session.start(ends_others())

        client.converse(begin, Call(group_of, decode))
    assert answered == [3]
    assert made[0].groups[2] == 0


def test_an_error_of_an_episode_or_a_request_ends_the_others_and_is_raised():
    def fails(request: SampleRequest) -> dict[str, Any]:
        raise RolloutError("the prompt is empty")

    with servers(3600.0) as made:
        client = SGLangClient([made[0].url], SGLangConfig())

        def begin(session: Any) -> None:
            async def breaks() -> None:
                await asyncio.sleep(0.05)
                raise RolloutError("the environment is broken")

            async def waits() -> None:
                await session.sample(requests_of(1, 1)[0])

            session.start(waits())
            session.start(breaks())

        with pytest.raises(RolloutError, match="the environment is broken"):
            client.converse(begin, Call(group_of, decode))
        with pytest.raises(RolloutError, match="the prompt is empty"):  # no fault of the server
            sample_each(lambda begin: client.converse(begin, Call(fails, decode)), requests_of(2, 2))
        assert made[0].groups.total() == 0


def status(code: int, body: bytes = b"out of luck", **headers: str) -> Fault:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda: web.Response(status=code, body=body, headers=names)


WRONG = {
    "deep": (status(200, b"[" * 200_000), "more than 201 levels"),
    "no JSON": (status(200, b"<html>"), "holds no JSON"),
    "too long": (status(200, b" " * (11 << 20)), "sends more than 10485760 bytes"),
    "packed": (status(200, b"abc", Content_Encoding="gzip"), "packed as 'gzip'"),
    "redirected": (status(307, Location="http://elsewhere.test/x"), "redirects to 'http://elsewhere.test/x'"),
}
REFUSED = {str(code): (status(code), f"HTTP {code}: out of luck") for code in (408, 413, 429, 500, 503)}


def ask_faulty(made: Sequence[Counting], requests: list[SampleRequest], **settings: Any) -> tuple[Any, list[str]]:
    told: list[str] = []
    client = SGLangClient([server.url for server in made], SGLangConfig(concurrency=64, **settings), tell=told.append)

    def begin_all(begin: Any) -> None:
        client.converse(begin, Call(group_of, decode, max_bytes=lambda _: 10 << 20))

    sample_each(begin_all, requests)
    return client, told


@pytest.mark.parametrize("name", [*WRONG, *REFUSED])
def test_a_fault_that_passes_is_counted_and_told_once(name: str) -> None:
    fault, message = (WRONG | REFUSED)[name]
    with servers(0.0) as made:
        made[0].faults = [fault, fault]
        client, told = ask_faulty(made, requests_of(3, 1))
        assert made[0].groups == {0: 1, 1: 1, 2: 1}
    assert client.counts["wrong_answers" if name in WRONG else "refused_requests"] == 2
    assert [message in line for line in told] == [True]


@pytest.mark.parametrize("name", ["deep", "413", "500"])
def test_a_fault_that_stays_ends_with_its_cause(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "LOSSES", 2)
    fault, message = (WRONG | REFUSED)[name]
    with servers(0.0, 0.0) as made:
        for server in made:
            server.always = fault
        error = RequestError if name == "413" else RolloutError
        with pytest.raises(error, match=f"group 0 sample 0: 2 attempts failed, the last: {made[1].url}.*{message}"):
            ask_faulty(made, requests_of(1, 1), attempts=2)


def test_a_connection_that_is_cut_every_time_is_no_endless_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is healthy between the cuts, as one that dies of a request and is started again."""
    monkeypatch.setattr(client_module, "LOSSES", 3)

    def cut() -> web.Response:
        raise asyncio.CancelledError  # ends the connection

    with servers(0.0) as made:
        made[0].always = cut
        with pytest.raises(RolloutError, match=r"lost 3 times with its connection, the last: .*Error"):
            ask_faulty(made, requests_of(1, 1))


def test_a_busy_server_is_waited_for_longer_than_one_that_fails() -> None:
    with servers(0.0) as made:
        made[0].faults = [status(429), status(503), status(408), status(429, Retry_After="1")]
        started = time.monotonic()
        client, _ = ask_faulty(made, requests_of(1, 1), attempts=1)
        assert time.monotonic() - started > 1.0
    assert client.counts["refused_requests"] == 4


def test_a_wait_that_a_server_asks_for_is_bounded() -> None:
    assert retry_after({"retry-after": "9" * 400}, 30.0) == 30.0
    assert retry_after({"retry-after": "2"}, 30.0) == 2.0
    for text in ("", "-3", "1e9", "inf", "Wed, 21 Oct 2015 07:28:00 GMT"):
        assert retry_after({"retry-after": text}, 30.0) == 0.0
