"""What doctor calls ready, the trainer begins with; what the trainer refuses, doctor does not call ready."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from train_world import World, trainer_of

from megarl.config import Config
from megarl.convert.job import Options
from megarl.convert.quantization import quantize
from megarl.core.fp8_names import SCALE
from megarl.data.prompts import load_prompts
from megarl.data.tokenizer import load_model_tokenizer
from megarl.errors import MegarlError
from megarl.megatron import distributed
from megarl.models.fit import check_fit
from megarl.models.hf_folder import INDEX, SINGLE
from megarl.models.shapes import read_shape
from megarl.ops.doctor import inputs, machine

REWARDS = """
def missing_keyword(*, prompt, response): return 1.0
def broken(*, prompt, response, answer): return answr == response
def text(*, prompt, response, answer): return "right"
def right(*, prompt, response, answer): return float(answer == response)
def make(): raise OSError("no such device")
def nothing_alone(rewards, groups): return rewards * (groups[0] == groups[-1])
"""


def edit(file: str, **changes: Any) -> Callable[[Path], None]:
    """Set keys of a JSON file of the model."""

    def change(folder: Path) -> None:
        path = folder / "model" / file
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def tensors(change: Callable[[dict[str, torch.Tensor]], Any], model: str = "model") -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        (file,) = (folder / model).glob("*.safetensors")
        found = load_file(file)
        change(found)
        save_file(found, file, metadata={"format": "pt"})

    return rewrite


def line(text: str, file: str = "train.jsonl") -> Callable[[Path], None]:
    """Add a line behind all others."""

    def add(folder: Path) -> None:
        with (folder / "task" / file).open("a") as opened:
            opened.write(text + "\n")

    return add


def truncate(folder: Path) -> None:
    (file,) = (folder / "model").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-4])


def add_prediction_layer(folder: Path) -> None:
    tensors(lambda t: t.update({"model.layers.4.eh_proj.weight": torch.ones(32, 64)}))(folder)


def quantized(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    """Write the model in FP8, and change its tensors."""

    def rewrite(folder: Path) -> None:
        quantize(folder / "model", folder / "fp8", Options())
        shutil.rmtree(folder / "model")
        (folder / "fp8").rename(folder / "model")
        (folder / "model" / INDEX).unlink()
        tensors(change)(folder)

    return rewrite


SCALED = "model.layers.0.mlp.experts.3.up_proj.weight"
KL = {"train__objective": "kl_grpo"}
CASES: dict[str, tuple[Callable[[Path], object] | None, dict[str, Any], bool]] = {
    # what: (what is done to the files, keys of the configuration, whether training begins)
    "nothing": (None, {}, True),
    "a prediction layer": (add_prediction_layer, {}, True),
    "a reference": (None, KL, True),
    "a reward of one's own": (None, {"reward__function": "inputs_under_test:right"}, True),
    "FP8": (quantized(lambda t: None), {}, True),
    "FP8 without a scale": (quantized(lambda t: t.pop(SCALED + SCALE)), {}, False),
    "no model": (lambda f: shutil.rmtree(f / "model"), {}, False),
    "an unknown family": (edit("config.json", model_type="strange"), {}, False),
    "a dtype that nobody can open": (edit("config.json", dtype="auto"), {}, False),
    "a config of another width": (edit("config.json", moe_intermediate_size=24), {}, False),
    "more experts than there are": (edit("config.json", num_experts_per_tok=9), {}, False),
    "no weights": (lambda f: (f / "model" / SINGLE).unlink(), {}, False),
    "truncated weights": (truncate, {}, False),
    "another index": (lambda f: (f / "model" / INDEX).write_text('{"weight_map": {"x": "x.safetensors"}}'), {}, False),
    "a missing tensor": (tensors(lambda t: t.pop("model.norm.weight")), {}, False),
    "a further tensor": (tensors(lambda t: t.update(x=torch.ones(1))), {}, False),
    "a transposed tensor": (
        tensors(lambda t: t.update({n: x.T.contiguous() for n, x in t.items() if n.endswith("3.up_proj.weight")})),
        {},
        False,
    ),
    "no reference": (lambda f: shutil.rmtree(f / "reference"), KL, False),
    "no tokenizer": (lambda f: [file.unlink() for file in (f / "model").glob("tokenizer*")], {}, False),
    "a broken tokenizer": (lambda f: (f / "model" / "tokenizer.json").write_text("{}"), {}, False),
    "a bad last line": (line('{"prompt": "12"}'), {}, False),
    "a long last prompt": (line('{"prompt": "123456789", "answer": "1"}'), {}, False),
    "a bad last held-out line": (line('{"prompt": ""}', "heldout.jsonl"), {"eval__every": 1}, False),
    "no chat template": (None, {"data__chat_template": True}, False),
    "no reward function": (None, {"reward__function": "inputs_under_test:wrong"}, False),
    "a reward without a keyword": (None, {"reward__function": "inputs_under_test:missing_keyword"}, False),
    "no environment": (None, {"environment__function": "inputs_under_test:nothing"}, False),
    "a broken environment": (None, {"environment__function": "inputs_under_test:make"}, False),
    "a turn that ends with several tokens": (
        None,
        {"environment__function": "tools", "environment__tools": ["calculator"], "environment__stop": ["123"]},
        False,
    ),
    "an advantage that is 0 in groups of one": (
        None,
        {"train__objective_overrides": {"advantage": "inputs_under_test:nothing_alone"}, "rollout__group_size": 1},
        False,
    ),
    "a number that another one contradicts": (None, {"megatron": {"num_moe_experts": 7}}, False),
    "a switch that needs another one": (
        None,
        {"megatron": {"moe_pad_expert_input_to_capacity": True}, "train__replay": "none"},
        False,
    ),
}


def asks_doctor(config: Config) -> list[str]:
    """What fails, tried in this process."""
    of_model, shape = inputs.read_model(config)
    failed = [check.name for check in [*of_model, *inputs.check_inputs(config, shape)] if check.status == "failed"]
    if shape is not None:
        check_fit(config, shape)
        for name, attempt in machine.attempts(config, failed):
            try:
                attempt()
            except Exception as error:  # of any kind, as in its own process
                failed.append(f"{name}: {error}")
    return failed


def asks_trainer(config: Config) -> None:
    """All that comes before the first step."""
    inputs.require_inputs(config)
    check_fit(config, read_shape(config.model.path))
    distributed.initialize(config)
    trainer_of(config)


@pytest.mark.parametrize("what", CASES)
def test_both_say_the_same(what: str, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil, keys, begins = CASES[what]
    for name in ("model", "reference", "task"):
        shutil.copytree(world.folder / name, tmp_path / name)
    (tmp_path / "inputs_under_test.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "inputs_under_test", raising=False)
    if spoil is not None:
        spoil(tmp_path)
    try:
        config = World(tmp_path).settings(run__dir=str(tmp_path / "run"), **keys)
    except MegarlError:  # for both of them
        assert not begins
        return
    found = asks_doctor(config)
    if begins:
        assert found == []
        asks_trainer(config)
        return
    assert found
    with pytest.raises(Exception) as refused:  # noqa: PT011 (what is raised is judged below)
        asks_trainer(config)
    assert isinstance(refused.value, MegarlError), refused.value


def test_held_out_prompts_that_are_trained_are_a_warning_of_both(
    world: World, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    task = world.folder / "task"
    trained, heldout = ((task / f"{name}.jsonl").read_text().splitlines() for name in ("train", "heldout"))
    prompts = {json.loads(line)["prompt"] for line in trained}
    fresh = [line for line in heldout if json.loads(line)["prompt"] not in prompts]
    assert fresh
    (tmp_path / "fresh.jsonl").write_text("\n".join(fresh))
    # The same question with another answer, and with other fields around it.
    known = json.dumps(json.loads(trained[0]) | {"answer": "77", "note": "another line"})
    (tmp_path / "mixed.jsonl").write_text("\n".join([*fresh, known]))
    sets = {"mixed": str(tmp_path / "mixed.jsonl"), "fresh": str(tmp_path / "fresh.jsonl")}
    same = {"data__heldout": str(task / "train.jsonl"), "eval__sets": sets}
    for keys, expected in ((same, 2), ({"data__heldout": sets["fresh"]}, 0)):
        config = world.settings(run__dir=str(tmp_path / f"run{expected}"), **keys)
        checks = machine.run_trial(config, set())[0]
        (told,) = [c.found for c in checks if c.name == "tokenizer, prompts, reward"] or [""]
        assert told.count("are in data.train too") == expected
        if not dist.is_initialized():
            distributed.initialize(config)
        trainer_of(config)
        printed = "".join(capfd.readouterr())
        assert printed.count("are in data.train too") == expected
        if expected:
            num = len(load_prompts(config.data, load_model_tokenizer(config.model)))
            for line in (f"data.heldout: {num} of {num} prompts", f"eval.sets.mixed: 1 of {len(fresh) + 1} prompts"):
                assert line in told
                assert f"warning: {line}" in printed
