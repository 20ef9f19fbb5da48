"""Routes of another batch are noticed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from matrix_world import VOCAB, Variant, build_alone
from megatron.core.transformer.moe.router import TopKRouter
from torch.utils.checkpoint import checkpoint

from megarl.errors import ReplayError
from megarl.replay import MicroRoutes, Recording, RoutingReplay
from megarl.replay.agreement import LEAST_JUDGED, MOST_SAMPLED, check_agreement, sample_rows
from megarl.replay.megatron_state import RELEASE, unwrap

B, S = 4, 16


class Loop:
    """A loop over [b, s] batches, and the routes that an engine with slightly other weights has recorded."""

    def __init__(
        self, router: str = "softmax", noise: float = 0.02, shape: tuple[int, int] = (B, S), **more: Any
    ) -> None:
        variant = Variant(router=router if not more else "softmax")
        self.model = build_alone(variant, **more)
        source = torch.Generator().manual_seed(0)
        self.batches = [torch.randint(0, VOCAB, shape, generator=source) for _ in range(3)]
        self.replay = RoutingReplay(self.model.chunks)
        weights = [p for p in self.model.chunks[0].parameters()]
        kept = [p.detach().clone() for p in weights]
        with torch.no_grad():
            for weight in weights:
                weight.mul_(1.0 + noise * torch.randn(weight.shape, generator=source))
            with self.replay.record() as recording:
                self.run()
            for weight, old in zip(weights, kept, strict=True):
                weight.copy_(old)
        self.routes = recording.routes
        self.bare = [MicroRoutes(one.experts) for one in self.routes]
        """Without token ids."""

    def run(self, batches: Sequence[torch.Tensor] | None = None) -> None:
        for tokens in self.batches if batches is None else batches:
            with torch.no_grad():
                self.model.chunks[0](input_ids=tokens, position_ids=torch.zeros_like(tokens), attention_mask=None)

    def replayed(self, routes: Sequence[MicroRoutes], **options: Any) -> Any:
        with self.replay.replay(routes, **options) as seen:
            self.run()
        return seen


@pytest.fixture
def loop(one_rank: None) -> Loop:
    return Loop()


def _each(change: Any) -> Any:
    """A mistake that is made in every micro-batch; with token ids too, if they go with the rows."""

    def make(routes: Sequence[MicroRoutes]) -> list[MicroRoutes]:
        return [
            MicroRoutes(change(one.experts), token_ids=None if one.token_ids is None else change(one.token_ids))
            for one in routes
        ]

    return make


def _transposed(rows: torch.Tensor) -> torch.Tensor:
    return rows.unflatten(0, (S, B)).transpose(0, 1).flatten(0, 1)


MISTAKES: dict[str, Any] = {
    "transposed": _each(_transposed),
    "shifted": _each(lambda rows: rows.roll(-1, 0)),
    "shifted late": _each(lambda rows: rows.roll(2, 0)),
    "swapped": lambda routes: [routes[0], routes[2], routes[1]],
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("carried", ["token ids carried", "experts alone"])
def test_a_typical_mistake_is_caught(mistake: str, carried: str, loop: Loop) -> None:
    routes = MISTAKES[mistake](loop.bare if carried == "experts alone" else loop.routes)
    about = "would have chosen" if carried == "experts alone" else "are of other tokens than the model gets"
    with pytest.raises(ReplayError, match=f"{about}.*Likely rows are shifted"):
        loop.replayed(routes)


@pytest.mark.parametrize("router", ["grouped", "every_other"])
def test_layers_in_another_order_are_caught(router: str, one_rank: None) -> None:
    loop = Loop(router)
    order = [1, 0, *range(2, len(loop.replay.layers))]
    routes = [MicroRoutes(one.experts[:, order], token_ids=one.token_ids) for one in loop.routes]
    with pytest.raises(ReplayError, match=r"2 of . layers are below"):
        loop.replayed(routes)


def test_another_top_k_is_caught_and_named(loop: Loop) -> None:
    for wrong, found in ((lambda e: e[..., :1], 1), (lambda e: torch.cat([e, e], 2), 4)):
        routes = [MicroRoutes(wrong(one.experts)) for one in loop.routes]
        with pytest.raises(ReplayError, match=rf"micro-batch 0: routes of shape .* {found}\), expected .* top-2\]"):
            loop.replayed(routes)


def test_routes_of_another_model_are_caught(loop: Loop) -> None:
    source = torch.Generator().manual_seed(1)
    random = [
        MicroRoutes(torch.rand((*one.experts.shape[:2], 8), generator=source).argsort(2)[..., :2])
        for one in loop.routes
    ]
    with pytest.raises(ReplayError, match="or routes are of another model") as raised:
        loop.replayed(random)
    assert re.search(r"2[4-8]% would be chance, expected at least 6[2-4]% \(min_agreement = 0\.5\)", str(raised.value))
    assert "3 of 3 micro-batches and 4 of 4 layers are below" in str(raised.value)
    assert loop.replayed(random, min_agreement=0.0).agreement is None


def test_routes_of_the_batch_pass_and_say_how_far_they_agree(loop: Loop) -> None:
    seen = loop.replayed(loop.routes)
    assert seen.compared_tokens == 3
    assert seen.agreement.shape == (3, 4)
    native = loop.replayed(loop.routes, observe=True).native
    for micro in range(3):
        same = (native[micro].experts[:, :, :, None] == loop.routes[micro].experts[:, :, None, :]).any(3)
        np.testing.assert_allclose(seen.agreement[micro], same.double().mean((0, 2)), atol=1e-12)
    assert 0.7 < seen.agreement.min() < seen.agreement.mean() < 1.0  # the engine is another


def test_the_threshold_can_be_set(loop: Loop) -> None:
    with pytest.raises(ReplayError, match=r"min_agreement = 0\.999"):
        loop.replayed(loop.bare, min_agreement=0.999)
    for value in (-0.1, 1.1, float("nan")):
        with pytest.raises(ReplayError, match="expected a number from 0"):
            RoutingReplay(loop.model.chunks, min_agreement=value)
    loop.replay = RoutingReplay(loop.model.chunks, min_agreement=0.999)
    with pytest.raises(ReplayError, match=r"min_agreement = 0\.999"):
        loop.replayed(loop.bare)


def test_rows_that_are_not_present_are_not_compared(loop: Loop) -> None:
    present = torch.arange(B * S) % 3 > 0
    routes = [
        MicroRoutes(
            torch.where(present[:, None, None], one.experts, 200),
            present,
            torch.where(present, one.token_ids, -1),
        )
        for one in loop.routes
    ]
    seen = loop.replayed(routes)
    assert seen.agreement.min() > 0.7
    assert seen.native_rows == 3 * 4 * int((~present).sum())
    nothing = [MicroRoutes(one.experts, torch.zeros(B * S, dtype=torch.bool)) for one in loop.routes]
    assert np.isnan(loop.replayed(nothing).agreement).all()


def test_a_recording_is_refused_for_other_micro_batches(loop: Loop) -> None:
    with loop.replay.record() as recording:
        loop.run()
    with (
        pytest.raises(ReplayError, match=r"micro-batch 0: .* are of other tokens"),
        loop.replay.replay(recording),
    ):
        loop.run([loop.batches[1], loop.batches[0], loop.batches[2]])


def test_input_that_is_changed_in_place_later_is_compared_as_it_was(one_rank: None) -> None:
    loop = Loop(shape=(1, S))
    buffer = torch.empty_like(loop.batches[0])
    with loop.replay.replay(loop.routes) as seen:
        for tokens in loop.batches:
            loop.run([buffer.copy_(tokens)])
    assert seen.compared_tokens == 3


def test_a_whole_model_in_one_checkpoint_shows_its_tokens_once(loop: Loop) -> None:
    """Its recomputation calls the model a second time, between the passes of other micro-batches."""
    scale = torch.ones((), requires_grad=True)

    def run(scale: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return scale * loop.model.chunks[0](tokens, torch.zeros_like(tokens), None).sum()

    with loop.replay.replay(loop.routes) as seen:
        for tokens in loop.batches:
            checkpoint(run, scale, tokens, use_reentrant=True).backward()
    assert seen.compared_tokens == 3


@pytest.mark.parametrize("router", ["softmax", "one layer"])
@pytest.mark.parametrize("laid_out", ["by token", "by layer"])
def test_what_a_block_is_given_is_not_written_to(router: str, laid_out: str, one_rank: None) -> None:
    """Missing rows are filled in a copy, however the given experts lie in memory."""
    loop = Loop() if router == "softmax" else Loop(router, moe_layer_freq=[0, 0, 1, 0])
    present = torch.arange(B * S) % 5 > 0
    given = [torch.where(present[:, None, None], one.experts, 77) for one in loop.routes]
    if laid_out == "by layer":
        given = [one.transpose(0, 1).contiguous().transpose(0, 1) for one in given]
    kept = [one.clone() for one in given]
    for _ in range(2):
        loop.replayed([MicroRoutes(one, present) for one in given])
    assert all(torch.equal(one, other) for one, other in zip(given, kept, strict=True))


def test_ids_are_not_compared_where_the_model_gets_none(loop: Loop) -> None:
    chunk = unwrap(loop.model.chunks[0])
    embed = chunk.embedding
    with loop.replay.replay(loop.routes) as seen, torch.no_grad():
        for tokens in loop.batches:
            positions = torch.zeros_like(tokens)
            chunk(None, positions, None, decoder_input=embed(input_ids=tokens, position_ids=positions))
    assert seen.compared_tokens == 0


@pytest.mark.parametrize(("num_rows", "expected"), [(1, 1), (MOST_SAMPLED, MOST_SAMPLED), (1000, MOST_SAMPLED)])
def test_sampled_rows_are_present_and_spread(num_rows: int, expected: int) -> None:
    present = torch.ones(2 * num_rows, dtype=torch.bool)
    present[::2] = False
    rows = sample_rows(MicroRoutes(torch.zeros(2 * num_rows, 1, 1), present))
    assert len(rows) == len(set(rows.tolist())) == expected
    assert present[rows].all()
    assert rows[0] < 2 * num_rows / expected
    assert rows[-1] >= 2 * num_rows * (1 - 1 / expected) - 1


@pytest.mark.parametrize(
    ("agreeing", "rows", "passes", "message"),
    [
        # p = 22 / 44, on top 2 sqrt(0.25 / 44) = 0.15076: (0.65076 - 0.25) / 0.75 = 0.53435
        (20, 40, 0.534, r"would have chosen 50%.*25% would be chance.*at least 65%"),
        # p = 54 / 104, on top 2 sqrt(p (1 - p) / 104) = 0.09798: (0.61721 - 0.5) / 0.5 = 0.23442
        (52, 100, 0.234, r"would have chosen 52%.*50% would be chance.*at least 62%"),
        # p = 2 / 12, on top 2 sqrt(p (1 - p) / 12) = 0.21517: (0.38184 - 0.25) / 0.75 = 0.17578
        (0, LEAST_JUDGED, 0.175, r"would have chosen 0%"),
        (0, LEAST_JUDGED - 1, 1.0, None),  # few rows prove little
    ],
)
def test_the_least_agreement_by_hand(agreeing: int, rows: int, passes: float, message: str | None) -> None:
    """Agreement p = (x + 2) / (n + 4) with 2 sqrt(p (1 - p) / (n + 4)) on top, beyond chance.

    One expert of four per row, always the same, which the router chooses in some rows. Chance is what other rows agree
    by, and half at most.
    """
    given, own = torch.zeros(rows, 1, 1, dtype=torch.uint8), torch.ones(rows, 1, 1, dtype=torch.uint8)
    own[:agreeing] = 0

    def check(experts: int, least: float) -> list[list[float]]:
        return check_agreement([given], [own], [0], experts, least).tolist()

    assert check(4, passes) == [[agreeing / rows]]
    assert check(1, 1.0) == [[agreeing / rows]]  # where all experts are chosen nothing can be told
    if message:
        with pytest.raises(ReplayError, match=message):
            check(4, passes + 0.001)


@pytest.mark.parametrize("topk", [1, 8])
@pytest.mark.parametrize("rows", [1, 2, 4, 16])
def test_engines_that_disagree_in_a_tenth_are_not_refused(topk: int, rows: int) -> None:
    """Of 128 experts; a whole row disagrees, in all of its layers."""
    random = np.random.default_rng(0)
    for _ in range(200):
        given = torch.from_numpy(random.random((rows, 4, 128)).argsort(2)[..., :topk])
        own = torch.where(torch.from_numpy(random.random(rows) < 0.1)[:, None, None], 127 - given, given)
        check_agreement([given], [own], [0, 1, 2, 3], 128, 0.5)


def test_what_a_block_is_given_is_checked_before_it_opens(loop: Loop) -> None:
    one = loop.bare[0]
    rows = len(one.experts)
    repeated, beyond, negative = one.experts.clone(), one.experts.clone(), one.experts.to(torch.int64)
    repeated[5, 1] = 3
    beyond[6, 2, 0] = 8
    negative[7, 3, 1] = -1
    half = torch.arange(rows) < 6
    wrong: list[tuple[MicroRoutes, str]] = [
        (MicroRoutes(one.experts.float()), "experts are torch.float32, expected integers"),
        (MicroRoutes(one.experts[0]), r"routes of shape \(4, 2\), expected \[tokens, 4 MoE layers"),
        (MicroRoutes(one.experts[:, :3]), "expected .tokens, 4 MoE layers"),
        (MicroRoutes(one.experts, torch.ones(1, dtype=torch.bool)), rf"present of shape \(1,\), expected \[{rows}\]"),
        (MicroRoutes(one.experts, torch.ones(rows)), "present is torch.float32, expected bool"),
        (MicroRoutes(one.experts, token_ids=torch.zeros(3).long()), r"token_ids of shape \(3,\)"),
        (MicroRoutes(repeated), r"row 5, layer 1: experts \[3, 3\], expected 2 different ones of 0 to 7"),
        (MicroRoutes(beyond), r"row 6, layer 2: experts \[8, \d\]"),
        (MicroRoutes(negative), r"row 7, layer 3: experts \[\d, -1\]"),
        (MicroRoutes(repeated, half), "row 5, layer 1"),
    ]
    for entry, message in wrong:
        with pytest.raises(ReplayError, match=f"micro-batch 1.*{message}"), loop.replay.replay([one, entry]):
            pytest.fail("the block must not open")
    recording = Recording([MicroRoutes(beyond)])  # experts of a recording are not checked
    with pytest.raises(ReplayError, match="0 forward passes used the routes of 1"), loop.replay.replay(recording):
        pass
    loop.replayed([MicroRoutes(beyond, half), *loop.bare[1:]])
    for dtype in (torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64):
        loop.replayed([MicroRoutes(one.experts.to(dtype)), *loop.bare[1:]])
    loop.replayed([one.experts, *loop.bare[1:]])
    for several in (one, one.experts):
        with pytest.raises(ReplayError, match="expected a list with one per micro-batch"):
            loop.replayed(several)
    with pytest.raises(ReplayError, match=r"micro-batch 0: routes are a .*, expected MicroRoutes or a Tensor"):
        loop.replayed([one.experts.numpy()])
    with pytest.raises(ReplayError, match=r"micro-batch 0: routes of shape .* 1\), expected .* top-2\]"):
        loop.replayed(loop.bare, compared=[MicroRoutes(one.experts[..., :1])] * 3)
    with loop.replay.record() as recording:
        loop.run()
    assert len(loop.replayed(loop.bare, compared=recording).shared) == 3


def test_ids_of_a_pass_that_failed_are_forgotten(loop: Loop) -> None:
    attention = unwrap(loop.model.chunks[0]).decoder.layers[0].self_attention

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    with loop.replay.replay(loop.routes) as seen:
        handle = attention.register_forward_pre_hook(fail)
        with pytest.raises(ZeroDivisionError):
            loop.run([loop.batches[2]])
        handle.remove()
        loop.run()
    assert seen.compared_tokens == 3


def _overriding(method: str) -> type[TopKRouter]:
    """A subclass of Megatron's router with this method of its own, which changes nothing."""

    def same(router: TopKRouter, *given: Any, **named: Any) -> Any:
        return getattr(TopKRouter, method)(router, *given, **named)

    return type("OwnRouter", (TopKRouter,), {method: same})


