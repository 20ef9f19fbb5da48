"""The supervision of a server: what needs no SGLang with a stand-in command, the rest against a real server."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest
from absent import SGLANG_PYTHON
from sglang_fixtures import START_DEADLINE_S

from megarl.engines.sglang import server as sglang_server
from megarl.engines.sglang.server import Server
from megarl.engines.sglang.spec import CPU_SHIM, PLUGIN, ServerSpec, command, environment, free_port, write_config
from megarl.errors import ConfigError, RolloutError

SPEC = ServerSpec("model", sys.executable, "float32", "server.log", port=30000)

# A server that leaves SIGTERM to a child that ignores it, as SGLang's children do for a while.
STUBBORN = """
import signal, subprocess, sys, time
child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(3600)"
subprocess.Popen([sys.executable, "-c", child])
time.sleep(3600)
"""


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 600.0
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.fixture
def stubborn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    """A server that is up."""
    monkeypatch.setattr(sglang_server, "command", lambda spec, config: [str(spec.python), "-c", STUBBORN])
    server = Server(dataclasses.replace(SPEC, log_file=tmp_path / "server.log"))
    server.start()
    until(lambda: "up" in server.log_tail())
    return server


def test_commands_and_environments_are_the_tried_ones(monkeypatch: pytest.MonkeyPatch):
    for name in ("RANK", "TORCHELASTIC_RUN_ID", "SGLANG_RETURN_ORIGINAL_LOGPROB"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("PYTHONPATH", "/mine")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64,expandable_segments:True")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {4, 6})
    text = " ".join(command(dataclasses.replace(SPEC, tp=2, max_total_tokens=512, extra_args=("--random-seed", "1"))))
    for expected in ("--device cpu", "--attention-backend torch_native", "--sampling-backend pytorch", "--tp-size 2"):
        assert expected in text
    assert "--enable-return-routed-experts" in text
    assert "--max-total-tokens 512 --random-seed 1" in text
    env = environment(dataclasses.replace(SPEC, tp=2))
    assert env["PYTHONPATH"] == os.pathsep.join([str(CPU_SHIM), str(PLUGIN), "/mine"])
    assert (env["SGLANG_USE_CPU_ENGINE"], env["OMP_NUM_THREADS"], env["HF_HUB_OFFLINE"]) == ("1", "1", "1")
    assert env["SGLANG_CPU_OMP_THREADS_BIND"] == "4|6"
    assert not {"RANK", "TORCHELASTIC_RUN_ID", "SGLANG_RETURN_ORIGINAL_LOGPROB"} & set(env)
    gpus = dataclasses.replace(SPEC, gpus=(2, 5), tp=2)  # no shim, and only their devices
    env = environment(gpus)
    assert (env["CUDA_VISIBLE_DEVICES"], env["PYTHONPATH"]) == ("2,5", f"{PLUGIN}:/mine")
    assert "cpu" not in command(gpus)
    assert env["PYTORCH_ALLOC_CONF"] == "max_split_size_mb:64,expandable_segments:True"
    resting = environment(dataclasses.replace(gpus, extra_args=("--enable-memory-saver",)))
    assert resting["PYTORCH_ALLOC_CONF"] == "max_split_size_mb:64"
    assert "SGLANG_DSA_FUSE_TOPK" not in env
    keyed = environment(dataclasses.replace(gpus, extra_args=("--enable-return-indexer-topk",)))
    assert keyed["SGLANG_DSA_FUSE_TOPK"] == "0"
    assert 20000 <= free_port("127.0.0.1") < 30000  # below the range of outgoing connections


def test_settings_that_cannot_work_are_refused():
    for changes, message in (
        ({"extra_args": ("--chunked-prefill-size", "-1")}, "without chunked prefill"),
        ({"extra_args": ("--api-key", "secret")}, "set api_key"),
        ({"extra_args": ("--tp-size=2",)}, "extra_args hold --tp-size: set tp"),
        ({"extra_args": ("--weight-version", "7")}, "must not name its old weights"),
        ({"extra_args": ("--config", "file.yaml")}, "it could set anything unchecked"),
    ):
        with pytest.raises(ConfigError, match=message):
            dataclasses.replace(SPEC, **changes)


def test_the_key_goes_through_a_file_that_only_the_owner_can_read():
    spec = dataclasses.replace(SPEC, api_key='se"cret: #')
    path = write_config(spec)
    try:
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.read_text() == 'api-key: "se\\"cret: #"\n'
        assert "cret" not in " ".join(command(spec, path)) + repr(spec)
    finally:
        path.unlink()


def test_stop_ends_children_that_ignore_sigterm(stubborn: Server):
    with pytest.raises(RolloutError, match=r"not ready after 1 s(.|\n)*\bup\b"):
        stubborn.wait_ready(1.0)
    members = stubborn.members()
    assert len(members) == 3  # reaper, server, child
    stubborn.stop(grace_s=0.5)
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in members)
    assert not stubborn.alive
    stubborn.stop()  # again: nothing to do


def test_a_dead_server_is_seen_at_once_and_starts_again_on_its_port(stubborn: Server):
    url, old = stubborn.url, stubborn.members()
    server = next(process for process in old if process.ppid() == stubborn._process.pid)
    server.kill()
    until(lambda: not stubborn.alive)
    with pytest.raises(RolloutError, match=r"ended with exit code 137"):
        stubborn.wait_ready(5.0)
    stubborn.start()
    assert (stubborn.alive, stubborn.url) == (True, url)
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in old)
    stubborn.kill()
    assert not stubborn.alive
    assert stubborn.members() == []


def test_kill_9_of_the_parent_takes_the_server_down(tmp_path: Path):
    script = f"""
