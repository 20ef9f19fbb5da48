"""A proxy before an SGLang server that changes what answers mean, and keeps a ledger of it.

What it returns is well-formed, with counts that agree: only the numbers can tell.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import json
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from aiohttp import ClientError, ClientSession, ClientTimeout, web

from megarl.routes import RoutingTrace, decode, encode
from megarl.routes.answers import is_compact

Pair = tuple[dict[str, Any], dict[str, Any]]
"""Body of a request and its answer."""
Lie = Callable[[Pair, list[Pair], random.Random], "dict[str, Any] | None"]
ROUTES = "routed_experts"


def _rows(answer: dict[str, Any]) -> int:
    return int(answer["meta_info"]["prompt_tokens"]) + len(answer["output_ids"]) - 1


def _others(pair: Pair, earlier: list[Pair]) -> list[Pair]:
    """Earlier pairs with another prompt."""
    return [other for other in earlier if other[0]["input_ids"] != pair[0]["input_ids"]]


def _swap(pair: Pair, earlier: list[Pair], rng: random.Random) -> dict[str, Any] | None:
    others = _others(pair, earlier)
    return copy.deepcopy(rng.choice(others)[1]) if others else None


def _swap_under_its_id(pair: Pair, earlier: list[Pair], rng: random.Random) -> dict[str, Any] | None:
    """Another prompt's answer, with the id, the version and the prompt of this one."""
    same = [o for o in _others(pair, earlier) if len(o[0]["input_ids"]) == len(pair[0]["input_ids"])]
    if not same:
        return None
    answer, mine = copy.deepcopy(rng.choice(same)[1]), pair[1]
    for name in ("id", "weight_version", "prompt_token_ids"):
        if name in mine["meta_info"]:
            answer["meta_info"][name] = mine["meta_info"][name]
    if "prompt_token_ids" in mine:
        answer["prompt_token_ids"] = mine["prompt_token_ids"]
    for span in answer["meta_info"].get("weight_versions") or []:
        span["version"] = mine["meta_info"]["weight_version"]
    return answer


def _replay(pair: Pair, earlier: list[Pair], rng: random.Random) -> dict[str, Any] | None:
    """An earlier answer to the same prompt."""
    same = [other for other in earlier if other[0]["input_ids"] == pair[0]["input_ids"]]
    return copy.deepcopy(rng.choice(same)[1]) if same else None


def _routes_of_another(pair: Pair, earlier: list[Pair], rng: random.Random) -> dict[str, Any] | None:
    mine = pair[1]
    fitting = [
        o for o in _others(pair, earlier) if _rows(o[1]) == _rows(mine) and _routes(o[1]) not in (None, _routes(mine))
    ]
    if not fitting:
        return None
    return _with(mine, **{ROUTES: _routes(rng.choice(fitting)[1])})


def _routes(answer: dict[str, Any]) -> Any:
    return answer["meta_info"].get(ROUTES)


def _routes_late(pair: Pair, earlier: list[Pair], rng: random.Random) -> dict[str, Any] | None:
    """Each token has the experts of the one before."""
    raw = base64.b64decode(_routes(pair[1]))
    if is_compact(raw):
        trace = decode(raw)
        shifted = encode(RoutingTrace(np.roll(trace.experts, 1, axis=0), trace.num_experts))
    else:
        per_row = len(raw) // _rows(pair[1])
        shifted = raw[-per_row:] + raw[:-per_row]
    return None if shifted == raw else _with(pair[1], **{ROUTES: base64.b64encode(shifted).decode()})


def _logprobs_late(pair: Pair, earlier: list[Pair], rng: random.Random) -> dict[str, Any] | None:
    entries = pair[1]["meta_info"]["output_token_logprobs"]
    if len(entries) < 3:
        return None
    values = [entries[-1][0], *(entry[0] for entry in entries[:-1])]
    moved = [[value, *entry[1:]] for value, entry in zip(values, entries, strict=True)]
    return _with(pair[1], output_token_logprobs=moved)


def _wrong_version(pair: Pair, earlier: list[Pair], rng: random.Random) -> dict[str, Any] | None:
    meta = pair[1]["meta_info"]
    wrong = str(int(meta["weight_version"]) + rng.choice([-1, 1, 1000]))
    spans = [dict(span, version=wrong) for span in meta.get("weight_versions") or []]
    return _with(pair[1], weight_version=wrong, **({"weight_versions": spans} if spans else {}))


def _wrong_id(pair: Pair, earlier: list[Pair], rng: random.Random) -> dict[str, Any] | None:
    return _with(pair[1], id=f"{rng.getrandbits(128):032x}")


