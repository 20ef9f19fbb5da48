"""The object that a training loop holds: it sets one hook per router, and opens blocks that record or replay.

Megatron-Core from 0.16 on, or an older release after ``megarl patch``, asks ``router.router_replay`` for the experts of
a batch. ``RoutingReplay`` sets one hook per router, which routes natively outside of ``record()`` and
``replay(routes)``. Models do not share state. Gate weights come from the logits of the pass at the replayed experts,
and carry gradients to the router (Ma et al., arXiv 2510.11370; Zheng et al., arXiv 2512.01374). With
``MicroRoutes.gates``, their values are the rollout's, and their gradients those of the logits.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from typing import Any, NoReturn

import torch

from megarl.core.devices import DeviceChecks
from megarl.errors import ReplayError
from megarl.files.hf_config import MoeShape
from megarl.replay.checks import check_chunks, check_routers, check_routes, find_routers, fitting_shape
from megarl.replay.hooks import Hook, count_dispatched, count_natively, replace_gates, tap
from megarl.replay.layout import local_rows
from megarl.replay.megatron_state import cp_position, split_position, unwrap
from megarl.replay.pass_log import PassLog
from megarl.replay.records import MicroRoutes, Recording
from megarl.replay.sessions import Scored, Session

MIN_AGREEMENT = 0.5
"""Of replayed experts with the routers' own choice, beyond chance; engines that run one model agree in about 0.9."""

Routes = Recording | Sequence[MicroRoutes | torch.Tensor]
"""One entry per micro-batch; a tensor has all rows present."""


