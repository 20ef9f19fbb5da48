"""The table of a configuration that says on which machines a run is started."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from megarl.config.tables.base import Count, Table

Where = Literal["local", "colocated", "disaggregated", "heterogeneous"]


class LaunchConfig(Table):
    """[launch]: where `megarl launch` starts a run, and what `megarl plan` reckons with; see docs/launch.md."""

    layout: Where = "local"
    """local: one machine, no Slurm; colocated: servers beside the trainer, on its GPUs; disaggregated: servers on nodes
    of their own in the same job; heterogeneous: the same as the second component of a heterogeneous job."""
    nodes: PositiveInt = 1
    """Nodes of the trainer."""
    ranks_per_node: PositiveInt = 1
    """Ranks of the trainer on each of its nodes; one for each GPU, where there are GPUs."""
    server_nodes: Count = 0
    """Nodes that hold SGLang servers and nothing else, sglang.servers on each."""
    gpu_memory_gib: PositiveFloat | None = None
    """Memory of one GPU for `megarl plan`, GiB; without it nothing is refused for want of memory."""
    max_restarts: Count = 3
    """Starts of the trainer in a row, after one that died, without a new checkpoint; for servers see
    sglang.max_restarts."""
    stop_grace_s: float = Field(default=240.0, gt=0)
    """Seconds between the request to stop and the moment when what has not ended is killed: time for a step's updates
    and a checkpoint, and less than the scripts' --signal=B:USR1@300."""

    @property
    def apart(self) -> bool:
        """Whether servers have nodes of their own."""
        return self.layout in ("disaggregated", "heterogeneous")

    @property
    def ranks(self) -> int:
        """Ranks of the trainer in all."""
        return self.nodes * self.ranks_per_node

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if self.layout == "local" and self.nodes > 1:
            raise ValueError(f'nodes: found {self.nodes} with layout = "local", which is one machine; set a layout')
        if self.apart != bool(self.server_nodes):
            expected = "at least 1" if self.apart else "0"
            raise ValueError(
                f'server_nodes: found {self.server_nodes} with layout = "{self.layout}", expected {expected}'
            )
        return self
