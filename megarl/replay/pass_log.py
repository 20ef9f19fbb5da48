"""Finds the forward pass of the model that a router's call belongs to, whatever the order and the threads of passes.

``PassLog._find_context`` walks Python's stack from the router outwards. The innermost of three frames decides:

- The call of a chunk (hooks of the modules note the frames). All routers of the call share one ``Pass``. A pass inside
  another pass is a probe, and routes natively. A caller may also run the layers, one micro-batch after the other.
- The backward method of an autograd function: a *reentrant* checkpoint (Megatron's, Transformer Engine's, torch's with
  ``use_reentrant=True``, a caller's own). Autograd passes one object to ``forward`` and ``backward``.
- The hook for saved tensors of a *non-reentrant* checkpoint (torch's, Transformer Engine's), with an object per region.

The two objects stand for regions that may be recomputed. A region remembers the pass around the region, or the passes
that began inside. A region without passes ran outside all blocks, and is recomputed natively.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass, field
from threading import get_ident
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch._C import _autograd
from torch.autograd.function import BackwardCFunction, FunctionCtx

from megarl.errors import ReplayError, refusal

if TYPE_CHECKING:
    from megarl.replay.hooks import Hook
    from megarl.replay.sessions import Session

_APPLY = getattr(getattr(torch.autograd.Function.apply, "__func__", None), "__code__", None)
"""None from torch 2.14 on, where ``apply`` is written in C; the search then looks for the frame of ``forward``."""
_METHODS = [getattr(BackwardCFunction, name, None) for name in ("apply", "apply_boxed")]
_BACKWARD = [method.__code__ for method in _METHODS if method is not None]
_top_hooks = getattr(_autograd, "_top_saved_tensors_default_hooks", lambda _: None)


@dataclass(eq=False, slots=True)
class PassBlock:
    """An open ``record()`` or ``replay()``, for the passes of the thread that opened the block."""

    session: Session | None
    """None once the block has closed."""
    passes: list[Pass] = field(default_factory=list)
    """Passes that have not ended in an exception."""

    def start(self, chunk: int, by_layers: bool) -> Pass:
        """Start a pass of the first micro-batch that has no pass of this chunk."""
        micros = {earlier.micro for earlier in self.passes if earlier.chunk == chunk}
        micro = next(number for number in itertools.count() if number not in micros)
        self.passes.append(Pass(chunk, micro, self, by_layers))
        return self.passes[-1]

    def micros_of(self, column: int) -> set[int]:
        """Micro-batches whose forward passes asked a router."""
        return {forward_pass.micro for forward_pass in self.passes if column in forward_pass.asked}


@dataclass(eq=False, slots=True)
class Pass:
    """A forward pass of a chunk, with all recomputations."""

    chunk: int
    micro: int
    block: PassBlock | None
    """None for a pass that routes natively."""
    by_layers: bool = False
    """Whether the caller runs the layers."""
    asked: set[int] = field(default_factory=set)
    """Columns of the routers called so far."""


@dataclass(frozen=True, slots=True)
class RouterCall:
    """The pass of a block that a router's call belongs to."""

    session: Session
    micro: int
    first: bool
    """True in the forward pass, False in a recomputation."""


@dataclass(eq=False, slots=True)
class _Region:
    """First passes of a region that may be recomputed."""

    inside: list[Pass] = field(default_factory=list)
    """Passes around the region."""
    begun: list[Pass] = field(default_factory=list)
    """Passes inside the region."""
    repeated: tuple[int, int] = (-1, 0)
    """(graph task of the current recomputation, passes begun in the task)."""


@dataclass(frozen=True, eq=False, slots=True)
class _Running:
    """A module call on the stack of a thread."""

    of: Pass
    first: bool
    module: torch.nn.Module
    around: list[Any]
    """Regions entered before the call."""
    thread: int = field(default_factory=get_ident)


