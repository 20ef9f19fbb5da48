"""Replay with ``min_score``: experts that the training router rates low give way to the router's own choice."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from dispatch_probe import DispatchProbe
from matrix_world import Variant, build_alone
from tiny_world import batch_of, fixed_coefficients, local_routes, micro_batches, rollouts

from megarl.errors import ReplayError
from megarl.megatron.passes.forward import MicroOutput, run
from megarl.replay import Recording, RoutingReplay
from megarl.replay.hooks import Question
from megarl.replay.sessions import replace_weak

ROUTERS = ("softmax", "pre_softmax", "fp64", "sigmoid_bias", "grouped", "top3", "top1")


def replaced_row(replayed: Sequence[int], own: Sequence[int], rate: Sequence[float], min_score: float) -> list[int]:
    """The experts in use by the rule's words, for one row. rate: how the router rates each expert."""
    weakest = min(rate[expert] for expert in own)
    kept = [expert for expert in replayed if rate[expert] >= min(min_score * weakest, weakest)]
    by_rate = sorted((expert for expert in own if expert not in kept), key=lambda expert: -rate[expert])
    left = iter(by_rate)
    return [expert if expert in kept else next(left) for expert in replayed]


@pytest.mark.parametrize("min_score", [0.01, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("kind", ["logits", "probabilities", "biased"])
@pytest.mark.parametrize(("top_k", "num_experts"), [(1, 4), (2, 8), (8, 12), (4, 4)])
def test_the_rule_for_one_row_at_a_time(kind: str, top_k: int, num_experts: int, min_score: float) -> None:
    generator = torch.Generator().manual_seed(top_k)
    logits = 2 * torch.randn(300, num_experts, generator=generator)
    scores = {
        "logits": logits,
        "probabilities": logits.softmax(1),
        "biased": logits.sigmoid() + torch.randn(num_experts, generator=generator),  # also below 0
    }[kind]
    experts = torch.rand(300, num_experts, generator=generator).argsort(1)[:, :top_k]
    question = Question(scores, lambda rows, k, *_: rows.topk(k, dim=1), top_k)
    used, counts = replace_weak(question, experts, min_score, kind == "logits")
    rate = scores.double().exp() if kind == "logits" else scores.double()
    own = scores.topk(top_k, dim=1).indices
    rows = (experts.tolist(), own.tolist(), rate.tolist())
    expected = [replaced_row(*row, min_score) for row in zip(*rows, strict=True)]
    assert used.tolist() == expected
    assert torch.equal(counts, (torch.tensor(expected) != experts).sum(1))
    assert all(len(set(row)) == top_k for row in expected)
    if min_score == 1:
        assert torch.equal(used.sort(1).values, own.sort(1).values)
    elif 1 < top_k < num_experts and min_score > 0.01:
        assert 0 < int(counts.sum()) < counts.numel() * top_k  # some, not all: the test can tell


def test_equal_scores_are_taken_in_the_routers_order() -> None:
    """Scores of three values, and so many experts that a sort which need not be stable takes another order."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(1, 4, (50, 128), generator=generator).double()
    experts = torch.rand(50, 128, generator=generator).argsort(1)[:, :64]
    used, _ = replace_weak(Question(scores, lambda rows, k, *_: rows.topk(k, dim=1), 64), experts, 1.0, False)
    rows = (experts.tolist(), scores.topk(64, dim=1).indices.tolist(), scores.tolist())
    assert used.tolist() == [replaced_row(*row, 1.0) for row in zip(*rows, strict=True)]


class World:
    """A model of the matrix on one rank, with random routes and holes."""

    def __init__(self, router: str, recompute: str = "none", **more: Any) -> None:
        self.model = build_alone(Variant(recompute, router=router), **more)
        shape = self.model.shape
        made = rollouts(30, len(shape.moe_layers), shape.num_experts, shape.topk)
        self.micros = micro_batches(self.model.settings, batch_of(made))
        self.replay = RoutingReplay(self.model.chunks, min_agreement=0.0)
        self.routes = [local_routes(micro, self.replay.layers, shape) for micro in self.micros]

    def step(self, **options: Any) -> tuple[Recording, list[MicroOutput], list[torch.Tensor]]:
        for chunk in self.model.chunks:
            chunk.zero_grad_buffer()
        with self.replay.replay(self.routes, **options) as recording:
            outputs = run(
                self.model.chunks, self.micros, temperature=1.0, vocab_size=32, coefficients=fixed_coefficients
            )
        return recording, outputs, [p.main_grad.clone() for c in self.model.chunks for p in c.parameters()]


@pytest.mark.parametrize("recompute", ["none", "uniform"])
@pytest.mark.parametrize("router", ROUTERS)
def test_tokens_go_where_the_rule_sends_them_in_every_pass(router: str, recompute: str, one_rank: None) -> None:
    world = World(router, recompute)
    oracle, topk = world.model.router, world.model.shape.topk
    probe = DispatchProbe(world.model.chunks, world.micros, oracle)
    recording, _, _ = world.step(min_score=0.8, compared=world.routes)
    probe.remove()
    assert any(one.is_recomputation for one in probe.seen) == (recompute == "uniform")
    for one in probe.seen:
        routes, own = world.routes[one.micro], oracle.choose(one.layer, one.logits)
        rate = one.logits.softmax(1).double()
        if router in ("sigmoid_bias", "grouped"):
            rate = (one.logits.sigmoid() + oracle.biases[one.layer]).double()
        present = torch.ones(len(own), dtype=torch.bool) if routes.present is None else routes.present
        replayed = torch.where(present[:, None], routes.experts[:, one.layer].long(), own)
        rows = zip(replayed.tolist(), own.tolist(), rate.tolist(), strict=True)
        expected = [replaced_row(*row, 0.8) for row in rows]
        assert torch.equal(torch.zeros_like(one.experts).scatter(1, torch.tensor(expected), True), one.experts)
        moved = [sum(a not in row for a in used) for used, row in zip(expected, replayed.tolist(), strict=True)]
        assert recording.replaced[one.micro][:, one.layer].tolist() == moved
        shared = recording.shared[one.micro][present, one.layer]
        assert (topk - shared).tolist() == torch.tensor(moved)[present].tolist()  # compared with the routes themselves
    assert any(int(counts.sum()) for counts in recording.replaced)
    assert probe.largest_gate_error() < 1e-5


def test_zero_replays_all_experts_and_one_is_native_routing(one_rank: None) -> None:
    world = World("softmax", "uniform")
    plain, before, gradients = world.step()
    off, after, same = world.step(min_score=0.0)
    assert plain.replaced == off.replaced == []
    assert all(torch.equal(a.logprobs, b.logprobs) for a, b in zip(before, after, strict=True))
    assert all(itertools.starmap(torch.equal, zip(gradients, same, strict=True)))
    with world.replay.record() as native:
        run(world.model.chunks, world.micros, temperature=1.0, vocab_size=32)
    world.replay = RoutingReplay(world.model.chunks, min_agreement=0.0, min_score=1.0)
    _, outputs, _ = world.step()
    with world.replay.replay(native, min_score=0.0):
        expected = run(world.model.chunks, world.micros, temperature=1.0, vocab_size=32)
    for a, b in zip(outputs, expected, strict=True):
        torch.testing.assert_close(a.logprobs, b.logprobs, rtol=0, atol=1e-6)
    with pytest.raises(ReplayError, match=r"min_score = 1\.5, expected a number from 0"):
        world.step(min_score=1.5)


def test_agreement_is_of_the_routes_and_not_of_what_replaced_them(one_rank: None) -> None:
    """Otherwise a high min_score would hide routes of another batch."""
    shares = []
    for min_score in (0.0, 1.0):
        recording, _, _ = World("softmax").step(min_score=min_score, min_agreement=1e-9)
        assert recording.agreement is not None
        shares.append(recording.agreement[0, 0])  # the first layer's input does not depend on experts
    assert shares[0] == shares[1] < 0.6


def test_scores_are_of_the_experts_in_use_and_then_of_the_same_experts(one_rank: None) -> None:
    for router in ("softmax", "pre_softmax", "sigmoid_bias", "top3"):
        world = World(router)
        options = {"temperature": 1.0, "vocab_size": 32}
        probe = DispatchProbe(world.model.chunks, world.micros, world.model.router)
        with world.replay.replay(world.routes, scored=True) as first:
            run(world.model.chunks, world.micros, **options)
        for one in probe.seen:
            logs = one.logits.sigmoid().log() if router == "sigmoid_bias" else one.logits.log_softmax(1)
            scores = first.scores[one.micro]
            experts = scores.experts[:, one.layer].long()
            assert torch.equal(torch.zeros_like(one.experts).scatter(1, experts, True), one.experts)
            torch.testing.assert_close(scores.log_probs[:, one.layer], logs.gather(1, experts), rtol=1e-4, atol=1e-5)
        probe.seen.clear()
        with world.replay.record(keep=False, scored=first.scores) as later:
            run(world.model.chunks, world.micros, **options)
        probe.remove()
        for one in probe.seen:
            logs = one.logits.sigmoid().log() if router == "sigmoid_bias" else one.logits.log_softmax(1)
            experts, scores = first.scores[one.micro].experts[:, one.layer].long(), later.scores[one.micro]
            torch.testing.assert_close(scores.log_probs[:, one.layer], logs.gather(1, experts), rtol=1e-4, atol=1e-5)
