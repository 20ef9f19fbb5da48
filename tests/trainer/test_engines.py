"""What a configuration says of the servers that are started, on their command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from tiny_families import write_family

from megarl.config import Config
from megarl.config import file as config_file
from megarl.engines.sglang.spec import command
from megarl.engines.sglang.transports.broadcast import Broadcast
from megarl.engines.sglang.transports.folder import Disk, WeightFolder
from megarl.engines.sglang.transports.ipc import SharedMemory
from megarl.engines.sglang.transports.protocol import Tensors
from megarl.models.hf_folder import SINGLE
from megarl.trainer import engines
from megarl.trainer.engines import server_specs


def config(sglang: dict[str, Any], model: str = "model") -> Config:
    settings = {
        "run": {"steps": 1},
        "model": {"path": model},
        "data": {"train": "train.jsonl", "max_prompt_tokens": 16},
        "rollout": {"engine": "sglang", "prompts_per_step": 1, "group_size": 2, "max_response_tokens": 8},
        "sglang": sglang,
        "optim": {"lr": 1e-4},
    }
    return config_file.parse(settings, {})


def words(tmp_path: Path, sglang: dict[str, Any]) -> list[str]:
    return command(server_specs(config(sglang), "127.0.0.1", None, tmp_path)[0])


@pytest.mark.parametrize(
    ("sglang", "share"),
    [({}, "0.1"), ({"mem_fraction": 0.3}, "0.3"), ({"gpus": [0]}, None), ({"gpus": [0], "mem_fraction": 0.7}, "0.7")],
)
def test_a_server_on_a_cpu_leaves_the_trainer_its_memory(tmp_path: Path, sglang: dict[str, Any], share: str | None):
    """SGLang's cache on a CPU is a share of the machine, taken at the start; on a GPU it chooses by itself."""
    found = words(tmp_path, sglang)
    assert ("--mem-fraction-static" in found) == (share is not None)
    if share is not None:
        assert found[found.index("--mem-fraction-static") + 1] == share


@pytest.mark.parametrize(
    ("sglang", "kind"),
    [
        ({"urls": ["http://server:1"], "sync": "distributed"}, Broadcast),
        ({"urls": ["http://server:1"], "sync": "tensor"}, Tensors),
        ({"urls": ["http://server:1"], "sync": "disk"}, Disk),
        ({"sync": "auto"}, SharedMemory),
    ],
)
def test_each_way_of_weights_has_its_transport(sglang: dict[str, Any], kind: type):
    assert type(engines.make_transport(config(sglang))) is kind


def test_servers_on_a_cpu_read_the_memory_of_the_first_rank_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Another rank has no part in an update, and no tensors of it."""
    monkeypatch.setattr(engines, "_api_key", lambda config: "key")
    monkeypatch.setattr(engines, "_start_servers", lambda *given: (None, ["http://127.0.0.1:9"]))
    monkeypatch.setattr(engines.dist, "get_world_size", lambda: 4)
    made = engines.make_sglang_engine(config({"sync": "ipc"}, str(write_family(tmp_path, "mixtral"))), print)
    assert not made.receives_weights
    settings = made._client.settings  # every rank samples with the same servers, and has its part of their room
    assert settings.concurrency == 256


def quantised(folder: Path) -> None:
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(
    ("spoil", "is_loaded"),
    [(None, True), (quantised, False), (lambda folder: (folder / SINGLE).unlink(), False)],
)
def test_servers_hold_what_is_sent_whatever_the_folder_holds(
    spoil: Callable[[Path], object] | None, is_loaded: bool, fp8: bool, tmp_path: Path
):
    """A config that says FP8 for bf16 weights, or files that a server reads otherwise than the trainer, reach none."""
    source = write_family(tmp_path / "model", "glm4_moe", num_nextn_predict_layers=1)
    if spoil is not None:
        spoil(source)
    before = {file.name: file.read_bytes() for file in source.iterdir()}
    (spec,) = server_specs(config({"fp8": fp8}, str(source)), "127.0.0.1", None, tmp_path / "run")
    assert {file.name: file.read_bytes() for file in source.iterdir()} == before
    found = json.loads((spec.model_path / "config.json").read_text())
    assert ("quantization_config" in found) == fp8
    assert (spec.model_path == source) == (is_loaded and not fp8)
    assert ("--load-format" in command(spec)) == (spec.model_path != source)
    if spec.model_path != source:
        assert not any(spec.model_path.glob("*.safetensors"))
        assert found["num_nextn_predict_layers"] == 0  # else a server would speculate with layers that nobody sends
    folder = WeightFolder(tmp_path / "sent", spec.model_path, version=1).finish()
    written = json.loads((folder / "config.json").read_text())
    assert (written.get("quantization_config"), written["num_nextn_predict_layers"]) == (
        found.get("quantization_config"),
        0,
    )


@pytest.mark.parametrize("master", ["2001:db8::7", "[2001:db8::7]", "10.0.0.7", "node7"])
def test_the_way_to_a_master_is_asked_for_at_its_whole_address(master: str, monkeypatch: pytest.MonkeyPatch):
    asked: list[str | None] = []

    def answer(url: str) -> str:
        asked.append(urlsplit(url).hostname)
        return "2001:db8::8"

    monkeypatch.setattr(engines, "own_address", answer)
    monkeypatch.setattr(engines.distributed, "gather_objects", lambda mine: [mine, "2001:db8::9"])
    monkeypatch.setenv("MASTER_ADDR", master)
    for rank in (0, 1):
        monkeypatch.setattr(engines.dist, "get_rank", lambda rank=rank: rank)
        assert engines._find_host([0, 1]) == "2001:db8::8"
    assert asked == [master.strip("[]"), "2001:db8::9", master.strip("[]")]
