"""Log-probabilities from vocabulary shards, in the dtypes of a GPU too, and how columns and outputs line up."""

from __future__ import annotations

import gc
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cuda_refusals import RefusesAsCuda, SaysCuda
from hypothesis import given
from hypothesis import strategies as st
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
)
from ranks import Case, case
from tiny_world import RECOMPUTE, config, fixed_coefficients, join, local_batch, micro_batches, policy_of, rollouts

from megarl.core.packing import pack
from megarl.errors import ConfigError
from megarl.megatron import distributed
from megarl.megatron.passes import logprobs as blocks
from megarl.megatron.passes.forward import run
from megarl.megatron.passes.logprobs import linear_logprobs
from megarl.megatron.passes.micro_batches import micro_batch, split_micro_batches, to_tokens
from megarl.trainer.mini_batch import make_rollout

pytestmark = pytest.mark.usefixtures("one_rank")
VOCABULARY = "test_megatron_forward:vocabulary"


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
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(blocks, "ROWS", rows)
    monkeypatch.setattr(blocks, "COLUMNS", columns)
    found = vocabulary({}, vocab_size, padded, 0.6, entropy, kept)
    assert_vocabulary(found)
    assert found["logprobs"].isneginf().nonzero().tolist() == ([[2]] if kept else [])  # the label is not in its set
    assert not kept or found["logprobs"][1] == 0  # the label is all of its set


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(0, 3))
def test_outputs_line_up_with_the_token_that_they_are_about(lengths: list[int], padding: int) -> None:
    join(config("unused"))  # type: ignore[arg-type]
    tokens = [one.tokens[:length] for one, length in zip(rollouts(), lengths, strict=False)]
    batch = pack([make_rollout(ids, np.arange(len(ids)) > 0) for ids in tokens], [0.0] * len(tokens))
    micro = micro_batch(batch, batch.num_tokens + padding)
    # an output that tells the position and the label it was computed for: 100 * position + label
    found = to_tokens(100.0 * torch.arange(micro.num_slots) + micro.labels, micro)
    whole = [token for ids in tokens for token in ids.tolist()]
    first = {0, *np.cumsum(lengths).tolist()}
    expected = [0.0 if at in first else 100.0 * (at - 1) + token for at, token in enumerate(whole)]
    assert found.tolist() == expected
    assert micro.input_ids[0, : batch.num_tokens].tolist() == whole
    if padding:
        assert micro.padding_mask is not None
        assert micro.padding_mask[0].tolist() == [False] * batch.num_tokens + [True] * padding
        assert micro.packing.cu_seqlens_q[-1] == micro.num_slots
    else:
        assert micro.padding_mask is None


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


NUM_ROWS, WIDTH = 9, 6


