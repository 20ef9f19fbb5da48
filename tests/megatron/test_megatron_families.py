"""Every family of models: what Megatron computes from its checkpoints, in every layout, against transformers."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cases_training
import pytest
import torch
from family_proofs import prove_replay
from local_engines import local_engine
from ranks import Case, case, slow
from safetensors.torch import save_file
from saves import save
from test_megatron_layouts import assert_gradients, assert_logprobs_of_transformers, reference_gradients
from tiny_families import FAMILIES, turn_experts, write_family
from tiny_world import MODELS, config, policy_of, safetensors_of
from torch_dist_weights import read_weights

from megarl.convert.conversion import to_hf, to_megatron
from megarl.convert.job import Options
from megarl.convert.quantization import quantize
from megarl.engines.weights import checkpoint_shapes
from megarl.errors import CheckpointError, ConfigError
from megarl.files import hf_config
from megarl.files.hf_config import DENSE
from megarl.megatron.distributed import from_main_rank
from megarl.megatron.hf_weights import save_hf
from megarl.megatron.policy import Policy
from megarl.models.hf_files import HFCheckpoint
from megarl.models.names import hf_shapes
from megarl.models.shapes import read_shape

__all__ = ["reference_gradients"]  # a fixture

GRADIENTS = "cases_training:gradients"
ROUND_TRIP = "cases_training:round_trip"
CHAIN = "test_megatron_families:chain"
NEW = [name for name in FAMILIES if name != "qwen3_moe"]
EXPERT_LAYOUTS = {name: "tp2" if name in DENSE else "tp2 ep2 etp1" for name in FAMILIES}
Reference = Callable[[str], tuple[float, dict[str, torch.Tensor]]]


def one_of(one: Case) -> Any:
    """`make test` takes the family with the most kinds of parameters, `make test-all` every one."""
    return one if ("model", "deepseek_v3") in one.arguments else slow(one)


def gradients_of(found: dict[str, Any]) -> dict[str, Any]:
    """Without expert biases, which have no gradient and are exported as they are."""
    biases = ("e_score_correction_bias", "expert_bias")
    kept = {name: value for name, value in found["gradients"].items() if not name.endswith(biases)}
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
        *(
            slow(case(2, GRADIENTS, "cp2", model=name))
            for name in ("olmoe", "deepseek_v3", "gpt_oss", "glm_moe_dsa", "qwen3_next")
        ),
        slow(case(4, GRADIENTS, "tp2 ep2 etp1 pp2", model="deepseek_v3")),
    ],
    ids=str,
)
def test_a_family_computes_the_same_in_every_layout(
    case: Case, outcome: dict[str, Any], models: dict[str, Path], reference_gradients: Reference
) -> None:
    model = dict(case.arguments)["model"]
    assert_logprobs_of_transformers(outcome, models[model])
    expected = reference_gradients(model)
    assert_gradients(gradients_of(outcome), expected)
    squares = sum(float(gradient.double().square().sum()) for gradient in expected[1].values())
    assert outcome["norm"] == pytest.approx(squares**0.5, rel=1e-5)


@pytest.mark.multirank
@pytest.mark.parametrize(
    "case",
    [
        *(one_of(case(2, ROUND_TRIP, EXPERT_LAYOUTS[name], model=name)) for name in NEW),
        case(2, ROUND_TRIP, "ep2", model="gpt_oss", gather_bytes=1),  # an expert of each rank at a time
    ],
    ids=str,
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


@pytest.mark.parametrize("model", [name for name, (kind, _) in FAMILIES.items() if kind not in DENSE])
def test_routes_of_an_engine_and_of_an_earlier_pass_are_replayed_with_the_proof(
    model: str, in_model_folder: None, models: dict[str, Path]
) -> None:
    proof = prove_replay(models[model])
    assert proof is not None
    assert proof["is_right"], proof
    assert proof["r3"][0] == proof["r3"][1] > 200
    assert proof["native"] < 0.9  # the engine's weights are others


def test_kimi_k2_is_read_as_deepseek_v3(tmp_path: Path) -> None:
    folder = write_family(tmp_path / "kimi", "kimi_k2")
    before = read_shape(folder)
    assert before.fields["rope_type"] == "yarn"
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "kimi_k2"}))
    assert read_shape(folder) == dataclasses.replace(before, family="kimi_k2")
    assert checkpoint_shapes(folder) == hf_shapes(before)


TOWER = {"vision_tower.patch.weight": torch.arange(6.0), "mm_projector.up_proj.weight": torch.eye(2)}


def within_kimi_k25(text: Path, folder: Path) -> Path:
    """Kimi-K2.5, which transformers does not have: Kimi-K2 beside a vision tower."""
    config, folder = json.loads((text / "config.json").read_text()), Path(shutil.copytree(text, folder))
    outer = {"model_type": "kimi_k25", "architectures": ["KimiK25ForConditionalGeneration"], "dtype": "float32"}
    outer |= {"media_placeholder_token_id": 7, "vision_config": {"vt_num_hidden_layers": 1}}
    outer["text_config"] = {**config, "model_type": "kimi_k2"}
    (folder / "config.json").write_text(json.dumps(outer))
    tensors = {f"language_model.{name}": tensor for name, tensor in safetensors_of(text).items()}
    save_file({**tensors, **TOWER}, folder / "model.safetensors")
    return folder


def test_the_text_part_of_kimi_k25_is_kimi_k2_and_its_tower_stays(
    models: dict[str, Path], tmp_path: Path, in_model_folder: None
) -> None:
    text, source = read_shape(models["kimi_k2"]), within_kimi_k25(models["kimi_k2"], tmp_path / "kimi")
    shape = read_shape(source)
    assert dataclasses.replace(shape, family=text.family) == text
    assert checkpoint_shapes(source) == hf_shapes(shape)

    to_megatron(source, tmp_path / "megatron", Options(layers="local"))
    made = to_megatron(source, tmp_path / "megatron", Options(layers="local", overwrite=True))
    assert "huggingface/model-beside-text.safetensors" in made["sha256"]
    to_hf(tmp_path / "megatron", tmp_path / "back", None, Options())
    stored, back = safetensors_of(source, True), safetensors_of(tmp_path / "back", True)
    assert {*TOWER} < {*stored} == {*back}
    assert all(torch.equal(back[name], tensor) for name, tensor in stored.items())

    quantize(source, tmp_path / "fp8", Options())
    stored8 = safetensors_of(tmp_path / "fp8", True)
    assert all(torch.equal(stored8[name], tensor) for name, tensor in TOWER.items())
    with HFCheckpoint(tmp_path / "fp8") as fp8:
        assert fp8.names() == {*stored}

    policy = policy_of(config(source, {}))
    save_hf(policy.chunks, policy.shape, source, tmp_path / "live")
    saved = safetensors_of(tmp_path / "live", True)
    assert {*saved} == {*stored}
    assert all(torch.equal(saved[name], tensor) for name, tensor in stored.items())
    engine = local_engine(source)
    live = dict(policy.export(True))
    engine.update_weights(live.items(), 1)
    assert all(torch.equal(engine._views[name], stored[name]) for name in live)


def test_a_tower_that_is_absent_is_an_error_and_a_larger_model_says_one_thing(
    models: dict[str, Path], tmp_path: Path
) -> None:
    source = within_kimi_k25(models["kimi_k2"], tmp_path / "kimi")
    to_megatron(source, tmp_path / "megatron", Options(layers="local"))
    bare = within_kimi_k25(models["kimi_k2"], tmp_path / "bare")
    tensors = safetensors_of(bare)
    save_file(tensors, bare / "model.safetensors")
    with pytest.raises(CheckpointError, match="holds the text model alone"):
        to_hf(tmp_path / "megatron", tmp_path / "back", bare, Options())
    hf = json.loads((source / "config.json").read_text())
    for changed, problem in (
        ({"hidden_size": 64}, "hidden_size is 64, and in text_config 32"),
        ({"text_config": {**hf["text_config"], "model_type": "llama"}}, "expected a table of model type 'kimi_k2'"),
        ({"text_config": None}, "text_config is None"),
        ({"index_topk": 4}, "index_topk"),
    ):
        (source / "config.json").write_text(json.dumps({**hf, **changed}))
        with pytest.raises(ConfigError, match=problem):
            read_shape(source)


def test_experts_in_the_form_of_transformers_5_are_the_same_model(tmp_path: Path) -> None:
    published = write_family(tmp_path / "published", "qwen3_vl_moe")
    saved = write_family(tmp_path / "saved", "qwen3_vl_moe")
    turn_experts(saved)
    with HFCheckpoint(published) as one, HFCheckpoint(saved) as other:
        for name in one.names():
            assert one.shape(name) == other.shape(name) == tuple(one.read(name).shape)
            assert torch.equal(one.read(name), other.read(name))
    square = write_family(tmp_path / "square", "qwen3_vl_moe", moe_intermediate_size=16)
    with pytest.raises(CheckpointError, match="a square matrix cannot be told apart"):
        to_megatron(square, tmp_path / "out", Options())


def test_every_reader_has_a_tiny_model() -> None:
    assert set(hf_config.FAMILIES) == {kind for kind, _ in FAMILIES.values()} | {"kimi_k2", "kimi_k25"}


def chain(layout: dict[str, int], model: str, then: str) -> dict[str, list[str]]:
    """HF -> torch_dist -> Megatron in ``layout``, saved by Megatron -> Megatron in ``then``, saved -> HF."""
    source, folder = MODELS / model, Path(f"{model}-chain")
    first, second, third, back = (folder / name for name in ("first", "second", "third", "back"))
    policy_of(config(source, layout))  # the ranks join
    from_main_rank(lambda: to_megatron(source, first, Options(layers="local")) and None)
    other = {part[:-1]: int(part[-1]) for part in then.split()}
    _through_megatron(policy_of(config(source, layout)), first, second)
    _through_megatron(policy_of(config(source, other)), second / "step_0000000", third)
    from_main_rank(lambda: to_hf(third, back, source, Options()) and None)
    stored, found = safetensors_of(source), safetensors_of(back)
    different = [name for name in stored if name not in found or not torch.equal(stored[name], found[name])]
    return {"different": different, "extra": sorted(set(found) - set(stored))}


def _through_megatron(policy: Policy, source: Path, target: Path) -> None:
    """Load into a model without weights and save, both by Megatron itself."""
    for chunk in policy.chunks:
        for tensor in (*chunk.parameters(), *dict(chunk.named_buffers()).values()):
            tensor.data.fill_(7.0)
    read_weights(source, policy.chunks)
    save(target, 0, policy, {}, keep=1)
