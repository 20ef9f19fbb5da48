"""Benchmarks: short names, files under names of their own, columns as on the hub, templates, mistakes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from megarl.config import Config
from megarl.config.file import parse
from megarl.data import benchmarks
from megarl.data.benchmarks import BENCHMARKS, BOXED, choose
from megarl.data.judge import load_reward
from megarl.errors import ConfigError, DataError

# The columns that the data sets have on the hub.
ROWS: dict[str, list[dict[str, Any]]] = {
    "aime24": [
        {"id": 60, "problem": "what is 20+5?", "solution": "25", "answer": "025", "url": "u", "year": "2024"},
        {"id": 61, "problem": "what is 200+4?", "solution": "204", "answer": "204", "url": "u", "year": "2024"},
    ],
    "aime25": [
        {"problem_idx": 1, "problem": "what is 60+10?", "answer": 70, "problem_type": ["Algebra"]},
        {"problem_idx": 2, "problem": "what is 500+88?", "answer": 588, "problem_type": ["Algebra", "Geometry"]},
    ],
    "hmmt25": [
        {"problem_idx": 1, "answer": "103", "problem_type": ["Algebra"], "problem": "what is 100+3?"},
        {"problem_idx": 2, "answer": "\\frac{1}{576}", "problem_type": ["Algebra"], "problem": "what is 1:576?"},
    ],
}
PLAIN = "{prompt} {x}="


def config(**data: Any) -> Config:
    return parse(
        {
            "run": {"steps": 1},
            "model": {"path": "model"},
            "data": {"train": "train.jsonl", **data},
            "rollout": {"prompts_per_step": 1, "group_size": 2, "max_response_tokens": 8},
            "optim": {"lr": 1e-3},
        }
    )


def load(benchmark: benchmarks.Benchmark, tokenizer: Any, **options: Any) -> list[Any]:
    return benchmarks.load(benchmark, tokenizer, config(max_prompt_tokens=64, **options))


@pytest.mark.parametrize(("name", "kind"), [("aime24", "jsonl"), ("aime25", "folder"), ("hmmt25", "parquet")])
def test_a_short_name_reads_its_columns_from_wherever_the_data_lies(
    name: str, kind: str, tokenizer: Any, write_jsonl: Callable[..., Path], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    source = tmp_path / f"data.{kind}" if kind != "folder" else tmp_path / "folder"
    if kind == "jsonl":
        write_jsonl(*ROWS[name], name=source.name)
    else:
        file = source if kind == "parquet" else source / "data" / "train-00000-of-00001.parquet"
        file.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(pa.Table.from_pylist(ROWS[name]), file)
    (chosen,) = choose([f"{name}={source}"], config(), PLAIN)
    assert (chosen.name, chosen.reward) == (name, "math_strict")
    prompts = load(chosen, tokenizer)
    assert [prompt.text for prompt in prompts] == [f"{row['problem']} {{x}}=" for row in ROWS[name]]
    assert [prompt.answer for prompt in prompts] == [str(row["answer"]) for row in ROWS[name]]
    reward = load_reward(chosen.reward)
    for prompt, right in zip(prompts, ROWS[name], strict=True):
        answer = right.get("solution", right["answer"])
        assert reward(prompt=prompt.text, response=f"so \\boxed{{{answer}}}", answer=prompt.answer) == 1.0
        assert reward(prompt=prompt.text, response="so \\boxed{3}", answer=prompt.answer) == 0.0


def test_short_names_stand_for_hub_data_sets() -> None:
    found = choose(["aime24", "hmmt25", "aime25"], config())
    assert [(b.name, b.source, b.split) for b in found] == [
        ("aime24", "HuggingFaceH4/aime_2024", "train"),
        ("hmmt25", "MathArena/hmmt_feb_2025", "train"),
        ("aime25", "MathArena/aime_2025", "train"),
    ]
    assert all(b.template == BOXED and "\\boxed" in BOXED for b in found)
    settings = config()
    of = settings.model_copy(update={"reward": settings.reward.model_copy(update={"threshold": 5.0})})
    assert [b.threshold for b in choose(["aime24", "aime25=a.jsonl", "own=b.jsonl"], of)] == [0.7, 0.7, 5.0]


def test_everything_else_is_read_and_judged_as_the_configuration_says(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    data = {"prompt_field": "question", "answer_field": "gold", "split": "test", "heldout": "held/out.jsonl"}
    words = ["a/b.parquet", "owner/name:part", f"{tmp_path}/own", "mine=owner/name", "plain=c.jsonl"]
    found = choose(words, config(**data))
    assert [(b.name, b.source, b.split) for b in found] == [
        ("b", "a/b.parquet", None),
        ("owner--name--part", "owner/name:part", "test"),
        ("own", f"{tmp_path}/own", "test"),
        ("mine", "owner/name", "test"),
        ("plain", "c.jsonl", None),
    ]
    (heldout,) = choose([], config(**data))
    assert (heldout.name, heldout.source, heldout.split) == ("heldout", "held/out.jsonl", None)
    for benchmark in (*found, heldout):
        assert (benchmark.prompt_field, benchmark.answer_field) == ("question", "gold")
        assert (benchmark.template, benchmark.reward) == (None, "exact_match")
    assert [b.template for b in choose([*words, "aime24"], config(), "q: {prompt}")] == ["q: {prompt}"] * 6


def test_mistakes_are_named() -> None:
    for words, template, expected in (
        (["aime26"], None, r"found 'aime26', expected aime24, aime25, hmmt25, .*"),
        (["x="], None, "expected NAME=SOURCE"),
        (["aime24=gsm8k"], None, "found 'gsm8k'"),
        (["a/x.jsonl", "b/x.parquet"], None, "two benchmarks named x; give one as NAME=b/x.parquet"),
        ([], None, "nothing to evaluate on: pass --data with files, hub names or aime24, aime25, hmmt25"),
        (["aime24"], "no place", r"--template: found 'no place', expected a text with \{prompt\}"),
    ):
        with pytest.raises(ConfigError, match=expected):
            choose(words, config(), template)


def test_without_network_the_error_says_which_data_set_and_what_to_do(tokenizer: Any) -> None:
    with pytest.raises(DataError) as caught:
        load(BENCHMARKS["aime25"], tokenizer)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("MathArena/aime_2025: ")
    assert "without network, write it to a JSONL file" in message
