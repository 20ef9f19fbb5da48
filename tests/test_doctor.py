"""The verdict of ``megarl doctor``, in real environments and over real files."""

from __future__ import annotations

import functools
import json
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from run_configs import run_text
from tiny_families import write_family

from megarl.config import file as config_file
from megarl.data.tiny import write_sort_task, write_tiny_model
from megarl.errors import ConfigError
from megarl.ops import doctor
from megarl.ops.doctor import inputs, machine, report

TRIAL = machine.run_trial


def write_model(folder: Path, family: str) -> None:
    write_family(folder, family)
    (folder / "tokenizer.json").write_text("{}")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A configuration with all that it names."""
    write_model(tmp_path / "model", "mixtral")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n')
    places = {"run__dir": "run", "model__path": "model", "data__train": "train.jsonl"}
    text = run_text(**{key: str(tmp_path / place) for key, place in places.items()})
    (tmp_path / "run.toml").write_text(text)
    return tmp_path / "run.toml"


@functools.cache
def tried() -> tuple[list[Any], dict[str, Any]]:
    """What the trainer's imports give here, tried once."""
    return TRIAL(None, set())


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Runs the doctor: its exit code, and what it prints, in lines that are not wrapped."""
    monkeypatch.setenv("COLUMNS", "500")
    monkeypatch.setattr(machine, "run_trial", lambda *_: tried())

    def run(*arguments: Any, **keywords: Any) -> tuple[int, str]:
        capsys.readouterr()
        code = doctor.doctor(*arguments, **{"trust": True, **keywords})
        return code, capsys.readouterr().out

    return run


def test_this_environment_is_ready_but_not_where_megatron_lacks_the_hook(shown, monkeypatch, tmp_path):
    code, text = shown()
    assert code == 0, text
    assert text.startswith("ready to train on this machine\n")
    assert "replay hook" in text
    assert "pip install 'megarl-moe[gpu]'" in text
    moe = tmp_path / "megatron" / "core" / "transformer" / "moe"
    moe.mkdir(parents=True)
    monkeypatch.setattr(machine, "find_installed", lambda: tmp_path)
    (moe / "moe_utils.py").write_text("def topk_routing_with_score_function(logits, topk): ...")
    (moe / "router.py").write_text("class TopKRouter: ...")
    code, text = shown()
    assert code == 1
    assert text.startswith("not ready to train on this machine: replay hook\n")
    assert "this Megatron-Core cannot replay routes; run `megarl patch apply`" in text


def test_a_configuration_is_tried_whole(path, tmp_path, shown, monkeypatch):
    """Tokenizer, first prompt and weights too, in the child process."""
    monkeypatch.undo()
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    shutil.rmtree(tmp_path / "model")
    write_tiny_model(tmp_path / "model")
    write_sort_task(tmp_path / "task", num_train=8, num_heldout=4, num_demonstrations=4)
    shutil.copy(tmp_path / "task" / "train.jsonl", tmp_path / "train.jsonl")
    report = doctor.examine(path, {"parallel.ep": 2}, trust=True)
    text = report.to_text()
    assert report.ready, text
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    broken = {check.name: check.says() for check in doctor.examine(path, trust=True).checks if check.status == "failed"}
    assert broken.keys() == {"weights"}
    assert "model.safetensors" in broken["weights"]


def test_what_a_run_warns_of_is_said(path, tmp_path, shown, monkeypatch):
    assert "warning" not in shown(path)[1]
    code, text = shown(path, {"rollout.top_p": 0.9})
    assert code == 0
    assert text.count("- warning: ") == 1
    assert "rollout.top_p: found 0.9: training optimises the policy within the recorded nuclei" in text
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match=r"found 3 ranks, expected a multiple of ep \* etp \* pp"):
        shown(path, {"parallel.ep": 2})


class TestSGLang:
    """The servers that a configuration asks for."""

    @pytest.fixture
    def path(self, path: Path) -> Path:
        path.write_text(path.read_text().replace("[rollout]", '[rollout]\nengine = "sglang"'))
        return path

    @contextmanager
    def server(self, info: Mapping[str, Any]) -> Iterator[str]:
        """The URL of something that says of itself what a server says; other paths are unknown to it."""

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                if self.headers.get("Authorization") not in (None, "Bearer open-sesame"):
                    self.send_error(401)
                elif self.path != "/server_info":
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
            try:
                yield f"http://127.0.0.1:{http.server_port}"
            finally:
                http.shutdown()
                thread.join()

    @pytest.mark.parametrize(
        ("script", "arguments", "message"),
        [
            ("echo 0.5.22", [], None),
            ("echo 0.5.16", [], "SGLang 0.5.16 is too old, expected at least 0.5.17"),
            ("echo 0.5.23", ["--enable-lmcache"], "brings keys and values back into other slots"),
            ("echo no such module >&2; exit 1", [], "has no SGLang (no such module)"),
            ("echo main", [], "'main', expected a release number"),
        ],
    )
    def test_a_release_is_shown_or_not_ready(self, path: Path, tmp_path: Path, script, arguments, message, shown):
        """A script stands for the Python of SGLang's environment; the test below asks real ones."""
        python = tmp_path / "python"
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
        code, text = shown(path, {"sglang.python": str(python), "sglang.arguments": arguments})
        if message is None:
            assert code == 0, text
            assert f"server {python}  SGLang 0.5.22\n" in text
        else:
            assert code == 1
            assert text.startswith("not ready")
            assert message in " ".join(text.split())

    def test_servers_that_run_are_asked_each(self, path: Path, shown):
        good = {"version": "0.5.23", "device": "cuda", "tp_size": 1, "api_key": "x"}
        old = {"version": "0.5.21", "enable_watermark": True}
        with self.server(good) as first, self.server(old) as second:
            assert shown(path, {"sglang.urls": [first]})[0] == 0
            code, text = shown(path, {"sglang.urls": [first, second, "http://127.0.0.1:9"]})
            wrong_tp = shown(path, {"sglang.urls": [first], "sglang.tp": 2})
        assert code == 1
        assert text.splitlines()[0].count("server http") == 2
        words = " ".join(text.split())
        assert "SGLang 0.5.21: with --enable-watermark" in words
        assert "no SGLang server answers at http://127.0.0.1:9" in words
        assert wrong_tp[0] == 1
        assert "--tp-size 1, expected 2" in wrong_tp[1]

    @pytest.mark.parametrize(
        ("settings", "item"),
        [
            ({"sglang.python": "nowhere/python"}, "nowhere/python"),
            ({"sglang.urls": ["http://127.0.0.1:9"], "sglang.api_key_env": "NO_SUCH_KEY"}, "NO_SUCH_KEY"),
            ({"sglang.urls": ["http://127.0.0.1:9"]}, "http://127.0.0.1:9"),
        ],
    )
    def test_what_is_missing_is_said_once(self, path: Path, settings: dict[str, Any], item: str, shown):
        code, text = shown(path, settings)
        assert code == 1
        assert sum(item in line for line in text.splitlines()[1:]) == 1, text
        assert "Errno" not in text

    def test_without_a_configuration_it_is_optional(self, shown, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
        monkeypatch.chdir(tmp_path)
        code, text = shown()
        assert code == 0
        (line,) = [line for line in text.splitlines() if "sglang" in line and ".venv-sglang" in line]
        assert line.startswith("optional  sglang")
        assert "(No such file or directory)" in line
        assert 'needed by rollout.engine = "sglang" alone' in line
        for check in json.loads(shown(json=True)[1])["checks"]:
            assert check["status"] != "ok" or not any(
                word in check["found"] for word in ("Errno", "not installed", "cannot")
            )

    def test_the_key_is_sent_and_its_absence_told(self, path: Path, monkeypatch: pytest.MonkeyPatch, shown):
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
    def test_real_environments_tell_their_release(self, path: Path, shown):
        venv = Path(__file__).parents[1] / ".venv-sglang"
        for python in (venv / "bin" / "python", *venv.glob("releases/*/python")):
            code, text = shown(path, {"sglang.python": str(python)})
            release = "0.5.23" if python.parent.name == "bin" else python.parent.name
            assert release in text
            assert code == (1 if release == "0.5.17" else 0)


def test_a_dense_model_is_ready_without_replay(path, tmp_path, shown):
    write_model(tmp_path / "dense", "qwen2")
    dense = {"model.path": str(tmp_path / "dense")}
    with pytest.raises(ConfigError, match='found "r3"'):
        shown(path, dense)
    code, text = shown(path, {**dense, "train.replay": "none"})
    assert code == 0, text


@pytest.mark.parametrize(
    ("release", "facts", "status", "said"),
    [
        ("2.11.0", {}, "ok", "2.11.0; used on GPUs"),
        ("2.12.0", {}, "warning", "2.12.0, expected 2.9 to 2.11 with megatron-core 0.16"),
        (
            "2.11.0",
            {"te_problem": "OSError: libcublas.so.13"},
            "warning",
            "cannot be imported (OSError: libcublas.so.13)",
        ),
    ],
)
def test_transformer_engine_is_compared(release, facts, status, said, monkeypatch):
    monkeypatch.setattr(machine, "version", lambda name: "0.16.1")
    check = machine._check_te(release, facts)
    assert check.status == status
    assert said in check.says()


def test_a_model_that_the_trainer_lacks_may_have_readable_routes(path: Path, tmp_path: Path):
    table = {"num_hidden_layers": 8, "n_routed_experts": 16, "num_experts_per_tok": 2, "num_hash_layers": 3}
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "deepseek_v4", **table}))
    refused, routes = inputs.read_model(config_file.load(path, trust=True))[0]
    assert "hyper-connections" in refused.says()
    says = "5 of 8 layers have routes, layers [0, 1, 2] take experts from a table of token ids"
    assert (routes.status, routes.says()) == ("ok", f"{says}: verify and the plug-in take the model")