def _truncated(pair: Pair, earlier: list[Pair], rng: random.Random) -> dict[str, Any] | None:
    """The last token is missing everywhere; all counts agree."""
    answer, meta = copy.deepcopy(pair[1]), pair[1]["meta_info"]
    if len(answer["output_ids"]) < 2:
        return None
    raw = base64.b64decode(_routes(answer))
    if is_compact(raw):
        trace = decode(raw)
        raw = encode(RoutingTrace(trace.experts[:-1], trace.num_experts))
    else:
        raw = raw[: -len(raw) // _rows(answer)]
    answer["output_ids"] = answer["output_ids"][:-1]
    spans = [dict(span, end=min(span["end"], meta["completion_tokens"] - 1)) for span in meta["weight_versions"] or []]
    answer["meta_info"] |= {
        "completion_tokens": meta["completion_tokens"] - 1,
        "output_token_logprobs": meta["output_token_logprobs"][:-1],
        ROUTES: base64.b64encode(raw).decode(),
        "finish_reason": {"type": "length", "length": meta["completion_tokens"] - 1},
        "weight_versions": spans,
    }
    return answer


def _other_token(pair: Pair, earlier: list[Pair], rng: random.Random) -> dict[str, Any] | None:
    """One token is another one, also in the list of log-probabilities."""
    answer = copy.deepcopy(pair[1])
    place = rng.randrange(len(answer["output_ids"]))
    token = (answer["output_ids"][place] + 1) % 10
    answer["output_ids"][place] = token
    answer["meta_info"]["output_token_logprobs"][place][1] = token
    return answer


def _with(answer: dict[str, Any], **meta: Any) -> dict[str, Any]:
    return {**answer, "meta_info": {**answer["meta_info"], **meta}}


LIES: dict[str, Lie] = {
    "answer to another request": _swap,
    "answer to another prompt under this id": _swap_under_its_id,
    "replayed answer": _replay,
    "routes of another response": _routes_of_another,
    "routes one token late": _routes_late,
    "log-probabilities one token late": _logprobs_late,
    "wrong weight version": _wrong_version,
    "another request's id": _wrong_id,
    "last token cut, counts agree": _truncated,
    "another token": _other_token,
}
BY_NUMBERS = (
    "answer to another prompt under this id",
    "routes of another response",
    "routes one token late",
    "log-probabilities one token late",
)
"""Lies that the tripwires find in the numbers alone."""


@dataclass
class LyingProxy:
    """Stands before the server at ``upstream``; its own address is ``url``."""

    upstream: str
    lies: Sequence[str] = ()
    """One is chosen for each answer that is changed."""
    share: float = 0.0
    rng: random.Random = field(default_factory=random.Random)
    ledger: list[dict[str, Any]] = field(default_factory=list)
    earlier: list[Pair] = field(default_factory=list)
    url: str = ""

    def __enter__(self) -> LyingProxy:
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(30.0)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30.0)

    def away(self, seconds: float) -> None:
        """Close the port for so long, and every connection."""

        async def leave() -> None:
            await self._runner.cleanup()
            await asyncio.sleep(seconds)
            await self._listen()

        asyncio.run_coroutine_threadsafe(leave(), self._loop).result(seconds + 60.0)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._port = 0
        self._loop.run_until_complete(self._open())
        self._ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(self._runner.cleanup())
        self._loop.run_until_complete(self._http.close())

    async def _open(self) -> None:
        self._http = ClientSession(timeout=ClientTimeout(total=None), trust_env=False)
        await self._listen()

    async def _listen(self) -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True)
        await site.start()
        self._port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self._port}"

    async def _serve(self, request: web.Request) -> web.Response:
        data = await request.read()
        dropped = {"host", "content-length", "transfer-encoding", "connection"}
        headers = {name: value for name, value in request.headers.items() if name.lower() not in dropped}
        try:
            async with self._http.request(
                request.method, f"{self.upstream}{request.path_qs}", data=data, headers=headers
            ) as answer:
                status, body, kind = answer.status, await answer.read(), answer.content_type
        except ClientError as error:
            return web.Response(status=502, text=str(error))
        if request.path == "/generate" and status == 200 and b"input_ids" in data:
            return web.json_response(self._change(await request.json(), json.loads(body)))
        return web.Response(status=status, body=body, content_type=kind)

    def _change(self, body: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
        pair = (body, answer)
        changed, lie = None, ""
        if self.lies and "rid" in body and self.rng.random() < self.share:  # not the proofs of weights
            lie = self.rng.choice(self.lies)
            changed = LIES[lie](pair, self.earlier, self.rng)
        self.earlier = [*self.earlier[-200:], pair]
        if changed is None or changed == answer:
            return answer
        self.ledger.append({"lie": lie, "rid": body.get("rid"), "version": answer["meta_info"]["weight_version"]})
        return changed
