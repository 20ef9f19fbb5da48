"""A Slurm of two nodes on this machine: munged, slurmctld and two slurmd, each with its files below one folder.

Needs slurm-wlm and munge, and root; with those a cluster is up in about a second.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from launch_world import until

from megarl.engines.sglang.spec import free_port

NODES = ("n1", "n2")

CONF = """ClusterName=megarl
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
KillWait=5
MinJobAge=3600
SchedulerParameters=sched_interval=2,bf_interval=5,sched_min_interval=0
SlurmdParameters=config_overrides
{nodes}
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:2
"""
NODE = "NodeName={name} NodeAddr=127.0.0.1 NodeHostname={host} Port={port} CPUs=8 RealMemory=16000 State=UNKNOWN"


@dataclass
class Cluster:
    """A running cluster; a context manager."""

    folder: Path
    _daemons: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        """What Slurm's commands need to find this cluster."""
        return {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def __enter__(self) -> Cluster:
        self._write_conf()
        try:
            self._start("munged", "--foreground", "--force", *self._munge_files())
            until(lambda: (self.folder / "munge.socket").exists(), "munged")
            self._start("slurmctld", "-D", "-i", "-f", str(self.folder / "slurm.conf"))
            for node in NODES:
                self._start("slurmd", "-D", "-N", node, "-f", str(self.folder / "slurm.conf"))
            until(lambda: self.run("sinfo", "-h", "-N", "-o", "%t").split() == ["idle"] * len(NODES), "the nodes")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in reversed(self._daemons):
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def run(self, *words: str | Path, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
        """Standard output of a command of Slurm; AssertionError with what it says if it fails."""
        done = subprocess.run(
            list(map(str, words)),
            env={**self.environment, **(env or {})},
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, *words: str | Path, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
        """``sbatch``; the id of the job."""
        return self.run("sbatch", "--parsable", *words, env=env, cwd=cwd).strip().split(";")[0]

    def job(self, job: str) -> dict[str, str]:
        """What ``scontrol show job`` says, by name."""
        words = self.run("scontrol", "--oneliner", "show", "job", job).splitlines()[0].split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, job: str, timeout_s: float) -> dict[str, str]:
        """Until a job has ended."""
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY")
        until(lambda: self.job(job)["JobState"] in ended, f"job {job}", timeout_s)
        return self.job(job)

    def _munge_files(self) -> list[str]:
        (self.folder / "munge.key").write_bytes(os.urandom(128))
        (self.folder / "munge.key").chmod(0o400)
        names = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        return [f"--{option}={self.folder}/munge.{name}" for option, name in names.items()]

    def _write_conf(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o755)
        host = socket.gethostname().split(".")[0]
        port, *ports = (free_port("127.0.0.1") for _ in range(1 + len(NODES)))
        nodes = [NODE.format(name=name, host=host, port=own) for name, own in zip(NODES, ports, strict=True)]
        text = CONF.format(host=host, port=port, folder=self.folder, nodes="\n".join(nodes))
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "state").mkdir(exist_ok=True)

    def _start(self, *words: str) -> None:
        log = (self.folder / f"{words[0]}.out").open("ab")
        self._daemons.append(
            subprocess.Popen(words, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        )
