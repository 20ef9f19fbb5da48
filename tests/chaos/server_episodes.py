"""Episodes with real SGLang servers: one that is shared and lied about, and servers of a run that are killed."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attacks
import httpx
from absent import SGLANG_PYTHON
from chaos_world import STEPS, Run
from episodes import BAD_INPUT, Arena, Happened, finish_whole
from invariants import require, require_clean, require_explained, require_whole, steps_of
from lying_proxy import BY_NUMBERS, LyingProxy

from megarl.data.tiny import write_tiny_model
from megarl.engines.sglang.server import Server
from megarl.engines.sglang.spec import ServerSpec

START_S = 300.0
LYING_STEPS = 3
"""A refused answer is asked for again only after a while."""
OWN_K3 = 1e-3
"""Both engines compute with fp32: their own k3 is about 1e-12."""
SERVERS = {"python": str(SGLANG_PYTHON), "mem_fraction": 0.1, "max_total_tokens": 8192, "start_deadline_s": START_S}


@contextmanager
def shared_server(arena: Arena) -> Iterator[Server]:
    """A server that the episodes use one after the other; each sends its own weights."""
    spec = ServerSpec(
        arena.world.model,
        SGLANG_PYTHON,
        dtype="float32",
        log_file=arena.world.root / "server.log",
        max_total_tokens=8192,
    )
    with Server(spec) as server:
        server.wait_ready(START_S)
        arena.server = server
        yield server


def _run(arena: Arena, name: str, proxy: LyingProxy, **sglang: Any) -> Run:
    table = {"urls": [proxy.url], "sync": "disk", "attempts": 6, "deadline_s": 60.0, "start_deadline_s": 60.0}
    return arena.run(name, rollout={"engine": "sglang"}, sglang={**table, **sglang}, environment={"function": None})


def wire_lies(arena: Arena, rng: random.Random, name: str) -> list[Happened]:
    """Answers that are well-formed and wrong. Each is refused and counted, or its sequence is dropped and counted."""
    lies = (rng.choice(BY_NUMBERS),)
    with LyingProxy(arena.server.url, lies, rng.choice([0.1, 0.2, 0.3, 1.0]), rng) as proxy:
        run = _run(arena, name, proxy)
        run.words = ["--run.steps", str(LYING_STEPS)]
        run.start()
        outcome = _judge_lies(run, proxy, run.until_end())
        require_clean(run)
        run.remove()
    told = Counter(entry["lie"] for entry in proxy.ledger)
    return [Happened(lie, outcome, None, times) for lie, times in told.items()]


def _judge_lies(run: Run, proxy: LyingProxy, code: int) -> str:
    """Compare what the proxy has changed with what the run says that it has refused or dropped."""
    require_explained(run)
    told = len(proxy.ledger)
    steps = steps_of(run)
    refused = sum(int(record.get("rollout/wrong_answers", 0)) for record in steps)
    dropped = sum(int(record.get("tripwires/dropped", 0)) for record in steps)
    if code != 0:
        require(code == BAD_INPUT and told, f"ended with code {code}, {told} answers were changed", run)
        return "refused until the run stopped with the cause"
    require_whole(run, LYING_STEPS)
    counts = f"{told} answers changed, {refused} refused, {dropped} dropped"
    require(refused or dropped or not told, counts, run)
    return "refused and counted" if refused else f"{dropped} of {told} sequences dropped and counted"


def foreign_weights(arena: Arena, rng: random.Random, name: str) -> list[Happened]:
    """A second client that replaces the weights of the run's server in the middle of the run."""
    other = arena.world.root / "foreign"
    if not other.exists():
        write_tiny_model(other, **arena.world.sizes, seed=99)
    with LyingProxy(arena.server.url) as proxy:
        run = _run(arena, name, proxy, checksums=True)
        run.start()
        run.until(lambda: run.step >= 2, "step 2")
        time.sleep(rng.uniform(0.0, 0.5))
        step = run.step
        body = {"model_path": str(other), "flush_cache": True}
        if rng.random() < 0.5:
            body["weight_version"] = str(step)
        answer = httpx.post(f"{arena.server.url}/update_weights_from_disk", json=body, timeout=60.0, trust_env=False)
        require(answer.json().get("success"), f"the foreign update was not taken: {answer.text[:200]}", run)
        outcome = _judge_foreign(run, run.until_end())
        require_clean(run)
        run.remove()
        return [Happened("weights replaced by another client", outcome)]


def _judge_foreign(run: Run, code: int) -> str:
    """No step has trained responses of foreign weights (k3 about 2): dropped, or the run has stopped."""
    require_explained(run)
    steps = steps_of(run)
    for record in steps:
        is_own = record["rollout/k3"] < OWN_K3 or record.get("tripwires/dropped", 0) > 0
        require(is_own, f"step {record['step']} has trained responses of foreign weights", run)
    if code != 0:
        require("weights" in run.said(), f"ended with code {code} and did not name the weights", run)
        return "stopped with the cause"
    require_whole(run)
    return "overwritten by the next update before a response"


def proxy_away(arena: Arena, rng: random.Random, name: str) -> list[Happened]:
    """Connections that are cut, and a port that nobody listens on for a while."""
    with LyingProxy(arena.server.url) as proxy:
        run = _run(arena, name, proxy)
        run.start()
        found = []
        for _ in range(2):
            wanted = run.step + 1
            if not run.until(lambda wanted=wanted: run.step >= min(wanted, STEPS - 1), f"step {wanted}"):
                break
            time.sleep(rng.uniform(0.0, 0.3))
            began, step = time.monotonic(), run.step
            proxy.away(rng.uniform(0.1, 3.0))
            run.until(lambda step=step: run.step > step or run.step == STEPS, f"a step after {step}")
            found.append(time.monotonic() - began)
        finish_whole(run)
        run.remove()
    return [Happened("proxy away for up to 3 s", "went on; lost nothing", seconds) for seconds in found]


SERVER_PROCESSES = ("scheduler", "detokenizer", "server launcher", "server's reaper", "rank")


def server_kills(arena: Arena, rng: random.Random, name: str) -> list[Happened]:
    """Signals to the processes of a run's own servers."""
    table = {**SERVERS, "servers": 2, "deadline_s": 30.0}
    run = arena.run(name, rollout={"engine": "sglang"}, sglang=table, environment={"function": None})
    run.start()
    found = []
    for _ in range(3):
        wanted = run.step + 1
        run.until(lambda wanted=wanted: run.step >= min(wanted, STEPS - 1) or run.step == STEPS, f"step {wanted}")
        time.sleep(rng.uniform(0.0, 0.5))
        step, began = run.step, time.monotonic()
        struck = attacks.signal_one(
            run, rng.choice(SERVER_PROCESSES), rng.choice(["SIGKILL", "SIGTERM", "SIGSTOP"]), rng
        )
        if struck is None:
            break
        outcome = "went on"
        while not run.until(lambda step=step: run.step > step or run.step == STEPS, f"a step after {step}"):
            if run.code == 0:
                break
            require_explained(run)
            outcome = "went on when started again"
            run.start()
        found.append(Happened(struck, outcome, time.monotonic() - began))
    finish_whole(run)
    run.remove()
    return found


SERVER_EPISODES = {
    "wire_lies": wire_lies,
    "foreign_weights": foreign_weights,
    "proxy_away": proxy_away,
    "server_kills": server_kills,
}
