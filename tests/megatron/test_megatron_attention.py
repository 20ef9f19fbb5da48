"""Packed attention and RMSNorm of the local layer spec, against their formulas."""

from __future__ import annotations

import math

import on_cpu  # noqa: F401
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.errors import ConfigError
from megarl.megatron.versions import takes
from megarl.stand_ins.attention import PackedAttention, PackedSequences, RMSNorm

HEADS, GROUPS, WIDTH = 4, 2, 8
MLA = takes(rope_utils._apply_rotary_pos_emb_bshd, "mla_rotary_interleaved")
LATENT = "mla_rotary_interleaved" if MLA else "multi_latent_attention"


class _Alone:
    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


CP_GROUP = {"cp_group": _Alone()} if takes(rope_utils.apply_rotary_pos_emb, "cp_group") else {}


def settings(**changes: object) -> TransformerConfig:
    values: dict[str, object] = {
        "num_layers": 1,
        "hidden_size": HEADS * WIDTH,
        "num_attention_heads": HEADS,
        "num_query_groups": GROUPS,
        "kv_channels": WIDTH,
        "attention_dropout": 0.0,
        "normalization": "RMSNorm",
        "use_cpu_initialization": True,
    }
    return TransformerConfig(**{**values, **changes})  # type: ignore[arg-type]


def attention(**changes: object) -> PackedAttention:
    return PackedAttention(settings(**changes), 1, AttnMaskType.causal, "self")


def by_formula(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """[T, heads, d] of one sequence, one query position and one head at a time, in float64."""
    rows = []
    for position in range(len(query)):
        heads = []
        for head in range(HEADS):
            group = head // (HEADS // GROUPS)
            scores = key[: position + 1, group] @ query[position, head] / math.sqrt(WIDTH)
            heads.append(scores.softmax(0) @ value[: position + 1, group])
        rows.append(torch.cat(heads))
    return torch.stack(rows)


def inputs(num_tokens: int, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(num_tokens, HEADS, WIDTH), (num_tokens, GROUPS, WIDTH), (num_tokens, GROUPS, WIDTH)]
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


@given(st.lists(st.integers(1, 7), min_size=1, max_size=6))
def test_packed_attention_and_its_gradients_equal_the_formula_in_each_sequence(lengths: list[int]) -> None:
    query, key, value = inputs(sum(lengths), torch.float64)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    weights = torch.randn(sum(lengths), HEADS * WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    found = attention()(query, key, value, packed_seq_params=PackedSequences.of(cu_seqlens))
    parts = [part.split(lengths) for part in (query, key, value)]
    expected = torch.cat([by_formula(*one) for one in zip(*parts, strict=True)])
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)

    gradients = torch.autograd.grad((found * weights).sum(), (query, key, value))
    wanted = torch.autograd.grad((expected * weights).sum(), (query, key, value))
    for gradient, want in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, want, rtol=1e-9, atol=1e-11)


@given(st.lists(st.integers(1, 7), min_size=2, max_size=6), st.randoms(use_true_random=False))
def test_a_sequence_does_not_see_what_it_is_packed_with(lengths: list[int], random: object) -> None:
    query, key, value = (tensor.detach() for tensor in inputs(sum(lengths), torch.float32))
    core = attention()
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    packed = core(query, key, value, packed_seq_params=PackedSequences.of(cu_seqlens)).split(lengths)
    order = list(range(len(lengths)))
    random.shuffle(order)  # type: ignore[attr-defined]
    parts = [[part.split(lengths)[index] for index in order] for part in (query, key, value)]
    shuffled = core(
        *(torch.cat(part) for part in parts),
        packed_seq_params=PackedSequences.of(torch.tensor([0, *(lengths[index] for index in order)]).cumsum(0)),
    ).split([lengths[index] for index in order])
    for place, index in enumerate(order):
        one = (part.split(lengths)[index] for part in (query, key, value))
        alone = core(*one, packed_seq_params=PackedSequences.of(torch.tensor([0, lengths[index]])))
        torch.testing.assert_close(packed[index], alone, rtol=0, atol=1e-6)
        torch.testing.assert_close(packed[index], shuffled[place], rtol=0, atol=1e-6)


def test_unpacked_inputs_are_causal_attention_of_each_batch_row() -> None:
    query, key, value = (tensor.detach() for tensor in inputs(10, torch.float64))
    batched = [tensor.view(2, 5, -1, WIDTH).transpose(0, 1) for tensor in (query, key, value)]
    found = attention()(*batched)
    for row in range(2):
        expected = by_formula(*(tensor[:, row] for tensor in batched))
        torch.testing.assert_close(found[:, row], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"attention_dropout": 0.1}, "attention_dropout"),
        ({"window_size": (4, 0)}, "window_size"),
        ({"softmax_type": "off-by-one"}, "softmax_type"),
    ],
)
def test_what_the_attention_cannot_do_is_refused_by_name(change: dict[str, object], name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        attention(**change)


def test_a_mask_is_refused_because_it_would_be_ignored() -> None:
    query, key, value = inputs(4, torch.float32)
    with pytest.raises(NotImplementedError, match="mask"):
        attention()(query, key, value, attention_mask=torch.ones(4, 4, dtype=torch.bool))


def test_rms_norm_is_the_formula_and_marks_its_weight() -> None:
    norm = RMSNorm(settings(), 16, eps=1e-5).double()
    torch.nn.init.normal_(norm.weight)
    values = torch.randn(7, 16, dtype=torch.float64)
    expected = values / (values.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight
    torch.testing.assert_close(norm(values), expected, rtol=1e-12, atol=1e-12)
    assert norm.weight.sequence_parallel is False  # type: ignore[attr-defined]
    parallel = settings(sequence_parallel=True, tensor_model_parallel_size=2)
    assert RMSNorm(parallel, 16).weight.sequence_parallel is True  # type: ignore[attr-defined]


def test_other_norms_are_refused() -> None:
    with pytest.raises(ConfigError, match="LayerNorm"):
        RMSNorm(settings(normalization="LayerNorm"), 16)
