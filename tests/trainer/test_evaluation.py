"""``megarl eval`` with real models: true pass rates, checkpoints in several layouts, mistakes."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from forks import Ended, Job, run_jobs
from safetensors.torch import load_file
from train_world import World
from transformers import AutoModelForCausalLM, AutoTokenizer

from megarl import cli
from megarl.core.sampling.pass_at_k import pass_at_k
from megarl.run.metrics_log import read_metrics

Megarl = Callable[..., int]


def figures(out: Path, name: str = "heldout") -> dict[str, Any]:
    return json.loads((out / "eval.json").read_text())["benchmarks"][name]["figures"]


def responses(out: Path, name: str = "heldout") -> list[dict[str, Any]]:
    text = (out / name / "responses.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.split("\n") if line]


def prompts_of(out: Path, name: str = "heldout") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / name / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def call(world: World, tmp_path: Path) -> Megarl:
    """``megarl eval`` with the world's configuration."""
    path = tmp_path / "run.toml"
    path.write_text(tomli_w.dumps(world.table() | {"run": {"steps": 1, "dir": str(tmp_path / "run"), "seed": 3}}))

    def run(*words: str | Path) -> int:
        from megarl.megatron import distributed

        distributed.shutdown()
        return cli.main(["eval", str(path), *map(str, words)])

    return run


