"""The gated delta net on packed sequences against transformers' module on each sequence alone."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_world
import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from megarl.models.layouts import LAYOUTS
from megarl.models.shapes import ModelShape

LENGTHS = [5, 70, 1, 5, 130]
"""Two of one length, one shorter than the convolution, some longer than a chunk of the rule."""


FIELDS: dict[str, Any] = {
    **{"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 16},
    **{"ffn_hidden_size": 40, "linear_attention_freq": [1], "linear_conv_kernel_dim": 4, "linear_key_head_dim": 8},
    **{"linear_value_head_dim": 12, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
}
SHAPE = ModelShape("qwen3_next", FIELDS, 30, 64, 1e4, False)


def modules(kind: str, tmp_path: Any) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Transformers' module with random weights, and ours with the same weights."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig
    from transformers import AutoConfig
    from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeGatedDeltaNet
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    from megarl.stand_ins.attention import RMSNorm
    from megarl.stand_ins.delta_net import PackedDeltaNet

    tiny_world.join(tiny_world.config(tmp_path))
    names = [name for name in FIELDS if name.startswith("linear_") and name != "linear_attention_freq"]
    hf = AutoConfig.for_model(kind, hidden_size=32, **{name: FIELDS[name] for name in names})
    torch.manual_seed(0)
    theirs = (Qwen3NextGatedDeltaNet if kind == "qwen3_next" else Qwen3_5MoeGatedDeltaNet)(hf, 0)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    fields = {key: value for key, value in FIELDS.items()}
    settings = TransformerConfig(
        **fields,
        normalization="RMSNorm",
        layernorm_zero_centered_gamma=True,
        layernorm_epsilon=hf.rms_norm_eps,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        use_cpu_initialization=True,
    )
    submodules = GatedDeltaNetSubmodules(ColumnParallelLinear, RMSNorm, RowParallelLinear)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    ours = PackedDeltaNet(settings, submodules, 1, pg_collection=groups)
    stored = dict(theirs.named_parameters())
    inputs = [parameter for name, parameter in stored.items() if name.startswith("in_proj")]
    values = {
        "in_proj.weight": LAYOUTS["delta_net_by_head" if kind == "qwen3_next" else "delta_net"].cut(
            inputs, 0, 1, SHAPE
        ),
        "out_norm.weight": stored["norm.weight"],
        **{name: stored[name] for name in ("conv1d.weight", "dt_bias", "A_log", "out_proj.weight")},
    }
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.copy_(values[name])
    return theirs, ours


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Within fp32's rounding: 1e-4 of the largest value."""
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-4


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5_moe_text"])
def test_packed_sequences_and_gradients_equal_transformers_module(kind: str, tmp_path: Any) -> None:
    from megarl.stand_ins.attention import PackedSequences

    theirs, ours = modules(kind, tmp_path)
    hidden = torch.randn(sum(LENGTHS), 32).requires_grad_()
    weights = torch.randn(sum(LENGTHS), 32)
    expected = torch.cat([theirs(sequence[None])[0] for sequence in hidden.split(LENGTHS)])
    (wanted,) = torch.autograd.grad((expected * weights).sum(), hidden, retain_graph=True)
    (expected * weights).sum().backward()
    of_weights = {name: parameter.grad for name, parameter in theirs.named_parameters()}

    packing = PackedSequences.of(torch.tensor([0, *LENGTHS]).cumsum(0))
    found = ours(hidden[:, None], packed_seq_params=packing)[0][:, 0]
    assert_near(found, expected)
    (gradient,) = torch.autograd.grad((found * weights).sum(), hidden, retain_graph=True)
    assert_near(gradient, wanted)
    (found * weights).sum().backward()
    parameters = dict(ours.named_parameters())
    of_inputs = [grad for name, grad in of_weights.items() if name.startswith("in_proj")]
    layout = LAYOUTS["delta_net_by_head" if kind == "qwen3_next" else "delta_net"]
    for gradient, wanted in zip(layout.join([parameters["in_proj.weight"].grad], SHAPE), of_inputs, strict=True):
        assert_near(gradient, wanted)
    for name in ("conv1d.weight", "dt_bias", "A_log", "out_proj.weight"):
        assert_near(parameters[name].grad, of_weights[name])
    assert_near(parameters["out_norm.weight"].grad, of_weights["norm.weight"])


def test_a_sequence_does_not_depend_on_its_neighbours(tmp_path: Any) -> None:
    from megarl.stand_ins.attention import PackedSequences

    _, ours = modules("qwen3_next", tmp_path)
    hidden = torch.randn(sum(LENGTHS), 32)
    packing = PackedSequences.of(torch.tensor([0, *LENGTHS]).cumsum(0))
    packed = ours(hidden[:, None], packed_seq_params=packing)[0].split(LENGTHS)
    for sequence, expected in zip(hidden.split(LENGTHS), packed, strict=True):
        alone = ours(sequence[:, None], packed_seq_params=PackedSequences.of(torch.tensor([0, len(sequence)])))[0]
        torch.testing.assert_close(alone, expected, rtol=1e-6, atol=1e-6)


def test_the_plan_knows_what_a_layer_keeps_for_the_backward_pass(tmp_path: Any) -> None:
    from megarl.ops.plan.trainer_memory import Cut, _linear_attention
    from megarl.stand_ins.attention import PackedSequences

    _, ours = modules("qwen3_next", tmp_path)
    hidden, held = torch.randn(512, 1, 32, requires_grad=True), {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        held[storage._cdata] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = ours(hidden, packed_seq_params=PackedSequences.of(torch.tensor([0, 512])))[0]
    assert output.shape == hidden.shape
    for tensor in (hidden, *ours.parameters()):
        held.pop(tensor.untyped_storage()._cdata, None)
    measured = sum(size for size, _ in held.values())
    assert _linear_attention(SHAPE, Cut(512, 4)) == pytest.approx(measured, rel=0.15)
