"""What is read of a Hugging Face folder: what transformers reads, and SGLang, or nothing at all."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from local_engines import local_engine
from safetensors.torch import load_file, save_file
from tiny_families import FAMILIES, write_family
from transformers import AutoConfig, AutoModelForCausalLM

from megarl.convert.conversion import to_hf, to_megatron
from megarl.convert.job import Options
from megarl.convert.quantization import quantize
from megarl.errors import CheckpointError, ConfigError
from megarl.files.hf_config import read_dtype
from megarl.models.hf_files import HFCheckpoint, check_tensors, describe_left_out
from megarl.models.hf_folder import INDEX, SINGLE
from megarl.models.names import hf_shapes
from megarl.models.shapes import read_shape

Tensors = dict[str, torch.Tensor]
MOE = [name for name, (_, config) in FAMILIES.items() if any("expert" in key for key in config)]
WITH_PREDICTION = [name for name in MOE if "num_nextn_predict_layers" in FAMILIES[name][1] or name == "glm4_moe"]
LOCAL = Options(layers="local")


def read_all(folder: Path) -> Tensors:
    with HFCheckpoint(folder) as found:
        return {name: found.read(name) for name in found.names()}


def are_equal(one: Tensors, other: Tensors) -> bool:
    same = one.keys() == other.keys()
    return same and all(one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one)


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    kept = {key: value for key, value in config.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(kept))


def read_checked(folder: Path) -> list[str]:
    """What is left out."""
    with HFCheckpoint(folder) as found:
        return check_tensors(found, hf_shapes(read_shape(folder)))


def test_experts_in_one_tensor_are_refused(tmp_path: Path) -> None:
    """transformers 5 writes all experts of a layer as one tensor only if it is asked to."""
    folder = write_family(tmp_path, "qwen3_moe")
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder, save_original_format=False)
    with pytest.raises(CheckpointError, match=r"tensors unknown: .*experts\.gate_up_proj"):
        read_checked(folder)


SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def shard(folder: Path, tensors: Tensors, index: str | None = INDEX, prefix: str = "") -> None:
    names = sorted(tensors)
    parts = dict(zip(SHARDS, (names[:9], names[9:]), strict=True))
    for file, part in parts.items():
        (folder / prefix).mkdir(exist_ok=True)
        save_file({name: tensors[name] for name in part}, folder / prefix / file, metadata={"format": "pt"})
    if index is not None:
        listing = {name: prefix + file for file, part in parts.items() for name in part}
        (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": listing}))


def single(folder: Path, tensors: Tensors, file: str = SINGLE) -> None:
    save_file(tensors, folder / file, metadata={"format": "pt"})


FOLDERS: dict[str, tuple[Callable[[Path, Tensors, Tensors], object], bool]] = {
    # name: (what is written of a model and of another one, whether it is read)
    "one file": (lambda f, a, _: single(f, a), True),
    "shards with an index": (lambda f, a, _: shard(f, a), True),
    "one file beside shards with an index": (lambda f, a, b: (single(f, a), shard(f, b)), False),
    "shards that an index does not name": (
        lambda f, a, b: (shard(f, a), single(f, b, "model-00003-of-00003.safetensors")),
        True,
    ),
    "shards without an index beside one file": (lambda f, a, b: (single(f, a), shard(f, b, None)), False),
    "a variant beside one file": (lambda f, a, b: (single(f, a), single(f, b, "model.fp16.safetensors")), False),
    "Mistral's own names beside one file": (
        lambda f, a, b: (single(f, a), single(f, {f"layers.{n}": t for n, t in b.items()}, "consolidated.safetensors")),
        True,
    ),
    "a file of macOS": (lambda f, a, _: (single(f, a), (f / "._model.safetensors").write_bytes(b"\0\5\26\7")), True),
    "the maker's form in a folder": (
        lambda f, a, b: (shard(f, a), (f / "original").mkdir(), torch.save(b, f / "original" / "consolidated.00.pth")),
        True,
    ),
    "pickles alone": (lambda f, a, _: torch.save(a, f / "pytorch_model.bin"), False),
    "pickles beside one file": (lambda f, a, b: (single(f, a), torch.save(b, f / "pytorch_model.bin")), True),
    "pickles beside shards without an index": (
        lambda f, a, b: (torch.save(a, f / "pytorch_model.bin"), shard(f, b, None)),
        False,
    ),
    "an index into a folder": (lambda f, a, b: (shard(f, a, prefix="sub/"), single(f, b, SHARDS[0])), False),
    "a shard that is not there": (lambda f, a, _: (shard(f, a), (f / SHARDS[1]).unlink()), False),
    "a file that the config names": (
        lambda f, a, b: (
            single(f, b),
            single(f, a, "x.safetensors"),
            edit_config(f, transformers_weights="x.safetensors"),
        ),
        False,
    ),
    "an adapter": (lambda f, a, _: (single(f, a), (f / "adapter_config.json").write_text("{}")), False),
}


def sglang_reads(folder: Path) -> Tensors:
    """The rule of SGLang's loader: files of the index, else all, where the last one counts."""
    files = [file for file in sorted(folder.glob("*.safetensors")) if not file.name.startswith(".")]
    if (folder / INDEX).is_file():
        named = {folder / name for name in json.loads((folder / INDEX).read_text())["weight_map"].values()}
        files = [file for file in files if file in named]
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("what", FOLDERS)
def test_trainer_transformers_and_servers_read_the_same_or_nothing(what: str, tmp_path: Path) -> None:
    model, other = tmp_path / "model", tmp_path / "other"
    write_family(model, "qwen3_moe", num_hidden_layers=1)
    tensors = load_file(model / SINGLE)
    (model / SINGLE).unlink()
    write, is_read = FOLDERS[what]
    write(model, tensors, {name: 2 * tensor for name, tensor in tensors.items()})
    if not is_read:
        with pytest.raises(CheckpointError, match=str(model)):
            HFCheckpoint(model)
        return
    found = read_all(model)
    AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).save_pretrained(other)
    assert are_equal(found, load_file(other / SINGLE))
    served = sglang_reads(model)
    assert are_equal(found, {name: served[name] for name in found})


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors", "modelopt", "fbgemm_fp8", None])
def test_another_quantisation_is_refused(method: str | None, key: str, tmp_path: Path) -> None:
    folder = write_family(tmp_path, "qwen3_moe", num_hidden_layers=1)
    edit_config(folder, **{key: {"quant_method": method, "bits": 4}})
    with pytest.raises(CheckpointError, match=f"is quantised by {method!r} with blocks None; expected"):
        HFCheckpoint(folder)


