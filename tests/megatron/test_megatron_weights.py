"""Hugging Face weights in and out of sharded Megatron models."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Case, case
from safetensors.torch import save_file
from tiny_world import config, logits_of_transformers, policy_of, rollouts, safetensors_of

from megarl.errors import CheckpointError
from megarl.stand_ins.attention import PackedSequences

ROUND_TRIP = "cases_training:round_trip"
SHARED = "cases_training:shared"

LAYOUTS_OF_2 = ["tp2 etp2", "ep2", "pp2", "pp2 vpp2", "tp2 ep2 etp1"]
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
    case(2, ROUND_TRIP, "tp2 ep2 etp1", receivers=(1,)),
    case(2, ROUND_TRIP, "ep2", receivers=(0,)),
    case(4, ROUND_TRIP, "tp2 ep2 etp1 pp2", receivers=(0,)),
    case(4, ROUND_TRIP, "tp2 ep2 etp1 pp2", receivers=(0, 2)),
    case(4, ROUND_TRIP, "tp2 ep2 etp2", receivers=(1, 2, 3)),
    case(4, ROUND_TRIP, "pp2 vpp2 ep2", receivers=(3,)),
    case(2, ROUND_TRIP, "ep2", gather_bytes=1),
    case(4, ROUND_TRIP, "tp2 ep2 etp1 pp2", receivers=(0, 1), gather_bytes=25000),
]


@pytest.mark.multirank
@pytest.mark.parametrize("case", ROUND_TRIPS, ids=str)
def test_export_gives_back_every_tensor_of_the_file_bit_for_bit(case: Case, outcome: dict[str, Any]) -> None:
    assert outcome["different"] == []
    assert sorted(outcome["names"]) == outcome["stored"]
    assert outcome["agree"] == 1  # every receiver saw the same
    assert outcome["elsewhere"] == 0


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("case", "by_node"),
    [
        (case(2, SHARED, "ep2", per_node=2, gpus=(0, 1)), [[0, 1]]),
        (case(2, SHARED, "tp2", per_node=2, gpus=(1,)), [[1]]),
        (case(4, SHARED, "tp2 ep2 etp1 pp2", per_node=2, gpus=(0, 1)), [[0, 1], [0, 1]]),
        (case(4, SHARED, "ep2", per_node=4, gpus=(1, 3)), [[1, 3]]),
    ],
    ids=str,
)
def test_ranks_on_the_gpus_of_servers_share_what_they_gather(by_node: list[list[int]], outcome: list[Any]) -> None:
    """A node's first rank gets the handles of all of them for every bucket; other ranks gather and share nothing."""
    *by_rank, num_tensors = outcome
    per_node = len(by_rank) // len(by_node)
    for rank, (seen, opened) in enumerate(by_rank):
        node, local = divmod(rank, per_node)
        assert all(gpus == by_node[node] for gpus in seen)
        assert bool(seen) == (local in (0, *by_node[node]))
        assert len(seen) == 0 or len(seen) > 3  # several buckets
        assert opened == (num_tensors * len(by_node[node]) if local == 0 else 0)


EXPERT = "model.layers.2.mlp.experts.7.up_proj.weight"


@pytest.mark.parametrize("what", ["missing", "unknown", "transposed", "a vocabulary too large"])
def test_tensors_that_are_not_the_models_are_named(
    what: str, models: dict[str, Path], tmp_path: Path, one_rank: None
) -> None:
    """``test_megatron_conversion`` and ``test_hf_folders`` break files in more ways."""
    tensors = safetensors_of(models["base"])
    if what == "missing":
        del tensors[EXPERT]
    changes = {
        "unknown": {"x": torch.zeros(2)},
        "transposed": {EXPERT: tensors.get(EXPERT, torch.zeros(1)).T.contiguous()},
        "a vocabulary too large": {"lm_head.weight": torch.zeros(33, 32)},
    }.get(what, {})
    save_file(tensors | changes, tmp_path / "model.safetensors")
    shutil.copy(models["base"] / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match="|".join(map(re.escape, changes or [EXPERT]))):
        policy_of(config(tmp_path))


def test_fp32_logits_equal_transformers_on_packed_ragged_sequences(models: dict[str, Path], one_rank: None) -> None:
    policy = policy_of(config(models["base"]))
    sequences = [rollout.tokens for rollout in rollouts()]
    lengths = [len(tokens) for tokens in sequences]
    device = next(policy.chunks[0].parameters()).device
    tokens = torch.cat([torch.as_tensor(one, dtype=torch.int64) for one in sequences])[None].to(device)
    packing = PackedSequences.of(torch.tensor([0, *lengths]).cumsum(0), device=device)
    with torch.no_grad():
        found = policy.chunks[0](
            input_ids=tokens, position_ids=torch.zeros_like(tokens), attention_mask=None, packed_seq_params=packing
        )[0]
    for logits, expected in zip(found.split(lengths), logits_of_transformers(models["base"], sequences), strict=True):
        assert float(expected.abs().max()) > 1  # logits that say something
        torch.testing.assert_close(logits.cpu(), expected, rtol=0, atol=1e-5)
