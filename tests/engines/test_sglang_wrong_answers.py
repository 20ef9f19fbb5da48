"""An engine before servers that lie about one answer in two: nothing of it is taken, all of it is counted."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

from megarl.core.types import Rollout, SampleRequest
from megarl.engines.protocol import SamplingParams
from megarl.engines.sglang import client as sglang_client
from megarl.engines.sglang.client import ClientSettings
from megarl.engines.sglang.engine import SGLangEngine
from megarl.errors import RolloutError

LAYERS, EXPERTS, TOPK, VOCABULARY, END, LIMIT, VERSION = 4, 16, 2, 40, 39, 6, 7
CONFIG = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": LAYERS,
    "num_experts": EXPERTS,
    "num_experts_per_tok": TOPK,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "eos_token_id": END,
}
PARAMS = SamplingParams(max_response_tokens=LIMIT, stop_token_ids=(END,))
Answer = dict[str, Any]
Lie = Callable[[Answer], Answer]


def rows_of(number: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random((number, LAYERS, EXPERTS)).argsort(2)[..., :TOPK].astype("<i4")


def of_meta(**changes: Any) -> Lie:
    return lambda answer: answer | {"meta_info": answer["meta_info"] | changes}


def of_tokens(change: Callable[[list[int]], list[Any]], kind: str | None = None) -> Lie:
    """Other tokens, with counts, log-probabilities and routes that fit them."""

    def lie(answer: Answer) -> Answer:
        tokens, meta = change(answer["output_ids"]), answer["meta_info"]
        reason = meta["finish_reason"] if kind is None else {"type": kind, "matched": END if kind == "stop" else None}
        number = meta["prompt_tokens"] + len(tokens) - 1
        changed = {
            "completion_tokens": len(tokens),
            "output_token_logprobs": [[-1.0, token, None] for token in tokens],
            "routed_experts": encode(rows_of(number)),
            "finish_reason": reason,
        }
        return answer | {"output_ids": tokens, "meta_info": meta | changed}

    return lie


def encode(rows: np.ndarray) -> str:
    return base64.b64encode(rows.tobytes()).decode()


def of_routes(change: Callable[[np.ndarray], np.ndarray]) -> Lie:
    def lie(answer: Answer) -> Answer:
        rows = change(rows_of(answer["meta_info"]["prompt_tokens"] + len(answer["output_ids"]) - 1))
        return of_meta(routed_experts=encode(np.broadcast_to(rows, (len(rows), LAYERS, TOPK))))(answer)

    return lie


LIES: dict[str, Lie] = {
    "token beyond the vocabulary": of_tokens(lambda tokens: [VOCABULARY, *tokens[1:]]),
    "negative token": of_tokens(lambda tokens: [-1, *tokens[1:]]),
    "token 3.7": of_tokens(lambda tokens: [3.7, *tokens[1:]]),
    "token true": of_tokens(lambda tokens: [True, *tokens[1:]]),
    "token as text": of_tokens(lambda tokens: [str(tokens[0]), *tokens[1:]]),
    "four times as long": of_tokens(lambda tokens: (tokens[:-1] * 30)[: 4 * LIMIT]),
    "stop for a cut response": of_tokens(lambda tokens: (tokens[:-1] * 9)[:LIMIT], "stop"),
    "length for a stopped one": of_tokens(lambda tokens: tokens, "length"),
    "end token cut off": of_tokens(lambda tokens: tokens[:-1], "stop"),
    "end token cut off, length": of_tokens(lambda tokens: tokens[:-1], "length"),
    "goes on behind its end": of_tokens(lambda tokens: [END, *tokens], "stop"),
    "no version": of_meta(weight_version=None),
    "version of no update": of_meta(weight_version=str(VERSION + 1)),
    "version before": of_meta(weight_version=str(VERSION - 1)),
    "log-probability -50": lambda answer: of_meta(
        output_token_logprobs=[[-50.0, token, None] for token in answer["output_ids"]]
    )(answer),
    "log-probability -1e30": lambda answer: of_meta(
        output_token_logprobs=[[-1e30, token, None] for token in answer["output_ids"]]
    )(answer),
    "another id": of_meta(id="0" * 32),
    "another prompt": lambda answer: answer | {"prompt_token_ids": [1, 2]},
    "padding": of_routes(lambda rows: np.broadcast_to(np.arange(TOPK), rows.shape)),
    "one row": of_routes(lambda rows: np.broadcast_to(rows[:1], rows.shape)),
    "no row": of_routes(lambda rows: np.full_like(rows, -1)),
    "zeros": of_routes(np.zeros_like),
    "a list": lambda answer: [answer],  # type: ignore[dict-item,return-value]
}


class Liar(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, lie: Lie | None, every: int = 2) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.lie, self.every, self.asked, self.lock = lie, every, 0, threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Liar

    def do_GET(self) -> None:
        self.write({"weight_version": str(VERSION)})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.asked += 1
            lies = self.server.lie is not None and self.server.asked % self.server.every == 0
        answer = honest(body)
        self.write(self.server.lie(answer) if lies and self.server.lie else answer)

    def write(self, content: Any) -> None:
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None: ...


def honest(body: Answer) -> Answer:
    prompt, tokens = body["input_ids"], [5, 9, END]
    meta = {
        "id": body["rid"],
        "finish_reason": {"type": "stop", "matched": END},
        "prompt_tokens": len(prompt),
        "completion_tokens": len(tokens),
        "weight_version": str(VERSION),
        "output_token_logprobs": [[-1.0, token, None] for token in tokens],
        "routed_experts": encode(rows_of(len(prompt) + len(tokens) - 1)),
    }
    return {"text": "x", "output_ids": tokens, "prompt_token_ids": prompt, "meta_info": meta}


@contextmanager
def engine_before(
    *servers: Liar, told: list[str], config: dict[str, Any] = CONFIG, **settings: Any
) -> Iterator[SGLangEngine]:
    for server in servers:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    engine = SGLangEngine(
        [server.url for server in servers], config, fleet=None, settings=ClientSettings(**settings), tell=told.append
    )
    engine._version, engine._complete = VERSION, True
    try:
        yield engine
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()


REQUESTS = [SampleRequest(np.arange(2, 14, dtype=np.int32), group, 0, 0) for group in range(6)]


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_client, "BACKOFF_S", 0.001)


def check(rollouts: list[Rollout]) -> None:
    assert [rollout.response_tokens.tolist() for rollout in rollouts] == [[5, 9, END]] * 6
    assert {rollout.finish_reason for rollout in rollouts} == {"stop"}


@pytest.mark.parametrize("name", LIES)
def test_no_lie_is_taken(name: str) -> None:
    told: list[str] = []
    with engine_before(Liar(LIES[name]), told=told, attempts=20) as engine:
        check(engine.generate(REQUESTS, PARAMS))
        assert engine.answer_counts["wrong_answers"] >= 3
    assert len(told) == 1
    assert "a wrong answer, which is asked for again: http://127.0.0.1" in told[0]


@pytest.mark.parametrize("name", ["token beyond the vocabulary", "one row", "a list"])
def test_a_lie_that_stays_ends_with_its_cause(name: str) -> None:
    with (
        engine_before(Liar(LIES[name], every=1), told=[], attempts=2) as engine,
        pytest.raises(
            RolloutError, match=r"group \d sample 0: 2 attempts failed, the last: http://127.*(token 40|same|read)"
        ),
    ):
        engine.generate(REQUESTS, PARAMS)


def test_what_an_honest_server_may_answer() -> None:
    told: list[str] = []
    with engine_before(
        Liar(of_routes(lambda rows: np.where(np.arange(len(rows))[:, None, None] < 4, -1, rows)), 1), told=told
    ) as engine:
        rollouts = engine.generate(REQUESTS, PARAMS)
        assert not engine.answer_counts
        masks = [rollout.routed_mask for rollout in rollouts]
        assert np.array_equal(masks, [[False] * 4 + [True] * 10 + [False]] * 6)  # type: ignore[arg-type]
    tight = CONFIG | {"max_position_embeddings": len(REQUESTS[0].prompt_tokens) + 5}  # a server stops before the last
    with engine_before(Liar(of_tokens(lambda tokens: [5, 9], "length"), 1), told=told, config=tight) as engine:
        rollouts = engine.generate(REQUESTS, PARAMS)
        assert [rollout.finish_reason for rollout in rollouts] == ["length"] * 6
    assert told == []


def test_an_answer_beyond_its_length_is_refused_before_it_is_read() -> None:
    told: list[str] = []
    with engine_before(Liar(lambda answer: answer | {"text": "x" * (2 << 20)}), told=told) as engine:
        check(engine.generate(REQUESTS, PARAMS))
    assert "/generate sends more than 10" in told[0]
