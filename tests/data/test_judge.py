from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from megarl.data.judge import Judge
from megarl.data.rewards import StepReward, Verdict
from megarl.errors import ConfigError

OWN = """
import asyncio, os, re, signal, subprocess, sys, time
from megarl.data.rewards import StepReward, Steps, instantaneous, wrong_if_stopped
from megarl.errors import ConfigError

class Odd(Exception):  # cannot be unpickled elsewhere
    def __init__(self, a, b):
        super().__init__(a)

def forever():
    while True:
        pass

def begin():
    open(os.path.join(os.path.dirname(__file__), "started"), "w").close()

def slow(seconds):
    begin()
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
    return 1.0

def crowd(answer):
    child = subprocess.Popen(["sleep", "600"])
    with open(answer, "a") as file:
        file.write(f"{os.getpid()} {child.pid} ")

DOES = {
    "nan": lambda a: float("nan"),
    "raise": lambda a: 1 / 0,
    "odd": lambda a: (_ for _ in ()).throw(Odd(1, 2)),
    "leave": lambda a: sys.exit(2),
    "exit": lambda a: os._exit(3),
    "segv": lambda a: os.kill(os.getpid(), signal.SIGSEGV),
    "loop": lambda a: begin() or forever(),
    "slow": lambda a: slow(0.5),
    "locked": lambda a: re.match("(a+)+$", "a" * 60 + "b"),  # holds the interpreter's lock
    "crowd": lambda a: crowd(a) or forever(),
    "crowd_exit": lambda a: crowd(a) or os._exit(3),
    "late": lambda a: (_ for _ in ()).throw(TimeoutError("gave up")),
    "pid": lambda a: os.getpid(),
    "refuse": lambda a: (_ for _ in ()).throw(ConfigError("not here")),
    "heavy": lambda a: len({"torch", "megatron", "transformers", "megarl.cli", "own_main"} & set(sys.modules)),
    "launcher": lambda a: sum(name in os.environ for name in ("RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID")),
    "greedy": lambda a: bytearray(5 << 30),
    "steps": lambda a: Steps(1, [StepReward(2, 0.5), StepReward(5, -1)]),
    "several": lambda a: {"long": 2.0, "right": 1.0},
}

def own(*, prompt, response, answer):
    return DOES[response](answer) if response in DOES else float(response)

@wrong_if_stopped(lambda answer: forever() if answer == "endless" else int(answer))
def checked(*, prompt, response, answer):
    return own(prompt=prompt, response=response, answer=answer)

@instantaneous
def at_once(*, prompt, response, answer):
    return own(prompt=prompt, response=response, answer=answer)

async def over_http(*, prompt, response, answer):
    if response == "loop":
        await asyncio.sleep(600)
    if response == "inner":
        task = asyncio.ensure_future(asyncio.sleep(600))
        asyncio.get_running_loop().call_soon(task.cancel)
        await task
    return own(prompt=prompt, response=response, answer=answer)

class Served:
    async def __call__(self, *, prompt, response, answer):
        return await over_http(prompt=prompt, response=response, answer=answer)

served = Served()
"""


@pytest.fixture(autouse=True)
def own_judges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "own_judges.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("own_judges", None)
    others.update(psutil.Process().children(recursive=True))
    yield
    assert not workers(), "a judge left processes"
    others.clear()


others: set[psutil.Process] = set()
"""What earlier tests have started and the session keeps, such as the ranks of a world."""


def workers(of: int | None = None) -> list[psutil.Process]:
    """Processes below this one since the test began, but for multiprocessing's tracker of semaphores and the zygote."""
    below = set(psutil.Process(of).children(recursive=True)) - others
    alive = [p for p in below if p.status() != psutil.STATUS_ZOMBIE]
    return [p for p in alive if not any(name in " ".join(p.cmdline()) for name in ("resource_tracker", "zygote.py"))]


async def judged(judge: Judge, response: str, answer: str = "") -> Verdict:
    return await judge.score(prompt="", response=response, answer=answer)


def one(judge: Judge, response: str, answer: str = "") -> Verdict:
    return asyncio.run(judged(judge, response, answer))


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@pytest.mark.parametrize("function", ["own", "at_once", "over_http", "served"])
def test_a_reward_that_fails_costs_its_response_alone(function: str) -> None:
    expected = {
        "0.25": None,
        "nan": "expected a finite number",
        "raise": "ZeroDivisionError: division by zero",
        "odd": "Odd: 1",
        "late": "TimeoutError: gave up",
        "1": None,
    }

    async def all_at_once(judge: Judge) -> list[Verdict]:
        return await asyncio.gather(*(judged(judge, response) for response in expected))

    with Judge(f"own_judges:{function}", workers=2) as judge:
        verdicts = dict(zip(expected, asyncio.run(all_at_once(judge)), strict=True))
        with pytest.raises(ConfigError, match="not here"):
            one(judge, "refuse")
        assert one(judge, "0.5") == Verdict(0.5)
    for response, error in expected.items():
        if error is None:
            assert verdicts[response] == Verdict(float(response))
        else:
            assert verdicts[response].reward is None
            assert error in (verdicts[response].error or "")
            assert "\n" not in (verdicts[response].error or "")
            assert re.search(r"own_judges\.py:\d+\)$", verdicts[response].error or "")
            assert verdicts[response].may_pass == (response == "late")
    assert [r for r, v in verdicts.items() if v.timed_out] == ["late"]


