"""What of the weight sync needs no server: folders, and what a fleet remembers."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeConfig

from megarl.config.tables.rollout import SGLangConfig
from megarl.data.tiny import write_tiny_model
from megarl.engines.sglang import member as sglang_member
from megarl.engines.sglang import server as sglang_server
from megarl.engines.sglang.engine import SGLangEngine
from megarl.engines.sglang.fleet import Fleet
from megarl.engines.sglang.member import Member
from megarl.engines.sglang.server import Server
from megarl.engines.sglang.spec import ServerSpec
from megarl.engines.sglang.transports.folder import WeightFolder, write_empty_model
from megarl.engines.weights import Bucket, checkpoint_shapes, split_into_buckets
from megarl.errors import ConfigError, RolloutError, WeightSyncError

SHAPES = {"a.weight": (2, 3), "b.weight": (4,), "c.weight": (1, 5)}


def tensors(seed: int = 0) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(name, torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()]


@pytest.mark.parametrize("tied", [False, True])
def test_the_expected_names_are_those_of_the_checkpoint_on_disk(tmp_path: Path, tied: bool):
    model = write_tiny_model(tmp_path / "model", hidden_size=32, num_experts=4, expert_width=16, dense_layers=(1,))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": tied}))
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).save_pretrained(tmp_path / "saved")
    with safe_open(tmp_path / "saved" / "model.safetensors", framework="pt") as file:
        on_disk = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert checkpoint_shapes(model) == on_disk
    assert ("lm_head.weight" in on_disk) != tied


def write_weights(folder: Path, source: Path, parts: Iterable[Bucket], version: int) -> Path:
    made = WeightFolder(folder, source, version)
    for bucket in parts:
        made.add(bucket)
    return made.finish()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.mkdir()
    for name in (
        "config.json",
        "tokenizer.json",
        "modeling_mine.py",
        "model.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
    ):
        (path / name).write_text("{}")
    return path


def test_a_weight_folder_is_a_checkpoint(source: Path, tmp_path: Path):
    whole = torch.randn(4, 6, generator=torch.Generator().manual_seed(2))
    given_ = [*tensors(), ("d.left", whole[:, :3]), ("d.right", whole[:, 3:])]  # views of one piece of memory
    found = write_weights(tmp_path / "out", source, split_into_buckets(given_, 40), 7)
    assert found.name == "version_0000007"
    listing = json.loads((found / "model.safetensors.index.json").read_text())
    assert len(set(listing["weight_map"].values())) > 1
    assert listing["metadata"]["total_size"] == sum(4 * tensor.numel() for _, tensor in given_)
    for name, tensor in given_:
        assert torch.equal(load_file(found / listing["weight_map"][name])[name], tensor)
    others = {file.name for file in found.iterdir()} - set(listing["weight_map"].values())
    copied = {"config.json", "tokenizer.json", "modeling_mine.py", "model.safetensors.index.json"}
    assert others == {".megarl.json", *copied}


def test_only_the_newest_version_stays_and_a_half_written_one_is_none(source: Path, tmp_path: Path):
    out = tmp_path / "out"
    first = write_weights(out, source, split_into_buckets(tensors(1), 1000), 1)

    def breaks():
        yield from split_into_buckets(tensors(2)[:1], 1000)
        raise WeightSyncError("the trainer fails")

    with pytest.raises(WeightSyncError, match="the trainer fails"):
        write_weights(out, source, breaks(), 2)
    assert first.exists()
    assert not (out / "version_0000002").exists()
    second = write_weights(out, source, split_into_buckets(tensors(2), 1000), 2)
    assert [path.name for path in out.iterdir()] == [second.name]
    again = write_weights(out, source, split_into_buckets(tensors(3), 1000), 2)
    assert torch.equal(load_file(again / "model-00000.safetensors")["a.weight"], tensors(3)[0][1])


def test_what_megarl_did_not_write_stays(source: Path, tmp_path: Path):
    out = tmp_path / "out"
    first = write_weights(out, source, split_into_buckets(tensors(1), 1000), 1)
    for folder in (first, out / "version_of_mine", out / "version_0000003.part"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "notes.txt").write_text("mine")
    write_weights(out, source, split_into_buckets(tensors(2), 1000), 2)
    assert [path.name for path in first.iterdir()] == ["notes.txt"]
    with pytest.raises(WeightSyncError, match=r"version_0000003\.part holds notes\.txt, which megarl did not write"):
        write_weights(out, source, split_into_buckets(tensors(3), 1000), 3)
    held = [path.read_text() for path in out.rglob("notes.txt")]
    assert held == ["mine"] * 3
    with pytest.raises(ConfigError, match=r"version_of_mine holds notes\.txt"):
        write_empty_model(source, out / "version_of_mine", fp8=False)


def test_a_fleet_of_strangers_needs_to_know_their_model(tmp_path: Path):
    with pytest.raises(ConfigError, match="needs source"):
        Fleet(urls=["http://127.0.0.1:9"])
    with pytest.raises(RolloutError, match=r"no SGLang server answers at http://127\.0\.0\.1:9 "):
        Fleet(urls=["http://127.0.0.1:9"], source=tmp_path).start()


def fleet_of_one(tmp_path: Path, told: list[str], **settings: Any) -> tuple[Fleet, Member, Server]:
    """A fleet of one server, which is not started."""
    spec = ServerSpec(tmp_path, sys.executable, "float32", tmp_path / "log", api_key="k")
    fleet = Fleet([spec], settings=SGLangConfig(start_deadline_s=3600.0), poll_s=0.05, **settings, tell=told.append)
    (member,) = fleet.members
    assert member.process is not None
    return fleet, member, member.process


def test_a_start_that_is_not_wanted_any_more_ends_soon_and_leaves_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sglang_server, "command", lambda spec, config: ["sleep", "36000"])
    fleet, _, server = fleet_of_one(tmp_path, [])
    threading.Timer(1.0, fleet.close).start()
    with pytest.raises(RolloutError, match="is not needed any more"):
        fleet.start()
    assert not server.members()
    assert server._config_file is None


def test_a_disk_that_refuses_the_log_does_not_end_the_watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Nobody would start any server again."""
    monkeypatch.setattr(sglang_server, "command", lambda spec, config: ["false"])
    fleet, member, _ = fleet_of_one(tmp_path, told := [])
    (tmp_path / "log").mkdir()  # what is opened here is refused, as on a full disk
    member.restart()
    assert "could not be started again" in told[-1]
    assert "Is a directory" in told[-1]
    fleet.close()


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen3_next"])
def test_a_qwen_model_with_a_dense_layer_is_refused(kind: str):
    config = Qwen3MoeConfig(num_hidden_layers=3, mlp_only_layers=[1], num_experts=4, num_experts_per_tok=2).to_dict()
    config |= {"model_type": kind, "num_experts": 4, "decoder_sparse_step": 1}
    with pytest.raises(ConfigError, match=r"only layers \(0, 2\) of 3 have experts: SGLang's Qwen"):
        SGLangEngine(["http://127.0.0.1:9"], config, fleet=None)
    SGLangEngine(["http://127.0.0.1:9"], config | {"mlp_only_layers": []}, fleet=None)


