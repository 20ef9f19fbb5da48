"""A fleet whose servers die and come back at every moment of its life; the servers are stand-ins that start fast."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import torch
from sglang_faulty import kill_9
from sglang_stand_in import MAGIC

from megarl.config.tables.rollout import SGLangConfig
from megarl.core.types import SampleRequest
from megarl.data.tiny import write_tiny_model
from megarl.engines.protocol import sample_each
from megarl.engines.sglang import client as sglang_client
from megarl.engines.sglang import fleet as sglang_fleet
from megarl.engines.sglang import server as sglang_server
from megarl.engines.sglang.client import Call, SGLangClient
from megarl.engines.sglang.fleet import Fleet
from megarl.engines.sglang.member import Member
from megarl.engines.sglang.server import Server
from megarl.engines.sglang.spec import ServerSpec, free_port
from megarl.engines.sglang.transports import ipc
from megarl.engines.sglang.transports import sender as sglang_sync
from megarl.engines.sglang.transports.broadcast import Broadcast
from megarl.engines.sglang.transports.folder import Disk
from megarl.engines.sglang.transports.ipc import SharedMemory
from megarl.engines.sglang.transports.protocol import Tensors, payload_of
from megarl.engines.weights import Bucket, WeightForm, checkpoint_shapes
from megarl.errors import ConfigError, RolloutError, WeightSyncError

STAND_IN = Path(__file__).with_name("sglang_stand_in.py")
FORM = WeightForm(torch.float32)
PATIENCE = {"start_deadline_s": 180.0, "checksums": False}
WAIT_S = 900.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("fleet") / "model", num_layers=1, num_experts=2)


shapes_of = cache(checkpoint_shapes)


def weights(model: Path, value: float) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of a version: every tensor begins with the two numbers that a stand-in looks for."""
    for name, shape in shapes_of(model).items():
        tensor = torch.zeros(shape)
        tensor.view(-1)[:2] = torch.tensor([MAGIC, value])
        yield name, tensor


@dataclass
class World:
    """A fleet of stand-ins, each with a folder."""

    model: Path
    root: Path
    told: list[str] = field(default_factory=list)
    fleets: list[Fleet] = field(default_factory=list)

    def folder(self, index: int) -> Path:
        return self.root / str(index)

    def control(self, index: int, **words: Any) -> None:
        self.folder(index).mkdir(exist_ok=True)
        part = self.folder(index) / "control.part"
        part.write_text(json.dumps(words))
        part.rename(self.folder(index) / "control.json")

    def events(self, index: int, *names: str) -> list[dict[str, Any]]:
        whole, _, _ = (self.folder(index) / "events.jsonl").read_text().rpartition("\n")  # the last may be half written
        return [event for event in map(json.loads, whole.splitlines()) if not names or event["event"] in names]

    def start(self, number: int = 2, urls: tuple[str, ...] = (), **fields: Any) -> Fleet:
        settings = {name: fields.pop(name) for name in ("checksums", "deltas", "max_restarts", "tp") if name in fields}
        fields = {"settings": SGLangConfig(**PATIENCE | settings), "poll_s": 0.02, "health_s": 1000.0, **fields}
        for index in range(number):
            self.control(index) if not self.folder(index).exists() else None
        specs = [
            ServerSpec(self.model, sys.executable, "float32", self.folder(index) / "log", api_key=fields.get("api_key"))
            for index in range(number)
        ]
        fleet = Fleet(specs, urls, source=self.model, tell=self.told.append, **fields)
        self.fleets.append(fleet)
        fleet.start()
        return fleet

    def update(self, fleet: Fleet, version: int) -> None:
        fleet.update(weights(self.model, version), version, FORM)

    def until(self, holds: Callable[[], object]) -> None:
        end = time.monotonic() + WAIT_S
        while not holds():
            assert time.monotonic() < end, self.told
            time.sleep(0.01)

    def kill(self, fleet: Fleet, index: int) -> None:
        """Kill a server, and wait until its keeper has seen it."""
        member, before = fleet.members[index], fleet.members[index].restarts
        kill_9(process_of(member))
        self.until(lambda: member.restarts > before)

    def hang(self, index: int, path: str, member: Member, patch: pytest.MonkeyPatch) -> None:
        """Let a server hang in a step: its deadline is over when the step has begun, and all others have time."""
        world, before, in_thread = self, len(self.events(index, path)), sglang_sync.in_thread

        class Exchange:
            def __init__(self, step: partial[Any]) -> None:
                http, _, asked, *_ = step.args
                self.hangs = asked == f"/{path}" and str(http.base_url).strip("/") == member.url
                self.future = in_thread(step)

            def result(self, timeout_s: float) -> Any:
                while self.hangs:
                    with suppress(TimeoutError):
                        return self.future.result(0.02)
                    is_joining = bool(world.events(0, "joining")) or not path.startswith("init")  # all others are there
                    if len(world.events(index, path)) > before and is_joining:
                        raise TimeoutError
                return self.future.result(timeout_s)

        patch.setattr(sglang_sync, "in_thread", Exchange)
        self.control(index, hold=path)

    def until_back(self, fleet: Fleet, version: int) -> None:
        self.until(lambda: all(m.holds is not None and m.holds.version == version for m in fleet.members))
        for member in fleet.members:
            assert self.ask(member) == [str(version), [version]]

    def ask(self, member: Member) -> list[Any]:
        """Name and number of the weights that a server samples with."""
        headers = {"authorization": f"Bearer {member.fleet.api_key}"}
        return httpx.post(f"{member.url}/generate", json={}, headers=headers, timeout=WAIT_S).json()["is"]


