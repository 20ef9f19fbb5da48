"""The reward function that asks a reward model, against a real HTTP server; tests/engines has SGLang's own."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from reward_server import Fault, Handler, RewardServer, score_of, serving

from megarl.config.tables.data import RewardModelConfig
from megarl.data import reward_model
from megarl.data.judge import Judge
from megarl.data.reward_model import RewardModel, step_ends
from megarl.data.rewards import StepReward, Verdict
from megarl.errors import ConfigError, RolloutError

KEY = "sk-secret-of-the-test"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[RewardServer]:
    monkeypatch.setattr(reward_model, "BACKOFF_S", 0.01)
    with serving() as found:
        yield found


def config(server: RewardServer, **settings: Any) -> RewardModelConfig:
    return RewardModelConfig(**{"urls": [server.url], **settings})


def judge(settings: RewardModelConfig, response: str = "abc", **more: str) -> Verdict:
    async def run() -> Verdict:
        with Judge("reward_model", timeout_s=0.001, model=settings) as made:  # waiting is no time of the reward
            return await made.score(**{"prompt": "1+1=", "response": response, "answer": "2", **more})

    return asyncio.run(run())


def test_texts_share_requests_and_every_score_is_its_own(server: RewardServer) -> None:
    texts = [f"{i} " + "x" * random.Random(i).randrange(50) for i in range(100)]
    model = RewardModel(config(server, batch_size=8, concurrency=3))
    for _ in range(2):  # in two event loops
        assert asyncio.run(model.score(texts)) == [score_of(text) for text in texts]
    assert sorted(text for request in server.requests for text in request["text"]) == sorted(2 * texts)
    assert max(len(request["text"]) for request in server.requests) == 8
    assert len(server.requests) == 2 * 13
    assert server.most <= 3
    assert {request["path"] for request in server.requests} == {"/classify"}


def test_the_model_reads_the_template_in_one_pass(server: RewardServer) -> None:
    text = "<user>{prompt}<model>{response}<end>{answer}{other}"
    response = "{answer} {prompt} é"
    verdict = judge(config(server, text=text), response)
    assert server.requests[0]["text"] == ["<user>1+1=<model>{answer} {prompt} é<end>2{other}"]
    assert verdict == Verdict(score_of(server.requests[0]["text"][0]))


def close(handler: Handler, body: dict[str, Any]) -> None:
    handler.close_connection = True


def cut(handler: Handler, body: dict[str, Any]) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'[{"embedding": [0.')
    handler.close_connection = True


def status(code: int, data: bytes = b"busy") -> Fault:
    return lambda handler, body: handler.answer(code, data)


def changed(change: Callable[[list[Any]], object]) -> Fault:
    def answer(handler: Handler, body: dict[str, Any]) -> bytes:
        found = json.loads(handler.good(body))
        return json.dumps(change(found)).encode()

    return answer


PASSING: dict[str, Fault] = {
    "closed": close,
    "cut": cut,
    "500": status(500),
    "503": status(503),
    "429": status(429),
    "no json": status(200, b"\xff\xfe ok"),
    "deep json": status(200, b"[" * 100_000),
    "a number": status(200, b"0.0"),
    "null": status(200, b"null"),
    "one is missing": changed(lambda found: found[1:]),
    "one too many": changed(lambda found: [*found, found[0]]),
    "exchanged": changed(lambda found: found[::-1]),
    "without a score": changed(lambda found: [{"meta_info": each["meta_info"]} for each in found]),
    "text": changed(lambda found: [{"embedding": ["no"]} for _ in found]),
    "a number as text": changed(lambda found: [{"embedding": ["0.5"]} for _ in found]),
    "a truth value": changed(lambda found: [{"embedding": [True]} for _ in found]),
    "408": status(408),
    "too long": status(200, b" " * (5 << 20)),
    "packed": lambda handler, body: handler.answer(
        200, gzip.compress(b" " * (50 << 20), 1), **{"Content-Encoding": "gzip"}
    ),
}


@pytest.mark.parametrize("name", PASSING)
def test_a_failure_that_passes_costs_an_attempt(name: str, server: RewardServer) -> None:
    server.faults = [PASSING[name]] * 2
    texts = ["a", "bb", "ccc"]
    assert asyncio.run(RewardModel(config(server)).score(texts)) == [score_of(text) for text in texts]
    assert len(server.requests) == 3
    assert len({tuple(request["rid"]) for request in server.requests}) == 3


@pytest.mark.parametrize("name", PASSING)
def test_a_failure_that_stays_is_no_reward_and_never_a_zero(name: str, server: RewardServer) -> None:
    server.always = PASSING[name]
    if name in ("one is missing", "one too many", "exchanged"):
        with pytest.raises(RolloutError, match="reward model: http"):
            asyncio.run(RewardModel(config(server, attempts=2)).score(["a", "b"]))
        assert len(server.requests) == 2
    else:
        verdict = judge(config(server, attempts=3))
        assert verdict.reward is None
        assert verdict.error is not None
        assert server.url in verdict.error
        assert not verdict.timed_out
        assert len(server.requests) == 3


def test_a_server_that_is_gone_or_hangs_is_no_reward(server: RewardServer) -> None:
    server.release.clear()
    verdict = judge(config(server, attempts=2, timeout_s=1.0))
    assert (verdict.reward, verdict.timed_out) == (None, True)
    assert verdict.error == f"TimeoutError: reward model: {server.url} took more than 1 s"
    assert len(server.requests) == 2
    with RewardServer() as other:
        gone = other.url
    verdict = judge(config(server, urls=[gone], attempts=2))
    assert (verdict.reward, verdict.timed_out) == (None, False)
    assert verdict.error is not None
    assert gone in verdict.error
    server.release.set()
    for _ in range(4):  # whichever server is asked first
        assert judge(config(server, urls=[gone, server.url])).reward is not None


def test_a_text_that_is_refused_costs_its_own_response(server: RewardServer) -> None:
    def refuse_long(handler: Handler, body: dict[str, Any]) -> bytes | None:
        if max(map(len, body["text"])) > 5:
            return handler.answer(400, b"The input is longer than the context")
        return handler.good(body)

    server.always = refuse_long

    async def run() -> list[object]:
        model = RewardModel(config(server))
        return await asyncio.gather(*(model.score([text]) for text in ("a", "toolong", "bb")), return_exceptions=True)

    first, second, third = asyncio.run(run())
    assert (first, third) == ([score_of("a")], [score_of("bb")])
    assert isinstance(second, RolloutError)
    assert "longer than the context" in str(second)
    assert len(server.requests) == 4


@pytest.mark.parametrize("value", ["NaN", "Infinity", "null"])
def test_a_score_that_is_no_number_is_no_reward(value: str, server: RewardServer) -> None:
    server.always = status(200, f'[{{"embedding": [{value}]}}]'.encode())
    verdict = judge(config(server))
    assert verdict.reward is None
    assert verdict.error is not None
    assert len(server.requests) == 1


def test_one_of_several_scores_is_named(server: RewardServer) -> None:
    server.always = changed(lambda found: [{"embedding": [0.25, 0.75]} for _ in found])
    assert judge(config(server, label=1)).reward == 0.75
    for label in (None, 2):
        with pytest.raises(ConfigError, match=r"reward_model.label: a text has 2 scores, expected"):
            judge(config(server, label=label))


@pytest.mark.parametrize("code", [401, 403, 404])
def test_a_server_that_cannot_work_ends_the_run_and_the_key_is_in_no_text(
    code: int, server: RewardServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", KEY)
    settings = config(server, api_key_env="MY_KEY")
    server.always = lambda handler, body: handler.answer(code, f"not {handler.headers['Authorization']}".encode())
    with pytest.raises(ConfigError, match=rf"answered HTTP {code}: not Bearer \*\*\*") as refused:
        judge(settings)
    server.always = lambda handler, body: handler.answer(500, f"not {handler.headers['Authorization']}".encode())
    verdict = judge(config(server, api_key_env="MY_KEY", attempts=1))
    echo = f"{'x' * 195} {KEY}".encode()
    server.always = lambda handler, body: handler.answer(400, echo)  # where the text is cut
    cut = judge(config(server, api_key_env="MY_KEY", attempts=1))
    assert verdict.error is not None
    assert cut.error is not None
    assert KEY[:4] not in f"{refused.value}{verdict.error}{cut.error}{settings!r}{settings.model_dump()}"
    assert {request["key"] for request in server.requests} == {f"Bearer {KEY}"}
    monkeypatch.delenv("MY_KEY")
    with pytest.raises(ConfigError, match="found no variable MY_KEY"):
        RewardModel(settings)


def test_a_redirection_gets_neither_text_nor_key(server: RewardServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", KEY)
    with serving() as other:
        server.always = lambda handler, body: handler.answer(307, b"", Location=f"{other.url}/classify")
        verdict = judge(config(server, api_key_env="MY_KEY", attempts=2))
        assert verdict.reward is None
        assert f"redirects to '{other.url}/classify'" in (verdict.error or "")
        assert not other.requests


def test_a_busy_server_is_asked_again_when_it_says(server: RewardServer) -> None:
    server.faults = [lambda handler, body: handler.answer(429, b"", **{"Retry-After": "1"})]
    started = time.monotonic()
    assert judge(config(server)).reward is not None
    assert time.monotonic() - started >= 1.0


def test_a_packed_answer_is_read(server: RewardServer) -> None:
    server.always = lambda handler, body: handler.answer(
        200, gzip.compress(handler.good(body)), **{"Content-Encoding": "gzip"}
    )
    assert asyncio.run(RewardModel(config(server)).score(["a"])) == [score_of("a")]


def test_who_does_not_wait_any_more_is_not_asked_for(server: RewardServer) -> None:
    async def run() -> float:
        model = RewardModel(config(server, batch_size=1, concurrency=1))
        server.release.clear()
        first = asyncio.create_task(model.score(["first"]))
        while not server.requests:
            await asyncio.sleep(0.01)
        dropped, kept = (asyncio.create_task(model.score([text])) for text in ("dropped", "kept"))
        await asyncio.sleep(0)
        dropped.cancel()
        first.cancel()  # its request is under way and holds its place until it ends
        server.release.set()
        return (await kept)[0]

    assert asyncio.run(run()) == score_of("kept")
    assert [request["text"] for request in server.requests] == [["first"], ["kept"]]


@pytest.mark.parametrize(
    ("response", "most", "ends"),
    [
        ("one\n\ntwo\n\nthree", 9, [5, 10, 15]),
        ("one\n\ntwo\n\n", 9, [5, 10]),
        ("one\n\n\n\ntwo", 9, [7, 10]),
        ("\n\none\n\ntwo \n\n ", 9, [7, 14]),
        ("one\n\ntwo\n\nthree", 2, [5, 15]),
        ("one\n\ntwo\n\nthree", 1, [15]),
        ("one", 9, [3]),
        ("\n\n", 9, [2]),
        ("", 9, [0]),
    ],
)
def test_where_steps_end(response: str, most: int, ends: list[int]) -> None:
    assert step_ends(response, "\n\n", most) == ends


def test_a_step_is_judged_with_all_before_it(server: RewardServer) -> None:
    settings = config(server, step="\n\n", text="{prompt}|{response}|")
    texts = ["1+1=|one\n\n|", "1+1=|one\n\ntwo|"]
    scores = [score_of(text) for text in texts]
    assert judge(settings, "one\n\ntwo") == Verdict(scores[1], (StepReward(5, scores[0]), StepReward(8, scores[1])))
    assert server.requests[0]["text"] == texts
    assert judge(settings, "") == Verdict(score_of("1+1=||"))  # no character, so no step
    server.always = status(500)
    assert judge(config(server, step="\n\n", attempts=1), "one\n\ntwo").reward is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"urls": ["http://host:1/"]}, "without a slash"),
        ({"urls": ["ftp://host"]}, "expected http"),
        ({"urls": ["http://host?key=a"]}, "question mark"),
        ({"urls": ["http://me:secret@host"]}, "found host, expected"),
        ({"text": "{prompt}"}, "expected {response}"),
        ({"step": ""}, "at least 1 character"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RewardModelConfig(**settings)
