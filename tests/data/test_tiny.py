"""The quickstart's model, tokenizer and task."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megarl.data.tiny import CHARACTERS, EOS_ID, PAD_ID, write_sort_task, write_tiny_model
from megarl.errors import DataError, MegarlError
from megarl.ops.quickstart import quickstart


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model", num_experts=4, hidden_size=32, expert_width=16)


def read(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_model_is_a_plain_checkpoint_with_one_tensor_per_expert(model_path: Path) -> None:
    tensors = load_file(model_path / "model.safetensors")
    assert tensors["model.layers.2.mlp.experts.3.gate_proj.weight"].shape == (16, 32)
    assert tensors["model.layers.0.mlp.experts.0.down_proj.weight"].shape == (32, 16)
    assert tensors["lm_head.weight"].shape == (32, 32)
    assert not any("gate_up" in name for name in tensors)
    model = AutoModelForCausalLM.from_pretrained(model_path)
    assert model.dtype == torch.float32
    assert model.config.eos_token_id == EOS_ID
    assert model.config.pad_token_id == PAD_ID
    assert torch.equal(model.lm_head.weight, tensors["lm_head.weight"])
    assert {p.name for p in model_path.parent.iterdir()} == {"model"}  # the staging directory is gone


def test_model_is_a_function_of_the_seed_and_leaves_the_generator_alone(tmp_path: Path, model_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    small = {"num_experts": 4, "hidden_size": 32, "expert_width": 16}
    again = load_file(write_tiny_model(tmp_path / "again", **small) / "model.safetensors")
    other = load_file(write_tiny_model(tmp_path / "other", seed=1, **small) / "model.safetensors")
    assert torch.equal(torch.rand(3), expected)
    first = load_file(model_path / "model.safetensors")
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_existing_directories_are_not_touched(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model-untrained", family="qwen3", hidden_size=32)
    with pytest.raises(DataError, match="already exists"):
        write_tiny_model(tmp_path)
    with pytest.raises(MegarlError, match="family qwen3: add --family qwen3"):
        quickstart(tmp_path)
    with pytest.raises(DataError, match="sort task: 91 prompts"):
        write_sort_task(tmp_path, num_train=91, num_heldout=0, num_demonstrations=0, digits=2)
    assert [path.name for path in tmp_path.iterdir()] == ["model-untrained"]


@pytest.mark.parametrize("text", [CHARACTERS, "  a  b ,. ?", "="])
def test_tokenizer_round_trip_is_exact(model_path: Path, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_path, local_files_only=True)
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text)
    assert all(2 <= i < 32 for i in ids)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*ids, EOS_ID], skip_special_tokens=True) == text


def test_sort_task_is_right_disjoint_and_partly_wrong(tmp_path: Path) -> None:
    write_sort_task(tmp_path, num_train=300, num_heldout=100, num_demonstrations=500, digits=4)
    train, heldout, demonstrations = (
        read(tmp_path / "train.jsonl"),
        read(tmp_path / "heldout.jsonl"),
        read(tmp_path / "demonstrations.jsonl"),
    )
    assert (len(train), len(heldout), len(demonstrations)) == (300, 100, 500)
    for row in train + heldout:
        assert row["prompt"].endswith("=")
        assert len(row["prompt"]) == 5
        assert row["answer"] == "".join(sorted(row["prompt"][:-1]))
    prompts = [row["prompt"] for row in train + heldout + demonstrations]
    assert len(set(prompts)) == 900
    right = ["".join(sorted(row["prompt"][:-1])) == row["response"] for row in demonstrations]
    assert sum(right) == 225  # 45 %
    assert 0.3 < sum(right[:250]) / 250 < 0.6  # spread over the file
    assert all(sorted(row["response"]) == sorted(row["prompt"][:-1]) for row in demonstrations)
    assert {p.name for p in tmp_path.glob("[!.]*")} == {"train.jsonl", "heldout.jsonl", "demonstrations.jsonl"}


_THREADED = """
import torch
from megarl.ops.quickstart import start_ranks

def work():
    torch.randn(1 << 21).sum()
    return int(torch.get_num_threads() != 1)

torch.set_num_threads(2)
torch.randn(1 << 21).sum()
start_ranks(["train"], work)
"""


def test_ranks_are_forks_also_of_a_process_whose_torch_has_threads() -> None:
    """A fork that waits for its parent's threads waits for ever."""
    subprocess.run([sys.executable, "-c", _THREADED], check=True, timeout=600)
