"""Nodes, addresses and ports of a job, from what Slurm says."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from ports import has_ipv6_loopback
from run_configs import SMALLEST

from megarl.config import Config
from megarl.config.file import parse, split_overrides
from megarl.errors import ConfigError
from megarl.ops.launch import node
from megarl.ops.launch.steps import addresses_of, find, free_ports, read_topology
from megarl.ops.launch.supervisor import Supervisor

TABLE: dict[str, Any] = {**SMALLEST, "rollout": {**SMALLEST["rollout"], "engine": "sglang"}}
ADDRESSES = {"a1": "10.0.0.1", "a2": "10.0.0.2", "b1": "10.0.1.1"}


def config(**launch: Any) -> Config:
    return parse({**TABLE, "launch": launch, "sglang": {"servers": 2}})


def slurm(words: Sequence[str]) -> str:
    """What scontrol prints."""
    if words[:3] == ["scontrol", "show", "hostnames"]:
        return {"a[1-2]": "a1\na2\n", "a[1-2],b1": "a1\na2\nb1\n", "b1": "b1\n"}[words[3]]
    assert words[:4] == ["scontrol", "--oneliner", "show", "node"]
    return f"NodeName={words[4]} NodeAddr={ADDRESSES[words[4]]} NodeHostName={words[4]} Port=1"


JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a[1-2],b1"}


def test_trainer_nodes_come_first_and_servers_get_ports_of_their_own() -> None:
    found = find(config(layout="disaggregated", nodes=2, server_nodes=1, ranks_per_node=8), JOB, slurm)
    assert [each.name for each in found.trainers] == ["a1", "a2"]
    assert found.trainers[0].address == "10.0.0.1"
    assert found.urls == [f"http://10.0.1.1:{port}" for port in found.server_ports]
    assert len({found.master_port, *found.server_ports}) == 3
    launch = {"topology": asdict(found), "logs": "/run/logs/7-0/attempt1", "command": ["train", "c.toml"]}
    assert read_topology(json.loads(json.dumps(launch))) == found
    first, second = (" ".join(node.torchrun(launch, index)) for index in (0, 1))
    assert "--nnodes 2 --node-rank 1 --nproc-per-node 8 --max-restarts 0 --master-addr 10.0.0.1" in second
    assert f"--master-port {found.master_port}" in first
    assert first.endswith("--redirects 3 --tee 0:3 --module megarl.cli train c.toml")
    assert "--tee" not in second  # its first rank is not the run's


def test_the_components_of_a_heterogeneous_job() -> None:
    env = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a[1-2]", "SLURM_HET_SIZE": "2"}
    env |= {"SLURM_JOB_NODELIST_HET_GROUP_0": "a[1-2]", "SLURM_JOB_NODELIST_HET_GROUP_1": "b1"}
    found = find(config(layout="heterogeneous", nodes=2, server_nodes=1), env, slurm)
    assert found.het
    assert [each.name for each in (*found.trainers, *found.servers)] == ["a1", "a2", "b1"]
    with pytest.raises(ConfigError, match="found a Slurm job of 1 components, expected 2"):
        find(config(layout="heterogeneous", nodes=2, server_nodes=1), JOB, slurm)


def test_a_job_of_other_size_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"found 3 nodes in Slurm job 7 \(a1 a2 b1\), .* 2 \+ 2; .* --nodes 4"):
        find(config(layout="disaggregated", nodes=2, server_nodes=2), JOB, slurm)
    with pytest.raises(ConfigError, match=r"found 2 nodes .* = 3 \+ 0; submit with --nodes 3 "):
        find(config(layout="colocated", nodes=3), {**JOB, "SLURM_JOB_NODELIST": "a[1-2]"}, slurm)
    with pytest.raises(ConfigError, match=r"found 3 nodes .* = 2 \+ 0; submit with --nodes 2 "):
        find(config(layout="colocated", nodes=2), JOB, slurm)
    with pytest.raises(ConfigError, match=r"outside of a Slurm job; submit colocated\.sbatch"):
        find(config(layout="colocated", nodes=2), {}, slurm)


def test_names_need_not_resolve_but_addresses_must_be_of_use() -> None:
    assert addresses_of(["a1", "b1"], {}, slurm) == {"a1": "10.0.0.1", "b1": "10.0.1.1"}
    for ipv6 in ("fd00::1", "[fd00::1]"):
        given = {"MEGARL_ADDRESSES": f"a1=192.168.0.9,b1={ipv6}"}
        assert addresses_of(["a1", "b1"], given, slurm) == {"a1": "192.168.0.9", "b1": "fd00::1"}
    with pytest.raises(ConfigError, match=r"node x has the address nowhere\.invalid, which does not resolve"):
        addresses_of(["x"], {"MEGARL_ADDRESSES": "x=nowhere.invalid"}, slurm)


def test_a_node_that_takes_its_own_name_for_the_loopback_address_is_asked_how_it_reaches_the_others() -> None:
    found = addresses_of(["a", "b"], {"MEGARL_ADDRESSES": "a=127.0.1.1,b=127.0.0.1"}, slurm)
    assert found == {"a": "127.0.1.1", "b": "127.0.0.1"}  # one machine: nothing else is there
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no route to anywhere")
        own = probe.getsockname()[0]
    assert addresses_of(["a", "b"], {"MEGARL_ADDRESSES": "a=127.0.1.1,b=192.0.2.1"}, slurm)["a"] == own


def test_ports_that_somebody_listens_on_are_passed_over_and_jobs_begin_elsewhere() -> None:
    first = free_ports(3, job=5)
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a connection may just have left it
        taken.bind(("", first[0]))
        taken.listen()
        assert free_ports(3, job=5)[0] != first[0]
    if has_ipv6_loopback():
        with socket.create_server(("::1", first[0]), family=socket.AF_INET6):
            assert free_ports(3, job=5)[0] != first[0]
    assert not set(free_ports(20, job=5)) & set(free_ports(20, job=6))
    assert free_ports(1, job=5, attempt=1) != first[:1]


def test_servers_and_trainer_read_the_same_file_and_only_the_trainer_meets_urls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = {**TABLE, "run": {"steps": 1, "dir": str(tmp_path / "run")}, "sglang": {"servers": 2, "gpus": [0, 1]}}
    table["launch"] = {"layout": "disaggregated", "nodes": 2, "server_nodes": 1}
    monkeypatch.setattr(os, "environ", {**os.environ})
    supervisor = Supervisor(parse(table), ["train", "--optim.lr", "0.5", "c.toml"])
    supervisor.folder.mkdir()
    supervisor.logs, supervisor.launch_file = tmp_path / "run" / "logs", tmp_path / "run" / "launch.json"
    supervisor._set_topology(find(supervisor.config, JOB, slurm))
    supervisor._write("starting")
    text = supervisor.launch_file.read_text()
    assert os.environ["MEGARL_API_KEY"] not in text
    launch = json.loads(text)
    for command, urls, gpus in (("command", supervisor.topology.urls, []), ("server_command", None, None)):
        rest, overrides = split_overrides(launch[command])
        assert rest == ["train", "c.toml"]
        assert overrides["optim.lr"] == 0.5
        assert overrides["sglang.api_key_env"] == "MEGARL_API_KEY"
        assert overrides.get("sglang.urls") == urls
        assert overrides.get("sglang.gpus") == gpus
        parse(table, overrides)  # and goes together
