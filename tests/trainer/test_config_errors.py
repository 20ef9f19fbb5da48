"""Settings that Megatron cannot serve cost one line, whatever Megatron raises and whenever it does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from megatron.core.transformer.transformer_config import TransformerConfig
from train_world import World

import megarl.trainer.step as train_step
from megarl import cli
from megarl.errors import ConfigError
from megarl.megatron.versions import as_config_error
from megarl.trainer.loop import train

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    # what Megatron does: settings, a pattern that the line matches on every release
    "a config asserts": (
        {"main_grads_dtype": "bfloat16"},
        r"optimizer: \w+: main_grads_dtype can only be fp32",
    ),
    "the gradient buffers' config asserts": ({"reuse_grad_buf_for_mxfp8_param_ag": True}, "keeping params in MXFP8"),
    "the optimizer asserts": ({"optimizer": "sgd"}, r"build the optimizer: \w+: Only Adam"),
    "the optimizer is unknown": ({"optimizer": "lion"}, r"lion(\b.*emerging-optimizers| optimizer is not supported)"),
    "the scaler asserts without a word": ({"loss_scale": -1.0}, r"AssertionError: +\(optimizer/grad_scaler.py:"),
    "a config imports in vain": ({"moe_permute_fusion": True}, r"the model: \w+: (cannot import|fused permutation)"),
    "the layer spec asserts": ({"use_kitchen": True}, "assert HAVE_KITCHEN"),
    "the attention is megarl's own": (
        {"apply_query_key_layer_scaling": True},
        "Transformer Engine supports no apply_query_key_layer_scaling",
    ),
    "the first pass asserts": (
        {"moe_apply_probs_on_input": True},
        r"Megatron cannot train: \w+: `moe_apply_probs_on_input`",
    ),
    "the first pass stumbles": ({"test_mode": True}, "Megatron cannot train: AttributeError"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_megatron_refuses_costs_one_line_and_exit_code_2(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    settings, expected = REFUSED[case]
    path = tmp_path / "run.toml"
    path.write_text(world.settings(run__dir=str(tmp_path / "run"), megatron=settings).to_toml())
    assert cli.main(["train", str(path)]) == 2
    shown = capsys.readouterr().err
    (line,) = [line for line in shown.splitlines() if line.startswith("megarl: error")]
    assert re.search(expected, line)
    assert "Traceback" not in shown
    if "own" not in case:
        assert f"; [megatron] sets {', '.join(settings)}" in line


def test_the_cold_start_refuses_alike(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = {"data": str(world.folder / "task" / "demonstrations.jsonl"), "steps": 2, "batch_size": 4, "lr": 1e-3}
    path = tmp_path / "run.toml"
    settings = world.settings(run__dir=str(tmp_path / "run"), sft=plan, megatron={"moe_apply_probs_on_input": True})
    path.write_text(settings.to_toml())
    assert cli.main(["sft", str(path)]) == 2
    assert re.search(r"Megatron cannot train: \w+: `moe_apply_probs_on_input`", capsys.readouterr().err)


def test_a_mistake_in_megarl_is_not_blamed_on_a_setting(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It arises below Megatron's schedule, with a harmless setting in the table."""

    def broken(*_: Any, **__: Any) -> Any:
        raise AssertionError("a mistake of megarl")

    monkeypatch.setattr(train_step, "coefficients", broken)
    with pytest.raises(AssertionError, match="a mistake of megarl"):
        train(world.settings(run__dir=str(tmp_path / "run"), megatron={"moe_z_loss_coeff": 1e-3}))


def test_without_settings_only_what_is_raised_on_purpose_is_a_refusal() -> None:
    shape: dict[str, Any] = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2}
    with pytest.raises(KeyError, match="bogus"), as_config_error("build", {}):
        TransformerConfig(**shape, cuda_graph_impl="local", cuda_graph_scope=["bogus"])  # type: ignore[list-item]
    said = r"^Megatron cannot build: .*num_attention_heads.*config\.py:\d+: .*\)$"
    with pytest.raises(ConfigError, match=said), as_config_error("build", {}):
        TransformerConfig(**shape | {"num_attention_heads": 3}, tensor_model_parallel_size=2)