class TestRouters:
    """RoutingReplay finds every router that Megatron's config promises, or says which one is missing."""

    def test_a_router_or_moe_layer_of_another_class(self, loop: Loop) -> None:
        layers = unwrap(loop.model.chunks[0]).decoder.layers
        layers[2].mlp.router = torch.nn.Linear(2, 2)
        with pytest.raises(ReplayError, match=r"layer 2: found 0 routers, expected 1 by .*its router a TopKRouter"):
            RoutingReplay(loop.model.chunks)
        layers[1].mlp = torch.nn.Linear(2, 2)
        with pytest.raises(ReplayError, match="layer 1: found 0 routers, expected 1 by moe_layer_freq"):
            RoutingReplay(loop.model.chunks)

    @pytest.mark.parametrize("method", ["forward", "routing"])
    def test_a_router_that_may_choose_in_its_own_way(self, method: str, loop: Loop) -> None:
        router = unwrap(loop.model.chunks[0]).decoder.layers[2].mlp.router
        router.__class__ = _overriding(method)
        refusal = f"layer 2: its router is a OwnRouter, and OwnRouter.{method} is not that of megatron-core {RELEASE}"
        with pytest.raises(ReplayError, match=re.escape(refusal)):
            RoutingReplay(loop.model.chunks)

    @pytest.mark.parametrize("method", ["forward", "routing"])
    def test_a_router_that_says_that_it_asks(self, method: str, loop: Loop) -> None:
        """One that computes logits in its own way need not."""
        router = unwrap(loop.model.chunks[0]).decoder.layers[2].mlp.router
        asking = _overriding(method)
        asking.asks_router_replay = True  # type: ignore[attr-defined]
        for accepted in (_overriding("gating"), type("Derived", (asking,), {})):
            router.__class__ = accepted
            loop.replay = RoutingReplay(loop.model.chunks)
            loop.replayed(loop.routes)
        router.__class__ = type("Derived", (asking,), {method: vars(_overriding(method))[method]})
        with pytest.raises(ReplayError, match=rf"its router is a Derived, and Derived\.{method}"):
            RoutingReplay(loop.model.chunks)

    @pytest.mark.parametrize(("frequency", "layers"), [(1, (0, 1, 2, 3)), (2, (0, 2)), ([0, 1, 1, 0], (1, 2))])
    def test_the_frequency_of_moe_layers(self, frequency: Any, layers: tuple[int, ...], one_rank: None) -> None:
        model = build_alone(Variant(), moe_layer_freq=frequency)
        assert RoutingReplay(model.chunks).layers == layers
        unwrap(model.chunks[0]).decoder.layers[0].config.moe_layer_freq = [1, 1, 1, 1] if layers != (0, 1, 2, 3) else 2
        with pytest.raises(ReplayError, match="by moe_layer_freq"):
            RoutingReplay(model.chunks)

    def test_some_of_the_chunks_or_two_models(self, loop: Loop) -> None:
        twice = [*loop.model.chunks, *loop.model.chunks]
        with pytest.raises(ReplayError, match="found 2 model chunks, expected 1"):
            RoutingReplay(twice)
        unwrap(loop.model.chunks[0]).config.virtual_pipeline_model_parallel_size = 2
        with pytest.raises(ReplayError, match=r"found 1 model chunks, expected 2 .* give RoutingReplay all chunks"):
            RoutingReplay(loop.model.chunks)
        with pytest.raises(ReplayError, match="found two routers of layer 0, expected one; make one RoutingReplay per"):
            RoutingReplay(twice)
        loop.replayed(loop.routes)  # a refused model keeps its hooks
