"""A chat template of a stranger's neither hangs a command nor takes its memory; ordinary ones cost little."""

from __future__ import annotations

import gc
import os
import resource
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest
from families import write_family
from loading import load as load_file

from megarl.data.tokenizer import load_tokenizer
from megarl.errors import ConfigError, DataError
from megarl.files.bounded_process import BoundedProcess

HOSTILE = {
    "loops": ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "1 s of processor"),
    "a power, folded when it is compiled": ("{{ 9 ** (9 ** 9) }}", "1 s of processor"),
    "a text that doubles": (
        "{% set n = namespace(t='xx') %}{% for i in range(40) %}{% set n.t = n.t + n.t %}{% endfor %}{{ n.t }}",
        "1024 MiB of memory",
    ),
    "a long text for each prompt": ("{{ 'x' * 10 ** 7 }}", "writes 10000000 characters"),
    "recursion": ("{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}", "RecursionError"),
}


@pytest.fixture(autouse=True)
def one_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.files.bounded_process.CPU_S", 1)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_one_line(name: str, tmp_path: Path, write_jsonl: Callable[..., Path]) -> None:
    template, told = HOSTILE[name]
    tokenizer = load_tokenizer(write_family(tmp_path / "model", "qwen3", chat_template=template), "model.path")
    path = write_jsonl({"prompt": "1+1", "answer": "2"})
    load = partial(load_file, path, tokenizer)
    before = resource.getrusage(resource.RUSAGE_SELF)
    with pytest.raises(DataError) as caught:
        load(chat_template=True, max_prompt_tokens=50)
    assert told in str(caught.value)
    assert "train.jsonl:1: the chat template refuses" in str(caught.value)
    assert "\n" not in str(caught.value)
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert after.ru_maxrss - before.ru_maxrss < 200 << 10  # KiB, of this process
    if "folded" in name:  # and when its variables are looked for
        with pytest.raises(ConfigError, match=r"data\.chat_template_args: the chat template cannot be read .*1 s of"):
            load(chat_template=True, max_prompt_tokens=50, chat_template_args={"a": 1})


def spin() -> None:
    while True:
        pass


def test_one_process_serves_all_calls_and_is_started_again_after_a_limit() -> None:
    calls = BoundedProcess(pid=os.getpid, spin=spin, ended=lambda: os.kill(os.getpid(), signal.SIGSEGV))
    number = calls.call("pid")
    assert number == calls.call("pid") != os.getpid()
    with pytest.raises(DataError, match="exit code -11; its process has ended"):
        calls.call("ended")
    again = calls.call("pid")
    assert again not in (number, os.getpid())
    del calls
    gc.collect()
    assert not psutil.pid_exists(again)


def test_the_process_ends_with_its_parent_and_holds_none_of_its_files(tmp_path: Path) -> None:
    lock = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    calls = BoundedProcess(files=lambda: len(os.listdir("/proc/self/fd")), pid=os.getpid)
    assert calls.call("files") <= 5  # three streams, the pipe and the folder that is listed
    os.close(lock)
    calls._connection.close()
    calls._process.join()
    assert calls._process.exitcode == 0


def test_an_interrupted_call_leaves_no_answer_for_the_next() -> None:
    def interrupt(number: int) -> int:
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(0.2)
        return number

    calls = BoundedProcess(interrupt=interrupt, double=lambda number: 2 * number)
    with pytest.raises(KeyboardInterrupt):
        calls.call("interrupt", 1)
    assert calls.call("double", 4) == 8
