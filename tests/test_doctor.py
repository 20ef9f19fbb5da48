from __future__ import annotations

import importlib.util
import io
import json
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tiny_families import write_family

from megarl import doctor
from megarl.config import file as config_file
from megarl.config import megatron_fields
from megarl.core.megatron_facts import REPLAY_BLOCKERS
from megarl.errors import ConfigError
from megarl.plan.plan import plan
from megarl.rollout.sglang.versions import CAPABILITIES, FAULTS
from megarl.train.loop import train

CONFIG = """
[run]
steps = 3
[model]
path = "models/tiny"
[parallel]
ep = 2
[data]
train = "train.jsonl"
max_prompt_tokens = 16
[rollout]
prompts_per_step = 32
group_size = 8
max_response_tokens = 10
[optim]
lr = 1e-4
"""


def shown(*arguments, **keywords) -> tuple[int, str]:
    console = Console(file=io.StringIO(), width=200)
    code = doctor.doctor(*arguments, console=console, **keywords)
    return code, console.file.getvalue()


def test_this_environment_is_found_complete():
    code, text = shown()
    assert code == 0
    assert "Everything that is required is here." in text
    assert "megatron-core" in text
    assert "0.16.1" in text
    assert "replay hook" in text
    assert "pip install 'megarl[gpu]'" in text  # square brackets are no markup
    for blocker in REPLAY_BLOCKERS:
        assert blocker.setting in text
        assert blocker.reason in text


def test_nothing_installed_is_a_result_and_not_a_crash(monkeypatch):
    def absent(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(doctor, "version", absent)
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "torch", None)  # `import torch` now raises ImportError
    code, text = shown()
    assert code == 1
    assert "Missing: torch, megatron-core, replay hook, transformers" in text


def test_a_broken_torch_is_a_result_and_not_a_crash(monkeypatch):
    def broken(name):
        raise OSError("libcudart.so.12: cannot open shared object file")

    monkeypatch.setattr(doctor.importlib, "import_module", broken)
    code, text = shown()
    assert code == 1
    assert "libcudart.so.12" in text


@pytest.fixture
def moe_source(monkeypatch, tmp_path):
    """The folder of the MoE layers in a Megatron whose source lies in ``tmp_path``."""
    moe = tmp_path / "transformer" / "moe"
    moe.mkdir(parents=True)
    monkeypatch.setattr(megatron_fields, "source_root", lambda: tmp_path)
    return moe


def test_a_megatron_without_the_hook_is_missing_something_required(moe_source):
    (moe_source / "moe_utils.py").write_text("def topk_routing_with_score_function(logits, topk): ...")
    (moe_source / "router.py").write_text("class TopKRouter: ...")
    code, text = shown()
    assert code == 1
    assert "Missing: replay hook." in text
    assert "run `python tools/patch.py apply`" in text


def test_a_release_that_imports_triton_needs_it(moe_source):
    (moe_source / "moe_utils.py").write_text("router_replay.get_replay_topk(scores)")
    (moe_source / "router.py").write_text("self.router_replay")
    assert "triton" not in shown()[1]
    (moe_source / "paged_stash.py").write_text("import triton")
    code, text = shown()
    is_absent = importlib.util.find_spec("triton") is None
    assert (code, "Missing: triton." in text) == (int(is_absent), is_absent)


