"""Hugging Face weights in and out of sharded Megatron models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Case, case

ROUND_TRIP = "cases_training:round_trip"
SAVED = "cases_training:saved"

LAYOUTS_OF_2 = ["tp2 etp2", "tp2 etp1", "ep2", "pp2", "pp2 vpp2", "tp2 ep2 etp1"]
LAYOUTS_OF_4 = ["tp2 ep2 etp2", "tp2 ep2 etp1 pp2", "pp2 vpp2 ep2"]
ROUND_TRIPS = [
    *(case(2, ROUND_TRIP, layout) for layout in LAYOUTS_OF_2),
    *(case(4, ROUND_TRIP, layout) for layout in LAYOUTS_OF_4),
    case(2, ROUND_TRIP, "tp2 ep2 etp1", model="bf16", dtype="bf16"),
    case(2, ROUND_TRIP, "pp2", model="base", dtype="bf16"),
    case(2, ROUND_TRIP, "pp2", model="tied"),
    case(2, ROUND_TRIP, "tp2", model="tied"),
    case(2, ROUND_TRIP, "tp2", model="vocab31"),
    case(4, ROUND_TRIP, "tp4", model="vocab30"),
]


@pytest.mark.multirank
@pytest.mark.parametrize("case", ROUND_TRIPS, ids=str)
def test_export_gives_back_every_tensor_of_the_file_bit_for_bit(case: Case, outcome: dict[str, Any]) -> None:
    assert outcome["different"] == []
    assert sorted(outcome["names"]) == outcome["stored"]
    assert outcome["agree"] == 1  # every rank saw the same


@pytest.mark.multirank
@pytest.mark.parametrize("case", [case(2, SAVED, "tp2 ep2 etp1"), case(2, SAVED, "pp2", model="tied")], ids=str)
def test_a_saved_model_is_the_same_model_to_transformers(case: Case, outcome: str, models: dict[str, Path]) -> None:
    from tiny_world import transformers_model

    model = dict(case.arguments).get("model", "base")
    tokens = torch.arange(2, 20)[None]
    with torch.no_grad():
        assert torch.equal(
            transformers_model(Path(outcome))(tokens).logits, transformers_model(models[model])(tokens).logits
        )
    assert not Path(outcome + ".partial").exists()
