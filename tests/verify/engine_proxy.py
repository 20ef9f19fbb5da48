"""A server before a real SGLang server: it damages answers in one way, or gives them in vLLM's form."""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import numpy as np

LAYERS, TOP_K = 4, 8
"""Of the model of test_verify_engine.py."""


class Recorded:
    """The real server's answers: the same request is asked once."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.known: dict[str, tuple[int, str]] = {}

    def ask(self, path: str, body: Any, num_updates: int = 0) -> tuple[int, Any]:
        together = (
            body and body.get("sampling_params", {}).get("ignore_eos") is False
        )  # their threads take salts in turn
        key = f"{num_updates} {path} " + json.dumps(
            {name: value for name, value in (body or {}).items() if name != "extra_key" or not together}
        )
        if key not in self.known:
            answer = httpx.request("GET" if body is None else "POST", self.url + path, json=body, timeout=600.0)
            self.known[key] = answer.status_code, answer.text
        status, text = self.known[key]
        return status, json.loads(text)


@contextmanager
def serving(answer: Callable[[str, Any], tuple[int, Any]]) -> Iterator[str]:
    """The URL of a server that answers as the function does."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            size = int(self.headers.get("content-length", 0))
            status, content = answer(self.path, json.loads(self.rfile.read(size)) if size else None)
            raw = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        do_POST = do_GET  # noqa: N815

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def rows_of(answer: Any) -> np.ndarray:
    raw = base64.b64decode(answer["meta_info"]["routed_experts"])
    return np.frombuffer(raw, "<i4").reshape(-1, LAYERS, TOP_K).copy()


def put_rows(answer: Any, rows: np.ndarray) -> None:
    answer["meta_info"]["routed_experts"] = base64.b64encode(rows.astype("<i4").tobytes()).decode()


def as_vllm(real: Recorded, moe_layers: slice = slice(None)) -> Callable[[str, Any], tuple[int, Any]]:
    """Answers of /v1/completions by vLLM's protocol, from what SGLang says to the same request."""

    def answer(path: str, body: Any) -> tuple[int, Any]:
        if path == "/version":
            return 200, {"version": "0.31.0"}
        if path != "/v1/completions":
            return 404, {"detail": "Not Found"}
        asked = {
            "input_ids": body["prompt"],
            "sampling_params": {
                "temperature": body["temperature"],
                "max_new_tokens": body["max_tokens"],
                "ignore_eos": body["ignore_eos"],
            },
            "return_logprob": True,
            "logprob_start_len": 0 if "prompt_logprobs" in body else -1,
            "return_routed_experts": True,
            "routed_experts_start_len": body["routed_experts_prompt_start"],
            "extra_key": body["cache_salt"],
        }
        _, found = real.ask("/generate", asked)
        choices = []
        for index, (one, prompt) in enumerate(zip(found, body["prompt"], strict=True)):
            file, meta = io.BytesIO(), one["meta_info"]
            np.save(file, rows_of(one)[:, moe_layers].astype(np.uint8))
            scored = [
                None if logprob is None else {str(token): {"logprob": logprob, "rank": 1, "decoded_token": ""}}
                for logprob, token, _ in meta.get("input_token_logprobs", ())
            ]
            choices.append(
                {
                    "index": index,
                    "text": one["text"],
                    "logprobs": {"token_logprobs": [entry[0] for entry in meta["output_token_logprobs"]]},
                    "finish_reason": "length",
                    "token_ids": one["output_ids"],
                    "prompt_token_ids": prompt,
                    "prompt_logprobs": scored or None,
                    "routed_experts": base64.b64encode(file.getvalue()).decode(),
                }
            )
        return 200, {"object": "text_completion", "choices": choices, "usage": {}}

    return answer
