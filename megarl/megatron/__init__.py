"""The training side: Megatron-Core models, packed batches, routing replay, optimizer, checkpoints, weights."""

import warnings

from megarl.megatron import cpu

# Megatron says on every import, on every rank, which optional kernel packages are absent; `megarl doctor` says it once.
warnings.filterwarnings("ignore", message=r"(Apex|Transformer Engine|.*are not installed|fused_)", module="megatron")
cpu.enable()