def process_of(member: Member) -> Server:
    return member.process


STEPS = (
    "pause_generation",
    "begin_weight_update",
    "update_weights_from_tensor",
    "end_weight_update",
    "flush_cache",
    "update_weight_version",
    "model_info",
    "weights_checker",
    "continue_generation",
)


@pytest.fixture
def world(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    def command(spec: ServerSpec, _: Path | None) -> list[str]:
        words = [str(spec.python), str(STAND_IN), str(spec.port), str(Path(spec.log_file).parent)]
        return [*words, spec.api_key] if spec.api_key else words

    monkeypatch.setattr(sglang_server, "command", command)
    monkeypatch.setattr(sglang_fleet, "checkpoint_shapes", shapes_of)  # read once
    monkeypatch.setattr("megarl.engines.weights.BUCKET_BYTES", 1 << 14)  # several buckets
    monkeypatch.setattr(sglang_sync, "CONTROL_S", WAIT_S)
    made = World(model, tmp_path)
    yield made
    print("\n".join(made.told))
    for fleet in made.fleets:
        fleet.close()
        assert not any(member.process.members() for member in fleet.members if member.process)


def test_an_update_does_not_wait_for_a_server_that_is_down(world: World):
    fleet = world.start()
    world.update(fleet, 1)
    world.control(1, start=1000.0)
    kill_9(process_of(fleet.members[1]))
    world.until(lambda: len(world.events(1, "started")) == 2)
    for version in (2, 3, 4):  # 1000 s to the start, and 180 s of patience
        world.update(fleet, version)
        assert world.ask(fleet.members[0]) == [str(version), [version]]
    assert not fleet.members[1].ready
    world.control(1)
    world.kill(fleet, 1)  # the start that hangs
    world.until_back(fleet, 4)
    assert any("could not be started again" in line for line in world.told)
    assert f"{fleet.members[1].url} is back with weights 4" in world.told[-1]


@pytest.mark.parametrize(("path", "deltas"), [*((path, False) for path in STEPS), ("update_weights_from_tensor", True)])
def test_a_server_may_die_and_hang_in_every_step_of_an_update(
    world: World, path: str, deltas: bool, monkeypatch: pytest.MonkeyPatch
):
    fleet = world.start(checksums=True, deltas=deltas)
    world.update(fleet, 1)
    world.control(1, die_at=path)
    world.update(fleet, 2)
    assert world.ask(fleet.members[0]) == ["2", [2.0]]
    world.until_back(fleet, 2)
    assert fleet.members[1].restarts == 1
    with monkeypatch.context() as patch:
        world.hang(1, path, fleet.members[1], patch)
        world.update(fleet, 3)
    (told,) = [line for line in world.told if "hangs in a weight update, which goes on without it" in line]
    seconds = sglang_sync.WHOLE_S if path in ("weights_checker", "end_weight_update") else WAIT_S
    assert f"({fleet.members[1].url}/{path}: no whole answer within {seconds:.0f} s" in told
    world.control(1)
    world.until_back(fleet, 3)
    world.update(fleet, 4)
    assert [world.ask(member) for member in fleet.members] == [["4", [4.0]]] * 2


@pytest.mark.parametrize("way", ["ipc", "disk", "broadcast", "join", "stranger"])
def test_an_update_goes_on_without_a_late_server_however_weights_travel(
    world: World, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    served = world.start(2).members if way == "stranger" else []
    fields: dict[str, Any] = {
        "ipc": {"transport": SharedMemory()},
        "disk": {"transport": Disk(), "copies": tmp_path / "weights"},
        "stranger": {"number": 0, "urls": tuple(member.url for member in served)},
    }.get(way, {"transport": Broadcast()})
    joins, shares = "init_weights_update_group", "update_weights_from_distributed"  # nobody is in it before all are
    paths = {"disk": "update_weights_from_disk", "broadcast": shares, "join": joins}
    path = paths.get(way, "update_weights_from_tensor")
    fleet = world.start(**fields)
    if way != "join":
        world.update(fleet, 1)
    with monkeypatch.context() as patch:
        world.hang(1, path, fleet.members[1], patch)
        world.update(fleet, 2)
    assert any("in a weight update, which goes on without it" in line for line in world.told)
    assert world.ask(fleet.members[0]) == ["2", [2.0]]
    world.control(1)  # the late server, ended and started again, may be ready by now
    world.until_back(fleet, 2)


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        ("no plugin", "gets whole updates in spite of sglang.deltas"),
        ("lost bucket", "takes no delta, and gets everything: HTTP 200"),
        ("forgets", "but the server holds None: send everything"),
        ("other byte", "send everything"),
        ("restart", "is back with weights 1"),
        (None, None),
    ],
)
def test_a_server_with_another_base_than_the_delta_gets_everything(world: World, fault: str | None, line: str | None):
    world.control(1, deltas=fault if fault == "no plugin" else None)
    fleet = world.start(deltas=True, checksums=True)
    world.update(fleet, 1)
    if fault == "restart":
        world.kill(fleet, 1)
        world.until_back(fleet, 1)  # with the copy, which is the base
    elif fault != "no plugin":
        world.control(1, deltas=fault)
    num_told = [len(world.events(index, "received")) for index in (0, 1)]
    for version in (2, 3):
        world.update(fleet, version)
        assert [world.ask(member) for member in fleet.members] == [[str(version), [version]]] * 2
    lines = [told for told in world.told if fleet.members[1].url in told and "is dead" not in told]
    assert [line in told for told in lines] == [True] * len(lines)
    assert len(lines) == (fault is not None)
    assert not any(fleet.members[0].url in told for told in world.told)
    sizes = [[event["bytes"] for event in world.events(index, "received")[num_told[index] :]] for index in (0, 1)]
    buckets = len(sizes[0]) // 2
    whole = sum(event["bytes"] for event in world.events(0, "received")[:buckets])
    assert sum(sizes[0]) < whole / 2  # of two updates
    if fault != "no plugin":
        assert sum(sizes[1][-buckets:]) == sum(sizes[0][-buckets:])  # the next update is a delta again


