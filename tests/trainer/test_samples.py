"""What the model wrote: the file, what a trainer puts there, ``megarl samples``, and the report."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forks import Job, run_jobs
from train_world import World
from transformers import AutoTokenizer

from megarl import __version__, cli
from megarl.config.file import RUN_ID
from megarl.core.types import Rollout
from megarl.data.prompts import Prompt
from megarl.engines.player import Failure, Sample
from megarl.errors import DataError
from megarl.ops.report.report import write_report
from megarl.run.metrics_log import MetricsLog
from megarl.run.samples import NAME, append, pack, read_samples, truncate_after
from megarl.run.starts import read_starts
from megarl.trainer.loop import train
from megarl.trainer.sampling.excerpts import choose, complete, describe


def response(step: int, **values: Any) -> dict[str, Any]:
    plain = {"group": step, "sample": 0, "rank": 0, "prompt": f"p{step}", "expected": f"a{step}"}
    plain |= {"response": f"r{step}", "parts": []}
    plain |= {"reward": 1.0, "rewards": {}, "error": None, "length": 5, "tool_calls": 0}
    plain |= {"gap": 0.1, "finish": "stop", "trained": True, "dropped": None}
    return {"step": step, **plain, **values}


def write(folder: Path, *steps: int) -> list[int]:
    """Append steps with two responses each; return the size of the file after each."""
    sizes = []
    for step in steps:
        append(folder, pack([response(step), response(step, sample=1)]))
        sizes.append((folder / NAME).stat().st_size)
    return sizes


def steps_of(folder: Path) -> list[int]:
    return [one["step"] for one in read_samples(folder)]


def test_what_was_written_is_read(tmp_path: Path) -> None:
    assert list(read_samples(tmp_path)) == []
    write(tmp_path, 1, 2)
    assert steps_of(tmp_path) == [1, 1, 2, 2]
    assert len(gzip.decompress((tmp_path / NAME).read_bytes()).splitlines()) == 4  # zcat reads it too
    assert pack([]) == b""
    append(tmp_path, pack([response(3, reward=float("nan"), gap=float("inf"), response="\ud800</x>")]))
    *_, last = read_samples(tmp_path)
    assert (last["reward"], last["gap"], last["response"]) == (None, None, "\ud800</x>")


def test_a_half_written_end_is_passed_over_and_cut_off(tmp_path: Path) -> None:
    *_, before, whole = write(tmp_path, 1, 2, 3)
    data = (tmp_path / NAME).read_bytes()
    for size in range(before, whole):
        (tmp_path / NAME).write_bytes(data[:size])
        assert steps_of(tmp_path) == [1, 1, 2, 2]
    truncate_after(tmp_path, 2)
    assert (tmp_path / NAME).stat().st_size == before
    write(tmp_path, 3)
    assert (tmp_path / NAME).read_bytes() == data


def test_damage_is_told_and_a_resumption_cuts_it_off(tmp_path: Path) -> None:
    first, *_ = write(tmp_path, 1, 2, 3)
    data = bytearray((tmp_path / NAME).read_bytes())
    data[first + 14 : first + 20] = b"\xff" * 6
    (tmp_path / NAME).write_bytes(data)
    with pytest.raises(DataError, match=f"byte {first}: damaged"):
        steps_of(tmp_path)
    truncate_after(tmp_path, 9)
    assert steps_of(tmp_path) == [1, 1]


WRONG = [{"parts": [1]}, {"parts": [["model"]]}, {"rewards": {"a": None}}, {"rewards": {"a": "x"}}]


@pytest.mark.parametrize(
    "line",
    [b"[1]", b"{}", b"nonsense", b"[" * 100_000, json.dumps(response(True)).encode()]
    + [json.dumps(response(1, **wrong)).encode() for wrong in WRONG],
)
def test_what_is_no_response_is_told(tmp_path: Path, line: bytes) -> None:
    (tmp_path / NAME).write_bytes(gzip.compress(line))
    with pytest.raises(DataError, match=NAME):
        steps_of(tmp_path)


def test_choose_takes_others_in_each_step() -> None:
    keys = [(prompt, sample) for prompt in range(4) for sample in range(2)]
    assert choose(keys[::-1], "all", 3) == keys
    assert choose(keys, 9, 3) == keys
    assert choose(keys, 4, 0) == [(0, 0), (1, 0), (2, 0), (3, 0)]
    assert choose(keys, 4, 1) == [(0, 1), (1, 1), (2, 1), (3, 1)]
    assert len(set(choose(keys, 3, 7))) == 3
    assert choose([], 4, 1) == []


def test_a_sample_is_described_with_its_tools_and_errors(world: World) -> None:
    tokenizer = AutoTokenizer.from_pretrained(world.model)
    tokens = np.array(tokenizer("12=34=5", add_special_tokens=False)["input_ids"], np.int32)
    mask = np.array([0, 0, 0, 1, 1, 0, 1], bool)
    nothing = np.zeros(7, np.float32)
    rollout = Rollout(0, 1, tokens, mask, nothing, None, None, nothing.astype(np.int32), "length")
    sample = Sample(rollout, 0.5, turns=2, components=(1.0, 0.0))
    failed = Sample(None, None, failure=Failure("ValueError: no", "", of_episode=True))
    key, other = (0, 1), (1, 0)
    names = "right", "short"
    prompt = Prompt(0, tokens[:3], "12=", "345", "train.jsonl:1")
    found = {key: describe(sample, prompt, tokenizer, names), other: describe(failed, prompt, tokenizer, names)}
    assert [one["prompt"] for one in found.values()] == ["12=", "12="]
    assert [one["expected"] for one in found.values()] == ["345", "345"]
    assert found[key]["response"] == "34=5"
    assert found[key]["parts"] == [["model", "34"], ["environment", "="], ["model", "5"]]
    assert (found[key]["length"], found[key]["tool_calls"]) == (3, 1)
    assert (found[key]["reward"], found[key]["rewards"]) == (0.5, {"right": 1.0, "short": 0.0})
    assert found[key]["finish"] == "length"
    assert (found[other]["response"], found[other]["reward"], found[other]["error"]) == ("", None, "ValueError: no")
    gaps = np.array([[0, 1, 0.3, 0.6, 3, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0, 0, 0]])
    told, bare = complete(found, 7, 2, np.array([10, 11]), np.array([[10, 1]]), [gaps], {})
    assert (told["step"], told["rank"], told["group"], told["sample"]) == (7, 2, 10, 1)
    assert (told["gap"], told["trained"], told["dropped"]) == (pytest.approx(0.2), True, None)
    assert (bare["group"], bare["gap"], bare["trained"]) == (11, None, False)
    dropped, _ = complete(found, 7, 2, np.array([10, 11]), np.array([[10, 1]]), [], {key: "k3 2"})
    assert (dropped["gap"], dropped["trained"], dropped["dropped"]) == (None, False, "k3 2")


def test_a_run_stores_responses_and_a_second_start_no_step_twice(world: World, tmp_path: Path) -> None:
    settings = world.settings(run__dir=str(tmp_path), run__steps=2, log__samples_per_step="all")
    (tmp_path / RUN_ID).write_text("0123456789abcdef")
    (tmp_path / NAME).write_bytes(pack([response(1)]) + pack([response(5)])[:-3])  # what a killed start has left
    train(settings)
    assert [(start["version"], start["new"]) for start in read_starts(tmp_path)] == [(__version__, True)]
    found = list(read_samples(tmp_path))
    assert [one["step"] for one in found] == [1] * 32 + [2] * 32
    assert len({(one["group"], one["sample"]) for one in found}) == 64
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    (first,) = [record for record in records if record["kind"] == "step" and record["step"] == 1]
    mine = [one for one in found if one["step"] == 1]
    assert np.mean([one["reward"] for one in mine]) == pytest.approx(first["reward/mean"])
    assert np.mean([one["length"] for one in mine]) == pytest.approx(first["response/length_mean"])
    weights = [one["length"] for one in mine]
    assert np.average([one["gap"] for one in mine], weights=weights) == pytest.approx(first["rollout/k3"], rel=1e-3)
    lines = (world.folder / "task" / "train.jsonl").read_text().splitlines()
    answers = {row["prompt"]: row["answer"] for row in map(json.loads, lines)}
    assert [one["expected"] for one in found] == [answers[one["prompt"]] for one in found]
    assert all(one["trained"] for one in found)


@pytest.mark.parametrize("count", [0, 1])
def test_the_failure_that_is_told_is_stored_whatever_rank_has_it(world: World, tmp_path: Path, count: int) -> None:
    settings = {"run__dir": str(tmp_path / "run"), "run__steps": 1, "log__samples_per_step": count}
    overrides = {**settings, "reward__function": "train_rewards:fails_on_rank_1"}
    (ended,) = run_jobs([Job("run", 2, "train_jobs:run", {"world": world, "overrides": overrides})], tmp_path).values()
    assert ended.exit_codes == (0, 0), ended.output
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    (told,) = [record["unjudged"] for record in map(json.loads, lines) if record["kind"] == "step"]
    assert told in ended.output
    if not count:
        assert not (tmp_path / "run" / NAME).exists()
        return
    fine, failed = sorted(read_samples(tmp_path / "run"), key=lambda one: one["rank"])
    assert (fine["rank"], fine["error"], failed["rank"], failed["reward"]) == (0, None, 1, None)
    assert failed["error"] in told


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """Rewards 0 to 4 in steps 1 to 5, with lengths that fall and gaps of their own; texts that must be escaped."""
    texts = ["</script><script>alert(1)</script>", "\x1b[31mred\x1b[0m", "a\u202eb", "<!--", "The END"]
    gaps = [0.3, None, 0.1, 0.5, 0.2]
    rows = [
        response(i + 1, response=text, reward=float(i), length=9 - i, gap=gap)
        for i, (text, gap) in enumerate(zip(texts, gaps, strict=True))
    ]
    append(tmp_path, b"".join(pack([row]) for row in rows))
    with MetricsLog(tmp_path) as log:
        log.write("step", 1, {"reward/mean": 0.5})
    return tmp_path


def test_samples_are_chosen_by_step(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, step in (([], 5), (["--step", "2"], 2)):
        assert cli.main(["samples", str(stored), *words]) == 0
        shown = capsys.readouterr().out
        assert re.findall(r"^--- step (\d+)", shown, re.MULTILINE) == [str(step)]
        assert "shown: 1 of 5 responses of steps 1 to 5; --step N shows another step" in shown
    assert cli.main(["samples", str(stored), "--step", "6"]) == 2
    assert "no response matches, of 5 responses of steps 1 to 5" in capsys.readouterr().err


def test_the_expected_answer_is_shown_beside_the_response_unless_an_older_run_has_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [response(1, expected="<b>\x1b[31m42</script>"), response(1, sample=1), response(1, sample=2, expected=None)]
    del rows[1]["expected"]
    append(tmp_path, pack(rows))
    with MetricsLog(tmp_path) as log:
        log.write("step", 1, {"reward/mean": 0.5})
    assert cli.main(["samples", str(tmp_path)]) == 0
    with_answer, *without, _ = capsys.readouterr().out.split("\n\n")
    assert "  response:\n    r1\n  expected:\n    <b>\\x1b[31m42</script>" in with_answer
    assert not any("expected" in text for text in without)
    assert cli.main(["samples", str(tmp_path), "--json"]) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [
        rows[0], rows[1] | {"expected": None}, rows[2],
    ]  # fmt: skip
    page = write_report(tmp_path).read_text()
    (text,) = re.findall(r'id="data-samples">(.*?)</script>', page)
    assert [one["expected"] for one in json.loads(text)] == [r"<b>\x1b[31m42</script>", "", ""]
    assert "<b>\\x1b" not in page
    append(tmp_path, pack([response(2, expected=5)]))
    with pytest.raises(DataError, match="expected is 5, expected str or null"):
        steps_of(tmp_path)


def test_a_terminal_gets_no_control_characters(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = [["model", "a"], ["environment\x1b", "\x07"], ["model", "\x1b[31mred\x1b[0m a\u202eb"]]
    append(stored, pack([response(6, parts=parts, error="\x9b")]))
    assert cli.main(["samples", str(stored)]) == 0
    shown = capsys.readouterr().out
    assert all(letter.isprintable() or letter == "\n" for letter in shown)
    assert r"\x1b[31mred" in shown
    assert r"a\u202eb" in shown


def test_no_text_of_a_model_becomes_part_of_the_page(stored: Path) -> None:
    page = write_report(stored).read_text()
    (text,) = re.findall(r'id="data-samples">(.*?)</script>', page)
    texts = [one["response"] for one in json.loads(text)]
    assert texts == ["</script><script>alert(1)</script>", r"\x1b[31mred\x1b[0m", r"a\u202eb", "<!--", "The END"]
    assert "alert(1)" in page
    assert "<script>alert" not in page
    assert "<!--" not in text
    assert page.count("<script") == 4
    assert "The run: 5 stored responses of steps 1 to 5." in page