import time
from megarl.engines.sglang import server as sglang_server
from megarl.engines.sglang.server import Server, ServerSpec
sglang_server.command = lambda spec, config: [spec.python, "-c", {STUBBORN!r}]
server = Server(ServerSpec("model", {sys.executable!r}, "float32", {str(tmp_path / "log")!r}, api_key="secret"))
server.start()
while "up" not in server.log_tail():
    time.sleep(0.05)
print(server._process.pid, server._config_file, flush=True)
time.sleep(3600)
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    leader, config_file = parent.stdout.readline().split()
    members = [process for process in psutil.process_iter() if sglang_server._is_living_member(process, int(leader))]
    assert len(members) == 3
    assert Path(config_file).exists()
    parent.kill()
    parent.wait()
    assert psutil.wait_procs(members, timeout=600.0)[1] == []
    assert not Path(config_file).exists()


def forward_passes(server: Server) -> int:
    """Those of prompts, by the server's log."""
    return Path(server.spec.log_file).read_text().count("Prefill batch")


@pytest.mark.sglang
@pytest.mark.gate
def test_the_health_check_of_a_real_server_generates_a_token(sglang_server: Server):
    httpx.post(f"{sglang_server.url}/flush_cache", timeout=600.0)
    before = forward_passes(sglang_server)
    assert sglang_server.healthy()
    assert forward_passes(sglang_server) == before + 1


@pytest.mark.sglang
def test_the_key_is_asked_for_and_seen_by_nobody_else_and_stop_leaves_nothing(sglang_spec: ServerSpec, tmp_path: Path):
    spec = dataclasses.replace(sglang_spec, python=SGLANG_PYTHON, api_key="open-sesame", log_file=tmp_path / "log")
    with Server(spec) as server:
        server.wait_ready(START_DEADLINE_S)
        members = server.members()
        assert len(members) >= 4  # reaper, launcher, scheduler, detokenizer
        assert not any("open-sesame" in part for process in members for part in process.cmdline())
        assert httpx.get(f"{server.url}/server_info").status_code == 401
        config_file = server._config_file
    assert psutil.wait_procs(members, timeout=600.0)[1] == []
    assert not config_file.exists()
