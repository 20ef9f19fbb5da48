"""Fixtures around a real SGLang server; conftest.py makes them known to all tests."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import preloaded
import pytest
from absent import SGLANG_PYTHON

from megarl.config.tables.rollout import SGLangConfig
from megarl.data.tiny import write_tiny_model
from megarl.engines.sglang import server as server_module
from megarl.engines.sglang.server import Server
from megarl.engines.sglang.spec import ServerSpec
from megarl.engines.sglang.transports.broadcast import Broadcast
from megarl.engines.sglang.transports.folder import Disk
from megarl.engines.sglang.transports.ipc import SharedMemory
from megarl.engines.sglang.transports.protocol import Tensors

START_DEADLINE_S = 1200.0
"""A start is 20 s of imports on an idle machine and minutes on a busy one."""
SGLANG_MODULES = (
    "sglang.srt.server_args",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.models.registry",
)


_pythons: dict[str, Path] = {}
"""The interpreters of SGLang whose servers are forks, by the programs that stand for them (``forking``)."""
_zygotes: dict[tuple[str, ...], preloaded.Zygote] = {}
MAX_ZYGOTES = 2
"""Each holds 0.7 GB."""


def transport_fields(way: str, folder: Path, **settings: Any) -> dict[str, Any]:
    """The fields of a fleet that sends weights in this way of ``sglang.sync``."""
    transports = {"tensor": Tensors, "distributed": Broadcast, "disk": Disk, "ipc": SharedMemory, "deltas": Tensors}
    copies = {"copies": folder} if way == "disk" else {}
    return {
        "transport": transports[way](),
        "settings": SGLangConfig(**{"checksums": False, "deltas": way == "deltas"} | settings),
        **copies,
    }


def forking(python: Path, folder: Path) -> Path:
    """A program that is ``python``, an interpreter with SGLang, but whose servers import everything once.

    Servers that the tests themselves start are forks of one process: such a start takes 2 seconds of a core, not 20.
    """
    path = preloaded.write_python(folder / "python", python, "sglang.launch_server", SGLANG_MODULES, "fork")
    _pythons[str(path)] = python
    return path


class _ForkedServer(preloaded.ForkedPopen):
    """Reaper and server are forks of a process that has SGLang imported."""

    def _zygote(self, words: Sequence[str], environment: Mapping[str, str]) -> preloaded.Zygote:
        python = next(word for word in words if word in _pythons)
        read_at_import = [f"{k}={v}" for k, v in sorted(environment.items()) if k.startswith(("SGLANG", "PYTHONPATH"))]
        key = (python, *read_at_import)
        if key not in _zygotes:
            while len(_zygotes) >= MAX_ZYGOTES:
                _zygotes.pop(next(iter(_zygotes))).close()
            more = {"ZYGOTE_PYTHON": python}
            _zygotes[key] = preloaded.Zygote(str(_pythons[python]), SGLANG_MODULES, {**environment, **more}, "fork")
        return _zygotes[key]


def _start(words: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    ours = any(word in _pythons for word in words) and "sglang.launch_server" in words
    return (_ForkedServer if ours else subprocess.Popen)(words, **options)


server_module.subprocess = SimpleNamespace(**vars(subprocess) | {"Popen": _start})  # type: ignore[assignment]


@pytest.fixture(scope="session")
def sglang_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of the pinned environment; its servers are forks, those of SGLANG_PYTHON are not."""
    return forking(SGLANG_PYTHON, tmp_path_factory.mktemp("sglang_python"))


@pytest.fixture(scope="session")
def sglang_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with experts in every layer (SGLang's Qwen3-MoE knows no dense ones) and routes that differ."""
    path = tmp_path_factory.mktemp("sglang") / "model"
    return write_tiny_model(path, hidden_size=64, num_experts=8, expert_width=32, initializer_range=0.3)


@pytest.fixture(scope="session")
def sglang_spec(sglang_python: Path, sglang_model: Path, tmp_path_factory: pytest.TempPathFactory) -> ServerSpec:
    log_file = tmp_path_factory.mktemp("sglang") / "server.log"
    return ServerSpec(sglang_model, sglang_python, dtype="float32", log_file=log_file, max_total_tokens=8192)


@pytest.fixture(scope="session")
def sglang_server(sglang_spec: ServerSpec) -> Iterator[Server]:
    """One running fp32 server, shared by the tests that leave it as it was."""
    with Server(sglang_spec) as server:
        server.wait_ready(START_DEADLINE_S)
        yield server


@pytest.fixture(scope="session")
def hostile_model(sglang_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights with few positions, and with sampling defaults that would ruin every rollout."""
    path = tmp_path_factory.mktemp("sglang") / "hostile"
    shutil.copytree(sglang_model, path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    defaults = {"do_sample": True, "top_k": 1, "top_p": 0.1, "temperature": 0.1, "repetition_penalty": 1.9}
    (path / "generation_config.json").write_text(json.dumps(defaults | {"eos_token_id": 1}))
    return path


@pytest.fixture(scope="session")
def updated_server(sglang_spec: ServerSpec, hostile_model: Path) -> Iterator[Server]:
    """One running fp32 server of ``hostile_model``; every test that uses it sends the weights it needs."""
    log_file = Path(sglang_spec.log_file).with_name("updated.log")
    with Server(replace(sglang_spec, model_path=hostile_model, log_file=log_file)) as server:
        server.wait_ready(START_DEADLINE_S)
        yield server
