"""The training side: Megatron-Core models, packed batches, routing replay, optimizer, checkpoints, weights."""

import warnings

from megarl.megatron import cpu

# Said on every import or first call, on every rank, about nothing the user can change: optional kernels that are absent
# (`megarl doctor` says it once), names that torch will rename, defaults of Megatron that its own code deprecates.
for message in (
    "Apex is not installed",
    "Transformer Engine and Apex are not installed",
    "full scope is deprecated",
    "The .grad attribute of a Tensor that is not a leaf",
    "`sequence_parallel` is set to `True`, but tensor model parallel size is 1",
    "When using sequence parallelism it is recommended to set the environment variable CUDA_DEVICE_MAX_CONNECTIONS",
    ".*`torch.distributed.(reduce_scatter_tensor|all_gather_into_tensor)` is deprecated",
    "Please use DTensor instead and we are deprecating ShardedTensor",
    "TypedStorage is deprecated",
    "torch.distributed.reduce_op is deprecated",
):
    warnings.filterwarnings("ignore", message=message)
cpu.enable()
