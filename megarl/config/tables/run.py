"""The tables about the run as a whole and what it leaves: [run], [eval], [checkpoint], [log]."""

from __future__ import annotations

from pydantic import Field, PositiveFloat, PositiveInt

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
    """Ask PyTorch and Megatron for deterministic kernels; slower on a GPU."""


class EvalConfig(Table):
    """[eval]: sampling on held-out prompts."""

    every: Count = 0
    """Global steps between evaluations; 0 = never."""
    samples: PositiveInt = 1
    """Responses per prompt."""
    max_prompts: PositiveInt | None = None
    """Use only this many prompts, the first ones; default all."""
    temperature: NonNegative = 1.0
    """Sampling temperature; 0 = greedy."""


class CheckpointConfig(Table):
    """[checkpoint]: what a killed run continues from."""

    every: Count = 0
    """Global steps between checkpoints; 0 = none in between. A run that is asked to stop (Ctrl-C) always saves."""
    at_end: bool = True
    """Save the last step, whatever `every` is; false for a benchmark that needs no weights."""
    keep: PositiveInt = 2
    """How many checkpoints stay on disk, the newest ones."""
    asynchronous: bool = False
    """Write checkpoints in background processes while training continues; needs host memory for a copy."""
    resume: bool = True
    """Continue from the newest checkpoint in run.dir, if there is one; false refuses a folder that holds a run."""


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
