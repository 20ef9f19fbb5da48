"""Log-probabilities from vocabulary shards, and how columns and outputs line up."""

from __future__ import annotations

import gc
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from ranks import Case, case
from tiny_world import RECOMPUTE, config, fixed_coefficients, join, local_batch, micro_batches, policy_of, rollouts

from megarl.core.packing import pack
from megarl.errors import ConfigError
from megarl.megatron import distributed
from megarl.megatron.passes import logprobs as blocks
from megarl.megatron.passes.forward import run
from megarl.megatron.passes.logprobs import linear_logprobs
from megarl.megatron.passes.micro_batches import micro_batch, split_micro_batches, to_tokens

VOCABULARY = "cases_forward:vocabulary"


def assert_vocabulary(found: dict[str, Any]) -> None:
    for name in ("logprobs", "entropies", "weight_gradient", "hidden_gradient"):
        torch.testing.assert_close(found[name], found[f"expected_{name}"], rtol=1e-5, atol=5e-6, msg=name)


@pytest.mark.multirank
@pytest.mark.parametrize(
    "case",
    [
        case(2, VOCABULARY, "tp2", vocab_size=14, padded=14, temperature=0.7),
        case(2, VOCABULARY, "tp2", vocab_size=13, padded=14, temperature=1.3),
        case(2, VOCABULARY, "tp2", vocab_size=13, padded=14, temperature=0.7, entropy=True, kept=True),
        # The last shard is padding alone.
        case(4, VOCABULARY, "tp4", vocab_size=9, padded=12, temperature=1.0),
        case(4, VOCABULARY, "tp4", vocab_size=9, padded=12, temperature=1.3, entropy=True, kept=True),
    ],
    ids=str,
)
def test_logprobs_of_a_split_vocabulary(case: Case, outcome: dict[str, Any]) -> None:
    assert_vocabulary(outcome)


@pytest.mark.parametrize(("vocab_size", "padded"), [(12, 12), (11, 12)])
@pytest.mark.parametrize(("rows", "columns"), [(1024, 8192), (4, 5), (3, 12), (1, 1)])
@pytest.mark.parametrize(("entropy", "kept"), list(itertools.product([False, True], repeat=2)))
def test_logprobs_of_a_whole_vocabulary(
    vocab_size: int,
    padded: int,
    rows: int,
    columns: int,
    entropy: bool,
    kept: bool,
    one_rank: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import cases_forward

    monkeypatch.setattr(blocks, "ROWS", rows)
    monkeypatch.setattr(blocks, "COLUMNS", columns)
    found = cases_forward.vocabulary({}, vocab_size, padded, 0.6, entropy, kept)
    assert_vocabulary(found)
    assert found["logprobs"].isneginf().nonzero().tolist() == ([[2]] if kept else [])  # the label is not in its set
    assert not kept or found["logprobs"][1] == 0  # the label is all of its set


@pytest.mark.usefixtures("one_rank")
def test_extreme_logits_give_finite_numbers() -> None:
    join(config("unused"))  # type: ignore[arg-type]
    group = torch.distributed.group.WORLD
    assert group is not None
    logits = torch.tensor([[1e4, 0.0, -1e4], [-1e30, 0.0, 1.0]], requires_grad=True)
    logprobs, entropies = linear_logprobs(logits, torch.eye(3), torch.tensor([2, 1]), 1.0, 3, group)
    assert torch.isfinite(logprobs).all()
    assert torch.isfinite(entropies).all()
    assert logprobs[0].item() == pytest.approx(-2e4)
    (logprobs + entropies).sum().backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()


@pytest.mark.usefixtures("one_rank")
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(0, 3))
def test_outputs_line_up_with_the_token_that_they_are_about(lengths: list[int], padding: int) -> None:
    join(config("unused"))  # type: ignore[arg-type]
    made = rollouts()[: len(lengths)]
    cut = [
        type(one)(
            **{
                **{name: getattr(one, name) for name in ("group", "sample", "finish_reason")},
                "tokens": one.tokens[:length],
                "loss_mask": one.loss_mask[:length],
                "rollout_logprobs": one.rollout_logprobs[:length],
                "routed_experts": None,
                "routed_mask": None,
                "weight_versions": one.weight_versions[:length],
            }
        )
        for one, length in zip(made, lengths, strict=False)
    ]
    batch = pack(cut, [0.0] * len(cut))
    micro = micro_batch(batch, batch.num_tokens + padding)
    # an output that tells the position and the label it was computed for: 100 * position + label
    output = 100.0 * torch.arange(micro.num_slots) + micro.labels
    found = to_tokens(output, micro)
    position = 0
    for one in cut:
        for offset, token in enumerate(one.tokens.tolist()):
            expected = 0.0 if offset == 0 else 100.0 * (position - 1) + token
            assert found[position].item() == expected
            position += 1
    assert micro.input_ids[0, : batch.num_tokens].tolist() == [t for one in cut for t in one.tokens.tolist()]
    if padding:
        assert micro.padding_mask is not None
        assert micro.padding_mask[0].tolist() == [False] * batch.num_tokens + [True] * padding
        assert micro.packing.cu_seqlens_q[-1] == micro.num_slots
    else:
        assert micro.padding_mask is None


