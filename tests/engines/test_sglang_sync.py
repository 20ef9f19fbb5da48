"""What of the weight sync needs no server: folders, and what a fleet remembers."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeConfig

from megarl.data.tiny import write_tiny_model
from megarl.engines.buckets import Bucket, split_into_buckets
from megarl.engines.sglang import member as sglang_member
from megarl.engines.sglang import server as sglang_server
from megarl.engines.sglang.engine import SGLangEngine
from megarl.engines.sglang.fleet import Fleet
from megarl.engines.sglang.member import FleetSettings
from megarl.engines.sglang.server import Server
from megarl.engines.sglang.spec import ServerSpec
from megarl.engines.sglang.transports.folder import WeightFolder, write_empty_model
from megarl.engines.sglang.transports.sender import WeightSender
from megarl.engines.weights import WeightForm, checkpoint_shapes
from megarl.errors import ConfigError, RolloutError, WeightSyncError

SHAPES = {"a.weight": (2, 3), "b.weight": (4,), "c.weight": (1, 5)}


def tensors(seed: int = 0) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(name, torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()]


def test_the_expected_names_are_those_of_the_checkpoint_on_disk(tmp_path: Path):
    model = write_tiny_model(tmp_path / "model", hidden_size=32, num_experts=4, expert_width=16, dense_layers=(1,))
    with safe_open(model / "model.safetensors", framework="pt") as file:
        on_disk = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert checkpoint_shapes(model) == on_disk


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


def test_a_disk_that_refuses_is_a_sync_error(source: Path, tmp_path: Path):
    (tmp_path / "out").write_text("a file where the folder should be")
    with pytest.raises(WeightSyncError, match="the weights of version 1 could not be written"):
        write_weights(tmp_path / "out", source, split_into_buckets(tensors(), 1000), 1)


def test_a_fleet_of_strangers_needs_to_know_their_model():
    with pytest.raises(ConfigError, match="needs source"):
        Fleet(urls=["http://127.0.0.1:9"])


def test_a_stranger_that_does_not_answer_is_named(tmp_path: Path):
    with pytest.raises(RolloutError, match=r"no SGLang server answers at http://127\.0\.0\.1:9 "):
        Fleet(urls=["http://127.0.0.1:9"], source=tmp_path).start()


class TestAServerThatCannotStart:
    """A fleet of servers whose process ends at once."""

    @pytest.fixture
    def told(self) -> list[str]:
        return []

    @pytest.fixture
    def fleet(self, tmp_path: Path, told: list[str]) -> Fleet:
        spec = ServerSpec(tmp_path, "/bin/false", "float32", tmp_path / "log")
        return Fleet([spec], settings=FleetSettings(5.0, max_restarts=2, poll_s=0.05), tell=told.append)

    def test_a_start_that_is_not_wanted_any_more_ends_soon_and_leaves_no_key(self, tmp_path: Path):
        slow = tmp_path / "slow"
        slow.write_text("#!/bin/sh\nsleep 3600\n")
        slow.chmod(0o755)
        fleet = Fleet([ServerSpec(tmp_path, slow, "float32", tmp_path / "log", api_key="k")])
        threading.Timer(1.0, fleet.close).start()
        started = time.monotonic()
        with pytest.raises(RolloutError, match="is not needed any more"):
            fleet.start()
        assert time.monotonic() - started < 600.0
        (member,) = fleet.members
        assert member.process is not None
        assert not member.process.members()
        assert member.process._config_file is None

    def test_a_disk_that_refuses_its_log_does_not_end_the_watch(self, fleet: Fleet, told: list[str], tmp_path: Path):
        """Nobody would start any server again."""
        (member,) = fleet.members
        assert member.process is not None
        member.process.start()
        while member.process.alive:
            pass
        (tmp_path / "log").unlink()
        (tmp_path / "log").mkdir()  # what is opened here is refused, as on a full disk
        fleet.members[0].restart()
        assert "could not be started again" in told[-1]
        assert "Is a directory" in told[-1]
        fleet.close()


def test_a_qwen_model_with_a_dense_layer_is_refused():
    config = Qwen3MoeConfig(num_hidden_layers=3, mlp_only_layers=[1], num_experts=4, num_experts_per_tok=2).to_dict()
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


class TestAServerThatIsStuck:
    """A fleet of one server that runs and is never healthy."""

    @pytest.fixture
    def told(self) -> list[str]:
        return []

    @pytest.fixture
    def fleet(self, tmp_path: Path, told: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
        monkeypatch.setattr(
            sglang_server, "command", lambda spec, config: [str(spec.python), "-c", STUCK, str(spec.port)]
        )
        spec = ServerSpec(tmp_path, sys.executable, "float32", tmp_path / "log")
        fleet = Fleet([spec], settings=FleetSettings(60.0, hang_s=0.2, poll_s=0.05), tell=told.append)
        (member,) = fleet.members
        assert member.process is not None
        member.process.start()
        member.url = member.process.url
        yield fleet
        fleet.close()

    def test_it_is_killed_when_it_has_been_silent_for_too_long(self, fleet: Fleet, told: list[str]):
        (member,) = fleet.members
        assert member.process is not None
        assert not fleet.members[0].needs_restart()
        time.sleep(0.3)
        assert fleet.members[0].needs_restart()
        assert not member.process.alive
        assert told == [f"{member.url} has not answered for 0 s: killed"]

    def test_one_that_has_answered_is_left_in_peace_for_a_while(self, fleet: Fleet, monkeypatch: pytest.MonkeyPatch):
        """That the process lives is seen without a check."""
        checks: list[str] = []
        monkeypatch.setattr(Server, "healthy", lambda self: checks.append("checked") is None)
        fleet.settings = replace(fleet.settings, health_s=1.0)
        (member,) = fleet.members
        assert member.process is not None
        for quarter in range(40):  # 10 s
            monkeypatch.setattr(sglang_member, "time", SimpleNamespace(monotonic=lambda now=quarter / 4: now))
            assert not fleet.members[0].needs_restart()
        assert len(checks) == 10
        member.process.kill()
        assert fleet.members[0].needs_restart()  # at once

    def test_it_is_spared_during_an_update(self, fleet: Fleet):
        """A paused server answers no health check either."""
        (member,) = fleet.members
        assert member.process is not None
        fleet.updating.set()
        for _ in range(3):
            assert not fleet.members[0].needs_restart()
            time.sleep(0.2)
        assert member.process.alive


def test_tied_embeddings_are_expected_once(tmp_path: Path):
    path = write_tiny_model(tmp_path / "model", hidden_size=32, num_experts=4, expert_width=16)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    tied = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    tied.save_pretrained(tmp_path / "tied")
    with safe_open(tmp_path / "tied" / "model.safetensors", framework="pt") as file:
        assert set(checkpoint_shapes(path)) == set(file.keys())
    assert "lm_head.weight" not in checkpoint_shapes(path)


def test_a_server_that_failed_to_come_back_does_not_end_the_next_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It died again before it could be asked for its release; the next update leaves it out."""
    spec = ServerSpec(write_tiny_model(tmp_path / "model"), sys.executable, dtype="float32", log_file=tmp_path / "log")
    fleet = Fleet([spec])
    (member,) = fleet.members
    member.url = "http://127.0.0.1:9"
    member.connection = WeightSender(member.url)
    member.process = server = Server(spec)
    for name in ("start", "wait_ready", "kill"):
        monkeypatch.setattr(server, name, lambda *_: None)
    monkeypatch.setattr(Server, "alive", property(lambda _: False))
    fleet.members[0].restart()
    with pytest.raises(WeightSyncError, match="tensors are missing"):
        fleet.update([], 1, WeightForm(torch.float32))
