"""Let verl 0.9 run on a machine without a GPU, to try things out: a platform of CPUs by verl's own registry.

    VERL_USE_EXTERNAL_MODULES=verl_on_cpu VERL_PLATFORM=cpu VERL_ENGINE_DEVICE=cuda

with this folder on PYTHONPATH. The last variable picks the engines that verl registers for CUDA; of these, FSDP2
(``actor.strategy=fsdp2``) starts on a CPU. FSDP1 refuses CPU tensors with ``sync_module_states``.
"""

import types
from functools import partial
from typing import Any

import torch
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import PlatformRegistry
from verl.utils import distributed

_NOTHING = ("empty_cache", "reset_peak_memory_stats", "ipc_collect")
_ZERO = ("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved")


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformCUDA):
    """One device "cpu" in each process, gloo, and no memory to report."""

    device_name = "cpu"  # type: ignore[assignment]
    vendor_name = "cpu"  # type: ignore[assignment]
    device_module = types.SimpleNamespace(  # type: ignore[assignment]
        **{name: getattr(torch.cpu, name) for name in torch.cpu.__all__},
        **{name: lambda *_: None for name in _NOTHING},
        **{name: lambda *_: 0 for name in _ZERO},
        mem_get_info=lambda *_: (0, 1),
        get_device_name=lambda *_: "CPU",
        manual_seed=torch.manual_seed,
    )

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def communication_backend_name(self) -> str:
        return "gloo"


# verl asks for "cpu:gloo,cpu:gloo" here, which torch refuses. Its worker takes the function from this module later.
_initialize = distributed.initialize_global_process_group_ray
distributed.initialize_global_process_group_ray = partial(_initialize, backend="gloo")