@pytest.mark.parametrize("function", ["own", "checked", "at_once", "served"])
def test_several_rewards_by_name(function: str) -> None:
    with Judge(f"own_judges:{function}", weights={"right": 1.0, "long": -0.25}) as judge:
        assert one(judge, "several") == Verdict(0.5, components=(1.0, 2.0))
        assert "expected rewards by name: ['right', 'long']" in (one(judge, "0.5").error or "")
        if function == "checked":  # a response that was stopped has none of them
            assert one(judge, "late", "7") == Verdict(0.0, timed_out=True)
    with Judge(f"own_judges:{function}") as judge:
        assert "expected a number; for several rewards by name, set" in (one(judge, "several").error or "")


def test_workers_start_with_the_first_call_that_needs_one() -> None:
    with Judge("exact_match") as judge:
        assert one(judge, " 7").reward == 0
        assert one(judge, " 7", "7").reward == 1
        assert not workers()
    with Judge("own_judges:own", workers=3, max_characters=1) as judge:
        assert not workers()
        assert one(judge, "10.5") == Verdict(10.5)  # a function of your own gets all of a long response
        assert len(workers()) == 1
        assert one(judge, "pid").reward == workers()[0].pid
    with Judge("math_strict", workers=1, max_characters=1000, timeout_s=600.0) as judge:
        assert one(judge, "$" * 200_000 + r" so it is \boxed{5}", "5") == Verdict(1.0)


@pytest.mark.parametrize(
    ("response", "told"),
    [("exit", "exit status 3"), ("segv", "killed by SIGSEGV"), ("leave", "SystemExit: 2")],
)
def test_a_worker_that_dies_costs_its_call_alone(response: str, told: str) -> None:
    responses = ["1", response, "2", "3", response, "4"]

    async def all_at_once(judge: Judge) -> list[Verdict]:
        return await asyncio.gather(*(judged(judge, r) for r in responses))

    with Judge("own_judges:own", workers=2) as judge:
        for verdict, asked in zip(asyncio.run(all_at_once(judge)), responses, strict=True):
            if asked == response:
                assert verdict.reward is None
                assert told in (verdict.error or "")
            else:
                assert verdict == Verdict(float(asked))


def test_a_worker_that_dies_between_calls_costs_nothing() -> None:
    with Judge("own_judges:own") as judge:
        for noticed_s in (0.0, 0.4):  # also when the pool has noticed it in the meantime
            os.kill(int(one(judge, "pid").reward or 0), signal.SIGKILL)
            time.sleep(noticed_s)
            assert one(judge, "1") == Verdict(1.0)


@pytest.mark.parametrize("function", ["own", "over_http"])
def test_a_call_that_takes_too_long_is_killed(function: str, tmp_path: Path) -> None:
    started = tmp_path / "started"
    late = Verdict(None, error="the reward function took more than 3 s", may_pass=True, timed_out=True)

    async def both(judge: Judge) -> list[Verdict]:
        return await asyncio.gather(judged(judge, "loop"), judged(judge, "1"))

    with Judge(f"own_judges:{function}", timeout_s=3.0) as judge:
        first = one(judge, "pid").reward
        assert asyncio.run(both(judge)) == [late, Verdict(1.0)]
        if function == "over_http":
            assert "CancelledError" in (one(judge, "inner").error or "")
            assert not workers()
            return
        assert one(judge, "pid").reward != first
        assert len(workers()) == 1
        assert one(judge, "crowd", str(started)).timed_out  # with the processes that it has started
        assert "exit status 3" in (one(judge, "crowd_exit", str(started)).error or "")
        pids = [int(pid) for pid in started.read_text().split()]
        assert len(pids) == 4
        until(lambda: not any(alive(pid) for pid in pids), "a process is left")


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("function", ["own", "over_http"])
def test_cancelling_stops_the_call(function: str, tmp_path: Path) -> None:
    started = tmp_path / "started"

    async def cancelled(judge: Judge) -> None:
        calls = [asyncio.ensure_future(judged(judge, "crowd", str(started)))] if function == "own" else []
        calls += [asyncio.ensure_future(judged(judge, "loop")) for _ in range(50)]
        await asyncio.sleep(0)
        while function == "own" and not started.exists():
            await asyncio.sleep(0.01)
        for call in calls:
            call.cancel()
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)
        assert await judged(judge, "2") == Verdict(2.0)

    with Judge(f"own_judges:{function}", timeout_s=60) as judge:
        asyncio.run(cancelled(judge))
        assert len(workers()) == (function == "own")
    if function == "own":
        until(lambda: not any(alive(int(pid)) for pid in started.read_text().split()), "a process is left")


