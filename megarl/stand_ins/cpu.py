"""Runs megatron-core 0.12 to 0.19 without CUDA: gloo and CPU tensors.

Megatron-Core assumes a GPU in five ways. ``enable`` applies one remedy for each. It changes nothing else of torch or
Megatron, and nothing at all on a machine with CUDA.

1. Calls of ``torch.cuda`` for streams, events, synchronisation, the current device and the random generator. A CPU has
   one stream and one generator, so the stand-ins do nothing, return ``"cpu"``, or use the CPU generator.
2. Literals ``"cuda"`` and ``"torch.cuda.FloatTensor"`` inside functions. The compiled functions of the listed modules
   get the same code with other constants.
3. ``torch.compile`` of small functions at import. On a CPU, compiling needs a C++ compiler and seconds per function.
   During Megatron's import, ``torch.compile`` returns functions unchanged.
4. Parts of it need NCCL: gloo takes no split sizes in tensors (all-to-all dispatcher), and no shares of unequal size
   (expert-tensor parallelism).
5. Each of its dozens of process groups starts an event loop of gloo, a thread that wakes up a hundred times a second.
   All groups of a process share one loop.
"""

import contextlib
import importlib
import importlib.util
import os
import sys
import types
import warnings
from collections.abc import Iterator
from datetime import timedelta
from functools import cache
from typing import Any

import torch
from torch.distributed import distributed_c10d

from megarl.files.texts import read_table


class _Stream:
    """The one stream of a CPU, and any event on it: work is finished when the call returns."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def synchronize(self, *_: Any) -> "_Stream":
        return self  # true, which is the answer to ``query``

    record = wait = wait_stream = wait_event = query = record_event = synchronize

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    def __hash__(self) -> int:
        return hash(_Stream)


class _Event(_Stream):
    """A class of its own, as torch's compiler expects."""