def kept_sets(labels: torch.Tensor, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, offsets): row 0 has none, row 1 its label alone, row 2 lacks its label, row 3 the whole vocabulary."""
    generator = torch.Generator().manual_seed(6)
    sets = []
    for row, label in enumerate(labels.tolist()):
        others = torch.randperm(vocab_size, generator=generator)
        others = others[others != label][: {0: 0, 1: 0, 3: vocab_size}.get(row, 4)]
        own = labels[row : row + 1] if row not in (0, 2) else labels[:0]
        sets.append(torch.cat([others[:2], own, others[2:]]))
    return torch.cat(sets), torch.tensor([0, *map(len, sets)]).cumsum(0)


def vocabulary(
    layout: dict[str, int],
    vocab_size: int,
    padded: int,
    temperature: float,
    entropy: bool = False,
    kept: bool = False,
) -> dict[str, Any]:
    """Log-probabilities, entropies and gradients of a weighted sum, with torch's float64 log_softmax beside them.

    entropy: the sum has the entropies in it too; kept: log-probabilities are of ``kept_sets``.
    """
    join(config(Path("unused"), layout))
    group = parallel_state.get_tensor_model_parallel_group()
    generator = torch.Generator().manual_seed(5)
    states = torch.randn(NUM_ROWS, WIDTH, generator=generator, dtype=torch.float64)
    whole = 2.0 * torch.randn(padded, WIDTH, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, vocab_size, (NUM_ROWS,), generator=generator)
    labels[:2] = torch.tensor([0, vocab_size - 1])
    weights = torch.randn(NUM_ROWS, generator=generator, dtype=torch.float64)
    entropy_weights = torch.randn(NUM_ROWS, generator=generator, dtype=torch.float64)
    sets = kept_sets(labels, vocab_size) if kept else None

    hidden = states.float().requires_grad_()
    shard = whole.float().chunk(group.size())[group.rank()].clone().requires_grad_()
    entering = copy_to_tensor_model_parallel_region(hidden, group=group)
    logprobs, entropies = linear_logprobs(entering, shard, labels, temperature, vocab_size, group, sets)
    terms = logprobs * weights.float() + (entropies * entropy_weights.float() if entropy else 0.0)
    terms.sum().backward()
    assert shard.grad is not None

    reference_hidden, reference = states.clone().requires_grad_(), whole.clone().requires_grad_()
    logits = reference_hidden @ reference[:vocab_size].t() / temperature
    full = torch.log_softmax(logits, 1)
    expected_entropies = -(full.exp() * full).sum(1)
    masked = full
    if sets is not None:
        member = torch.zeros(logits.shape, dtype=torch.bool)
        for row, (start, end) in enumerate(itertools.pairwise(sets[1].tolist())):
            member[row, sets[0][start:end]] = True
        masked = logits.masked_fill(~member & member.any(1, keepdim=True), -torch.inf).log_softmax(1)
    picked = masked.gather(1, labels[:, None])[:, 0]
    live = torch.where(picked.isneginf(), 0.0, picked)
    (live * weights + (expected_entropies * entropy_weights if entropy else 0.0)).sum().backward()
    assert reference.grad is not None
    assert reference_hidden.grad is not None
    gathered = gather_from_tensor_model_parallel_region(shard.grad.t().contiguous(), group=group).t()
    return {
        "logprobs": logprobs.detach(),
        "expected_logprobs": picked.detach().float(),
        "entropies": entropies.detach(),
        "expected_entropies": expected_entropies.detach().float(),
        "weight_gradient": gathered,
        "expected_weight_gradient": reference.grad.float(),
        "hidden_gradient": hidden.grad,
        "expected_hidden_gradient": reference_hidden.grad.float(),
    }


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(
    ("hidden_dtype", "weight_dtype"), [(FP32, BF16), (FP32, FP16), (BF16, BF16), (FP32, FP32), (BF16, FP32)]
)
@pytest.mark.parametrize("sets", [False, True])
def test_a_gpu_accepts_every_product_and_is_never_waited_for(
    hidden_dtype: torch.dtype, weight_dtype: torch.dtype, sets: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "ROWS", 4)
    monkeypatch.setattr(blocks, "COLUMNS", 16)
    torch.manual_seed(0)
    hidden = torch.randn(10, 8, dtype=BF16).to(hidden_dtype).requires_grad_()
    weight = torch.randn(40, 8, dtype=BF16).to(weight_dtype).requires_grad_()
    labels = torch.arange(10) * 4
    labels[-1] = 36
    member = torch.rand(10, 37) < 0.3
    member[range(10), labels] = True
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), member.sum(1).cumsum(0)])
    kept = (member.nonzero()[:, 1].int(), offsets) if sets else None
    with SaysCuda(), RefusesAsCuda() as gpu:
        found, entropies = linear_logprobs(hidden, weight, labels, 0.7, 37, None, kept)
        (found + 0.1 * entropies).sum().backward()
    assert gpu.operands == {weight_dtype} - {FP32}
    logits = hidden.detach().double() @ weight.detach()[:37].double().t() / 0.7
    reference = [one.detach().double().requires_grad_() for one in (hidden, weight)]
    logits = reference[0] @ reference[1][:37].t() / 0.7
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    if kept is not None:
        logits = logits.masked_fill(~member, -torch.inf)
    expected = logits.log_softmax(1)[range(10), labels]
    (expected + 0.1 * entropy).sum().backward()
    torch.testing.assert_close(found.detach(), expected.detach().float())
    for tensor, other in zip((hidden, weight), reference, strict=True):
        assert tensor.grad is not None
        assert other.grad is not None
        assert (tensor.grad.dtype, tensor.grad.shape) == (tensor.dtype, tensor.shape)
        # 16-bit products round the gradient of each logit.
        error = float((tensor.grad - other.grad).norm() / other.grad.norm())
        assert error < (1e-5 if weight_dtype == tensor.dtype == FP32 else 1e-2)


CERTAINTY = torch.tensor([[60.0, 0.0, -60.0], [200.0, 0.0, 0.0]])


@pytest.mark.parametrize("kept", [None, (torch.tensor([1, 0, 0]), torch.tensor([0, 2, 3]))])
def test_gradients_of_certainties_are_finite(kept: tuple[torch.Tensor, torch.Tensor] | None) -> None:
    logits = CERTAINTY.clone().requires_grad_()
    logprobs, entropies = linear_logprobs(logits, torch.eye(3), torch.tensor([0, 0]), 1.0, 3, None, kept)
    (logprobs + entropies).sum().backward()
    torch.testing.assert_close(logprobs.detach(), torch.zeros(2))
    torch.testing.assert_close(logits.grad, torch.zeros(2, 3))


def test_a_far_larger_logit_outside_the_set_changes_nothing() -> None:
    logits = torch.tensor([[1e4, 1.0, 0.0]], requires_grad=True)
    kept = torch.tensor([2, 1], dtype=torch.int32), torch.tensor([0, 2])
    logprobs, _ = linear_logprobs(logits, torch.eye(3), torch.tensor([1]), 1.0, 3, None, kept)
    logprobs.sum().backward()
    expected = float(torch.tensor([1.0, 0.0]).softmax(0)[1])
    assert logprobs.item() == pytest.approx(-0.3132616875, rel=1e-6)
    assert logits.grad is not None
    assert logits.grad[0].tolist() == pytest.approx([0.0, expected, -expected], rel=1e-6)


def test_sets_that_do_not_fit_the_rows_are_refused() -> None:
    hidden, weight, labels, ids = torch.randn(3, 8), torch.randn(9, 8), torch.arange(3), torch.arange(3)
    for offsets in (torch.tensor([0, 1, 3]), torch.tensor([0, 1, 2, 2])):
        with pytest.raises(ValueError, match=r"expected \[4\] for 3 labels and an end at 3"):
            linear_logprobs(hidden, weight, labels, 1.0, 9, None, (ids, offsets))


def test_states_that_were_bf16_give_the_same_numbers_in_either_dtype() -> None:
    torch.manual_seed(0)
    states, weight = torch.randn(9, 8, dtype=BF16), torch.randn(20, 8, dtype=BF16)
    found = []
    for dtype in (BF16, FP32):
        hidden, output = states.to(dtype, copy=True).requires_grad_(), weight.clone().requires_grad_()
        logprobs, entropies = linear_logprobs(hidden, output, torch.arange(9), 0.7, 20)
        (logprobs + 0.1 * entropies).sum().backward()
        assert hidden.grad is not None
        found.append((logprobs.detach(), entropies.detach(), output.grad, hidden.grad.to(BF16)))
        assert hidden.grad.dtype == dtype  # fp32 states get a gradient that tensor parallelism sums in fp32
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
