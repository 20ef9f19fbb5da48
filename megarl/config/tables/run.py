"""The tables about the run as a whole: [run], [eval], [checkpoint], [launch], [log]."""

from collections.abc import Iterable
from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from megarl.config.tables.base import Count, NonNegative, Row, Table

SINKS = ("tensorboard", "wandb", "mlflow")


class RunConfig(Table):
    """[run]: the run as a whole."""

    name: str = Field(default="run", min_length=1)
    """Name of the run, shown in logs and reports."""
    dir: str | None = None
    """Folder for metrics, checkpoints and the resolved configuration; default runs/<name>."""
    seed: Count = 0
    """Seed of everything random: prompt order, sampling, initial weights without a checkpoint."""
    steps: PositiveInt
    """Global steps. A step samples prompts_per_step * group_size responses and trains on the responses."""
    collective_timeout_s: PositiveFloat | None = None
    """Longest wait of a rank for other ranks before the run ends; seconds. Default 1800, and with SGLang servers more
    than the longest wait for a server."""
    deterministic: bool = False
    """Ask PyTorch, Megatron, Transformer Engine, cuBLAS and NCCL for deterministic kernels; slower on a GPU."""


class EvalConfig(Table):
    """[eval]: sampling on held-out prompts, and on further benchmarks."""

    every: Count = 0
    """Global steps between evaluations; 0 = never."""
    samples: PositiveInt = 1
    """Responses per prompt."""
    max_prompts: PositiveInt | None = None
    """Use only the first prompts, up to this number; default all."""
    temperature: NonNegative = 1.0
    """Sampling temperature; 0 = greedy."""
    sets: dict[str, str] = {}
    """Benchmarks besides data.heldout, name = source: as NAME=SOURCE of `megarl eval --data`."""

    def rows(self) -> Iterable[Row]:
        for name in {"heldout", "pooled"} & {*self.sets}:
            yield self.row("reserved_set", True, reserved=name)


class CheckpointConfig(Table):
    """[checkpoint]: saved states from which a killed run continues."""

    every: Count = 0
    """Global steps between checkpoints; 0 = only at the end. A run asked to stop (Ctrl-C) always saves."""
    at_end: bool = True
    """Save the last step, for any value of `every`; false for a benchmark that needs no weights."""
    keep: PositiveInt = 2
    """Number of newest checkpoints that stay on disk, in addition to checkpoints of keep_every."""
    keep_every: Count = 0
    """Keep checkpoints of steps that are multiples of this number, a multiple of `every`, for later evaluation; 0 = no
    extra checkpoints."""
    asynchronous: bool = False
    """Write checkpoints in background processes while training continues; needs host memory for a copy."""
    resume: bool = True
    """Continue from the newest checkpoint in run.dir, if present; false refuses a folder that holds a run."""


class LaunchConfig(Table):
    """[launch]: nodes and ranks for `megarl launch` and `megarl plan`; see docs/launch.md."""

    layout: Literal["local", "colocated", "disaggregated", "heterogeneous"] = "local"
    """local: one machine, no Slurm; colocated: servers on the trainer's GPUs; disaggregated: servers on separate nodes
    of the job; heterogeneous: servers in the second component of a heterogeneous job."""
    nodes: PositiveInt = 1
    """Nodes of the trainer."""
    ranks_per_node: PositiveInt = 1
    """Ranks of the trainer on a node; on GPU nodes one rank per GPU."""
    server_nodes: Count = 0
    """Nodes that hold only SGLang servers, sglang.servers per node."""
    gpu_memory_gib: PositiveFloat | None = None
    """Memory of one GPU for `megarl plan`, GiB. Without a value, plan refuses nothing for lack of memory."""
    max_restarts: Count = 3
    """Most restarts of a trainer in a row without a new checkpoint; for servers see sglang.max_restarts."""
    stop_grace_s: PositiveFloat = 240.0
    """Seconds from the request to stop until running processes are killed. Choose enough for the updates of a step and
    a checkpoint, and less than the 300 s of --signal=B:USR1@300 in the scripts."""

    @property
    def apart(self) -> bool:
        """Whether servers have nodes of their own."""
        return self.layout in ("disaggregated", "heterogeneous")

    @property
    def ranks(self) -> int:
        """Ranks of the trainer in all."""
        return self.nodes * self.ranks_per_node

    def rows(self) -> Iterable[Row]:
        yield from self.only_with('another layout than "local", which is one machine', self.layout != "local", "nodes")
        expected = "at least 1" if self.apart else "0"
        yield self.row("server_nodes", self.apart != bool(self.server_nodes), expected=expected)


class LogConfig(Table):
    """[log]: where metrics go besides metrics.jsonl."""

    sinks: list[str] = ["tensorboard"]
    """Where records go besides metrics.jsonl: "tensorboard", "wandb", "mlflow", or your own as "package.module:sink";
    see docs/sinks.md."""
    project: str | None = None
    """Project of Weights & Biases, experiment of MLflow; default: as the packages' environment variables say."""
    hang_s: PositiveFloat = 900.0
    """A rank without progress for this long writes the stacks of its threads below run.dir/ranks; seconds."""
    traces_every: Count = 0
    """Steps between dumps of the routes into run.dir/traces, for `megarl trace`; 0 = never."""
    samples_per_step: Literal["all"] | Count = 4
    """Responses of each step to store with their texts in run.dir/responses.jsonl.gz, for `megarl samples` and the
    report: a number of responses of the first rank, plus the first failed response of any rank; "all": all responses of
    all ranks; 0: no responses."""

    def rows(self) -> Iterable[Row]:
        for name in self.sinks:
            is_wrong = (":" not in name and name not in SINKS) or self.sinks.count(name) > 1
            yield self.row("sink", is_wrong, name=name)

    def writes_traces(self, done: int) -> bool:
        """Whether step ``done``, from 1, dumps its routes."""
        return bool(self.traces_every) and done % self.traces_every == 0