class PassLog:
    """The passes of one model; a newer RoutingReplay of the model takes over the log."""

    def __init__(self) -> None:
        self._blocks: dict[int, PassBlock] = {}  # by thread
        self._running: dict[FrameType, _Running] = {}
        self._regions: WeakKeyDictionary[Any, _Region] = WeakKeyDictionary()
        self._hiding: set[type] = set()  # autograd functions around passes of blocks that hide their context

    @property
    def is_open(self) -> bool:
        """Whether any thread has an open block."""
        return bool(self._blocks)

    @property
    def is_watching(self) -> bool:
        """Whether a pass may matter: a block is open, or graphs of a closed block are left."""
        return bool(self._blocks or self._regions or self._hiding)

    def open(self, session: Session) -> PassBlock:
        """Start a block of this thread. ReplayError if the thread has an open block."""
        if get_ident() in self._blocks:
            raise ReplayError("already recording or replaying; blocks do not nest")
        return self._blocks.setdefault(get_ident(), PassBlock(session))

    def close(self, block: PassBlock) -> None:
        """End a block: recomputations of its passes are refused from now on."""
        self._blocks = {thread: entry for thread, entry in self._blocks.items() if entry is not block}
        self._running = {frame: entry for frame, entry in self._running.items() if entry.of.block is not block}
        block.session = None

    def enter(self, module: torch.nn.Module, chunk: int) -> None:
        """A pass of a chunk begins, or begins again in a recomputation; called by a hook of the module."""
        block = self._blocks.get(get_ident())
        frame = _frame_of_call(block is not None)
        if frame is None:
            return
        running, region, around = self._find_context(frame)
        new, first = Pass(chunk, -1, None), True  # a probe
        if region is not None:
            remembered = self._recall(region)
            if remembered is not None and not remembered.inside:
                new, first = self._repeat(remembered), False
        elif running is None and block is None:
            return
        elif running is None and block is not None:
            if torch._C._current_graph_task_id() != -1:
                self._refuse(_NO_REGION)
            new = block.start(chunk, False)
        if new.block is not None:
            for outer_region in around:
                self._remember(outer_region).begun.append(new)
        self._running[frame] = _Running(new, first, module, around)

    def leave(self, module: torch.nn.Module) -> Pass | None:
        """End the call of ``enter``; returns the pass of a whole first call."""
        frame = sys._getframe(2)
        ended = self._running.pop(frame, None)
        if ended is not None:
            return ended.of if ended.first and ended.of.block is not None else None
        for frame, entry in reversed(self._running.items()):  # after an exception
            if entry.module is module and entry.thread == get_ident():
                del self._running[frame]
                if entry.first and entry.of.block is not None:
                    entry.of.block.passes.remove(entry.of)  # its number is the next one's: a caller tries again
                break
        return None

    def identify(self, hook: Hook) -> RouterCall | None:
        """Return the pass of a router's current call; None routes natively. ReplayError if the pass cannot be known."""
        block = self._blocks.get(get_ident())
        if not self.is_watching:
            return None
        running, region, around = self._find_context(sys._getframe(1))
        first = region is None and (running is None or running.first)
        if running is not None:
            current = running.of
            if current.block is None or current.chunk != hook.chunk:
                return None
            around = [entry for entry in around if not any(entry is other for other in running.around)]
        elif region is not None:
            remembered = self._recall(region)
            if remembered is None:
                return None
            if len({id(entry) for entry in remembered.inside}) != 1:
                self._refuse("several passes have a part in its checkpoint", hook)
            current = remembered.inside[0]
        elif torch._C._current_graph_task_id() != -1 and self._blocks:  # of a device's own thread too
            self._refuse(_NO_REGION, hook)
        elif block is None:
            return None
        else:
            current = self._continue(block, hook)
        session = None if current.block is None else current.block.session
        if session is None:
            self._refuse("the block of its forward pass has closed", hook)
        if first and hook.column in current.asked:
            raise ReplayError(refusal("router_called_twice", hook=hook, current=current))
        if first:
            current.asked.add(hook.column)
        for entry in around:
            self._remember(entry).inside.append(current)
        return RouterCall(session, current.micro, first)

    def _find_context(self, frame: FrameType | None) -> tuple[_Running | None, object, list[Any]]:
        """Return (running pass, recomputed region, regions entered inside); the inner of pass and region is set.

        A class in the list stands for an autograd function that hides its context.
        """
        running: _Running | None = None
        recomputed: object = None
        entered: list[Any] = _entered_checkpoints()
        inner = frame
        while frame is not None:
            code = frame.f_code
            if (running := self._running.get(frame)) is not None:
                break
            if code is _APPLY:
                entered.append(_context_of(inner) or frame.f_locals["cls"])
            elif _APPLY is None and code.co_name == "forward" and code.co_varnames[:1] != ("self",):
                context = _context_of(frame)
                if context is not None and context not in entered:
                    entered.append(context)
            elif code in _BACKWARD:
                recomputed = frame.f_locals["self"]
                break
            elif code.co_name == "unpack_hook" and "frame" in code.co_freevars:
                recomputed = frame.f_locals["frame"]
                break
            inner, frame = frame, frame.f_back
        return running, recomputed, entered

    def _remember(self, region: Any) -> _Region:
        if isinstance(region, type):
            self._hiding.add(region)
            return _Region()
        return self._regions.setdefault(region, _Region())

    def _recall(self, region: Any) -> _Region | None:
        """Return the passes of a region; None for a region outside of blocks."""
        remembered = self._regions.get(region)
        if remembered is None and getattr(region, "_forward_cls", None) in self._hiding:
            self._refuse(_NO_REGION)
        return remembered

    def _repeat(self, region: _Region) -> Pass:
        """Return the pass that begins again in a recomputation of a region."""
        task = torch._C._current_graph_task_id()
        number = region.repeated[1] if region.repeated[0] == task else 0
        region.repeated = task, number + 1
        if number >= len(region.begun):
            self._refuse("the model was called more often than in the first pass")
        return region.begun[number]

    def _continue(self, block: PassBlock, hook: Hook) -> Pass:
        """Return the pass of a router that the caller calls alone. ReplayError if several passes fit."""
        flying = [
            candidate
            for candidate in block.passes
            if candidate.by_layers and candidate.chunk == hook.chunk and hook.column not in candidate.asked
        ]
        if not flying and hook.is_first:
            return block.start(hook.chunk, True)
        if len(flying) != 1:
            raise ReplayError(refusal("layer_without_pass", hook=hook, passes=len(flying)))
        return flying[0]

    def _refuse(self, reason: str, hook: Hook | None = None) -> NoReturn:
        facts = {"layer": "" if hook is None else f"layer {hook.layer}: ", "reason": reason}
        raise ReplayError(refusal("unknown_recomputation", **facts))


