"""Applies all stand-ins to this process: the body of ``megarl.enable_cpu``."""

import warnings

from megarl.stand_ins import cpu, te

_SILENCED = (
    "Apex is not installed",
    "Transformer Engine and Apex are not installed",
    "full scope is deprecated",
    "The .grad attribute of a Tensor that is not a leaf",
    "`sequence_parallel` is set to `True`, but tensor model parallel size is 1",
    ".*`torch.distributed.(reduce_scatter_tensor|all_gather_into_tensor)` is deprecated",
    "Please use DTensor instead and we are deprecating ShardedTensor",
    "TypedStorage is deprecated",
    "torch.distributed.reduce_op is deprecated",
)
"""Warnings that every rank would print and no user can act on: absent optional kernels (``megarl doctor`` reports
those), names that torch will rename, Megatron's use of deprecated defaults."""


def enable() -> bool:
    """See ``megarl.enable_cpu``."""
    te.hide_unusable()
    for message in _SILENCED:
        warnings.filterwarnings("ignore", message=message)
    is_on_cpu = cpu.enable()
    te.stand_in()
    return is_on_cpu
