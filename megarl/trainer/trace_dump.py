"""Writes the routes of a step to files: those that the engine used, and those that the training routers would choose.

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
    """Writes the files of a run. Each rank writes the sequences that it sampled, since it has their routes."""

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

        ``rollouts``: by mini-batch. TraceError if the engine recorded no routes.
        """
        sampled, trained = [], []
        for mini, of_mini in zip(minis, rollouts, strict=True):
            here = [index for index, rollout in enumerate(of_mini) if rollout.routed_experts is not None]
            experts = self._gather_routes(mini, of_mini, here)
            for index in here:
                one = from_rollout(of_mini[index], self.shape.num_experts)
                sampled.append(one)
                versions = np.full(of_mini[index].num_tokens, step - 1, np.int32)  # the weights before the first update
                trace = RoutingTrace(experts[index], self.shape.num_experts, label=one.name)
                trained.append(TracedSequence(one.name, trace, one.tokens, versions))
        if not sampled:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        rank = torch.distributed.get_rank()
        write_traces(self.folder / f"step_{step:07d}.rollout.rank{rank:04d}.safetensors", self.info, sampled)
        write_traces(self.folder / f"step_{step:07d}.training.rank{rank:04d}.safetensors", self.info, trained)

    def _gather_routes(
        self, mini: MiniBatch, rollouts: Sequence[Rollout], here: Sequence[int]
    ) -> dict[int, np.ndarray]:
        """Return the routes [T, L, K] of the sequences ``here``, collected from the ranks whose routers saw them."""
        native = mini.native_routes
        if native is None:
            raise TraceError("log.traces_every: the engine recorded no routes; expected them with every rollout")
        rows = torch.cat([routes.experts.cpu() for routes in native])
        lengths = [rollouts[index].num_tokens for index in here]
        want = Placement.of_sequences(here, lengths, self.shape.moe_layers)
        have = Placement.of_micro_batches(mini.micro_batches, self.layers)
        found = exchange(have, rows, want, distributed.model_group())
        parts = found.numpy().view(np.uint8 if found.dtype is torch.uint8 else np.uint16)
        return dict(zip(here, np.split(parts, np.cumsum(lengths)[:-1]), strict=True)) if here else {}
