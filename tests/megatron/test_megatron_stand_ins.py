"""What stands in on a CPU: packed attention and RMSNorm by their formulas, CUDA's calls, no Transformer Engine."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import on_cpu  # noqa: F401
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.errors import ConfigError
from megarl.stand_ins.attention import PackedAttention, PackedSequences, RMSNorm

HEADS, GROUPS, WIDTH = 4, 2, 8


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


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("softmax", ["vanilla", "learnable"])
@pytest.mark.parametrize("layer", [1, 2])
def test_windows_and_sinks_are_those_of_gpt_oss(layer: int, softmax: str, is_packed: bool) -> None:
    from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    window, length = 3, 9
    changes = {"window_size": (window - 1, 0), "window_attn_skip_freq": [1, 0], "softmax_type": softmax}
    core = PackedAttention(settings(num_layers=2, **changes), layer, AttnMaskType.causal, "self").double()
    sinks = torch.nn.Parameter(torch.randn(HEADS, generator=torch.Generator().manual_seed(2)).double())
    if softmax == "learnable":
        core.softmax_offset = sinks
    columns = inputs(length, torch.float64)
    sees = sliding_window_causal_mask_function(window) if layer == 1 else causal_mask_function
    every = torch.arange(length)
    hidden = torch.where(sees(0, 0, every[:, None], every), 0.0, -torch.inf)
    module = torch.nn.Module()
    module.sinks = sinks if softmax == "learnable" else torch.full((HEADS,), -1e30)  # type: ignore[assignment]
    module.num_key_value_groups = HEADS // GROUPS  # type: ignore[assignment]
    batched = [column.transpose(0, 1)[None] for column in columns]
    expected = eager_attention_forward(module, *batched, hidden, WIDTH**-0.5)[0].view(length, -1)
    if is_packed:
        found = core(*columns, packed_seq_params=PackedSequences.of(torch.tensor([0, length])))
    else:
        found = core(*(column[:, None] for column in columns))[:, 0]
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    leaves = [*columns, *([sinks] if softmax == "learnable" else [])]
    gradients, wanted = (torch.autograd.grad(out.square().sum(), leaves) for out in (found, expected))
    for gradient, want in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, want, rtol=1e-9, atol=1e-11)


def test_unpacked_inputs_are_causal_attention_of_each_batch_row() -> None:
    query, key, value = (tensor.detach() for tensor in inputs(10, torch.float64))
    batched = [tensor.view(2, 5, -1, WIDTH).transpose(0, 1) for tensor in (query, key, value)]
    found = attention()(*batched)
    for row in range(2):
        expected = by_formula(*(tensor[:, row] for tensor in batched))
        torch.testing.assert_close(found[:, row], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("change", [{"attention_dropout": 0.1}, {"softmax_type": "off-by-one"}], ids=str)
def test_what_the_attention_cannot_do_is_refused_by_name(change: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(change))):
        attention(**change)
    with pytest.raises(ConfigError, match="LayerNorm"):
        RMSNorm(settings(normalization="LayerNorm"), 16)
    with pytest.raises(NotImplementedError, match="mask"):  # it would be ignored
        attention()(*inputs(4, torch.float32), attention_mask=torch.ones(4, 4, dtype=torch.bool))


def test_rms_norm_is_the_formula_and_marks_its_weight() -> None:
    norm = RMSNorm(settings(), 16, eps=1e-5).double()
    torch.nn.init.normal_(norm.weight)
    values = torch.randn(7, 16, dtype=torch.float64)
    expected = values / (values.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight
    torch.testing.assert_close(norm(values), expected, rtol=1e-12, atol=1e-12)
    assert norm.weight.sequence_parallel is False  # type: ignore[attr-defined]
    parallel = settings(sequence_parallel=True, tensor_model_parallel_size=2)
    assert RMSNorm(parallel, 16).weight.sequence_parallel is True  # type: ignore[attr-defined]


HERE = str(Path(__file__).parent)


def run_python(code: str, first: str | Path = HERE) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(first), *sys.path]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=1200)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_nothing_is_touched_where_there_is_cuda() -> None:
    code = """
import torch
names = ("synchronize", "current_device", "stream", "Stream", "Event", "get_rng_state", "manual_seed")
before = [getattr(torch.cuda, name) for name in names], torch.Tensor.cuda, torch.compile
torch.cuda.is_available = lambda: True
from megarl.stand_ins import cpu
assert cpu.enable() is False
assert ([getattr(torch.cuda, name) for name in names], torch.Tensor.cuda, torch.compile) == before
assert not hasattr(torch.cuda, "_megarl_cpu_layer")
print("untouched")
"""
    assert "untouched" in run_python(code)


@pytest.mark.parametrize("first", ["", "import megatron.core, megatron.core.models.gpt"], ids=["megarl", "megatron"])
def test_a_model_trains_whoever_imports_megatron_first(first: str, models: dict[str, Path]) -> None:
    code = f"""
{first}
import os
import cases_training
os.chdir({str(models["base"].parent.parent)!r})
found = cases_training.fixed_batch_steps({{}})
print(found["losses"][0] != found["losses"][1])
"""
    assert "True" in run_python(code)


CODE = """
import warnings
import torch
torch.cuda.is_available = lambda: {cuda}
from megarl.stand_ins import te
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    te.hide_unusable()
try:
    import transformer_engine
    print("imported", end="; ")
except ImportError:
    print("hidden", end="; ")
print(te.find_te()[0], [str(each.message) for each in caught])
"""


@pytest.mark.parametrize(
    ("cuda", "code", "said"),
    [
        (True, "", "imported; True []"),
        (
            True,
            "import sys; sys.modules.pop(__name__); raise OSError('no such file')",
            "hidden; False",
        ),
        (True, "raise ImportError('undefined symbol')", "(ImportError: undefined symbol)"),
        (False, "raise RuntimeError('not asked for')", "hidden; False []"),
    ],
)
def test_transformer_engine_is_used_if_it_can_be_imported(cuda: bool, code: str, said: str, tmp_path: Path) -> None:
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "pytorch.py").write_text(code)
    found = run_python(CODE.format(cuda=cuda), tmp_path)
    assert said in found
    assert ("cannot be imported" in found) == (cuda and bool(code))
