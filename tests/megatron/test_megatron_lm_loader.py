"""A converted checkpoint, read with the steps of Megatron-LM's ``load_checkpoint``; docs/megatron_lm.md is right."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt import GPTModel
from tiny_world import config, join
from torch_dist_weights import read_weights

from megarl.convert.conversion import to_megatron
from megarl.convert.job import Options
from megarl.megatron.model import build_model, transformer_config
from megarl.models.shapes import ModelShape, read_shape

PAGE = (Path(__file__).parent.parent.parent / "docs" / "megatron_lm.md").read_text()


def build(shape: ModelShape, moe_layer_freq: int | None = None, vocab_size: int | None = None) -> GPTModel:
    settings = transformer_config(shape, {}, torch.float32)
    if moe_layer_freq is not None:
        settings.moe_layer_freq = moe_layer_freq
    if vocab_size is not None:
        shape = dataclasses.replace(shape, vocab_size=vocab_size)
    return build_model(shape, settings)[0]


def converted(model: Path, folder: Path) -> ModelShape:
    """DIR of the page: ``release`` inside, and the tracker file."""
    join(config(Path("unused")))
    to_megatron(model, folder / "release", Options(layers="local"))
    (folder / "latest_checkpointed_iteration.txt").write_text("release\n")
    return read_shape(model)


def common_of(folder: Path) -> dict[str, Any]:
    word = (folder / "latest_checkpointed_iteration.txt").read_text().strip()
    assert dist_checkpointing.check_is_distributed_checkpoint(str(folder / word))
    return dist_checkpointing.load_common_state_dict(str(folder / word))


def load(folder: Path, model: GPTModel, heed_metadata: bool = True) -> None:
    """``--load FOLDER --ckpt-format torch_dist --finetune``, for the weights."""
    metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common_of(folder)) or {}
    metadata = {**metadata, "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    wanted = {"model": model.sharded_state_dict(metadata=metadata if heed_metadata else None)}
    found = dist_checkpointing.load(wanted, str(folder / "release"), strict="assume_ok_unexpected")
    model.load_state_dict(found["model"], strict=True)


def assert_equal_weights(found: GPTModel, wanted: GPTModel) -> None:
    others = dict(wanted.named_parameters())
    assert others
    for name, parameter in found.named_parameters():
        other = others.pop(name)
        assert torch.equal(parameter[: len(other)], other), name
    assert not others


@pytest.mark.parametrize(
    ("moe_layer_freq", "heed_metadata"),
    [(1, True), (None, True), (None, False)],
    ids=["apart", "list of layers", "list of layers, metadata ignored"],
)
def test_the_weights_load(
    moe_layer_freq: int | None,
    heed_metadata: bool,
    models: dict[str, Path],
    tmp_path: Path,
    one_rank: None,
) -> None:
    shape = converted(models["olmoe"], tmp_path)
    assert converted(models["olmoe"], tmp_path / "oracle") == shape
    expected, model = build(shape), build(shape, moe_layer_freq)
    read_weights(tmp_path / "oracle" / "release", [expected])
    load(tmp_path, model, heed_metadata)
    assert_equal_weights(model, expected)


def test_a_longer_vocabulary_loads(models: dict[str, Path], tmp_path: Path, one_rank: None) -> None:
    shape = converted(models["olmoe"], tmp_path)
    expected, model = build(shape), build(shape, vocab_size=128)
    read_weights(tmp_path / "release", [expected])
    load(tmp_path, model)
    assert_equal_weights(model, expected)


def test_what_the_page_says_is_there_and_what_is_missing(
    models: dict[str, Path], tmp_path: Path, one_rank: None
) -> None:
    shape = converted(models["olmoe"], tmp_path)
    assert shape == read_shape(models["olmoe"])
    common = common_of(tmp_path)
    missing = {
        name
        for row in re.findall(r"^\|(.*)\| \*\*missing\*\* \|$", PAGE, re.MULTILINE)
        for name in re.findall(r"`args\.(\w+)`", row)
    }
    assert missing == {"kv_channels"}
    assert not missing & set(vars(common["args"]))
    there = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "num_experts": 8, "ffn_hidden_size": 40}
    layout = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1}
    assert vars(common["args"]) == {**layout, **there, "moe_ffn_hidden_size": 40}
    assert (common["checkpoint_version"], common["iteration"]) == (3.0, 0)
