"""The reward function that asks a reward model, against a real HTTP server; tests/engines has SGLang's own."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from reward_server import Fault, Handler, RewardServer, score_of, serving

from megarl.config.tables.data import RewardModelConfig
from megarl.data import reward_model
from megarl.data.judge import Judge
from megarl.data.reward_model import RewardModel
from megarl.data.rewards import Verdict
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


def scores_of(settings: RewardModelConfig, texts: list[str]) -> list[float]:
    async def run() -> list[float]:
        return await asyncio.gather(*map(RewardModel(settings).score, texts))

    return asyncio.run(run())


def test_every_score_is_its_own_and_a_rank_has_no_more_requests_than_allowed(server: RewardServer) -> None:
    texts = [f"{i} " + "x" * random.Random(i).randrange(50) for i in range(100)]
    assert scores_of(config(server, concurrency=3), texts) == [score_of(text) for text in texts]
    assert sorted(request["text"][0] for request in server.requests) == sorted(texts)
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
    "429": status(429),
    "no json": status(200, b"\xff\xfe ok"),
    "deep json": status(200, b"[" * 100_000),
    "a number": status(200, b"0.0"),
    "one is missing": changed(lambda found: found[1:]),
    "exchanged": changed(lambda found: [{**each, "meta_info": {"id": "other"}} for each in found]),
    "a number as text": changed(lambda found: [{"embedding": ["0.5"]} for _ in found]),
    "too long": status(200, b" " * (5 << 20)),
    "packed": lambda handler, body: handler.answer(
        200, gzip.compress(b" " * (50 << 20), 1), **{"Content-Encoding": "gzip"}
    ),
}


@pytest.mark.parametrize("name", PASSING)
def test_a_failure_costs_an_attempt_and_is_never_a_zero(name: str, server: RewardServer) -> None:
    server.faults = [PASSING[name]] * 2
    assert scores_of(config(server), ["bb"]) == [score_of("bb")]
    assert len(server.requests) == 3
    assert len({tuple(request["rid"]) for request in server.requests}) == 3
    server.always = PASSING[name]
    verdict = judge(config(server, attempts=3))
    assert verdict.reward is None
    assert server.url in str(verdict.error)
    assert not verdict.timed_out
    assert len(server.requests) == 6


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
        score = RewardModel(config(server)).score
        return await asyncio.gather(*map(score, ("a", "toolong", "bb")), return_exceptions=True)

    first, second, third = asyncio.run(run())
    assert (first, third) == (score_of("a"), score_of("bb"))
    assert isinstance(second, RolloutError)
    assert "longer than the context" in str(second)
    assert len(server.requests) == 3


@pytest.mark.parametrize("value", ["NaN", "Infinity", "null"])
def test_a_score_that_is_no_number_is_no_reward(value: str, server: RewardServer) -> None:
    server.always = status(200, f'[{{"embedding": [{value}]}}]'.encode())
    verdict = judge(config(server))
    assert verdict.reward is None
    assert verdict.error is not None
    assert len(server.requests) == 1
    server.always = changed(lambda found: [{"embedding": [0.25, 0.75]} for _ in found])
    with pytest.raises(ConfigError, match="gave 2 scores for a text, expected one"):
        judge(config(server))


@pytest.mark.parametrize("code", [401, 404])
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
    with serving() as other:  # a redirection gets neither text nor key
        server.always = lambda handler, body: handler.answer(307, b"", Location=f"{other.url}/classify")
        verdict = judge(config(server, api_key_env="MY_KEY", attempts=2))
        assert f"redirects to '{other.url}/classify'" in (verdict.error or "")
        assert not other.requests
    for wrong in ({"urls": ["http://host:1/"]}, {"urls": ["http://me:secret@host"]}, {"text": "{prompt}"}):
        with pytest.raises(ValueError, match=r"without a slash|found host, expected|expected {response}"):
            config(server, **wrong)
    monkeypatch.delenv("MY_KEY")
    with pytest.raises(ConfigError, match="found no variable MY_KEY"):
        RewardModel(settings)