@pytest.mark.parametrize("path", ["server_info", "update_weights_from_tensor"])
def test_a_server_may_die_again_while_it_comes_back(world: World, path: str):
    fleet = world.start()
    world.update(fleet, 1)
    world.control(1, die_at=path)
    world.kill(fleet, 1)
    world.until_back(fleet, 1)
    assert fleet.members[1].restarts == 2
    assert not fleet.prove()


def test_a_server_that_comes_back_in_the_middle_of_an_update_gets_the_new_weights_after_it(world: World):
    fleet = world.start()
    world.update(fleet, 1)
    world.control(1, start=0.3)
    world.kill(fleet, 1)

    def slow() -> Iterator[tuple[str, torch.Tensor]]:
        for number, item in enumerate(weights(world.model, 2)):
            if number == 5:
                world.until(lambda: fleet.members[1].ready)
                time.sleep(0.1)  # looks of its keeper
            yield item

    fleet.update(slow(), 2, FORM)
    world.until_back(fleet, 2)
    pid = world.events(1)[-1]["pid"]
    loaded = [event for event in world.events(1, "flush_cache") if event["pid"] == pid]
    assert [event["weights"] for event in loaded] == [[2.0]]  # never those of the update before


@pytest.mark.parametrize("way", ["memory", "disk"])
def test_an_update_in_the_middle_of_the_delivery_of_a_copy(world: World, tmp_path: Path, way: str):
    """From memory the delivery ends with its bucket and the update takes the server along; from a folder it is late."""
    fleet = world.start(copies=tmp_path / "spare" if way == "disk" else "memory")
    world.update(fleet, 1)
    path = "update_weights_from_tensor" if way == "memory" else "update_weights_from_disk"
    world.control(1, hold=path)
    before = len(world.events(1))
    world.kill(fleet, 1)
    world.until(lambda: any(event["event"] == path for event in world.events(1)[before:]))

    def let_go() -> None:
        world.until(fleet.updating.is_set)
        time.sleep(1.0)
        world.control(1)

    letting_go = threading.Thread(target=let_go)
    letting_go.start()
    world.update(fleet, 2)
    letting_go.join()
    if way == "memory":
        assert world.ask(fleet.members[1]) == ["2", [2.0]]
    world.until_back(fleet, 2)
    assert fleet.members[1].restarts == 1
    named = [event["version"] for event in world.events(1, "continue_generation") if event["version"] != "default"]
    assert named[-1] == "2"
    assert "1" not in named[1:]  # it is not let in with old weights