@pytest.mark.usefixtures("one_rank")
def test_micro_batches_hold_every_sequence_once_within_the_limit() -> None:
    join(config("unused"))  # type: ignore[arg-type]
    batch = local_batch()
    micros = split_micro_batches(batch, 20, multiple_of=2)
    assert len(micros) % 2 == 0
    assert all(micro.batch.num_tokens <= 20 for micro in micros)
    seen = []
    for micro in micros:
        bounds = micro.batch.cu_seqlens.tolist()
        seen += [tuple(micro.batch.tokens[a:b].tolist()) for a, b in itertools.pairwise(bounds)]
    assert sorted(seen) == sorted(tuple(one.tokens.tolist()) for one in rollouts())
    same = split_micro_batches(batch, 20, padded_to_max=True)
    assert len({micro.num_slots for micro in same}) == 1
    with pytest.raises(ConfigError, match=r"micro_batch_tokens.*more than the 8"):
        split_micro_batches(batch, 8)
    with pytest.raises(ConfigError, match=r"8 sequences.*needs 9"):
        split_micro_batches(batch, 64, multiple_of=9)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("recompute", ["none", "uniform", "moe"])
@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_no_graph_outlives_its_backward_pass(dispatcher: str, recompute: str, models: dict[str, Path]) -> None:
    settings = config(models["base"], recompute=RECOMPUTE[recompute], parallel__dispatcher=dispatcher)
    policy = policy_of(settings)
    before = _with_graph()
    run(
        policy.chunks,
        micro_batches(settings, local_batch()),
        temperature=1.0,
        vocab_size=policy.shape.vocab_size,
        coefficients=fixed_coefficients,
    )
    known = set(map(id, before))  # Megatron's hooks of earlier models among them
    assert [list(one.shape) for one in _with_graph() if id(one) not in known] == []


def _with_graph() -> list[torch.Tensor]:
    gc.collect()
    return [one for one in gc.get_objects() if type(one) is torch.Tensor and one.grad_fn is not None]


@pytest.mark.usefixtures("one_rank")
def test_a_second_initialisation_is_refused_and_a_shutdown_allows_it() -> None:
    settings = config("unused")  # type: ignore[arg-type]
    distributed.shutdown()
    distributed.initialize(settings)
    with pytest.raises(ConfigError, match="exists already"):
        distributed.initialize(settings)
    distributed.shutdown()
    distributed.initialize(settings)
    assert distributed.is_main_rank()
    assert distributed.holds_outputs()


@pytest.mark.usefixtures("one_rank")
def test_groups_over_gloo_are_named_by_their_ranks_alone() -> None:
    """Ranks that are in different numbers of other groups would never meet."""

    def make() -> str:
        distributed._connect_by_gloo.cache_clear()
        group = distributed._connect_by_gloo((0,))
        assert dist.get_backend(group) == "gloo"
        name = group.group_name
        dist.destroy_process_group(group)
        return name

    distributed.shutdown()
    distributed.initialize(config("unused"))  # type: ignore[arg-type]
    name = make()
    more = dist.new_group([0])
    again = make()
    dist.destroy_process_group(more)
    distributed._connect_by_gloo.cache_clear()
    assert again == name
