"""Numbers on a GPU that computes nothing: ``with Computing():`` every operation has its values.

Each operation runs through torch's real CUDA dispatch first (devices, dtypes, shapes, caching allocator, launches).
Then the CPU's kernel computes its values in the same memory, which is possible as the null GPU's memory is the host's.
What cannot be computed raises; nothing is left with the values of memory that no kernel has written.

Operations whose sizes depend on values cannot run on a device that computes nothing. Those are computed first and
written to the device afterwards, and torch's warning about the wait of the host is given here (``WAITING``).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from null_gpu.replacements import REPLACEMENTS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from megarl.megatron.passes import logprobs

_WAITING = """
_unique _unique2 bincount masked_select nonzero repeat_interleave unique_consecutive unique_dim
"""
WAITING = frozenset(_WAITING.split())
"""The size of the result depends on values: the host waits for the device."""
_COMPUTED_ONLY = """
_linalg_svd argsort cummax cummin cumprod cumsum digamma erfinv exp2 exp2_ histc kthvalue lgamma linalg_inv_ex
linalg_qr logcumsumexp masked_scatter masked_scatter_ median multinomial randperm searchsorted sort topk
"""
COMPUTED_ONLY = frozenset(_COMPUTED_ONLY.split())
"""Their CUDA code reads what its own kernels wrote, or needs a library that the null GPU does not stand for."""
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
_UNWRITTEN = """
_pin_memory empty empty_like empty_permuted empty_strided is_pinned new_empty new_empty_strided pin_memory
record_stream resize_ set_
"""
UNWRITTEN = frozenset(_UNWRITTEN.split())
"""They give memory without values, or leave values as they are."""
COLLECTIVES = {"c10d", "_c10d_functional"}
WRITING = {"copy_", "fill_", "zero_"}
"""They overwrite what they change, so that it does not matter that CUDA copies and fills for real."""


@contextlib.contextmanager
def computing() -> Iterator[None]:
    """``Computing()`` on the null GPU; nothing on a GPU that computes by itself."""
    if not os.environ.get("NULL_GPU"):
        yield
        return
    # Triton kernels have no values: those of the loss (tests/megatron/test_megatron_logprob_kernels.py has their
    # numbers), and some of torch's own operations.
    native: Any = getattr(torch.backends, "python_native", None)  # from torch 2.12 on
    of_torch = contextlib.nullcontext() if native is None else native.triton.disabled()
    with mock.patch.object(logprobs, "kernels_for", return_value=None), of_torch, Computing():
        yield


class Computing(TorchDispatchMode):
    """Compute the values of all operations on CUDA tensors. Raises NotImplementedError with the operation's name."""

    def __enter__(self) -> Computing:
        # Only the attention that torch composes of other operations has values.
        self._before = (
            [getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in _ATTENTION],
            torch.backends.cudnn.enabled,
        )
        _allow([False] * len(_ATTENTION), cudnn=False)
        _device().null_gpu_computing(1)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _device().null_gpu_computing(-1)
        _allow(self._before[0], cudnn=self._before[1])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled() and func._can_decompose():  # without autograd, nothing has done so before
            TorchDispatchMode.__enter__(self)
            try:
                return func.decompose(*args, **kwargs)
            finally:
                TorchDispatchMode.__exit__(self, None, None, None)
        name = func._schema.name.partition("::")[2]
        if func.namespace == "c10d" and name == "barrier":
            with _kernels_skipped():  # it reduces a tensor of any values
                return func(*args, **kwargs)
        if func.namespace in COLLECTIVES or func.is_view or name in UNWRITTEN:
            return func(*args, **kwargs)
        flat = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, (torch.Tensor, torch.device))]
        if not any(x.is_cuda if isinstance(x, torch.Tensor) else x.type == "cuda" for x in flat):
            return func(*args, **kwargs)
        with torch.no_grad():
            if name in INDEXING:
                args = (args[0], _as_numbers(args[1]), *args[2:])
            if name in WAITING and kwargs.get("output_size") is None:
                _say_waiting(str(func))
                return _compute_first(func, args, kwargs)
            if name in WAITING or name in COMPUTED_ONLY:
                return _compute_first(func, args, kwargs)
            return _compute_after(func, name, args, kwargs)


_text_of = torch._tensor_str._str
# torch formats tensors without modes.
torch._tensor_str._str = lambda x, **options: _text_of(
    _on_cpu(x.detach()) if os.environ.get("NULL_GPU") else x, **options
)


@functools.cache
def _device() -> ctypes.CDLL:
    """It refuses kernels that are launched outside of an operation."""
    return ctypes.PyDLL(None)


@contextlib.contextmanager
def _kernels_skipped() -> Iterator[None]:
    """What the kernels of this block leave out is computed afterwards, or needed by nobody."""
    _device().null_gpu_with_values(1)
    try:
        yield
    finally:
        _device().null_gpu_with_values(-1)


_ATTENTION = ("flash", "mem_efficient", "cudnn")


def _allow(kinds: list[bool], *, cudnn: bool) -> None:
    for name, allowed in zip(_ATTENTION, kinds, strict=True):
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(allowed)
    torch.backends.cudnn.enabled = cudnn