def test_close_leaves_no_process_whatever_its_keepers_are_doing(world: World):
    for slow, seen in (("start", "started"), ("update_weights_from_tensor",) * 2, ("server_info",) * 2):
        fleet = world.start()
        world.update(fleet, 1)
        servers = [process_of(member) for member in fleet.members]
        before = len(world.events(1))
        world.control(1, **{slow: 1000.0})
        kill_9(servers[1])
        world.until(lambda at=before, seen=seen: any(e["event"] == seen for e in world.events(1)[at:]))
        fleet.close()
        assert not any(server.members() for server in servers)
        assert not any(member.keeper.is_alive() for member in fleet.members)
        world.control(1)


def test_nothing_starts_while_the_servers_rest(world: World):
    """The trainer has the memory: a server that is starting is ended, and comes back with the next update."""
    fleet = world.start()
    world.update(fleet, 1)
    world.control(1, start=1000.0)
    kill_9(process_of(fleet.members[1]))
    began = len(world.events(1, "started"))
    world.until(lambda: len(world.events(1, "started")) > began)
    fleet.rest()
    assert not process_of(fleet.members[1]).members()
    kill_9(process_of(fleet.members[0]))  # and one that dies while it rests
    world.control(1)
    time.sleep(0.3)
    assert not any(process_of(member).alive for member in fleet.members)
    world.update(fleet, 2)
    world.until_back(fleet, 2)
    fleet.rest()
    assert world.events(0, "release_memory_occupation")
    world.update(fleet, 3)
    assert [world.ask(member) for member in fleet.members] == [["3", [3.0]]] * 2


def test_a_server_that_always_dies_is_given_up_and_the_others_go_on(world: World):
    fleet = world.start(max_restarts=2)
    world.update(fleet, 1)
    (world.folder(1) / "events.jsonl").unlink()
    (world.folder(1) / "events.jsonl").mkdir()  # the stand-in cannot write there: it ends at once
    process_of(fleet.members[1]).kill()
    world.until(lambda: any("died 3 times and is given up" in line for line in world.told))
    world.update(fleet, 2)
    assert world.ask(fleet.members[0]) == ["2", [2.0]]
    assert not fleet.prove()


class TestStart:
    def test_none_that_starts_is_an_error_with_the_cause(self, world: World):
        for index in (0, 1):
            world.control(index, die_at="start")
        with pytest.raises(RolloutError, match="ended with exit code 3 before it was ready"):
            world.start()

    def test_with_servers_on_other_nodes_it_waits_for_those_of_this_one(self, world: World):
        fleet = Fleet([], ["http://127.0.0.1:9"], source=world.model, tell=world.told.append)
        world.fleets.append(fleet)
        assert fleet.start(is_only=False) == ["http://127.0.0.1:9"]
        assert isinstance(fleet.failure, RolloutError)
        world.update(fleet, 1)

    def test_what_megarl_cannot_use_is_bad_input(self, world: World):
        with pytest.raises(ConfigError, match="--tp-size 1, expected 2"):
            world.start(tp=2)


