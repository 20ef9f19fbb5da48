"""The tables about the run as a whole: [run], [eval], [checkpoint], [launch], [log]."""

from collections.abc import Iterable
from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from megarl.config.rows import Row
from megarl.config.tables.base import Count, NonNegative, Table


class RunConfig(Table):
    """[run]: the run as a whole."""

    name: str = Field(default="run", min_length=1)
    """Name of the run, shown in logs and reports."""
    dir: str | None = None
    """Folder for metrics, checkpoints and the resolved configuration; default runs/<name>."""
    seed: Count = 0
    """Seed of everything random: prompt order, sampling, initial weights that no checkpoint gives."""
    steps: PositiveInt
    """Global steps. A step samples prompts_per_step * group_size responses and trains on them."""
    collective_timeout_s: PositiveFloat | None = None
    """Longest time that a rank waits for the others before the run ends; default 1800, with SGLang servers longer than
    a rank may wait for one."""
    deterministic: bool = False
    """Ask PyTorch, Megatron, Transformer Engine, cuBLAS and NCCL for deterministic kernels; slower on a GPU."""


class EvalConfig(Table):
    """[eval]: sampling on held-out prompts, and on further benchmarks."""

    every: Count = 0
    """Global steps between evaluations; 0 = never."""
    samples: PositiveInt = 1
    """Responses per prompt."""
    max_prompts: PositiveInt | None = None
    """Use only this many prompts, the first ones; default all."""
    temperature: NonNegative = 1.0
    """Sampling temperature; 0 = greedy."""
    sets: dict[str, str] = {}
    """Benchmarks besides data.heldout, name = source: as NAME=SOURCE of `megarl eval --data`."""

    def rows(self) -> Iterable[Row]:
        for name in {"heldout", "pooled"} & {*self.sets}:
            yield True, f"sets: found the name {name}, which means something else", "choose another name"


class CheckpointConfig(Table):
    """[checkpoint]: what a killed run continues from."""

    every: Count = 0
    """Global steps between checkpoints; 0 = none in between. A run that is asked to stop (Ctrl-C) always saves."""
    at_end: bool = True
    """Save the last step, whatever `every` is; false for a benchmark that needs no weights."""
    keep: PositiveInt = 2
    """How many checkpoints stay on disk, the newest ones; those of keep_every and keep_best besides."""
    keep_every: Count = 0
    """Checkpoints of these steps stay, for later evaluation: multiples of `every`; 0 = none."""
    keep_best: str | None = None
    """The step with the best pass rate so far is saved and stays: on this benchmark, or "pooled" over all."""
    asynchronous: bool = False
    """Write checkpoints in background processes while training continues; needs host memory for a copy."""
    verify_gib: NonNegative = 64.0
    """GiB that each rank reads to compare a checkpoint with its manifest before it is loaded. Of a larger one, random
    files are compared, and the names and sizes of all."""
    resume: bool = True
    """Continue from the newest checkpoint in run.dir, if there is one; false refuses a folder that holds a run."""
    accept_inputs: list[str] = []
    """Inputs that may differ from those that the run began with, each as the error names it: "NAME:DIGEST"."""


class LaunchConfig(Table):
    """[launch]: where `megarl launch` starts a run, and what `megarl plan` calculates with; see docs/launch.md."""

    layout: Literal["local", "colocated", "disaggregated", "heterogeneous"] = "local"
    """local: one machine, no Slurm; colocated: servers beside the trainer, on its GPUs; disaggregated: servers on nodes
    of their own in the same job; heterogeneous: the same as the second component of a heterogeneous job."""
    nodes: PositiveInt = 1
    """Nodes of the trainer."""
    ranks_per_node: PositiveInt = 1
    """Ranks of the trainer on each of its nodes; one for each GPU, where there are GPUs."""
    server_nodes: Count = 0
    """Nodes that hold SGLang servers and nothing else, sglang.servers on each."""
    gpu_memory_gib: PositiveFloat | None = None
    """Memory of one GPU for `megarl plan`, GiB. Without it, plan refuses nothing for lack of memory."""
    max_restarts: Count = 3
    """Most restarts of a trainer that dies, in a row without a new checkpoint; for servers see
    sglang.max_restarts."""
    stop_grace_s: PositiveFloat = 240.0
    """Seconds from the request to stop until processes that still run are killed. It must be enough for a step's
    updates and a checkpoint, and less than the 300 s of --signal=B:USR1@300 in the scripts."""

    @property
    def apart(self) -> bool:
        """Whether servers have nodes of their own."""
        return self.layout in ("disaggregated", "heterogeneous")

    @property
    def ranks(self) -> int:
        """Ranks of the trainer in all."""
        return self.nodes * self.ranks_per_node

    def rows(self) -> Iterable[Row]:
        yield (
            self.layout == "local" and self.nodes > 1,
            f'nodes: found {self.nodes} with layout = "local", which is one machine',
            "set a layout",
        )
        expected = "at least 1" if self.apart else "0"
        yield (
            self.apart != bool(self.server_nodes),
            f'server_nodes: found {self.server_nodes} with layout = "{self.layout}", expected {expected}',
        )


class LogConfig(Table):
    """[log]: where metrics go besides metrics.jsonl."""

    tensorboard: bool = True
    """Write TensorBoard event files below run.dir."""
    wandb_project: str | None = None
    """Also log to this Weights & Biases project; default none."""
    hang_s: PositiveFloat = 900.0
    """A rank without progress for this long writes the stacks of its threads below run.dir/ranks; seconds."""
    traces_every: Count = 0
    """Steps between dumps of the routes into run.dir/traces, for `megarl trace`; 0 = never."""
    samples_per_step: Literal["all"] | Count = 4
    """Responses of each step to store with their texts in run.dir/responses.jsonl.gz, for `megarl samples` and the
    report: so many of those that the first rank drew, and the first of any rank that failed, or "all" of all ranks;
    0 = none."""
    objective_every: Count = 1
    """Steps between the objective's statistics (ratio, clip/*, tis/*, kl/*, gap/*, first_order/*); 0 = never. Losses,
    counts, rewards and what tripwires watch are logged in every step."""
    variance_every: Count = 0
    """Steps between measurements of the gradient's variance and its best baseline (variance/*, baseline/*), each of
    which takes one more forward and backward pass; 0 = never."""

    def writes_traces(self, done: int) -> bool:
        """Whether step ``done``, from 1, dumps its routes."""
        return bool(self.traces_every) and done % self.traces_every == 0