def true_pass_rates(world: World) -> np.ndarray:
    """How likely the model itself thinks a first token 0 to 4 after each held-out prompt, [P]."""
    model = AutoModelForCausalLM.from_pretrained(world.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(world.model)
    lines = (world.folder / "task" / "heldout.jsonl").read_text().splitlines()
    low = tokenizer.convert_tokens_to_ids(list("01234"))
    rates = []
    for prompt in (json.loads(text)["prompt"] for text in lines):
        with torch.no_grad():
            logits = model(torch.tensor([tokenizer(prompt)["input_ids"]])).logits[0, -1]
        rates.append(float(logits.double().softmax(-1)[low].sum()))
    return np.array(rates)


def test_figures_are_those_of_the_model(world: World, call: Megarl, tmp_path: Path) -> None:
    """Against probabilities that transformers computes, within 4 standard errors; and recounted from the responses."""
    words = ["--rollout.max_response_tokens", "1", "--reward.function", "train_rewards:starts_low"]
    words += ["--rollout.fp8_rounding", "false", "--samples", "128", "--k", "1", "4", "16"]
    assert call("--out", tmp_path / "out", *words) == 0
    p, found, drawn = true_pass_rates(world), figures(tmp_path / "out"), responses(tmp_path / "out")
    spread = np.sqrt((p * (1 - p)).mean() / 128 / len(p))
    assert 0.05 < p.mean() < 0.95
    assert abs(found["avg"]["value"] - p.mean()) < 4 * spread
    for k in (1, 4, 16):
        # A prompt's estimate moves by at most k times as much as its pass rate, (1 - (1 - p)^k)' <= k.
        assert abs(found["pass"][str(k)]["value"] - (1 - (1 - p) ** k).mean()) < 4 * k * spread
    right = np.array([line["response"][:1] in list("01234") for line in drawn]).reshape(len(p), 128)
    assert found["avg"]["value"] == pytest.approx(right.mean())
    counts = np.full(len(p), 128), right.sum(axis=1)
    assert [found["pass"][k]["value"] for k in ("1", "4", "16")] == [
        pytest.approx(pass_at_k(*counts, int(k)).mean()) for k in ("1", "4", "16")
    ]
    assert [(line["prompt"], line["sample"]) for line in drawn] == [(i, j) for i in range(len(p)) for j in range(128)]
    assert {line["length"] for line in drawn} == {1}
    stops = sum(line["finish_reason"] == "stop" for line in drawn)
    assert found["truncated"] == pytest.approx(1 - stops / len(drawn))
    assert stops  # the end token is among the first ones
    rows = [json.loads(line) for line in (tmp_path / "out" / "heldout" / "prompts.jsonl").read_text().splitlines()]
    assert [row["correct"] for row in rows] == right.sum(axis=1).tolist()


def test_failed_rewards_are_counted_and_said(call: Megarl, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--out", tmp_path, "--samples", "4", "--reward.function", "train_rewards:sometimes_raises") == 0
    found, drawn = figures(tmp_path), responses(tmp_path)
    failed = [line["response"][:1].isdigit() for line in drawn]
    assert [line["reward"] is None for line in drawn] == failed
    assert 0 < found["judged"] == 64 - sum(failed) < found["responses"] == 64
    assert found["avg"]["value"] == np.mean([(line["reward"] or 0.0) > 0.7 for line in drawn])
    assert found["pass"]["4"]["prompts"] == 16
    shown = capsys.readouterr().out
    assert f"heldout: {64 - sum(failed)} of 64 responses judged" in shown
    assert next(line["error"] for line in drawn if line["error"]) in shown
    assert {line["error"] is None for line in drawn if line["reward"] is not None} == {True}
    first = next(line for line in drawn if line["error"])
    assert f"prompt {prompts_of(tmp_path)[first['prompt']]['text']!r}, response {first['response']!r}, answer" in shown


def test_benchmarks_do_not_change_each_other(
    world: World, call: Megarl, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    task, out = world.folder / "task", tmp_path / "out"
    shutil.copy(task / "heldout.jsonl", tmp_path / "copy.jsonl")
    words = ["--samples", "2", "--eval.max_prompts", "5", "--reward.function", "train_rewards:raises_on_demand"]
    # Results of the first stay when the second ends the call; responses of the second are kept, but do not count.
    train, copy = f"train={task / 'train.jsonl'}", tmp_path / "copy.jsonl"
    asked = [json.loads(line)["prompt"] for line in copy.read_text().splitlines()]
    monkeypatch.setenv("NO_VERDICT_ON", ",".join(asked))
    assert call("--out", out, "--data", train, copy, *words) == 2
    told = capsys.readouterr().err
    assert "copy: no response has a reward, train_rewards:raises_on_demand or the environment failed" in told
    assert "first: ValueError: no verdict" in told
    assert sorted(path.name for path in (out / "copy").glob("[!.]*")) == ["prompts.jsonl", "responses.jsonl"]
    assert [*json.loads((out / "eval.json").read_text())["benchmarks"]] == ["train"]
    monkeypatch.delenv("NO_VERDICT_ON")
    assert call("--out", out, "--data", train, copy, *words) == 0
    # Alone, in another folder: the same responses, for seeds do not depend on the company.
    assert call("--out", tmp_path / "alone", "--data", copy, *words, "--k", "2") == 0
    name = Path("copy") / "responses.jsonl"
    assert (tmp_path / "alone" / name).read_bytes() == (out / name).read_bytes()
    assert responses(out, "copy") != responses(out, "train")
    assert list(figures(tmp_path / "alone", "copy")["pass"]) == ["2"]
    assert list(figures(out, "copy")["pass"]) == ["1", "2"]


def test_greedy_takes_the_most_likely_token(world: World, call: Megarl, tmp_path: Path) -> None:
    words = ["--eval.temperature", "0", "--rollout.max_response_tokens", "1", "--rollout.fp8_rounding", "false"]
    assert call("--out", tmp_path, *words, "--eval.max_prompts", "4") == 0
    model = AutoModelForCausalLM.from_pretrained(world.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(world.model)
    lines = (world.folder / "task" / "heldout.jsonl").read_text().splitlines()[:4]
    for line, drawn in zip(lines, responses(tmp_path), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([tokenizer(json.loads(line)["prompt"])["input_ids"]])).logits[0, -1]
        assert drawn["response"] == tokenizer.decode(int(logits.argmax()), skip_special_tokens=True)
    # A nucleus of one token leaves no other either.
    words[1:2] = ["1", "--rollout.top_p", "1e-6"]
    assert call("--out", tmp_path / "nucleus", *words, "--eval.max_prompts", "4") == 0
    assert responses(tmp_path / "nucleus") == responses(tmp_path)


def test_episodes_are_evaluated_as_they_train(
    world: World, call: Megarl, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two turns of at most 2 tokens around an observation; the environment fails on prompts that begin with 0 to 4."""
    words = ["--environment.function", "own_parts:make", "--environment.max_turn_tokens", "2"]
    assert call("--out", tmp_path, *words, "--samples", "2") == 0
    texts = (world.folder / "task" / "heldout.jsonl").read_text().splitlines()
    fails = [json.loads(text)["prompt"][0] in "01234" for text in texts]
    drawn = responses(tmp_path)
    for line in drawn:
        if fails[line["prompt"]]:
            assert (line["reward"], line["finish_reason"], line["turns"]) == (None, "abort", 1)
            assert line["error"].startswith("turn 0: the environment failed: OSError: the disk is gone (")
        else:
            assert line["turns"] == 2
            assert "=7" in line["response"]
            assert line["reward"] == sum(map(str.isdigit, line["response"])) / len(line["response"])
        assert 1 <= line["length"] <= 4  # the model's own tokens
    found = figures(tmp_path)
    assert 0 < sum(fails) < 16
    assert found["responses"] - found["judged"] == 2 * sum(fails)
    assert "first failure: turn 0: the environment failed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--checkpoint", "{model}"], "; a Hugging Face folder goes to --model.path"),
        (["--checkpoint", "{tmp}"], "holds no complete checkpoint"),
        (["--checkpoint", "{tmp}/step_0000007"], "has no manifest.json"),
        (["--model.path", "{tmp}/bare"], "weights: {tmp}/bare has no *.safetensors"),
        (["--samples", "4", "--k", "8"], "--k: found 8, expected 1 to --samples = 4"),
        (["--samples", "2", "--eval.temperature", "0"], "--samples: found 2 with eval.temperature = 0"),
        (["--data", "aime23"], "--data: found 'aime23', expected aime24, aime25, hmmt25"),
        (["--data", "hmmt25"], "MathArena/hmmt_feb_2025: neither a file here nor"),
        (["--data.max_prompt_tokens", "3"], "more than data.max_prompt_tokens = 3"),
        (["--out", "{tmp}/file"], "--out: {tmp}/file cannot be made"),
    ],
)
def test_mistakes_cost_one_line_and_exit_code_2(
    words: list[str], expected: str, world: World, call: Megarl, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "step_0000007").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "bare").mkdir()
    shutil.copy(world.model / "config.json", tmp_path / "bare")
    places = {"{tmp}": str(tmp_path), "{model}": str(world.model)}
    for place, value in places.items():
        words, expected = [word.replace(place, value) for word in words], expected.replace(place, value)
    if words == ["--checkpoint", str(tmp_path)]:
        (tmp_path / "step_0000007").rename(tmp_path / "step_0000007.partial")
    assert call(*words) == (1 if "manifest" in expected else 2)  # damage is no mistake
    seen = capsys.readouterr().err.splitlines()
    assert len(seen) == 1
    assert expected in seen[0]


@pytest.fixture(scope="module")
def layouts(world: World, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Ended]]:
    """A run of two steps on EP2, and evaluations of its last checkpoint."""
    folder = tmp_path_factory.mktemp("layouts")
    run = folder / "run"
    trained = {"run__dir": str(run), "parallel__ep": 2, "checkpoint__every": 1, "eval__every": 2}
    step = run / "checkpoints" / "step_0000002"
    task = world.folder / "task"
    data = (str(task / "heldout.jsonl"), f"train={task / 'train.jsonl'}")

    def job(name: str, ranks: int, checkpoint: Path | None, more: dict[str, Any]) -> Job:
        asked = {"data": data, "samples": 2, "checkpoint": checkpoint, "out": folder / name}
        return Job(name, ranks, "train_jobs:evaluated", {"world": world, "overrides": {**trained, **more}, **asked})

    hf = {"model__path": str(folder / "hf")}
    export = {"world": world, "overrides": {}, "checkpoint_path": step, "out": folder / "hf"}
    last = {"world": world, "overrides": {**trained, "parallel__ep": 1}, "checkpoint": run}
    wrong = {"reward__function": "train_rewards:raises_on_rank_1", "parallel__ep": 1, "parallel__tp": 2}
    jobs = [
        Job("run", 2, "train_jobs:run", {"world": world, "overrides": trained}),
        Job("export", 1, "train_jobs:exported", export),
        job("tp1", 1, step, {"parallel__ep": 1}),
        job("ep2", 2, step, {}),
        job("tp2", 2, step, {"parallel__ep": 1, "parallel__tp": 2}),
        job("hf1", 1, None, hf),
        job("hf2", 2, None, hf),
        job("earlier", 1, step.with_name("step_0000001"), {"parallel__ep": 1}),
        Job("newest", 1, "train_jobs:evaluated", last),
        job("wrong", 2, step, wrong),
        job("one process", 1, step, {}),
    ]
    return folder, run_jobs(jobs, folder / "jobs")


@pytest.mark.slow
@pytest.mark.multirank
def test_acceptance_checkpoint_and_exported_folder_give_the_same_responses_in_every_layout(
    layouts: tuple[Path, dict[str, Ended]],
) -> None:
    folder, ended = layouts
    for name in ("run", "export", "tp1", "ep2", "tp2", "hf1", "hf2", "earlier", "one process"):
        ended[name].checked()
    left_out = 'one process loads the whole checkpoint, and leaves out parallel = {"ep" = 2}'
    assert [name for name in ended if left_out in ended[name].output] == ["one process"]
    assert ended["export"].value == 2
    for benchmark in ("heldout", "train"):
        wanted = (folder / "tp1" / benchmark / "responses.jsonl").read_bytes()
        for name in ("ep2", "tp2", "hf1", "hf2", "one process"):
            assert (folder / name / benchmark / "responses.jsonl").read_bytes() == wanted, (name, benchmark)
            assert figures(folder / name, benchmark) == figures(folder / "tp1", benchmark)
        assert (folder / "earlier" / benchmark / "responses.jsonl").read_bytes() != wanted
    versions = [
        json.loads((folder / name / "eval.json").read_text())["benchmarks"]["heldout"]["weights_version"]
        for name in ("ep2", "earlier", "hf1")
    ]
    assert versions == [2, 1, 0]


@pytest.mark.slow
@pytest.mark.multirank
def test_the_newest_checkpoint_of_a_run_gives_the_figures_that_training_logged(
    layouts: tuple[Path, dict[str, Ended]],
) -> None:
    folder, ended = layouts
    ended["newest"].checked()
    out = folder / "run" / "eval" / "step_0000002"
    found = figures(out)
    logged = [record for record in read_metrics(folder / "run" / "metrics.jsonl") if record["kind"] == "eval"][-1]
    assert logged["step"] == 2
    assert found["avg"]["value"] == logged["eval/pass_rate"]
    assert found["reward_mean"] == pytest.approx(logged["eval/reward"])
    assert found["length_mean"] == logged["eval/length_mean"]
    saved = json.loads((out / "eval.json").read_text())
    assert saved["config"]["rollout"]["group_size"] == 4  # as written, not as the ranks were laid out
    assert saved["checkpoint"].endswith("step_0000002")


@pytest.mark.slow
@pytest.mark.multirank
def test_an_error_on_one_rank_ends_all(layouts: tuple[Path, dict[str, Ended]]) -> None:
    _, ended = layouts
    assert all(ended["wrong"].exit_codes)
    assert "this reward cannot work on rank 1" in ended["wrong"].output
    assert "the evaluation on heldout failed on 1 other ranks" in ended["wrong"].output


@pytest.mark.slow
@pytest.mark.multirank
def test_a_run_is_converted_and_evaluated_by_its_own_configuration_from_anywhere(
    layouts: tuple[Path, dict[str, Ended]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, ended = layouts
    for name in ("run", "export", "tp1"):
        ended[name].checked()
    run = Path(shutil.copytree(folder / "run", tmp_path / "elsewhere" / "moved"))
    monkeypatch.chdir(tmp_path)
    for source, out in ((run, "a"), (run / "checkpoints", "b"), (run / "checkpoints" / "step_0000002", "c")):
        assert cli.main(["convert", str(source), out]) == 0
        exported, found = (load_file(next(each.glob("*.safetensors"))) for each in (folder / "hf", Path(out)))
        assert exported.keys() == found.keys()
        assert all(torch.equal(exported[name], found[name]) for name in exported)
    assert cli.main(["eval", "--checkpoint", "elsewhere/moved", "--samples", "2", "--out", "again"]) == 0
    assert responses(tmp_path / "again") == responses(folder / "tp1")
    capsys.readouterr()
    # The model has gone, and the run has no checkpoint.
    saved = run / "config.toml"
    saved.write_text(re.sub("(?m)^path = .*$", 'path = "/gone/model"', saved.read_text()))
    shutil.copytree(run / "checkpoints" / "step_0000002", tmp_path / "alone" / "step_0000002")
    for words, told in (
        (["convert", str(run), "d"], "found no config.json in the folder of its model, /gone/model; give --model"),
        (["convert", "alone/step_0000002", "d"], "has no config.toml of a run in it or above it: give --model"),
        (["eval", "--checkpoint", str(run)], "model.path: there is no folder /gone/model"),
        (["eval", "--checkpoint", "alone/step_0000002"], "has no config.toml of a run in it or above it: give CONFIG"),
        (
            ["quantize", str(run), "d"],
            f"a Megatron checkpoint, expected a Hugging Face folder; `megarl convert {run} OUT`",
        ),
    ):
        assert cli.main(words) == 2
        assert told in capsys.readouterr().err, words
    shutil.rmtree(run / "checkpoints")
    assert cli.main(["convert", str(run), "d"]) == 2
    assert "is of a run without a complete checkpoint" in capsys.readouterr().err