class RoutingReplay:
    """Record and replay the expert choice of all routers of a model's chunks on this rank.

    >>> replay = RoutingReplay(model_chunks)
    >>> with replay.record() as recording: ...     # old-log-prob pass (R2)
    >>> with replay.replay(recording.routes): ...  # forward and backward, each micro-batch exactly once

    A rank without MoE layers has empty routes. Routers of exempt layers (``MoeShape``) are left alone, and have no
    routes. Routers of multi-token-prediction layers route natively, because no trace has rows for them. ReplayError if
    Megatron is too old to call the hook, if a setting would bypass it (``megarl doctor`` lists them), if the router of
    another MoE layer is no TopKRouter or has a choice of its own, or if these are not all chunks of one model on this
    rank.

    Under replay, load-balancing losses count the experts that tokens are sent to (Megatron would count those that the
    router would have chosen), as expert-bias updates do. The z-loss does not change.

    min_agreement: in [0, 1], the least agreement of the replayed experts with the routers' own choice, beyond chance
    (``agreement.py``). 0 switches the check off. shape: ``MoeShape.of(config.json)``, if Megatron's config does not say
    which layers have experts (hybrid models) or are exempt; None: ``MoeShape.of_megatron``. min_score: in [0, 1];
    above 0, a replayed expert stays only if its score is at least this share of the weakest score in the router's own
    top K, otherwise the best of the own top K take its place (``replace_weak``). 0 replays all experts.
    """

    def __init__(
        self,
        model_chunks: Sequence[torch.nn.Module] | torch.nn.Module,
        min_agreement: float = MIN_AGREEMENT,
        shape: MoeShape | None = None,
        min_score: float = 0.0,
    ) -> None:
        self._min_agreement = _check_share("min_agreement", min_agreement)
        self._min_score = _check_share("min_score", min_score)
        self._hooks: list[Hook] = []
        wrapped = [model_chunks] if isinstance(model_chunks, torch.nn.Module) else model_chunks
        chunks = [unwrap(chunk) for chunk in wrapped]
        routers: list[list[Any]] = [find_routers(chunk, shape) for chunk in chunks]
        check_chunks(chunks)
        self._config = chunks[0].config
        self.shape = fitting_shape(self._config, shape)
        """Of the whole model's routes."""
        layers = [layer.layer_number - 1 for chunk in chunks for layer in chunk.decoder.layers]
        self.exempt_layers = tuple(layer for layer in layers if layer in self.shape.exempt_layers)
        """0-based global layers of this rank that are exempt from replay."""
        check_routers([router for of_chunk in routers for router in of_chunk])
        old_hooks = [router.router_replay for of_chunk in routers for router in of_chunk]
        log = next((hook.log for hook in old_hooks if isinstance(hook, Hook)), None)
        self._log = PassLog() if log is None else log  # of an earlier RoutingReplay, whose graphs may be left
        for index, (chunk, of_chunk) in enumerate(zip(chunks, routers, strict=True)):
            for place, router in enumerate(of_chunk):
                if isinstance(router.router_replay, Hook):
                    router.router_replay.remove_taps()
                router.router_replay = hook = Hook(router, len(self._hooks), self._log, index, place == 0)
                count_dispatched(router, hook)
                router.routing = partial(replace_gates, router.routing, hook)
                self._hooks.append(hook)
                if hook.is_first:
                    hook.taps = tap(chunk, index, self._log)

    def __reduce__(self) -> NoReturn:
        raise ReplayError("a RoutingReplay is not copied: a copy of its model routes natively, and takes a new one")

    @property
    def layers(self) -> tuple[int, ...]:
        """0-based global layers of this rank's routers, in the order of the columns of ``MicroRoutes``."""
        return tuple(hook.layer for hook in self._hooks)

    def rows(
        self, experts: torch.Tensor, present: torch.Tensor | None = None, token_ids: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None, cu_seqlens_padded: torch.Tensor | None = None,
        gates: torch.Tensor | None = None,
    ) -> MicroRoutes:  # fmt: skip
        """Return the routes of one micro-batch as this rank's routers see them (TP with SP, CP, PP, VPP).

        Give the whole micro-batch on every rank, with all MoE layers of the model in layer order: experts [b, s, L, K],
        present bool [b, s], token_ids [b, s]; or packed [T, L, K], [T] and [T] with ``cu_seqlens`` int64 [N+1].
        ``cu_seqlens_padded``: those with padding, as in Megatron's PackedSeqParams; one more sequence may stand for
        padding at the end. gates: the engine's gate weights, as experts. ReplayError if shapes do not fit.
        """
        tp = split_position(self._config)
        columns = experts, present, token_ids, cu_seqlens, cu_seqlens_padded, gates
        return local_rows(self.shape, self.layers, tp, cp_position(), *columns)

    def detach(self) -> None:
        """Remove this object's hooks, when no autograd graph of a block is left; those of a newer object stay.
        ReplayError in an open block.
        """
        if self._log.is_open:
            raise ReplayError("recording or replaying; detach after the block has closed")
        for hook in self._hooks:
            hook.remove_taps()
            if hook.router.router_replay is hook:
                hook.router.router_replay = None
                count_natively(hook.router)

    @contextmanager
    def record(self, keep: bool = True, compared: Routes | None = None, scored: Scored = False) -> Iterator[Recording]:
        """Route natively; ``recording.routes`` has the choice, one MicroRoutes per forward micro-batch.

        compared: routes of the same micro-batches; ``recording.shared`` counts the experts that they share with the
        choice. keep: False keeps these counts only. scored: True records how likely the routers find the experts in
        use (``recording.scores``); the scores of an earlier recording, the experts of that recording.
        """
        compared_routes = None if compared is None else self._check(compared, recorded=True)
        with self._open(Session(self._hooks, None, keep, compared_routes, scored=scored)) as recording:
            yield recording

    @contextmanager
    def replay(
        self, routes: Routes, observe: bool = False, compared: Routes | None = None, min_agreement: float | None = None,
        *,
        checked: bool = False, checks: DeviceChecks | None = None, min_score: float | None = None,
        scored: Scored = False,
    ) -> Iterator[Recording]:  # fmt: skip
        """Use ``routes``, one entry per micro-batch in the order of the forward passes.

        With activation checkpointing, run the backward pass in the block of its forward pass, in any order. ReplayError

        - on opening, if routes cannot be of this model;
        - on closing, if a router did not use every micro-batch once, if rows are of other tokens than the model's
          (``MicroRoutes.token_ids``), or if they agree too little with the routers (``min_agreement``);
        - in a recomputation whose first pass is unknown.

        observe: the Recording also has the routers' own choice. compared: other routes of the same micro-batches; the
        Recording counts the experts that they share with those in use, and with the routers' own choice. checked: the
        experts were checked before, as those of a Recording, and are not checked again or copied. checks: takes the
        comparison of token ids, for the caller to ``require`` after the block; None: it is made on closing. min_score:
        as of the object, for this block. scored: as in ``record``.
        """
        entries = self._check(routes, recorded=checked or isinstance(routes, Recording))
        compared_routes = None
        if compared is not None:
            compared_routes = entries if compared is routes else self._check(compared, recorded=True)
        limit = self._min_agreement if min_agreement is None else _check_share("min_agreement", min_agreement)
        score = self._min_score if min_score is None else _check_share("min_score", min_score)
        options = limit, checks, score, scored
        with self._open(Session(self._hooks, entries, observe, compared_routes, *options)) as recording:
            yield recording

    def _check(self, routes: Routes, recorded: bool) -> list[MicroRoutes]:
        entries = routes.routes if isinstance(routes, Recording) else routes
        if isinstance(entries, (MicroRoutes, torch.Tensor)):
            raise ReplayError(f"routes are one {type(entries).__name__}, expected a list with one per micro-batch")
        return [check_routes(f"micro-batch {i}", entry, self._hooks, recorded) for i, entry in enumerate(entries)]

    @contextmanager
    def _open(self, session: Session) -> Iterator[Recording]:
        for hook in self._hooks:
            if hook.router.router_replay is not hook:
                raise ReplayError(f"layer {hook.layer}: the router's hook was replaced; use the newest RoutingReplay")
        block, recording = self._log.open(session), Recording()
        try:
            yield recording
            session.close(self._hooks, block, recording)
        finally:
            self._log.close(block)
            for hook in self._hooks:
                hook.dispatched.pop(get_ident(), None)
                hook.gates.pop(get_ident(), None)


def _check_share(name: str, value: float) -> float:
    if not 0.0 <= value <= 1.0:
        raise ReplayError(f"{name} = {value!r}, expected a number from 0 (no check) to 1")
    return value
