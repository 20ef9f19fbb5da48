"""Every family of models: what Megatron computes from its checkpoints, in every layout, against transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cases_training
import numpy as np
import pytest
import torch
from ranks import Case, case, slow
from test_megatron_layouts import assert_gradients, assert_logprobs_of_transformers, reference_gradients
from tiny_families import FAMILIES, write_family
from tiny_world import safetensors_of

from megarl.core.types import Rollout, SampleRequest
from megarl.engines.local.engine import LocalEngine
from megarl.engines.protocol import SamplingParams
from megarl.engines.weights import checkpoint_shapes
from megarl.errors import CheckpointError, ConfigError
from megarl.files.moe_config import DENSE
from megarl.models.names import hf_shapes
from megarl.models.shapes import SHAPES, read_shape

__all__ = ["reference_gradients"]  # a fixture

GRADIENTS = "cases_training:gradients"
ROUND_TRIP = "cases_training:round_trip"
CHAIN = "cases_families:chain"
NEW = [name for name in FAMILIES if name != "qwen3_moe"]
EXPERT_LAYOUTS = {name: "tp2" if name in DENSE else "tp2 ep2 etp1" for name in FAMILIES}
Reference = Callable[[str], tuple[float, dict[str, torch.Tensor]]]


def one_of(one: Case) -> Any:
    """`make test` takes the family with the most kinds of parameters, `make test-all` every one."""
    return one if ("model", "deepseek_v3") in one.arguments else slow(one)


def gradients_of(found: dict[str, Any]) -> dict[str, Any]:
    """Without expert biases, which have no gradient and are exported as they are."""
    kept = {name: value for name, value in found["gradients"].items() if "e_score_correction_bias" not in name}
    return {**found, "gradients": kept}


@pytest.mark.parametrize("model", NEW)
def test_a_family_computes_what_transformers_computes_gradients_included(
    model: str, in_model_folder: None, models: dict[str, Path], reference_gradients: Reference
) -> None:
    found = cases_training.gradients({}, model)
    assert_logprobs_of_transformers(found, models[model])
    assert_gradients(gradients_of(found), reference_gradients(model))


@pytest.mark.multirank
@pytest.mark.parametrize(
    "case",
    [
        *(one_of(case(2, GRADIENTS, EXPERT_LAYOUTS[name], model=name)) for name in NEW),
        *(slow(case(2, GRADIENTS, "pp2", model=name)) for name in NEW),
        *(slow(case(2, GRADIENTS, "cp2", model=name)) for name in ("olmoe", "deepseek_v3")),
        slow(case(4, GRADIENTS, "tp2 ep2 etp1 pp2", model="deepseek_v3")),
    ],
    ids=str,
)
def test_a_family_computes_the_same_in_every_layout(
    case: Case, outcome: dict[str, Any], models: dict[str, Path], reference_gradients: Reference
) -> None:
    model = dict(case.arguments)["model"]
    assert_logprobs_of_transformers(outcome, models[model])
    assert_gradients(gradients_of(outcome), reference_gradients(model))


@pytest.mark.multirank
@pytest.mark.parametrize(
    "case", [one_of(case(2, ROUND_TRIP, EXPERT_LAYOUTS[name], model=name)) for name in NEW], ids=str
)
def test_live_weights_are_exported_bit_for_bit(case: Case, outcome: dict[str, Any]) -> None:
    assert outcome["different"] == []
    assert sorted(outcome["names"]) == outcome["stored"]


@pytest.mark.multirank
@pytest.mark.parametrize(
    "case", [one_of(case(2, CHAIN, EXPERT_LAYOUTS[name], model=name, then="pp2")) for name in FAMILIES], ids=str
)
def test_acceptance_a_chain_of_layouts_gives_back_every_bit(case: Case, outcome: dict[str, Any]) -> None:
    assert outcome == {"different": [], "extra": []}


@pytest.mark.parametrize("model", FAMILIES)
def test_the_map_knows_every_tensor_and_its_shape(model: str, models: dict[str, Path]) -> None:
    stored = {name: tuple(tensor.shape) for name, tensor in safetensors_of(models[model]).items()}
    assert hf_shapes(read_shape(models[model])) == stored


def changed(folder: Path, **values: Any) -> Path:
    config = json.loads((folder / "config.json").read_text())
    for name, value in values.items():
        config.pop(name) if value is None else config.update({name: value})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_kimi_k2_is_read_as_deepseek_v3(tmp_path: Path) -> None:
    folder = write_family(tmp_path / "kimi", "kimi_k2")
    before = read_shape(folder)

    def sample() -> Rollout:
        engine = LocalEngine.from_pretrained(folder)
        return engine.generate(
            [SampleRequest(np.arange(5, 13, dtype=np.int32), 0, 0, 1)], SamplingParams(max_response_tokens=8)
        )[0]

    sampled = sample()
    assert read_shape(changed(folder, model_type="kimi_k2")) == before
    assert checkpoint_shapes(folder) == hf_shapes(before)
    np.testing.assert_array_equal(sample().rollout_logprobs, sampled.rollout_logprobs)
    assert before.fields["rope_type"] == "yarn"


def test_configs_of_older_transformers_say_the_same(tmp_path: Path) -> None:
    folder = write_family(tmp_path / "kimi", "kimi_k2")
    before = read_shape(folder)
    rope = dict(json.loads((folder / "config.json").read_text())["rope_parameters"])
    theta = rope.pop("rope_theta")
    old = {"type": rope.pop("rope_type"), **rope}
    assert read_shape(changed(folder, rope_parameters=None, rope_theta=theta, rope_scaling=old)) == before


@pytest.mark.parametrize(
    ("model", "values", "says"),
    [
        ("deepseek_v3", {"topk_group": 4}, "topk_group 4 and n_group 4; expected twice as many experts as groups"),
        ("deepseek_v3", {"norm_topk_prob": False}, "norm_topk_prob is False"),
        ("deepseek_v3", {"attention_bias": True}, "attention_bias is True"),
        ("kimi_k2", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_type 'linear'"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv is 8.0"),
        ("mixtral", {"sliding_window": 16}, "sliding-window"),
        ("qwen3", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_type 'yarn'"),
        ("qwen3", {"hidden_act": "gelu"}, "'gelu'"),
        ("qwen3", {"rms_norm_eps": "1e-6"}, "rms_norm_eps is '1e-6'"),
        ("llama", {"attention_bias": True}, "attention_bias is True"),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is left out"),
        ("qwen2", {"model_type": "qwen3_next"}, "gated delta net"),
    ],
)
def test_what_megatron_would_compute_otherwise_is_refused(
    model: str, values: dict[str, Any], says: str, tmp_path: Path
) -> None:
    folder = changed(write_family(tmp_path / "model", model), **values)
    with pytest.raises(ConfigError, match=says):
        read_shape(folder)


def test_every_reader_has_a_tiny_model() -> None:
    assert set(SHAPES) == {kind for kind, _ in FAMILIES.values()} | {"kimi_k2"}


def test_a_tensor_of_another_shape_is_named(tmp_path: Path, models: dict[str, Path]) -> None:
    from safetensors.torch import save_file
    from tiny_world import config, policy_of

    folder = write_family(tmp_path / "model", "olmoe")
    tensors = safetensors_of(folder)
    name = "model.layers.0.self_attn.q_norm.weight"
    tensors[name] = tensors[name][:8].clone()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{name} \(8,\) \(expected \(32,\)\)"):
        policy_of(config(folder))