SPELLINGS: list[Any] = [..., None, "float32", "bfloat16", "float16", "auto", "torch.bfloat16", "bf16", "", 3, {"": "x"}]


@pytest.mark.parametrize("key", ["dtype", "torch_dtype", "both"])
@pytest.mark.parametrize("value", SPELLINGS, ids=repr)
def test_the_dtype_is_that_of_transformers_or_refused(key: str, value: Any, tmp_path: Path) -> None:
    named = {"dtype": "float16", "torch_dtype": value} if key == "both" else {key: value}
    config = {"model_type": "qwen3_moe"} | {name: spelt for name, spelt in named.items() if spelt is not ...}
    (tmp_path / "config.json").write_text(json.dumps(config))
    if key == "both" or value in (..., None, "float32", "bfloat16", "float16"):
        theirs = AutoConfig.from_pretrained(tmp_path).dtype
        assert read_dtype(config) == str(theirs or torch.bfloat16).removeprefix("torch.")
        return
    with pytest.raises(ConfigError, match=re.escape(f"{key} is {value!r}")):
        read_dtype(config)


def with_prediction_layer(folder: Path, family: str, **config: Any) -> list[str]:
    """Write a model whose files hold one more layer, as those of GLM-4.5 and DeepSeek-V3; returns its names."""
    write_family(folder, family, num_nextn_predict_layers=0)
    edit_config(folder, **config)
    tensors = load_file(folder / SINGLE)
    layer = {name.replace("layers.3.", "layers.4."): t + 1 for name, t in tensors.items() if ".layers.3." in name}
    for name, shape in (("eh_proj.weight", (32, 64)), ("enorm.weight", (32,)), ("shared_head.head.weight", (30, 32))):
        layer[f"model.layers.4.{name}"] = torch.ones(shape)
    single(folder, tensors | layer)
    return sorted(layer)