def _compute_after(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Run on CUDA, then write the CPU's values into what CUDA returned or changed."""
    seed = _seed(func, args, kwargs)
    on_cpu = tree_map(_on_cpu, (args, kwargs))
    changed = [] if name in WRITING else [_on_cpu(t) for t in _changed(func, args, kwargs)]
    kept = [t.clone() for t in changed]
    with _kernels_skipped():
        made = func(*args, **kwargs)
    for t, before in zip(changed, kept, strict=True):
        t.copy_(before)
    with _seeded(seed):
        computed = _call(func, *on_cpu)
    return _write(func, made, computed)


def _compute_first(func: Any, args: Any, kwargs: Any) -> Any:
    """Compute on the CPU and copy the result to the device of the arguments."""
    tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
    devices = {x.device for x in tensors if x.dim()} | {torch.device(d) for d in [kwargs.get("device")] if d}
    if len(devices) > 1:
        raise RuntimeError(f"{func}: expected all tensors on the same device, found {sorted(map(str, devices))}")
    (device,) = devices or {tensors[0].device}
    seed = _seed(func, args, kwargs)
    with _seeded(seed):
        computed = _call(func, *tree_map(_on_cpu, (args, kwargs)))
    if func._schema.is_mutable:
        return kwargs.get("out", args[0])
    return tree_map(lambda x: _on_device(x, device) if isinstance(x, torch.Tensor) else x, computed)


def _call(func: Any, args: Any, kwargs: Any) -> Any:
    """The CPU's result. Raises NotImplementedError if the CPU cannot compute it."""
    try:
        return REPLACEMENTS.get(func, func)(*args, **kwargs)
    except (NotImplementedError, RuntimeError) as error:
        raise NotImplementedError(f"null GPU: the CPU cannot compute {func}: {error}") from error


def _write(func: Any, made: Any, computed: Any) -> Any:
    if isinstance(made, torch.Tensor):
        return _write_tensor(func, made, computed)
    if isinstance(made, (tuple, list)):
        return type(made)(_write(func, m, c) for m, c in zip(made, computed, strict=True))
    return computed


def _write_tensor(func: Any, made: torch.Tensor, computed: Any) -> torch.Tensor:
    if not isinstance(computed, torch.Tensor) or made.shape != computed.shape:
        found = tuple(computed.shape) if isinstance(computed, torch.Tensor) else type(computed).__name__
        raise NotImplementedError(f"null GPU: {func} gives {tuple(made.shape)} on CUDA and {found} on the CPU")
    target = _on_cpu(made)
    if target.data_ptr() != computed.data_ptr() or target.stride() != computed.stride():
        target.copy_(computed)
    return made


def _on_cpu(x: Any) -> Any:
    """A CPU tensor in the same memory; CUDA devices become the CPU."""
    if isinstance(x, torch.device):
        return torch.device("cpu") if x.type == "cuda" else x
    if isinstance(x, torch.Generator):
        return torch.default_generator
    if not isinstance(x, torch.Tensor) or not x.is_cuda:
        return x
    storage = x.untyped_storage()
    if not storage.nbytes():
        return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype)
    raw = torch.frombuffer((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr()), dtype=torch.uint8)
    size = x.element_size()
    whole = raw[: storage.nbytes() // size * size].view(x.dtype)
    return torch.as_strided(whole, x.size(), x.stride(), x.storage_offset())


def _on_device(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor with these values that is there without a copy which would be counted."""
    made = torch.empty_like(x, device=device)
    _on_cpu(made).copy_(x)
    return made


def _changed(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """The CUDA tensors that ``func`` changes."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from (x for x in tree_flatten(value)[0] if isinstance(x, torch.Tensor) and x.is_cuda)


def _as_numbers(indices: Any) -> list[Any]:
    """Boolean indices as numbers, which CUDA finds with ``nonzero``: the host waits."""
    found: list[Any] = []
    for index in indices:
        if isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8):
            if index.is_cuda:
                _say_waiting("index by a boolean tensor")
            found += [_on_device(numbers, index.device) for numbers in _on_cpu(index).nonzero(as_tuple=True)]
        else:
            found.append(index)
    return found


def _seed(func: Any, args: Any, kwargs: Any) -> int | None:
    """For random operations on CUDA: a seed of the CPU, made of what CUDA's generator is about to use."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return None
    given = next((x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Generator)), None)
    cuda = given or torch.cuda.default_generators[torch.cuda.current_device()]
    offset = cuda.get_offset()
    if func._schema.name.partition("::")[2] in COMPUTED_ONLY:
        cuda.set_offset(offset + 4)  # as the operation on CUDA would do
    return (cuda.initial_seed() * 1_000_003 + offset) % 2**63


@contextlib.contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    """The CPU's own generator begins with ``seed``, and goes on later as if nothing had been drawn."""
    before = None if seed is None else torch.get_rng_state()
    if seed is not None:
        torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        if before is not None:
            torch.set_rng_state(before)


def _say_waiting(what: str) -> None:
    if torch.cuda.get_sync_debug_mode():
        warnings.warn(f"called a synchronizing CUDA operation ({what})", stacklevel=2)
