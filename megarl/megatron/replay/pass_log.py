"""Finds the forward pass that a router's call belongs to, whatever the order of backward passes.

In the recomputation of a checkpointed layer, the router must use the experts of that layer's own first pass. Calls are
not counted; the autograd graph identifies each recomputation:

- *Reentrant* checkpointing (Megatron's, Transformer Engine's, torch's with ``use_reentrant=True``) is an autograd node
  with a ``run_function``. torch numbers the nodes of a thread in order of creation. A checkpoint's node is created just
  before its first pass, which has no graph. So the node's own pass is the first that the router saw after its number.
- *Non-reentrant* checkpointing (torch's default) has a frame object per region. The hooks for saved tensors hold it in
  both passes.

A recomputation whose first pass ran outside all blocks routes natively, as that pass did. If the block has closed, or
the first pass cannot be identified, it is a ReplayError.
"""

from __future__ import annotations

import sys
import threading
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch._C import _autograd
from torch.utils.checkpoint import _CheckpointFrame

from megarl.errors import ReplayError

KEPT_BLOCKS = 256
"""Closed blocks that are remembered, to tell their late recomputations from native ones; older graphs are refused."""
_top_hooks = getattr(_autograd, "_top_saved_tensors_default_hooks", lambda _: None)


@dataclass(eq=False, slots=True)
class Block:
    """An open ``record()`` or ``replay()``."""

    thread: int = field(default_factory=threading.get_ident)
    opened: int = field(default_factory=_autograd._get_sequence_nr)
    """Nodes of this thread with this number or a larger one were created in the block or after it."""

    def check_thread(self) -> None:
        """ReplayError unless on the thread that opened the block, because nodes are numbered by thread."""
        if threading.get_ident() != self.thread:
            raise ReplayError("the block closes on another thread than it was opened on; close it where it was opened")


@dataclass(frozen=True, slots=True)
class Call:
    """The pass that a router's call belongs to."""

    micro: int | None
    """Micro-batch of the open block; None for a pass outside blocks."""
    first: bool
    """True for a forward pass, False for a recomputation."""
    checkpointed: bool
    """Whether the layer may be recomputed from this pass."""


