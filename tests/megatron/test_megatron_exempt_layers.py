"""Layers without a choice: replay leaves them alone, and the watch proves that their experts follow from token ids."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases_exempt import SHAPE, TableRouter, with_tables
from matrix_world import Variant, build_alone
from megatron.core.transformer.moe.router import TopKRouter
from ranks import case, slow

from megarl.errors import ReplayError
from megarl.files.hf_config import MoeShape
from megarl.replay import MicroRoutes, RoutingReplay
from megarl.replay.megatron_state import unwrap
from megarl.verify import RoutingWatch

REPLAYED = "cases_exempt:replayed"
CASES = [
    case(1, REPLAYED, recompute="none"),
    case(1, REPLAYED, recompute="uniform"),
    case(2, REPLAYED, "pp2", recompute="uniform"),
    slow(case(2, REPLAYED, "tp2 ep2 etp1", recompute="moe")),
    slow(case(2, REPLAYED, "pp2 vpp2", recompute="block")),
]


@pytest.mark.multirank
@pytest.mark.parametrize("case", CASES, ids=str)
def test_other_layers_are_replayed_and_exempt_ones_are_proven(case: Any, outcome: dict[str, Any]) -> None:
    """With pp2 a stage has exempt layers alone."""
    assert {layer for one in outcome["ranks"] for layer in one["exempt"]} == {0, 1}
    assert {layer for one in outcome["ranks"] for layer in one["layers"]} == {2, 3}
    for one in outcome["ranks"]:
        assert one["is_right"], one["report"]
        assert one["wrong"] == []
        assert len(one["compared"]) == len(one["layers"]) + len(one["exempt"])
        assert all(one["compared"])
        assert (one["recomputed"] > 0) == (dict(case.arguments)["recompute"] not in ("none", "block")) or one["exempt"]
        said = f"not replayed: layers {list(one['exempt'])} take experts from a table of token ids"
        assert (said in one["report"]) == bool(one["exempt"])


@pytest.mark.multirank
@pytest.mark.parametrize("case", [case(2, REPLAYED, "pp2", recompute="uniform", forgets=True)], ids=str)
def test_a_table_that_reads_the_tokens_of_another_micro_batch_is_found(case: Any, outcome: dict[str, Any]) -> None:
    """The first stage is a micro-batch ahead when it recomputes: a global variable has the later one's tokens."""
    first, second = outcome["ranks"]
    assert not first["is_right"]
    assert "recomputation of micro-batch 0, layer 0" in first["report"]
    assert second["is_right"]


class _Shifted(TableRouter):
    def note(self, ids: torch.Tensor) -> None:
        self.ids = ids.flatten().roll(1)


@pytest.mark.usefixtures("one_rank")
class TestOneRank:
    @pytest.mark.parametrize(("kind", "is_right"), [(TableRouter, True), (_Shifted, False)])
    def test_rows_of_one_token_have_the_same_experts(self, kind: type[TopKRouter], is_right: bool) -> None:
        model, ids = with_tables(build_alone(Variant()), kind), torch.arange(32) ** 2 % 7
        with RoutingWatch(model.chunks, shape=SHAPE) as watch, torch.no_grad():
            model.chunks[0](input_ids=ids[None], position_ids=None, attention_mask=None)
        experts = torch.zeros(32, 2, 2, dtype=torch.uint8)
        report = watch.report([MicroRoutes(experts, None, ids)])
        assert watch.layers == [2, 3]
        assert report.layers == (2, 3, 0, 1)
        assert report.compared.tolist() == [[32] * 4]
        assert (report.right[0, 2:].tolist() == [32, 32]) == is_right
        assert watch.report([MicroRoutes(experts)]).compared.tolist() == [[32, 32, 0, 0]]
        assert len(watch.report([]).missing) == 1

    def test_a_router_that_chooses_is_not_exempt_and_a_table_is_not_replayed(self) -> None:
        model = build_alone(Variant())
        with pytest.raises(
            ReplayError, match="layer 0 is exempt from replay, but its TopKRouter chooses experts by hid"
        ):
            RoutingReplay(model.chunks, shape=SHAPE)
        with_tables(model)
        with pytest.raises(
            ReplayError, match=r"TableRouter\.routing is not that .* give RoutingReplay a MoeShape with"
        ):
            RoutingReplay(model.chunks)
        assert RoutingReplay(model.chunks, shape=SHAPE).layers == (2, 3)
        with pytest.raises(ReplayError, match=r"layer 3: found 1 routers, expected 0 by the MoeShape"):
            RoutingReplay(model.chunks, shape=replace(SHAPE, moe_layers=(2,)))
        with pytest.raises(ReplayError, match=r"the MoeShape has .*'topk': 3.*, expected .*'topk': 2.* as Megatron's"):
            RoutingReplay(model.chunks, shape=replace(SHAPE, topk=3))

    def test_a_shape_says_which_layers_of_a_hybrid_model_have_experts(self) -> None:
        """Megatron's hybrid models leave moe_layer_freq at 1; their pattern is no field of the config."""
        model = build_alone(Variant(router="every_other"))
        unwrap(model.chunks[0]).config.moe_layer_freq = 1
        with pytest.raises(ReplayError, match="layer 0: found 0 routers, expected 1 by moe_layer_freq"):
            RoutingReplay(model.chunks)
        hybrid = MoeShape(4, (1, 3), 8, 2)
        replay, watch = RoutingReplay(model.chunks, shape=hybrid), RoutingWatch(model.chunks, shape=hybrid)
        whole = torch.zeros(2, 16, 2, 2, dtype=torch.uint8)
        assert list(replay.layers) == watch.layers == [1, 3]
        assert replay.rows(whole).experts.shape == watch.rows(whole).experts.shape == (32, 2, 2)

    @pytest.mark.parametrize("field", ["moe_n_hash_layers", "moe_num_hash_layers"])
    def test_routers_of_later_releases_that_say_so_are_exempt(self, field: str) -> None:
        """Megatron-LM's dev and main branches have these names; no release has."""
        model = build_alone(Variant())
        layers = unwrap(model.chunks[0]).decoder.layers
        layers[0].mlp.router.is_hash_layer = True
        with pytest.raises(ReplayError, match=r"layer 0: .*TopKRouter\.is_hash_layer is not that of megatron-core"):
            RoutingReplay(model.chunks)
        setattr(unwrap(model.chunks[0]).config, field, 1)
        replay = RoutingReplay(model.chunks)
        assert (replay.layers, replay.exempt_layers) == ((1, 2, 3), (0,))
        assert layers[0].mlp.router.router_replay is None


def test_the_shape_of_later_configurations() -> None:
    fields = {"num_layers": 5, "moe_router_topk": 2, "moe_layer_freq": 1, "num_moe_experts": 8}
    found = MoeShape.of_megatron(SimpleNamespace(**fields, moe_n_hash_layers=3))
    assert found == MoeShape(5, (3, 4), 8, 2, (0, 1, 2))
    assert found.dense_layers == ()
