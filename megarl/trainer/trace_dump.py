"""Writes the routes of a step to files: the engine's routes, and the choice of the training routers.

``megarl trace diff`` on the two files shows where the engines disagree, layer by layer.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from megarl.core.types import Rollout
from megarl.errors import ConfigError, TraceError
from megarl.megatron import distributed
from megarl.megatron.policy import Policy
from megarl.megatron.rollout_routes import Placement, exchange
from megarl.routes import RoutingTrace
from megarl.routes.trace_file import TracedSequence, TraceInfo, from_rollout, write_traces
from megarl.trainer.mini_batch import MiniBatch


class TraceDump:
    """Writes the files of a run. Each rank writes its sampled sequences.

    ConfigError if Megatron's settings bypass the replay hook.
    """

    def __init__(self, folder: Path, policy: Policy) -> None:
        if policy.replay is None:
            raise ConfigError(
                "log.traces_every: Megatron's settings bypass the replay hook, so its routers cannot be recorded; "
                "run `megarl doctor` to find the setting, or remove log.traces_every"
            )
        self.folder, self.layers, self.shape = folder, policy.replay.layers, policy.shape
        shape = policy.shape
        self.info = TraceInfo(policy.config.model.path, shape.moe_layers, shape.num_experts, shape.topk)

    def write(self, step: int, rollouts: Sequence[Sequence[Rollout]], minis: Sequence[MiniBatch]) -> None:
        """Write the files of a step after the first pass over all its mini-batches; a collective call of a model copy.

        rollouts: by mini-batch. TraceError if the engine recorded no routes.
        """
        sampled, trained = [], []
        for mini, of_mini in zip(minis, rollouts, strict=True):
            recorded = [index for index, rollout in enumerate(of_mini) if rollout.routed_experts is not None]
            experts = self._gather_routes(mini, of_mini, recorded)
            for index in recorded:
                sequence = from_rollout(of_mini[index], self.shape.num_experts)
                sampled.append(sequence)
                versions = np.full(of_mini[index].num_tokens, step - 1, np.int32)  # the weights before the first update
                trace = RoutingTrace(experts[index], self.shape.num_experts, label=sequence.name)
                trained.append(TracedSequence(sequence.name, trace, sequence.tokens, versions))
        if not sampled:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        rank = torch.distributed.get_rank()
        for engine, sequences in (("rollout", sampled), ("training", trained)):
            file = self.folder / f"step_{step:07d}.{engine}.rank{rank:04d}.safetensors"
            write_traces(file, self.info, sequences)

    def _gather_routes(
        self, mini: MiniBatch, rollouts: Sequence[Rollout], indices: Sequence[int]
    ) -> dict[int, np.ndarray]:
        """Return the routes [T, L, K] of sequences, collected from the ranks of their routers."""
        if mini.first is None or mini.first.native_routes is None:
            raise TraceError("log.traces_every: the engine recorded no routes; expected them with every rollout")
        rows = torch.cat([routes.experts.cpu() for routes in mini.first.native_routes])
        lengths = [rollouts[index].num_tokens for index in indices]
        target = Placement.of_sequences(indices, lengths, self.shape.moe_layers)
        source = Placement.of_micro_batches(mini.micro_batches, self.layers)
        received = exchange(source, rows, target, distributed.model_group())
        experts = received.numpy().view(np.uint8 if received.dtype is torch.uint8 else np.uint16)
        return dict(zip(indices, np.split(experts, np.cumsum(lengths)[:-1]), strict=True)) if indices else {}