def test_a_configuration_shows_its_layout_and_is_not_hit(tmp_path, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    path = tmp_path / "run.toml"
    path.write_text(CONFIG)
    code, text = shown(path)
    assert code == 0
    assert "HIT" not in text
    assert "2; must be a multiple of 2" in text
    assert "etp 1 x ep 2 x pp 1 x dp 1" in text
    assert "128 sequences per rank" in text
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert "etp 1 x ep 2 x pp 1 x dp 2" in shown(path)[1]


def test_an_objective_outside_the_family_is_warned_of_and_its_reference_shown(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(CONFIG)
    code, text = shown(path, {"train.objective_overrides.cap": 0.5} | KL)
    assert code == 0
    assert "warning: objective: the weight ('identity', power 0.5, cap 0.5)" in text
    assert "models/tiny" in text[text.index("reference policy") :]
    plain = shown(path)[1]
    assert "warning" not in plain
    assert "reference policy" not in plain


def test_sampling_from_a_nucleus_is_warned_of(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(CONFIG)
    code, text = shown(path, {"rollout.top_p": 0.9})
    assert code == 0
    assert text.count("warning: ") == 1
    assert "warning: rollout.top_p: found 0.9: tokens outside of the nucleus are never sampled" in text


KL = {"train.objective_overrides.kl": "k3", "train.objective_overrides.kl_coef": 0.1}


def test_a_blocker_in_the_file_or_in_a_flag_is_marked_and_then_refused(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(CONFIG + "[megatron]\nmoe_router_fusion = true\n")
    console = Console(file=io.StringIO(), width=200)
    with pytest.raises(ConfigError, match="moe_router_fusion"):
        doctor.doctor(path, console=console)
    rows = [line for line in console.file.getvalue().splitlines() if "HIT" in line]
    assert len(rows) == 1
    assert "moe_router_fusion" in rows[0]

    code, text = shown(path, {"train.replay": "none", "megatron.moe_router_force_load_balancing": True})
    assert code == 0
    assert text.count("HIT") == 2


def test_an_unreadable_file_is_explained_after_the_tables(tmp_path):
    console = Console(file=io.StringIO(), width=200)
    with pytest.raises(ConfigError, match="cannot be read"):
        doctor.doctor(tmp_path / "absent.toml", console=console)
    assert "Installed" in console.file.getvalue()


def test_without_a_configuration_the_releases_are_listed():
    _, text = shown()
    assert "0.5.7 to 0.5.23" in text
    for name in (*(entry.name for entry in CAPABILITIES), *(fault.name for fault in FAULTS)):
        assert name in text


class TestSGLang:
    """The servers that a configuration asks for."""

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        path = tmp_path / "run.toml"
        path.write_text(CONFIG.replace("[rollout]", '[rollout]\nengine = "sglang"'))
        return path

    def interpreter(self, folder: Path, script: str) -> str:
        """Stands for the Python of SGLang's environment; the test below asks real ones."""
        path = folder / "python"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return str(path)

    @contextmanager
    def server(self, info: Mapping[str, Any], path: str = "/server_info") -> Iterator[str]:
        """The URL of something that says of itself what a server says; other paths are unknown to it."""

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                if self.headers.get("Authorization") not in (None, "Bearer open-sesame"):
                    self.send_error(401)
                elif self.path != path:
                    self.send_error(404)
                else:
                    self.send_response(200)
                    self.end_headers()
                    self.wfile.write(json.dumps(info).encode())

            def log_message(self, format: str, *args: object):
                pass

        with HTTPServer(("127.0.0.1", 0), Handler) as http:
            thread = threading.Thread(target=http.serve_forever)
            thread.start()
            yield f"http://127.0.0.1:{http.server_port}"
            http.shutdown()
            thread.join()

    def test_a_good_release_is_shown_with_what_it_can_do(self, path: Path, tmp_path: Path):
        code, text = shown(path, {"sglang.python": self.interpreter(tmp_path, "echo 0.5.20")})
        assert code == 0
        (row,) = [line for line in text.splitlines() if str(tmp_path / "python") in line]
        assert "yes" in row
        assert "0.5.20" in row
        assert "routed_experts, routed_experts_start_len, weight_versions" in row
        assert "update_session" not in row

    @pytest.mark.parametrize(
        ("script", "arguments", "message"),
        [
            ("echo 0.5.6", [], "SGLang 0.5.6 returns no routes, expected at least 0.5.7"),
            ("echo 0.5.17", [], "or add --disable-overlap-schedule"),
            ("echo 0.5.23", ["--enable-lmcache"], "brings keys and values back into other slots"),
            ("echo 0.5.23", ["--api-key", "x"], "set api_key"),
            ("echo no such module >&2; exit 1", [], "has no SGLang (no such module)"),
            ("echo main", [], "'main', expected a release number"),
        ],
    )
    def test_what_a_run_would_refuse_ends_with_an_error(
        self, path: Path, tmp_path: Path, script: str, arguments: list[str], message: str
    ):
        settings = {"sglang.python": self.interpreter(tmp_path, script), "sglang.arguments": arguments}
        code, text = shown(path, settings)
        assert code == 1
        assert "REFUSED" in text
        assert message in " ".join(text.split())

    def test_an_interpreter_that_is_not_there_is_an_error_of_this_engine_alone(self, path: Path, tmp_path: Path):
        missing = {"sglang.python": str(tmp_path / "nothing")}
        code, text = shown(path, missing)
        assert code == 1
        assert "run `make sglang-cpu`, or set sglang.python" in " ".join(text.split())
        code, text = shown(path, missing | {"rollout.engine": "local"})
        assert code == 0
        assert "REFUSED" not in text

    def test_arguments_that_avoid_a_fault_make_a_release_good(self, path: Path, tmp_path: Path):
        python = self.interpreter(tmp_path, "echo 0.5.17")
        assert shown(path, {"sglang.python": python, "sglang.arguments": ["--disable-overlap-schedule"]})[0] == 0
        code, text = shown(path, {"sglang.python": python, "sglang.gpus": [0]})
        assert code == 0  # the fault is the CPU's
        assert 'weights to servers sglang.sync = "ipc"' in " ".join(text.split())

    def test_a_release_that_an_option_is_beyond_is_refused(self, path: Path, tmp_path: Path):
        settings = {"sglang.python": self.interpreter(tmp_path, "echo 0.5.22"), "sglang.checksums": True}
        code, text = shown(path, settings)
        assert code == 1
        assert "0.5.22 gives no checksums on a CPU" in " ".join(text.split())
        assert shown(path, settings | {"sglang.gpus": [0]})[0] == 0
        assert shown(path, settings | {"sglang.checksums": False})[0] == 0

    def test_servers_that_run_are_asked_each(self, path: Path):
        good = {"version": "0.5.23", "device": "cuda", "tp_size": 1, "api_key": "x"}
        old = {"version": "0.5.8", "enable_eplb": True}
        with self.server(good) as first, self.server(old, "/get_server_info") as second:
            assert shown(path, {"sglang.urls": [first]})[0] == 0
            code, text = shown(path, {"sglang.urls": [first, second, "http://127.0.0.1:9"]})
            wrong_tp = shown(path, {"sglang.urls": [first], "sglang.tp": 2})
        assert code == 1
        assert text.count("REFUSED") == 2
        words = " ".join(text.split())
        assert "SGLang 0.5.8: with expert-parallel load balancing" in words
        assert "no SGLang server answers at http://127.0.0.1:9" in words
        assert wrong_tp[0] == 1
        assert "--tp-size 1, expected 2" in wrong_tp[1]

    def test_the_key_is_sent_and_its_absence_told(self, path: Path, monkeypatch: pytest.MonkeyPatch):
        with self.server({"version": "0.5.23"}) as url:
            settings = {"sglang.urls": [url], "sglang.api_key_env": "SESAME"}
            monkeypatch.delenv("SESAME", raising=False)
            code, text = shown(path, settings)
            assert code == 1
            assert "no variable SESAME" in text
            monkeypatch.setenv("SESAME", "open-sesame")
            assert shown(path, settings)[0] == 0
            monkeypatch.setenv("SESAME", "wrong")
            code, text = shown(path, settings)
            assert code == 1
            assert "401" in text

    @pytest.mark.sglang
    def test_real_environments_tell_their_release(self, path: Path):
        venv = Path(__file__).parents[1] / ".venv-sglang"
        for python in (venv / "bin" / "python", *venv.glob("releases/*/python")):
            code, text = shown(path, {"sglang.python": str(python)})
            release = "0.5.23" if python.parent.name == "bin" else python.parent.name
            assert f"  {release} " in text
            assert code == (1 if release == "0.5.17" else 0)


def test_what_a_dense_model_cannot_do_is_refused_as_by_train_and_plan(tmp_path):
    write_family(tmp_path / "model", "qwen2")
    (tmp_path / "run.toml").write_text(CONFIG)
    words = {"model.path": str(tmp_path / "model"), "parallel.ep": 1}
    for change, says in (
        ({}, 'train.replay: found "r3"'),
        ({"train.max_native_flip": 0.3}, "max_native_flip: found 0.3"),
    ):
        none = {"train.replay": "none"} if change else {}
        for refuse in (
            lambda more: shown(tmp_path / "run.toml", more, trust=True),
            lambda more: plan(config_file.load(tmp_path / "run.toml", more, trust=True)),
            lambda more: train(config_file.load(tmp_path / "run.toml", more, trust=True)),
        ):
            with pytest.raises(ConfigError, match=says):
                refuse({**words, **none, **change})
    code, text = shown(tmp_path / "run.toml", {**words, "train.replay": "none"}, trust=True)
    assert code == 0
    assert "qwen2, dense; routes are not asked for" in text
    write_family(tmp_path / "moe", "mixtral")
    code, text = shown(tmp_path / "run.toml", {"model.path": str(tmp_path / "moe"), "train.replay": "none"}, trust=True)
    assert "mixtral, top-2 of 8 experts; routes are asked for" in text
    assert "layers" not in text[text.index("routes are asked for") :]
    write_family(tmp_path / "norms", "olmoe")
    code, text = shown(
        tmp_path / "run.toml", {"model.path": str(tmp_path / "norms"), "train.replay": "none"}, trust=True
    )
    assert "Transformer Engine has no norm over all heads" in text


@pytest.mark.parametrize(
    ("release", "code", "said"),
    [
        ("2.11.0", "", "2.11.0 fused"),
        ("2.12.0", "", "megatron-core 0.16.1 supports 2.9 to 2.11"),
        (
            "2.11.0",
            "raise OSError('libcublas.so.13: no such file')",
            "cannot be imported (libcublas.so.13: no such file)",
        ),
    ],
)
def test_transformer_engine_is_tried_and_its_release_compared(release, code, said, tmp_path, monkeypatch):
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "pytorch.py").write_text(code)
    info = tmp_path / f"transformer_engine-{release}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: transformer-engine\nVersion: {release}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.delitem(sys.modules, name)
    finding = next(each for each in doctor.findings() if each.name == "transformer-engine")
    assert said in f"{finding.found} {finding.note}"
    assert (finding.found is None) == bool(code)
