"""The training side: Megatron-Core models, packed batches, routing replay, optimizer, checkpoints, weights.

A file imports only files above in the list:

- ``stand_ins``: Megatron without CUDA, without Transformer Engine and without fused kernels.
- ``versions``, ``config_errors``: differences of releases, Megatron's refusals as ConfigError.
- ``distributed``: process groups and small collective calls.
- ``model``, ``hf_weights``: the model, and its weights under Hugging Face names.
- ``passes``: micro-batches, forward and backward, log-probabilities.
- ``replay``: routing replay.
- ``policy``: model, optimizer, schedule and replay together.
- ``checkpoints``: checkpoints of a run.
- ``frozen``, ``gradients``: models that are not trained; gradients of single samples.

It may import ``models``, ``data``, ``config``, ``core`` and ``errors``.
"""

import warnings

from megarl.stand_ins import cpu, te

# Every rank would print these at import or first call, and the user can change nothing about them: absent optional
# kernels (`megarl doctor` reports those), names that torch will rename, Megatron's own use of deprecated defaults.
for message in (
    "Apex is not installed",
    "Transformer Engine and Apex are not installed",
    "full scope is deprecated",
    "The .grad attribute of a Tensor that is not a leaf",
    "`sequence_parallel` is set to `True`, but tensor model parallel size is 1",
    ".*`torch.distributed.(reduce_scatter_tensor|all_gather_into_tensor)` is deprecated",
    "Please use DTensor instead and we are deprecating ShardedTensor",
    "TypedStorage is deprecated",
    "torch.distributed.reduce_op is deprecated",
):
    warnings.filterwarnings("ignore", message=message)
cpu.enable()
te.stand_in()
