"""What replay changes and what it leaves alone: gates, losses, counters, layers that no trace knows."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from dispatch_probe import DispatchProbe, tap
from matrix_world import Variant, build_alone, build_bare, fields_of, settings_of
from megatron.core import parallel_state
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter
from tiny_world import batch_of, fixed_coefficients, local_routes, micro_batches, rollouts

from megarl.errors import ConfigError
from megarl.megatron.passes.forward import run
from megarl.megatron.passes.micro_batches import MicroBatch, micro_batch
from megarl.replay import RoutingReplay
from megarl.replay.megatron_state import unwrap

PLAIN = Variant()
AUX = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.5}


class Setup:
    """A model of the matrix on one rank, with the fixed batch in micro-batches and its routes."""

    def __init__(self, variant: Variant = PLAIN, padded: bool = False, **more: Any) -> None:
        self.model = build_alone(variant, **more)
        shape = self.model.shape
        self.rollouts = rollouts(30, len(shape.moe_layers), shape.num_experts, shape.topk, holes=False)
        self.micros: list[MicroBatch] = micro_batches(self.model.settings, batch_of(self.rollouts))
        if padded:
            self.micros = [micro_batch(one.batch, one.num_slots + 3) for one in self.micros]
        self.replay = RoutingReplay(self.model.chunks, min_agreement=0.0)  # the routes are random
        self.routes = [local_routes(micro, self.replay.layers, shape) for micro in self.micros]

    def train(self) -> None:
        for chunk in self.model.chunks:
            chunk.zero_grad_buffer()
        run(self.model.chunks, self.micros, temperature=1.0, vocab_size=32, coefficients=fixed_coefficients)

    def score(self) -> None:
        run(self.model.chunks, self.micros, temperature=1.0, vocab_size=32)

    def routers(self) -> list[Any]:
        return [layer.mlp.router for layer in unwrap(self.model.chunks[0]).decoder.layers]


def losses(tracker: dict[str, Any], name: str) -> torch.Tensor:
    """fp32 [L], what a record has counted under this name."""
    entry = tracker[name]
    return entry["values"] if isinstance(entry, dict) else entry.values


@pytest.fixture(autouse=True)
def tracker(one_rank: None) -> Iterator[dict[str, Any]]:
    """Megatron's record of auxiliary losses by layer, empty; 0.12, 0.13 to 0.17 and 0.18 keep it in three places."""
    if importlib.util.find_spec("megatron.core.transformer.moe.moe_logging"):
        found = importlib.import_module("megatron.core.transformer.moe.moe_logging").get_moe_metrics_tracker().metrics
    else:
        home = moe_utils if hasattr(moe_utils, "get_moe_layer_wise_logging_tracker") else parallel_state
        found = home.get_moe_layer_wise_logging_tracker()
    found.clear()
    yield found
    found.clear()


def balance_losses(setup: Setup, experts: list[list[torch.Tensor]], probe: DispatchProbe) -> np.ndarray:
    """float64 [L] by the definition E / (K T^2) sum_e n_e sum_t softmax(logits)_te, summed over micro-batches.

    ``experts[micro][layer]`` [T, K] is what the n_e count; the probe knows the logits.
    """
    num_experts, topk = setup.model.shape.num_experts, setup.model.shape.topk
    total = np.zeros(len(setup.replay.layers))
    for one in probe.seen:
        chosen = experts[one.micro][one.layer]
        counts = np.bincount(chosen.flatten().numpy(), minlength=num_experts)
        scores = one.logits[: len(chosen)].double().softmax(1).sum(0).numpy()
        total[one.layer] += num_experts / (topk * len(chosen) ** 2) * float((counts * scores).sum())
    return total


