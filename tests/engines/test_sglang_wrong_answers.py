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

from megarl.config.tables.rollout import SGLangConfig
from megarl.core.types import SampleRequest
from megarl.engines.protocol import SamplingParams
from megarl.engines.sglang import client as sglang_client
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
REQUESTS = [SampleRequest(np.arange(2, 14, dtype=np.int32), group, 0, 0) for group in range(6)]
Answer = dict[str, Any]
Lie = Callable[[Answer], Any]


def rows_of(number: int) -> np.ndarray:
    return np.random.default_rng(0).random((number, LAYERS, EXPERTS)).argsort(2)[..., :TOPK]


def encode(rows: np.ndarray) -> str:
    return base64.b64encode(rows.astype("<i4").tobytes()).decode()


def answer_to(body: Answer, tokens: tuple[int, ...] = (5, 9, END)) -> Answer:
    """What an honest server says."""
    prompt = body["input_ids"]
    rows = rows_of(len(prompt) + len(tokens) - 1)
    meta = {
        "id": body["rid"],
        "finish_reason": {"type": "stop", "matched": END},
        "prompt_tokens": len(prompt),
        "completion_tokens": len(tokens),
        "weight_version": str(VERSION),
        "output_token_logprobs": [[-1.0, token, None] for token in tokens],
        "routed_experts": encode(rows),
    }
    return {"text": "x", "output_ids": list(tokens), "prompt_token_ids": prompt, "meta_info": meta}


def of_meta(**changes: Any) -> Lie:
    return lambda body: (found := answer_to(body)) | {"meta_info": found["meta_info"] | changes}


def of_routes(change: Callable[[np.ndarray], np.ndarray]) -> Lie:
    return of_meta(routed_experts=encode(change(rows_of(len(REQUESTS[0].prompt_tokens) + 2))))


LIES: dict[str, Lie] = {
    "token beyond the vocabulary": lambda body: answer_to(body, (VOCABULARY, 9, END)),
    "end token cut off": lambda body: answer_to(body, (5, 9)),
    "version of no update": of_meta(weight_version=str(VERSION + 1)),
    "another id": of_meta(id="0" * 32),
    "another prompt": lambda body: answer_to(body) | {"prompt_token_ids": [1, 2]},
    "one row": of_routes(lambda rows: np.broadcast_to(rows[:1], rows.shape)),
    "a list": lambda body: [answer_to(body) | {"meta_info": {}}],
}
"""One of each kind: test_sglang_wire.py has all that an answer may have wrong."""


class Liar(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, lie: Lie, every: int = 2) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.lie, self.every, self.asked, self.lock = lie, every, 0, threading.Lock()


class Handler(BaseHTTPRequestHandler):
    server: Liar

    def do_GET(self) -> None:
        self.write({"weight_version": str(VERSION)})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.asked += 1
            lies = self.server.asked % self.server.every == 0
        self.write(self.server.lie(body) if lies else answer_to(body))

    def write(self, content: Any) -> None:
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None: ...


@contextmanager
def engine_before(server: Liar, told: list[str], **settings: Any) -> Iterator[SGLangEngine]:
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    url, own = f"http://127.0.0.1:{server.server_address[1]}", SGLangConfig(**settings)
    engine = SGLangEngine([url], CONFIG, fleet=None, settings=own, tell=told.append)
    engine.weight_version, engine._complete = VERSION, True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sglang_client, "BACKOFF_S", 0.001)
        yield engine
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("name", LIES)
def test_no_lie_is_taken(name: str) -> None:
    with engine_before(Liar(LIES[name]), told := [], attempts=20) as engine:
        rollouts = engine.generate(REQUESTS, PARAMS)
        assert [rollout.response_tokens.tolist() for rollout in rollouts] == [[5, 9, END]] * 6
        assert {rollout.finish_reason for rollout in rollouts} == {"stop"}
        assert engine.answer_counts["wrong_answers"] >= 3
    (line,) = told
    assert "wrong answers, which are asked for again, the first: http://127.0.0.1" in line
    stays = engine_before(Liar(LIES[name], every=1), [], attempts=2)
    cause = {"token beyond the vocabulary": "token 40", "one row": "same", "a list": "read"}.get(name, "")
    told_last = rf"group \d sample 0: 2 attempts failed, the last: http://127.*{cause}"
    with stays as engine, pytest.raises(RolloutError, match=told_last):
        engine.generate(REQUESTS, PARAMS)