def test_without_torch_it_says_what_to_install(lean, path: Path):
    alone = lean("doctor")
    assert (alone.returncode, alone.stderr) == (1, "")
    assert alone.stdout.startswith("not ready to train on this machine: ")
    assert ", torch, transformers: not installed; pip install 'megarl-moe[train]'" in alone.stdout
    found = json.loads(lean("doctor", "--json", str(path)).stdout)
    assert {*found} == {"verdict", "config", "checks", "versions"}
    assert (found["verdict"], found["config"], found["versions"]["torch"]) == ("not ready", str(path), None)
    status = {each["name"]: each["status"] for each in found["checks"]}
    assert status["torch"] == status["megatron-core"] == "failed"
    assert status["data.train"] == status["model.path"] == "ok"


def failed(path: Path, **overrides: object) -> dict[str, str]:
    """What is wrong with the things that the configuration names."""
    config = config_file.load(path, {key.replace("__", "."): value for key, value in overrides.items()}, trust=True)
    of_model, shape = inputs.read_model(config)
    return {
        each.name: each.says() for each in (*of_model, *inputs.check_inputs(config, shape)) if each.status == "failed"
    }


def test_what_is_missing_is_named(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("SESAME", raising=False)
    nowhere = str(tmp_path / "nothing")
    assert "model.path" not in failed(path)
    assert f"`hf download OWNER/MODEL --local-dir {nowhere}`" in failed(path, model__path=nowhere)["model.path"]
    assert "no such file" in failed(path, data__train=str(tmp_path / "no.jsonl"))["data.train"]
    assert "no field 'question'" in failed(path, data__prompt_field="question")["data.train"]
    assert "no variable SESAME" in failed(path, sglang__api_key_env="SESAME")["sglang.api_key_env"]
    judge = {"reward__function": "reward_model", "reward_model__urls": ["http://127.0.0.1:9"]}
    assert "nothing listens at" in failed(path, **judge)["reward_model.urls"]
    (tmp_path / "run").write_text("a file, where a folder should be")
    assert "cannot be written" in failed(path)["run.dir"]
    (tmp_path / "model" / "config.json").write_text('{"model_type": "strange"}')
    assert "strange" in failed(path)["model.path"]
    launch = {"launch__layout": "colocated", "launch__nodes": 2, "launch__stop_grace_s": 300}
    monkeypatch.setenv("PATH", "/nowhere")
    assert "without sbatch, srun, scontrol" in failed(path, **launch)["launch.layout"]
    assert "launch.layout" not in failed(path)


def test_a_broken_package_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(name: str) -> None:
        raise OSError("libcudart.so.12: cannot open shared object file")

    monkeypatch.setattr(machine.importlib, "import_module", fail)
    says = {check.name: check.says() for check in machine.run_trial(None, set())[0]}
    assert "libcudart.so.12" in says["datasets"]
    assert "torch" not in says


def test_every_text_belongs_to_a_check() -> None:
    sources = "".join(Path(module.__file__).read_text("utf-8") for module in (inputs, machine))
    assert [key for key in report._TEXTS if f'"{key}"' not in sources] == []


def test_a_finding_says_its_name_once() -> None:
    assert report.Finding("log.sinks", "failed", "log.sinks: found 1").says() == "found 1"
    assert report.Finding("sinks", "failed", "log.sinks: found 1").says() == "log.sinks: found 1"