@pytest.mark.parametrize("padded", [False, True])
def test_the_balancing_loss_counts_the_experts_that_tokens_are_sent_to(tracker: dict[str, Any], padded: bool) -> None:
    setup = Setup(padded=padded, **AUX)
    probe = DispatchProbe(setup.model.chunks, setup.micros, setup.model.router)
    with setup.replay.replay(setup.routes):
        setup.train()
    probe.remove()
    under_replay = losses(tracker, "load_balancing_loss").double().numpy().copy()
    tokens = [micro.batch.num_tokens for micro in setup.micros]
    sent = [
        [routes.experts[:t, layer].long() for layer in range(4)] for routes, t in zip(setup.routes, tokens, strict=True)
    ]
    np.testing.assert_allclose(under_replay, balance_losses(setup, sent, probe), rtol=1e-5)

    tracker.clear()
    probe = DispatchProbe(setup.model.chunks, setup.micros, setup.model.router)
    setup.train()
    probe.remove()
    natively = losses(tracker, "load_balancing_loss").double().numpy()
    chosen: list[list[torch.Tensor]] = [[torch.empty(0)] * 4 for _ in setup.micros]
    for one in probe.seen:
        chosen[one.micro][one.layer] = one.logits[: tokens[one.micro]].topk(2).indices
    np.testing.assert_allclose(natively, balance_losses(setup, chosen, probe), rtol=1e-5)
    assert np.abs(natively - under_replay).max() > 1e-3  # the two differ, so the test can tell them apart


def test_the_balancing_loss_reaches_the_router_through_the_dispatched_experts(tracker: dict[str, Any]) -> None:
    def router_gradients(**more: Any) -> list[torch.Tensor]:
        setup = Setup(**more)
        with setup.replay.replay(setup.routes):
            setup.train()
        return [router.weight.main_grad.clone() for router in setup.routers()]

    for a, b in zip(router_gradients(), router_gradients(**AUX), strict=True):
        assert float((a - b).abs().max()) > 1e-4


@pytest.mark.parametrize(
    ("kind", "name"),
    [("seq_aux_loss", "seq_load_balancing_loss"), ("global_aux_loss", "global_load_balancing_loss")],
)
def test_every_kind_of_balancing_loss_counts_dispatched_experts(tracker: dict[str, Any], kind: str, name: str) -> None:
    """One micro-batch of one batch row: all three kinds are then the same number."""
    if kind == "global_aux_loss" and not hasattr(TopKRouter, "_apply_global_aux_loss"):
        with pytest.raises(ConfigError, match="has no global_aux_loss"):
            Setup(moe_router_load_balancing_type=kind, moe_aux_loss_coeff=0.5)
        return
    found = {}
    for other in ("aux_loss", kind):
        setup = Setup(moe_router_load_balancing_type=other, moe_aux_loss_coeff=0.5)
        setup.micros, setup.routes = setup.micros[:1], setup.routes[:1]
        with setup.replay.replay(setup.routes):
            setup.train()
        one_label = other == "aux_loss" or not hasattr(TopKRouter, "_apply_seq_aux_loss")  # as there was before 0.14
        label = "load_balancing_loss" if one_label else name
        found[other] = losses(tracker, label).clone()
        tracker.clear()
    torch.testing.assert_close(found[kind], found["aux_loss"], rtol=1e-6, atol=0)


@pytest.mark.parametrize("recompute", ["none", "uniform"])
def test_expert_bias_counters_count_replayed_experts_once_and_no_padding(recompute: str) -> None:
    setup = Setup(Variant(recompute, router="sigmoid_bias"), padded=True, moe_router_bias_update_rate=0.0)
    for chunk in setup.model.chunks:  # the update would reset the counters
        unwrap(chunk).config.finalize_model_grads_func = None
    with setup.replay.replay(setup.routes):
        setup.score()
        assert all(float(router.local_tokens_per_expert.sum()) == 0 for router in setup.routers())
    with setup.replay.replay(setup.routes):
        setup.train()
    for layer, router in enumerate(setup.routers()):
        rows = [
            routes.experts[: m.batch.num_tokens, layer] for routes, m in zip(setup.routes, setup.micros, strict=True)
        ]
        counts = np.bincount(torch.cat(rows).flatten().numpy(), minlength=8)
        assert router.local_tokens_per_expert.tolist() == counts.tolist()