class PassLog:
    """The passes of one router. A newer RoutingReplay of the same model takes it over."""

    def __init__(self, layer: int) -> None:
        self.layer = layer
        self.forwarded = 0
        """Forward passes in the open block."""
        self._block: Block | None = None
        self._marks: list[int] = []  # node number at each pass of the block, ascending
        self._micros: list[int | None] = []  # micro-batch of each of those passes; None if it had a graph
        self._frames: WeakKeyDictionary[Any, tuple[Block, list[int]]] = WeakKeyDictionary()
        self._closed: deque[tuple[int, int]] = deque(maxlen=KEPT_BLOCKS)
        self._forgotten = 0  # nodes below may be of a block that has left _closed
        self._threads: set[int] = set()  # where passes outside blocks may have left checkpoints
        self._region: tuple[object, int] = (None, 0)  # (the current recomputation, the router's calls in it so far)

    def open(self, block: Block) -> None:
        """Start a block: forward passes are numbered from 0."""
        self._block, self.forwarded = block, 0
        self._marks, self._micros = [], []

    def close(self) -> None:
        """End the block: recomputations of its passes are refused from now on."""
        assert self._block is not None
        if len(self._closed) == KEPT_BLOCKS:
            self._forgotten = max(self._forgotten, self._closed[0][1])
        elsewhere = threading.get_ident() != self._block.thread
        self._closed.append((self._block.opened, sys.maxsize if elsewhere else _autograd._get_sequence_nr()))
        self._block = None

    def take_over(self) -> PassLog:
        """This log for a newer RoutingReplay. Making one declares that other threads are done."""
        self._threads.clear()
        return self

    def identify(self, training: bool) -> Call:
        """Identify the current call; ``training`` is the module's mode. ReplayError if that is impossible."""
        entered, recomputed = _checkpoint_frames()
        first = recomputed is None and torch._C._current_graph_task_id() == -1
        if recomputed is not None:
            micro = self._micro_of_frame(recomputed)
        elif first:
            micro = None if self._block is None else self.forwarded
            self.forwarded += 1
        else:
            micro = self._micro_of_node(torch._C._current_autograd_node())
        self._keep(micro, first, entered, training)
        return Call(micro, first, bool(entered) or (training and not torch.is_grad_enabled()))

    def _keep(self, micro: int | None, first: bool, entered: list[object], training: bool) -> None:
        without_graph = not torch.is_grad_enabled()
        if micro is None or self._block is None:
            if without_graph and training:
                self._threads.add(threading.get_ident())
            return
        for frame in entered:
            self._frames.setdefault(frame, (self._block, []))[1].append(micro)
        if without_graph and threading.get_ident() != self._block.thread:
            raise self._unknown_pass("the pass runs on another thread than the block was opened on")
        if (first or without_graph) and threading.get_ident() == self._block.thread:
            self._marks.append(_autograd._get_sequence_nr())
            self._micros.append(micro if without_graph else None)

    def _micro_of_frame(self, frame: object) -> int | None:
        block, micros = self._frames.get(frame, (None, []))
        if block is None:
            return None
        if block is not self._block:
            raise self._unknown_pass("the block of its forward pass has closed")
        return micros[self._calls_before((torch._C._current_graph_task_id(), id(frame)), len(micros))]

    def _micro_of_node(self, node: Any) -> int | None:
        if not hasattr(node, "run_function"):
            if self._block is None:
                return None  # a forward pass started by a backward hook
            raise self._unknown_pass(
                "it runs inside a backward pass, and no known checkpoint started it (an autograd function with "
                "run_function, as those of torch, Megatron and Transformer Engine)"
            )
        number, block = node._sequence_nr(), self._block
        if block is not None and number >= block.opened:
            if self._threads - {block.thread}:
                raise self._unknown_pass(
                    "earlier passes outside blocks ran on another thread; make a new RoutingReplay after them"
                )
            at = bisect_right(self._marks, number)
            at += self._calls_before((torch._C._current_graph_task_id(), number), len(self._marks) - at)
            if self._micros[at] is None:
                raise self._unknown_pass("its checkpoint has no first pass without a graph")
            return self._micros[at]
        if number < self._forgotten or any(opened <= number < closed for opened, closed in self._closed):
            raise self._unknown_pass("the block of its forward pass has closed")
        return None

    def _calls_before(self, region: object, most: int) -> int:
        """How often this recomputation has called the router before: a region may contain two passes of it."""
        calls = self._region[1] + 1 if self._region[0] == region else 0
        self._region = (region, calls)
        if calls >= most:
            raise self._unknown_pass("the router was called more often than in the first pass")
        return calls

    def _unknown_pass(self, why: str) -> ReplayError:
        return ReplayError(
            f"layer {self.layer}: recomputation of an unknown forward pass: {why}; run the backward pass inside the "
            "same block as its forward pass, on the thread that opened it"
        )


def _checkpoint_frames() -> tuple[list[object], object]:
    """(frames of the non-reentrant checkpoints in their first pass, the frame being recomputed or None).

    They are on torch's stack of hooks for saved tensors, possibly below others.
    """
    taken: list[tuple[Any, Any]] = []
    entered: list[object] = []
    recomputed = None
    try:
        while recomputed is None and (hooks := _top_hooks(True)) is not None:
            _autograd._pop_saved_tensors_default_hooks()
            taken.append(hooks)
            frame, again = _frame_of(hooks[0])
            if again:
                recomputed = frame
            elif frame is not None:
                entered.append(frame)
    finally:
        for hooks in reversed(taken):
            _autograd._push_saved_tensors_default_hooks(*hooks)
    return entered, recomputed


def _frame_of(pack: Any) -> tuple[object, bool]:
    """(frame of a hook for saved tensors or None, whether it is being recomputed)."""
    while hasattr(pack, "__wrapped__"):  # torch disables compilation by a wrapper
        pack = pack.__wrapped__
    names = getattr(getattr(pack, "__code__", None), "co_freevars", ())
    if "target_frame_ref" in names:
        return pack.__closure__[names.index("target_frame_ref")].cell_contents(), True
    frame = pack.__closure__[names.index("frame")].cell_contents if "frame" in names else None
    return (frame if isinstance(frame, _CheckpointFrame) else None), False