# Answers its health check with 503, as SGLang does when its scheduler is stuck.
STUCK = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Stuck(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_error(503)

HTTPServer(("127.0.0.1", int(sys.argv[1])), Stuck).serve_forever()
"""


def test_a_server_that_is_stuck_is_killed_when_it_has_been_silent_for_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sglang_server, "command", lambda spec, config: [str(spec.python), "-c", STUCK, str(spec.port)])
    fleet, member, server = fleet_of_one(tmp_path, told := [], hang_s=10.0, health_s=1.0)
    server.start()
    member.url = server.url
    now = [0.0]
    monkeypatch.setattr(sglang_member, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with monkeypatch.context() as patch:
        checks: list[str] = []
        patch.setattr(Server, "healthy", lambda self: checks.append("checked") is None)
        for quarter in range(40):  # 10 s; that the process lives is seen without a check
            now[0] = quarter / 4
            assert not member.needs_restart()
        assert len(checks) == 10
    fleet.updating.set()
    now[0] = 100.0
    assert not member.needs_restart()  # a paused server answers no health check either
    fleet.updating.clear()
    assert not member.needs_restart()
    now[0] = 111.0
    assert member.needs_restart()
    assert not server.alive
    assert told == [f"{member.url} has not answered for 10 s: killed"]
    fleet.close()