def test_a_server_of_somebody_else_with_a_key_is_awaited_and_brought_up_to_date(world: World):
    port = free_port("127.0.0.1")
    url = f"http://127.0.0.1:{port}"
    world.control(7)
    words = [sys.executable, str(STAND_IN), str(port), str(world.folder(7)), "k"]
    fleet = world.start(1, (url,), api_key="k")  # it is not there yet
    assert url in world.told[0]
    world.update(fleet, 1)
    process = subprocess.Popen(words)
    try:
        world.until_back(fleet, 1)
        process.kill()
        process.wait()
        world.update(fleet, 2)
        assert fleet.members[0].url == url
        assert not fleet.members[0].ready
        process = subprocess.Popen(words)
        world.until_back(fleet, 2)
        assert httpx.post(f"{url}/generate", json={}).status_code == 401
        asked = len(world.events(7, "model_info"))
        world.control(7, odd=["model_info"])  # as what stands between may answer
        world.until(lambda: len(world.events(7, "model_info")) > asked + 4)
        world.control(7)
        world.update(fleet, 3)
        world.until_back(fleet, 3)
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("deltas", [False, True])
def test_weights_that_somebody_else_changes_are_found_named_and_sent_again(world: World, deltas: bool):
    fleet = world.start(checksums=True, deltas=deltas)
    world.update(fleet, 1)
    assert not fleet.prove()
    url = fleet.members[1].url
    for path, body in (
        ("pause_generation", {}),
        ("update_weights_from_tensor", None),
        ("continue_generation", {}),
    ):
        bucket = Bucket(weights(world.model, 1.5))
        httpx.post(f"{url}/{path}", json={"serialized_named_tensors": [payload_of(bucket)]} if body is None else body)
    assert world.ask(fleet.members[1]) == ["1", [1.5]]  # the version says nothing of it
    assert fleet.prove()
    found = [line for line in world.told if "does not compute with the weights that it was sent" in line]
    assert len(found) == 1
    assert found[0].startswith(f"{url} ")
    assert "1 checksums are others" in found[0]
    assert [world.ask(member) for member in fleet.members] == [["1", [1.0]]] * 2
    assert not fleet.prove()


@pytest.mark.parametrize("deaf", [(1,), (0, 1)])
def test_an_update_that_servers_confirm_and_do_not_make_is_found_by_default(world: World, deaf: tuple[int, ...]):
    fleet = world.start(checksums=True)
    for version in (1, 1, 2):  # equal weights have equal checksums
        world.update(fleet, version)
    for index in deaf:
        world.control(index, deaf=True)
    message = "did not make it: other weights were sent" if len(deaf) == 2 else "holds other weights than the first"
    for _ in range(2):
        with pytest.raises(WeightSyncError, match=message):
            world.update(fleet, 3)
    for index in deaf:
        world.control(index)
    world.update(fleet, 4)
    assert [world.ask(member) for member in fleet.members] == [["4", [4.0]]] * 2


def test_a_release_without_sessions_is_updated_without_them(world: World):
    world.control(0, info={"version": "0.5.17", "device": "cuda"})
    world.update(old := world.start(1), 3)
    assert world.ask(old.members[0]) == ["3", [3.0]]
    assert not world.events(0, "begin_weight_update", "end_weight_update")


def test_a_server_without_checksums_is_refused_unless_they_are_off(world: World):
    world.control(0, refuse="weights_checker")
    world.update(fleet := world.start(1), 1)
    assert not fleet.prove()
    must = world.start(1, checksums=True)
    with pytest.raises(WeightSyncError, match=r"gives no checksums, HTTP 400.*sglang\.checksums = false"):
        world.update(must, 1)


def test_a_refusal_ends_the_update_and_the_next_one_is_complete(world: World):
    fleet = world.start()
    world.update(fleet, 1)
    with pytest.raises(WeightSyncError, match="tensors are missing"):
        fleet.update([], 2, FORM)
    kill_9(process_of(fleet.members[1]))
    world.until(lambda: fleet.members[1].ready is False)
    assert fleet.last is None
    world.update(fleet, 3)
    world.until_back(fleet, 3)
    flushed, sent = (len(world.events(0, name)) for name in ("flush_cache", "update_weights_from_tensor"))
    world.control(0, refuse="update_weights_from_tensor")
    with pytest.raises(WeightSyncError, match="the server stays paused"):
        world.update(fleet, 4)
    assert len(world.events(0, "update_weights_from_tensor")) == sent + 1  # no bucket follows
    assert len(world.events(0, "flush_cache")) == flushed
    world.control(0)
    world.update(fleet, 5)
    assert [world.ask(member) for member in fleet.members] == [["5", [5.0]]] * 2