def test_closing_ends_calls_under_way(tmp_path: Path) -> None:
    async def closed(judge: Judge) -> None:
        call = asyncio.ensure_future(judged(judge, "loop"))
        queued = asyncio.ensure_future(judged(judge, "1"))
        while not (tmp_path / "started").exists():
            await asyncio.sleep(0.01)
        judge.close()
        assert not workers()
        for awaited in (call, queued):
            with pytest.raises(RuntimeError, match="closed"):
                await awaited

    judge = Judge("own_judges:own")
    asyncio.run(closed(judge))
    judge.close()
    with pytest.raises(RuntimeError, match="closed"):
        one(judge, "1")


def test_a_response_that_costs_too_much_is_wrong_if_the_answer_can_be_read() -> None:
    wrong = Verdict(0.0, timed_out=True)
    with Judge("own_judges:checked", timeout_s=3.0) as judge:
        assert one(judge, "steps", "7") == Verdict(1.0, (StepReward(2, 0.5), StepReward(5, -1.0)))
        for response in ("loop", "locked", "late", "greedy", "segv"):
            assert one(judge, response, "7") == wrong, response
            assert "ValueError" in (one(judge, response, "seven").error or ""), response
        assert one(judge, "late", "endless").reward is None
        # What does not depend on the response alone is no answer, and neither is what comes from outside.
        for response in ("raise", "exit", "nan"):
            assert one(judge, response, "7").reward is None, response
        assert one(judge, "0.5", "7") == Verdict(0.5)


@pytest.mark.parametrize(("response", "reward"), [("slow", 1.0), ("loop", 0.0)])
def test_the_load_of_the_machine_changes_no_verdict(response: str, reward: float, tmp_path: Path) -> None:
    """The worker does not run for longer than its limit, in the middle of a call: only its CPU time counts."""

    async def stopped_for_a_while(judge: Judge) -> Verdict:
        call = asyncio.ensure_future(judged(judge, response, "7"))
        while not (tmp_path / "started").exists():
            await asyncio.sleep(0.01)
        worker = workers()[0]
        worker.suspend()
        await asyncio.sleep(2.5)
        assert not call.done()
        worker.resume()
        return await call

    with Judge("own_judges:checked", timeout_s=1.0) as judge:
        assert asyncio.run(stopped_for_a_while(judge)) == Verdict(reward, timed_out=not reward)


def test_what_cannot_be_used_is_refused_at_once() -> None:
    for name, told in (("exakt_match", "expected exact_match"), ("__main__:reward", "__main__")):
        with pytest.raises(ConfigError, match=told):
            Judge(name)


MAIN = """
import asyncio, os, signal, sys
print("the main module runs", flush=True)
from megarl.data.judge import Judge
judge = Judge("own_judges:own", workers=2, timeout_s=600)

def ask(response, answer=""):
    return asyncio.run(judge.score(prompt="", response=response, answer=answer)).reward
"""


def run_main(tmp_path: Path, code: str, *, as_module: bool, **options: object) -> subprocess.Popen[str]:
    (tmp_path / "own_main.py").write_text(MAIN + textwrap.dedent(code))
    arguments = ["-m", "own_main"] if as_module else [str(tmp_path / "own_main.py")]
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": path, "RANK": "0", "WORLD_SIZE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("as_module", [True, False])
def test_the_main_module_does_not_run_again(tmp_path: Path, as_module: bool) -> None:
    """Neither a script without a guard nor ``python -m`` (what a launcher runs) is imported by the workers."""
    code = """
    print(ask("heavy"), ask("launcher"), ask("exit"), ask("0.5"))
    1 / 0  # ends without closing
    """
    process = run_main(tmp_path, code, as_module=as_module)
    out, err = process.communicate(timeout=600)
    assert out.splitlines() == ["the main module runs", "0.0 0.0 None 0.5"], err
    assert process.returncode == 1
    assert err.strip().endswith("ZeroDivisionError: division by zero")


@pytest.mark.parametrize("response", ["locked", "crowd", "1"])
def test_workers_die_with_the_trainer(tmp_path: Path, response: str) -> None:
    code = f"""
    print(int(ask("pid")), flush=True)
    ask({response!r}, {str(tmp_path / "started")!r})
    signal.pause()
    """
    process = run_main(tmp_path, code, as_module=False)
    process.stdout.readline()
    worker = int(process.stdout.readline())
    if response == "crowd":
        until(lambda: (tmp_path / "started").exists() and len((tmp_path / "started").read_text().split()) == 2, "call")
    else:
        time.sleep(0.5)
    left = [worker, *(p.pid for p in workers(process.pid))]
    assert all(alive(pid) for pid in left)
    process.kill()
    process.communicate(timeout=600)
    until(lambda: not any(alive(pid) for pid in left), "a worker outlived the trainer")