class TestPredictionLayers:
    @pytest.mark.parametrize("counted", [1, ...])
    @pytest.mark.parametrize("family", WITH_PREDICTION)
    def test_they_are_left_out_and_named(self, family: str, counted: Any, tmp_path: Path) -> None:
        folder = tmp_path / "model"
        layer = with_prediction_layer(folder, family, num_nextn_predict_layers=counted)
        left_out = read_checked(folder)
        assert left_out == layer
        assert f"left out: {len(layer)} tensors of prediction layer 4 (" in describe_left_out(left_out)
        done = to_megatron(folder, tmp_path / "megatron", LOCAL)
        assert done["dropped"] == layer
        to_hf(tmp_path / "megatron", tmp_path / "back", None, Options())
        written = json.loads((tmp_path / "back" / "config.json").read_text())
        assert not written.get("num_nextn_predict_layers")
        views = local_engine(folder)._views
        assert read_all(tmp_path / "back").keys() == views.keys()

    @pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe"])
    def test_qwen_names_them_mtp(self, family: str, tmp_path: Path) -> None:
        folder = write_family(tmp_path / "model", family)
        config = json.loads((folder / "config.json").read_text())
        config.get("text_config", config)["mtp_num_hidden_layers"] = 1
        (folder / "config.json").write_text(json.dumps(config))
        layer = {"mtp.fc.weight": torch.ones(32, 64), "mtp.layers.0.self_attn.q_norm.weight": torch.ones(16)}
        single(folder, load_file(folder / SINGLE) | layer)
        assert to_megatron(folder, tmp_path / "megatron", LOCAL)["dropped"] == sorted(layer)
        to_hf(tmp_path / "megatron", tmp_path / "back", folder, Options())
        written = json.loads((tmp_path / "back" / "config.json").read_text())
        assert written.get("text_config", written)["mtp_num_hidden_layers"] == 0

    def test_quantized_they_stay(self, tmp_path: Path) -> None:
        """Engines speculate with them, and training has not moved the other layers."""
        layer = with_prediction_layer(tmp_path / "model", "glm4_moe", num_nextn_predict_layers=1)
        quantize(tmp_path / "model", tmp_path / "out", Options())
        assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 1
        with HFCheckpoint(tmp_path / "out") as found:
            assert found.names_of_prediction_layers() == {*layer}

    @pytest.mark.parametrize("count", ["1", 1.5, [1]])
    def test_a_count_that_is_none(self, count: Any, tmp_path: Path) -> None:
        with_prediction_layer(tmp_path / "model", "glm4_moe", num_nextn_predict_layers=count)
        with pytest.raises(ConfigError, match=r"num_nextn_predict_layers is .*, expected"):
            to_megatron(tmp_path / "model", tmp_path / "out", LOCAL)

    def test_layers_that_nothing_explains_are_refused(self, tmp_path: Path) -> None:
        """A config.json with too few layers is not the model."""
        folder = write_family(tmp_path / "model", "qwen3_moe")
        edit_config(folder, num_hidden_layers=3)
        with pytest.raises(CheckpointError, match=r"tensors unknown: model\.layers\.3.*--drop GLOB"):
            to_megatron(folder, tmp_path / "out", LOCAL)
        with_prediction_layer(tmp_path / "glm", "glm4_moe", num_nextn_predict_layers=1)
        tensors = load_file(tmp_path / "glm" / SINGLE)
        single(tmp_path / "glm", tensors | {"model.layers.5.enorm.weight": torch.ones(32)})
        with pytest.raises(CheckpointError, match=r"1 tensors unknown: model\.layers\.5\."):
            to_megatron(tmp_path / "glm", tmp_path / "out", LOCAL)
        with_prediction_layer(tmp_path / "few", "glm4_moe", num_nextn_predict_layers=1, num_hidden_layers=3)
        with pytest.raises(CheckpointError, match=r"tensors unknown: model\.layers\.3\."):
            to_megatron(tmp_path / "few", tmp_path / "out", LOCAL)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64, torch.float8_e4m3fn, torch.float8_e5m2])
def test_weights_in_8_bits_of_which_the_config_says_nothing_are_refused(dtype: torch.dtype, tmp_path: Path):
    folder, name = write_family(tmp_path / "model", "qwen3_moe"), "model.layers.0.self_attn.q_proj.weight"
    tensors = load_file(folder / SINGLE)
    save_file(tensors | {name: tensors[name].to(dtype)}, folder / SINGLE, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"{name} has dtype \w+, expected weights in 16"):
        read_checked(folder)