def test_a_session_begins_without_a_server_that_is_behind(world: World):
    """It is paused, and would keep its requests waiting."""
    fleet = world.start()
    world.update(fleet, 1)
    world.control(1, hold="update_weights_from_tensor")
    world.kill(fleet, 1)
    world.until(lambda: fleet.members[1].ready)
    client = SGLangClient([member.url for member in fleet.members], SGLangConfig(start_deadline_s=WAIT_S))
    requests = [SampleRequest(np.array([1, 2], np.int32), group, 0, 0) for group in range(6)]
    call = Call(body=lambda _: {"mine": 1}, decode=lambda request, *_: request, version="1")
    assert len(sample_each(partial(client.converse, call=call), requests)) == len(requests)
    assert sum(event["mine"] for event in world.events(0, "generate")) == len(requests)
    assert not any(event["mine"] for event in world.events(1, "generate"))


def test_no_request_meets_other_weights_than_those_it_asks_for(world: World, monkeypatch: pytest.MonkeyPatch):
    """Servers die at random moments, of updates and of revivals too; every answer is of the version of its session."""
    monkeypatch.setattr(sglang_client, "LOSSES", 1000)
    fleet, rng = world.start(3, max_restarts=1000), random.Random(7)

    def kill() -> None:
        killed, end = 0, time.monotonic() + WAIT_S
        while killed < 12 and time.monotonic() < end:
            time.sleep(rng.uniform(0.0, 0.4))
            with suppress(AssertionError, AttributeError, psutil.NoSuchProcess):  # dead already
                kill_9(process_of(rng.choice(fleet.members)))
                killed += 1

    settings = SGLangConfig(concurrency=2, start_deadline_s=WAIT_S)
    client = SGLangClient([member.url for member in fleet.members], settings)
    requests = [SampleRequest(np.array([1, 2], np.int32), group, 0, 0) for group in range(30)]
    killer, version = threading.Thread(target=kill), 0
    killer.start()
    while killer.is_alive() or version < 3:
        version += 1
        world.update(fleet, version)
        answers: list[Any] = []

        def decode(request: SampleRequest, answer: Any, *_: object, answers: list[Any] = answers) -> Any:
            answers.append(answer["is"])
            return request

        ask = partial(client.converse, call=Call(lambda request: {}, decode, version=str(version)))
        assert len(sample_each(ask, requests)) == len(requests)
        assert answers == [[str(version), [version]]] * len(requests)
    killer.join()
    world.until(lambda: sum(member.restarts for member in fleet.members) > 3)
    world.until_back(fleet, version)


@pytest.mark.parametrize("way", ["tensor", "ipc"])
def test_a_bucket_is_sent_while_the_next_one_is_made(world: World, way: str):
    """The server keeps the first one until half of the third is gathered: it would wait for ever otherwise."""
    path = "update_weights_from_tensor"
    world.control(0, hold=path)
    fleet = world.start(1, transport=SharedMemory() if way == "ipc" else Tensors())
    alive, gathered = [0], [0]
    sizes = [4 * math.prod(shape) for shape in shapes_of(world.model).values()]

    def slow() -> Iterator[tuple[str, torch.Tensor]]:
        for item in weights(world.model, 1):
            yield item
            gathered[0] += item[1].nbytes
            if gathered[0] > 1.5 * (1 << 14) and not alive[0]:
                world.until(lambda: world.events(0, path))
                assert not world.events(0, "received")
                alive[0] = len(world.events(0, path))
                world.control(0)

    fleet.update(slow(), 1, FORM)
    assert alive == [1]
    received = world.events(0, "received")
    assert len(received) > 4
    assert sum(event["bytes"] for event in received) == sum(sizes)
    assert {event["shared"] for event in received} == {way == "ipc"}
    order = [event["event"] for event in world.events(0) if event["event"] in (path, "received", "flush_cache")]
    assert order == [path, "received"] * len(received) + ["flush_cache"]  # one after the other
    assert world.ask(fleet.members[0]) == ["1", [1.0]]
    assert not list(ipc.SHARED_MEMORY.glob(f"torch_{os.getpid()}_*"))


def test_without_a_copy_a_server_that_was_lost_gets_no_requests_until_the_next_update(world: World):
    fleet = world.start(2, copies="none")
    world.update(fleet, 1)
    assert fleet.last.copy is None
    world.kill(fleet, 1)
    world.until(lambda: fleet.members[1].ready)
    time.sleep(0.2)  # looks of its keeper
    assert world.ask(fleet.members[1]) == ["default", [0.0]]  # which no rollout accepts
    assert not fleet.prove()
    world.update(fleet, 2)
    assert [world.ask(member) for member in fleet.members] == [["2", [2.0]]] * 2
