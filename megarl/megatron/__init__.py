"""The training side: Megatron-Core models, packed batches, routing replay, optimizer, checkpoints, weights."""

from megarl.megatron import cpu

cpu.enable()
