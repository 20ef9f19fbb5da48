"""What releases of Megatron-Core after 0.16 do on the way to the experts: replayed, or refused when replay is set up.

``test_megatron_versions.py`` runs this file on the newest release, where nothing is skipped.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from dispatch_probe import DispatchProbe, TopTwo, tap
from matrix_world import Variant
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.moe import moe_utils, router
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from test_megatron_replay_semantics import Setup

from megarl.errors import ReplayError
from megarl.replay import MicroRoutes, RoutingReplay
from megarl.replay.megatron_state import unwrap
from megarl.stand_ins.attention import PackedSequences

pytestmark = pytest.mark.usefixtures("one_rank")

FIELDS = {field.name for owner in (TransformerConfig, PackedSeqParams) for field in dataclasses.fields(owner)}


def needs(found: bool, release: str) -> Any:
    return pytest.mark.skipif(not found, reason=f"from megatron-core {release} on")


class _RootOfSoftplus(TopTwo):
    def gates(self, logits: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        scores = torch.where(experts, torch.log1p(logits.exp()).sqrt(), 0.0)
        return scores / scores.sum(1, keepdim=True)


@needs("sqrtsoftplus" in (moe_utils.topk_routing_with_score_function.__doc__ or ""), "0.18")
@pytest.mark.parametrize("recompute", ["none", "uniform", "moe"])
def test_routes_are_replayed_with_the_root_of_the_softplus_as_score(recompute: str) -> None:
    setup = Setup(Variant(recompute), moe_router_score_function="sqrtsoftplus")
    probe = DispatchProbe(setup.model.chunks, setup.micros, _RootOfSoftplus())
    with setup.replay.replay(setup.routes):
        setup.train()
    probe.remove()
    assert probe.violations(setup.rollouts, setup.replay.layers) == []
    assert probe.largest_gate_error() < 1e-5
    assert len(probe.seen) == len(setup.micros) * 4 * (1 if recompute == "none" else 2)


@needs(hasattr(router, "InferenceTopKRouter"), "0.17")
def test_the_router_for_inference_is_replayed_in_training() -> None:
    setup = Setup()
    for one in setup.routers():
        one.__class__ = router.InferenceTopKRouter
    setup.replay = RoutingReplay(setup.model.chunks, min_agreement=0.0)
    probe = DispatchProbe(setup.model.chunks, setup.micros)
    with setup.replay.replay(setup.routes):
        setup.train()
    probe.remove()
    assert probe.violations(setup.rollouts, setup.replay.layers) == []


@needs("tokens_per_sample" in FIELDS, "0.19")
def test_samples_that_moe_layers_unpack_have_their_rows_in_the_order_of_the_routers() -> None:
    """``tokens_per_sample`` turns [b s] into [s, b] in front of every router."""
    setup = Setup()
    num_samples, length = 3, 5
    tokens = torch.randint(0, 30, (1, num_samples * length), generator=torch.Generator().manual_seed(1))
    draw = torch.rand(tokens.numel(), 4, 8, generator=torch.Generator().manual_seed(2))
    experts = draw.topk(2, dim=2).indices
    seen = torch.arange(tokens.numel()).view(num_samples, length).T.flatten()  # what the routers see, in order

    as_given = torch.arange(tokens.numel())
    model = unwrap(setup.model.chunks[0])
    sent: list[torch.Tensor] = []
    tap(model.decoder.layers[0].mlp.token_dispatcher, lambda _, routing_map, __: sent.append(routing_map.bool()))

    def forward(order: torch.Tensor, sample: int | None) -> torch.Tensor:
        packed = PackedSequences.of(torch.arange(0, tokens.numel() + 1, length))
        packed.tokens_per_sample = sample
        inputs: dict[str, Any] = {"input_ids": tokens, "position_ids": None, "attention_mask": None}
        with setup.replay.replay([MicroRoutes(experts[order], None, tokens[0, order])]), torch.no_grad():
            return model(**inputs, packed_seq_params=packed)

    plain = forward(as_given, None)
    torch.testing.assert_close(forward(seen, length), plain)
    assert torch.equal(sent[1], torch.zeros_like(sent[1]).scatter(1, experts[seen, 0], True))
    torch.testing.assert_close(forward(as_given, tokens.numel()), plain)  # one sample stays as it is
    with pytest.raises(ReplayError, match="token"):
        forward(as_given, length)


@needs(hasattr(TopKRouter, "quantile_balancing"), "0.19")
def test_quantile_balancing_is_refused() -> None:
    refusal = "moe_router_load_balancing_type = 'quantile_balancing': .* without the replay hook"
    with pytest.raises(ReplayError, match=refusal):
        Setup(moe_router_load_balancing_type="quantile_balancing")