_NO_REGION = refusal("no_checkpoint_region")


def _frame_of_call(in_block: bool) -> FrameType | None:
    """The frame of ``Module.__call__`` that runs the calling hook; None for a compiled model outside blocks."""
    frame = sys._getframe(3)
    is_known = frame.f_code.co_filename == torch.nn.modules.module.__file__
    if in_block and not is_known:
        raise ReplayError("a compiled model hides its forward passes; in a block, call the module (compile its parts)")
    return frame if is_known else None


def _context_of(frame: FrameType | None) -> object:
    """Return the ``ctx`` of an autograd function's forward, decorated or not; None without ``ctx``."""
    if frame is None:
        return None
    value = frame.f_locals.get(next(iter(frame.f_code.co_varnames), ""))
    value = value[0] if isinstance(value, tuple) and value else value
    return value if isinstance(value, FunctionCtx) else None


def _entered_checkpoints() -> list[Any]:
    """Return the frames of non-reentrant checkpoints in a first pass, up to a recomputed checkpoint.

    The frames are on torch's stack of hooks for saved tensors, possibly below hooks of other code.
    """
    popped: list[tuple[Any, Any]] = []
    entered: list[Any] = []
    is_again = False
    try:
        while not is_again and (hooks := _top_hooks(True)) is not None:
            _autograd._pop_saved_tensors_default_hooks()
            popped.append(hooks)
            frame, is_again = _frame_of(hooks[0])
            entered += [] if frame is None else [frame]
    finally:
        for hooks in reversed(popped):
            _autograd._push_saved_tensors_default_hooks(*hooks)
    return entered


def _frame_of(pack: Any) -> tuple[object, bool]:
    """Return (frame of a hook for saved tensors in a first pass or None, whether the hook is of a recomputation).

    The classes have the same names in torch and in Transformer Engine.
    """
    while hasattr(pack, "__wrapped__"):  # torch disables compilation by a wrapper
        pack = pack.__wrapped__
    owner = getattr(pack, "__qualname__", "").partition(".")[0]
    names = getattr(getattr(pack, "__code__", None), "co_freevars", ())
    if owner != "_checkpoint_hook" or "frame" not in names:
        return None, owner == "_recomputation_hook"
    return pack.__closure__[names.index("frame")].cell_contents, False