class _SharedLoopGloo(distributed_c10d.ProcessGroupGloo):
    """Remedy 5: a gloo group on the shared event loop of this process."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, enable_reconfigure: bool = False) -> None:
        assert not enable_reconfigure, "groups of the CPU layer keep their ranks"  # torch 2.14 passes it
        gloo: Any = type(self)  # torch's stubs lack _Options
        options = gloo._Options()
        options._devices, options._timeout = [_gloo_device(os.getpid())], timeout
        super().__init__(store, rank, size, options)


@cache
def _gloo_device(process: int) -> Any:
    del process  # a key of the cache, because threads do not survive a fork
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    gloo = distributed_c10d.ProcessGroupGloo
    return gloo.create_device(interface=interface) if interface else gloo.create_default_device()


def enable() -> bool:
    """Make megatron-core usable without CUDA. Return whether the layer is active. May be called again."""
    if torch.cuda.is_available():
        return False
    if getattr(torch.cuda, "_megarl_cpu_layer", False):
        return True
    _replace_cuda_calls()
    distributed_c10d.ProcessGroupGloo = _SharedLoopGloo
    with _eager_functions(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        names = [f"megatron.core.{name}" for name in read_table(__file__)["retargeted"]]
        modules = [importlib.import_module(name) for name in names if importlib.util.find_spec(name)]
    for module in modules:
        _retarget(module)
    _replace_helpers()
    torch.cuda.__dict__["_megarl_cpu_layer"] = True
    return True


def _replace_cuda_calls() -> None:
    """Remedy 1: stand-ins for the parts of ``torch.cuda`` that Megatron calls unconditionally."""
    # Each name gets a function of its own: torch's compiler has a rule per function and refuses to load if two collide.
    stream = _Stream()
    for name in ("synchronize", "set_device", "empty_cache"):
        setattr(torch.cuda, name, lambda *_, **__: None)
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.current_stream = lambda *_: stream
    torch.cuda.default_stream = lambda *_: stream
    torch.cuda.stream = lambda *_: contextlib.nullcontext()
    torch.cuda.Stream = _Stream
    torch.cuda.Event = _Event
    torch.cuda.get_rng_state = torch.cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda new_state, *_, **__: torch.set_rng_state(new_state)
    torch.cuda.random.set_rng_state = torch.cuda.set_rng_state
    torch.cuda.manual_seed = lambda seed: torch.manual_seed(seed) and None
    torch.Tensor.cuda = lambda self, *_, **__: self


@contextlib.contextmanager
def _eager_functions() -> Iterator[None]:
    """Remedy 3: inside, ``torch.compile`` returns functions unchanged."""
    if "megatron.core.jit" in sys.modules:  # Megatron was imported before megarl: its functions are already compiled
        torch.compiler.set_stance("force_eager")
        yield
        return

    def leave(function: Any = None, **_: Any) -> Any:
        return (lambda inner: inner) if function is None else function

    compile_function, torch.compile = torch.compile, leave
    try:
        yield
    finally:
        torch.compile = compile_function


def _replace_literals(constant: Any) -> Any:
    """The constant of a function without CUDA: a string, a tuple of constants, or the code of an inner function."""
    if constant == "cuda":
        return "cpu"
    if isinstance(constant, str) and constant.startswith("torch.cuda.") and constant.endswith("Tensor"):
        return constant.replace("torch.cuda.", "torch.")
    if isinstance(constant, tuple):
        return tuple(_replace_literals(item) for item in constant)
    if isinstance(constant, types.CodeType):
        return constant.replace(co_consts=tuple(_replace_literals(item) for item in constant.co_consts))
    return constant


def _retarget(module: types.ModuleType) -> None:
    """Remedy 2: replace device literals in all functions and methods that the module defines."""
    for value in list(vars(module).values()):
        for member in vars(value).values() if isinstance(value, type) else (value,):
            function = getattr(member, "__func__", getattr(member, "fget", member))
            while function is not None:
                if isinstance(function, types.FunctionType) and function.__module__ == module.__name__:
                    function.__code__ = _replace_literals(function.__code__)
                function = getattr(function, "__wrapped__", None)


def _gather_unequal(share: torch.Tensor, group: Any, sizes: list[int]) -> torch.Tensor:
    """Remedy 4: gather shares [size of the rank, ...] by padding them."""
    padded = share.new_zeros(max(sizes), *share.shape[1:])
    padded[: share.size(0)] = share
    shares = [torch.empty_like(padded) for _ in sizes]
    torch.distributed.all_gather(shares, padded, group=group)
    return torch.cat([share_of_rank[:size] for share_of_rank, size in zip(shares, sizes, strict=True)])


def _reduce_scatter_unequal(whole: torch.Tensor, group: Any, sizes: list[int]) -> torch.Tensor:
    """Remedy 4: reduce-scatter [sum of sizes, ...] by reducing the whole."""
    reduced = whole.clone()
    torch.distributed.all_reduce(reduced, group=group)
    return torch.split(reduced, sizes)[group.rank()].clone()


def _with_unequal(equal: Any, unequal: Any) -> Any:
    def exchange(tensor: torch.Tensor, group: Any = None, sizes: Any = None, *arguments: Any, **options: Any) -> Any:
        if sizes is None or group.size() == 1:
            return equal(tensor, group, sizes, *arguments, **options)
        return unequal(tensor, group, [int(size) for size in sizes])

    return exchange


def _replace_helpers() -> None:
    """Remedies 1 (generator of the tensor-parallel tracker, pinned memory) and 4."""
    random: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    random._get_cuda_rng_state, random._set_cuda_rng_state = torch.cuda.get_rng_state, torch.cuda.set_rng_state
    dispatcher: Any = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    dispatcher.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, record_stream=False: (
        tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
    )
    rotary: Any = importlib.import_module("megatron.core.models.common.embeddings.rope_utils")
    code = rotary.get_pos_emb_on_this_cp_rank.__code__
    constants = tuple(False if constant is True else constant for constant in code.co_consts)  # pin_memory
    rotary.get_pos_emb_on_this_cp_rank.__code__ = code.replace(co_consts=constants)
    mappings: Any = importlib.import_module("megatron.core.tensor_parallel.mappings")
    for name, unequal in (("gather", _gather_unequal), ("reduce_scatter", _reduce_scatter_unequal)):
        equal = getattr(mappings, f"_{name}_along_first_dim")
        setattr(mappings, f"_{name}_along_first_dim", _with_unequal(equal, unequal))