@pytest.mark.parametrize("rate", [0.0, 1e-2])
def test_expert_bias_moves_by_the_dispatched_load_and_only_if_asked(rate: float) -> None:
    setup = Setup(Variant(router="sigmoid_bias"), moe_router_bias_update_rate=rate)
    before = [router.expert_bias.clone() for router in setup.routers()]
    with setup.replay.replay(setup.routes):
        setup.train()
    for layer, (router, old) in enumerate(zip(setup.routers(), before, strict=True)):
        counts = np.bincount(torch.cat([r.experts[:, layer] for r in setup.routes]).flatten().numpy(), minlength=8)
        step = rate * np.sign(counts.mean() - counts)
        np.testing.assert_allclose((router.expert_bias - old).numpy(), step, atol=1e-7)


class TestMultiTokenPrediction:
    """A model with a multi-token-prediction layer whose router shares a layer number with the decoder's."""

    @pytest.mark.parametrize("recompute", ["none", "moe"])
    def test_decoder_layers_replay_and_the_prediction_layer_routes_natively_and_is_counted(
        self, recompute: str
    ) -> None:
        model = build_bare(Variant(recompute), prediction_layers=1)
        tokens = torch.randint(0, 30, (1, 10), generator=torch.Generator().manual_seed(1))
        inputs: dict[str, Any] = {
            "input_ids": tokens,
            "position_ids": torch.arange(10)[None],
            "attention_mask": None,
            "labels": tokens.roll(-1, 1),
        }
        sent: dict[str, list[torch.Tensor]] = {}
        for name, module in model.named_modules():
            if name.endswith("mlp.token_dispatcher") or not hasattr(module, "token_dispatcher"):
                continue
            self._tap(module, sent.setdefault(name, []))
        assert len(sent) == 5
        prediction = next(name for name in sent if name.startswith("mtp"))
        replay = RoutingReplay(model, min_agreement=0.0)
        assert replay.layers == (0, 1, 2, 3)
        experts = torch.rand(10, 4, 8, generator=torch.Generator().manual_seed(2)).argsort(2)[..., :2].to(torch.uint8)
        model.train()
        with replay.replay([experts]) as recording:
            model(**inputs).sum().backward()
        assert recording.native_rows == 0
        with replay.replay([experts]):
            model(**inputs).sum().backward()
        for maps in sent.values():
            del maps[len(maps) // 2 :]
        passes = 2 if recompute == "moe" else 1
        for name, maps in sent.items():
            assert len(maps) == passes
            if name != prediction:
                layer = int(name.split(".")[2])
                wanted = torch.zeros(10, 8, dtype=torch.bool).scatter(1, experts[:, layer].long(), True)
                assert all(torch.equal(seen, wanted) for seen in maps)
        router = model.get_submodule(prediction).router
        hidden = router.seen
        native = torch.zeros(10, 8, dtype=torch.bool).scatter(1, (hidden @ router.weight.T).topk(2).indices, True)
        assert all(torch.equal(seen, native) for seen in sent[prediction])
        assert router.weight.grad is not None
        assert float(router.weight.grad.abs().max()) > 0

        replay.detach()
        assert all(module.router_replay is None for module in model.modules() if hasattr(module, "router_replay"))

    def _tap(self, module: Any, maps: list[torch.Tensor]) -> None:
        def see(hidden: torch.Tensor, routing_map: torch.Tensor, _: torch.Tensor) -> None:
            maps.append(routing_map.bool().clone())
            module.router.seen = hidden.detach().reshape(-1, hidden.size(-1)).clone()

        tap(module.token_dispatcher, see)


def test_deep_ep_without_gpus_is_refused_before_anything_is_built() -> None:
    with pytest.raises(ConfigError, match="needs GPUs and the deep_ep package"):
        fields_of(settings_of({}, Variant(dispatcher="flex")), Variant())
