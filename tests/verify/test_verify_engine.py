"""The contract for engines: a real SGLang server keeps it, and each damage of its answers is named."""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from biased_models import write_biased
from engine_proxy import Recorded, as_vllm, put_rows, rows_of, serving
from safetensors.torch import load_file, save_file
from sglang_fixtures import START_DEADLINE_S

from megarl.engines.sglang.server import Server
from megarl.engines.sglang.spec import ServerSpec
from megarl.errors import ConfigError, RolloutError, TraceError
from megarl.files.hf_config import MoeShape
from megarl.verify import engine
from megarl.verify.engine import check_engine, show_engine
from megarl.verify.engine_client import _read_vllm

EVERYTHING: dict[str, Any] = {"top_p": 0.9, "pressure": True, "update": True}
CHUNK = 32


@pytest.fixture(scope="module")
def model(sglang_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense layer, three of 160 experts with biases in float32, and no end token that greedy decoding would take."""
    folder = write_biased(tmp_path_factory.mktemp("verify") / "model", "glm4_moe")
    for file in sglang_model.glob("*token*"):
        shutil.copy(file, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 512}))
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"][config["eos_token_id"]] = 0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def real(model: Path, sglang_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    """A server with little memory and small chunks."""
    log = tmp_path_factory.mktemp("verify") / "log"
    limits = ("--chunked-prefill-size", str(CHUNK), "--max-running-requests", "12")
    with Server(ServerSpec(model, sglang_python, "float32", log, max_total_tokens=512, extra_args=limits)) as server:
        server.wait_ready(START_DEADLINE_S)
        yield Recorded(server.url)


@pytest.mark.sglang
@pytest.mark.gate
def test_a_real_server_keeps_the_contract(real: Recorded, model: Path) -> None:
    lines: list[str] = []
    assert show_engine(real.url, lines.append, **EVERYTHING) == 0
    text = "\n".join(lines)
    assert [line for line in lines if not line.startswith("ok ")] == [], text
    assert len(lines) == len(engine.CONTRACT["points"]) == 14
    for part in (
        "48 of 48 rows were cached",
        f"72 tokens in chunks of {CHUNK}",
        "requests were retracted",
        "3 tensors",
    ):
        assert part in text
    assert httpx.get(f"{real.url}/model_info").json()["weight_version"] == "default"
    few = check_engine(real.url, model_path=model)
    assert {check.name for check in few if check.verdict == "not asked"} == {"retraction", "kept sets"}
    assert "an update needs update" in next(check.found for check in few if check.name == "weight version")


Damage = Callable[[str, Any, Any], Any]
Where = Callable[[np.ndarray, dict[str, Any], list[int]], bool]
"""Of a sequence: its rows, meta_info and prompt."""


def on_answers(change: Callable[[Any, list[int]], Any]) -> Damage:
    def damage(path: str, body: Any, content: Any) -> Any:
        for answer, prompt in zip(content, body["input_ids"], strict=True) if path == "/generate" else ():
            change(answer, prompt)
        return content

    return damage


def on_rows(change: Callable[[np.ndarray], Any], where: Where = lambda rows, meta, prompt: True) -> Damage:
    """A damage of rows [rows, layers, K], which returns others or None."""

    def damage(answer: Any, prompt: list[int]) -> None:
        rows = rows_of(answer)
        if where(rows, answer["meta_info"], prompt):
            changed = change(rows)
            put_rows(answer, rows if changed is None else changed)

    return on_answers(damage)


def on_meta(change: Callable[[dict[str, Any]], Any], where: Callable[[dict[str, Any]], Any] = bool) -> Damage:
    return on_answers(lambda answer, _: change(answer["meta_info"]) if where(answer["meta_info"]) else None)


def on_scores(change: Callable[[np.ndarray], np.ndarray], where: Callable[[dict[str, Any]], Any] = bool) -> Damage:
    """A damage of the log-probabilities of a response."""

    def damage(meta: dict[str, Any]) -> None:
        entries = meta["output_token_logprobs"]
        for entry, score in zip(entries, change(np.array([entry[0] for entry in entries], np.float32)), strict=True):
            entry[0] = float(score)

    return on_meta(damage, where)


def on_page(page: str, change: Callable[[Any], Any]) -> Damage:
    return lambda path, body, content: change(content) if path == page else content


def put(index: Any, value: Any) -> Callable[[np.ndarray], None]:
    """Write a value, or a function of the rows, into rows."""

    def change(rows: np.ndarray) -> None:
        rows[index] = value(rows) if callable(value) else value

    return change


def is_cached(rows: np.ndarray, meta: dict[str, Any], prompt: list[int]) -> bool:
    return meta["cached_tokens"] == 48 < len(rows)


def is_in_chunks(rows: np.ndarray, meta: dict[str, Any], prompt: list[int]) -> bool:
    return (len(prompt), meta["cached_tokens"]) == (72, 0)


def is_first(rows: np.ndarray, meta: dict[str, Any], prompt: list[int]) -> bool:
    return len(rows) == 63


def is_retracted(rows: np.ndarray, meta: dict[str, Any], prompt: list[int]) -> bool:
    return meta["num_retractions"] > 0


def has_sets(meta: dict[str, Any]) -> bool:
    return "output_token_sampling_mask" in meta


def name_version(**version: str) -> Damage:
    def change(meta: dict[str, Any]) -> None:
        del meta["weight_versions"], meta["weight_version"]
        meta.update(version)

    return on_meta(change)


def exchange_in_batch(path: str, body: Any, content: Any) -> Any:
    if path == "/generate" and len(content) == 17:
        put_rows(content[0], np.resize(rows_of(content[1]), rows_of(content[0]).shape))
    return content


def keep_cache(path: str, body: Any, content: Any) -> Any:
    """An update whose flush was refused."""
    UPDATES.extend([path] if path == "/update_weights_from_disk" else [])
    if path == "/generate" and UPDATES:
        content[0]["meta_info"]["cached_tokens"] = 47
    return content


def round_biases(content: Any) -> Any:
    """What a server on a CPU answers after biases have been through bf16."""
    return {"ranks": [{"checksums": content["ranks"][0]["checksums"] | ROUNDED}]}


def through_bf16(values: np.ndarray) -> np.ndarray:
    return torch.from_numpy(values).bfloat16().float().numpy()


ROUNDED: dict[str, str] = {}
UPDATES: list[str] = []
ROUTES = {"routes"}
SCORES = {"logprobs", "retraction", "kept sets"}
FOREIGN = "rows are missing or of other tokens"
DAMAGES: dict[str, tuple[Damage, set[str], str]] = {
    "no routes": (on_meta(lambda meta: meta.pop("routed_experts")), ROUTES, "has no routed_experts"),
    "a lost row": (on_rows(lambda rows: rows[:-1]), ROUTES, "routes of 62 rows, expected 63 rows"),
    "another model": (on_rows(lambda rows: rows[:, :3]), ROUTES, "no whole number of rows of 4 layers"),
    "routes of a dense layer": (on_rows(put(np.s_[:, 0], 1)), ROUTES, "the dense layer 0 has routes"),
    "zeros": (on_rows(put(np.s_[:], 0)), ROUTES, "experts [0, 0, 0, 0, 0, 0, 0, 0], expected 8 different"),
    "a row of zeros": (on_rows(put(9, 0)), ROUTES, "row 9, layer 0: experts [0, 0,"),
    "padding": (on_rows(put(np.s_[9, 1:], range(8))), ROUTES, "1 of 63 rows name experts 0..7"),
    "a missing row": (on_rows(put(9, -1)), ROUTES, "1 of 63 rows are -1"),
    "one row for all": (on_rows(put(np.s_[:], lambda rows: rows[:1])), ROUTES, "all 63 rows are the same"),
    "an expert twice": (on_rows(put(np.s_[3, 2, 1], lambda rows: rows[3, 2, 0])), ROUTES, "row 3, layer 1: experts"),
    "an unknown expert": (on_rows(put(np.s_[3, 2, 1], 160)), ROUTES, "different ones of 0 to 159"),
    "rows of the token before": (
        on_rows(lambda rows: np.concatenate([rows[:1], rows[:-1]])), {"token of a row", "later turn"}, "in rows []"
    ),
    "rows of the next token": (
        on_rows(lambda rows: np.concatenate([rows[1:], rows[-1:]])), {"token of a row", "prefix cache"}, "rows [46, 47]"
    ),
    "stale rows of a cached prefix": (
        on_rows(put(np.s_[4:8], lambda rows: rows[20:24]), is_cached), {"prefix cache"}, f"4 {FOREIGN}, [4, 5, 6]"
    ),
    "one stale layer of a cached prefix": (
        on_rows(put(np.s_[4, 1], lambda rows: rows[5, 1]), is_cached), {"prefix cache"}, f"1 {FOREIGN}, [4]"
    ),
    "a stale row at the end of a chunk": (
        on_rows(put(CHUNK, lambda rows: rows[0]), is_in_chunks), {"chunks"}, f"1 {FOREIGN}, [{CHUNK}]"
    ),
    "a lost row at the end of a chunk": (on_rows(put(CHUNK, -1), is_in_chunks), {"chunks"}, f"1 {FOREIGN}, [{CHUNK}]"),
    "rows of another request": (exchange_in_batch, {"batch"}, f"63 {FOREIGN}, [0, 1, 2]"),
    "a draft layer's rows": (
        on_rows(put(np.s_[48:63:2], lambda rows: rows[:8]), is_first), {"decode", "batch"}, f"{FOREIGN}, [48, 50, 52]"
    ),
    "stale rows after a retraction": (
        on_rows(put(np.s_[-9:], lambda rows: rows[:9]), is_retracted), {"retraction"}, FOREIGN
    ),
    "old log-probabilities after a retraction": (
        on_scores(lambda scores: scores - 0.1, lambda meta: meta["num_retractions"]), {"retraction"}, "by 0.1 nats on"
    ),
    "rounded log-probabilities": (on_scores(through_bf16), {"logprobs"}, "numbers of bf16"),
    "log-probabilities of others": (on_scores(lambda scores: np.roll(scores, 1) - 0.1), SCORES, "nats on average"),
    "no log-probabilities": (
        on_meta(lambda meta: meta["output_token_logprobs"].clear()), SCORES | {"determinism"}, "of 16 tokens"
    ),
    "another weight version": (name_version(weight_version="older"), {"weight version"}, "{'older'}"),
    "no weight version": (name_version(), {"weight version"}, "{None}"),
    "an update without a flush": (keep_cache, {"weight version"}, "with 47 cached tokens"),
    "rounded biases": (on_page("/weights_checker", round_biases), {"expert biases"}, "are rounded to bf16"),
    "kept sets without the token": (
        on_meta(lambda meta: [ids.clear() for ids in meta["output_token_sampling_mask"]], has_sets),
        {"kept sets"}, "16 kept sets, 16 log-probabilities within them",
    ),
    "log-probabilities within other sets": (
        on_meta(lambda meta: meta.update(output_token_sampling_logprobs=[-0.01] * 16), has_sets),
        {"kept sets"}, "of probability 0.0",
    ),
}  # fmt: skip
"""A way to damage the answers, the points that fail, and a part of what one of them says."""


@pytest.mark.sglang
@pytest.mark.parametrize("name", DAMAGES)
def test_a_damage_is_named(name: str, real: Recorded, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    damage, failing, text = DAMAGES[name]
    ROUNDED.update(checksums_of_rounded(model))
    count = itertools.count()
    monkeypatch.setattr(engine, "uuid4", lambda: SimpleNamespace(hex=f"{next(count):032x}"))  # the same in each run

    updates: list[str] = []

    def answer(path: str, body: Any) -> tuple[int, Any]:
        updates.extend([path] if path.startswith("/update") else [])
        status, content = real.ask(path, body, len(updates))
        return status, damage(path, body, content) if status == 200 else content

    # Whose request is retracted, and where, is a matter of time: others' verdicts must not depend on it.
    options = EVERYTHING | {"pressure": "retraction" in failing}
    with serving(answer) as url:
        checks = {check.name: check for check in check_engine(url, model_path=model, **options)}
    found = {point for point, check in checks.items() if check.verdict == "fails"}
    assert found == failing, [(point, checks[point].found) for point in found ^ failing]
    assert any(text in checks[name].found for name in failing), [checks[name].found for name in failing]


@pytest.mark.sglang
def test_biases_that_a_server_has_rounded_are_named(real: Recorded, model: Path, tmp_path: Path) -> None:
    """For real: the server loads weights whose biases have been through bf16, and then the right ones again."""
    shutil.copytree(model, tmp_path / "rounded")
    tensors = load_file(model / "model.safetensors")
    through = {name: value.bfloat16().float() if name.endswith("bias") else value for name, value in tensors.items()}
    save_file(through, tmp_path / "rounded/model.safetensors", metadata={"format": "pt"})
    for folder, verdict in ((tmp_path / "rounded", "fails"), (model, "ok")):
        body = {"model_path": str(folder), "weight_version": "default"}
        httpx.post(f"{real.url}/update_weights_from_disk", json=body, timeout=600.0).raise_for_status()
        checks = check_engine(real.url, model_path=model)
        assert {c.verdict for c in checks if c.name == "expert biases"} == {verdict}
        assert {c.verdict for c in checks if c.name not in ("expert biases", "retraction", "kept sets")} == {"ok"}


@pytest.mark.sglang
@pytest.mark.parametrize("layers", [slice(None), slice(1, None)], ids=["all layers", "layers with experts"])
def test_vllm_is_asked_as_its_protocol_says(real: Recorded, model: Path, layers: slice) -> None:
    """Its documented form around the routes of a real model; vLLM itself does not run here."""
    with serving(as_vllm(real, layers)) as url:
        checks = {check.name: check for check in check_engine(url, model_path=model, **EVERYTHING)}
        with pytest.raises(ConfigError, match=r"give the folder of the server's model as model_path"):
            check_engine(url)
    verdicts = {name: check.verdict for name, check in checks.items()}
    silent = {name for name, verdict in verdicts.items() if verdict == "not answered"}
    assert silent == {
        "prefix cache",
        "chunks",
        "retraction",
        "kept sets",
        "weight version",
        "expert biases",
    }
    assert {verdict for name, verdict in verdicts.items() if name not in silent} == {"ok"}, checks


NPY = (
    "k05VTVBZAQB2AHsnZGVzY3InOiAnfHUxJywgJ2ZvcnRyYW5fb3JkZXInOiBGYWxzZSwgJ3NoYXBlJzogKDMsIDIsIDIpLC"
    "B9ICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgIAoBAAcCAwQFBgABBAc="
)
CHOICE = {
    "index": 0,
    "text": "",
    "logprobs": {
        "text_offset": [0, 1],
        "token_logprobs": [-0.5, -1.25],
        "tokens": ["a", "b"],
        "top_logprobs": [None] * 2,
    },
    "finish_reason": "length",
    "stop_reason": None,
    "token_ids": [7, 8],
    "prompt_token_ids": [5, 6],
    "prompt_logprobs": [None, {"6": {"logprob": -2.0, "rank": 3, "decoded_token": "x"}}],
    "routed_experts": NPY,
}
"""By vLLM's protocol: three rows of two layers with two of eight experts, in uint8."""


def test_an_answer_of_vllm_is_read() -> None:
    answer = _read_vllm(CHOICE, 0)
    assert (answer.tokens, answer.prompt) == ([5, 6, 7, 8], [5, 6])
    assert answer.logprobs().tolist() == [-0.5, -1.25]
    assert np.array_equal(answer.logprobs("input"), [np.nan, -2.0], equal_nan=True)
    for shape in (MoeShape(2, (0, 1), 8, 2), MoeShape(3, (1, 2), 8, 2)):
        trace = answer.trace(shape)
        assert trace.experts[:3].tolist() == [[[1, 0], [7, 2]], [[3, 4], [5, 6]], [[0, 1], [4, 7]]]
        assert trace.row_mask.tolist() == [True, True, True, False]
    with pytest.raises(TraceError, match=r"routes are \[3, 2, 2\], expected \[rows, 4, 2\]"):
        answer.trace(MoeShape(4, (1, 2, 3), 8, 2))
    lists = _read_vllm(CHOICE | {"routed_experts": [[[1, 0]]]}, 0)  # up to 0.21, generated tokens alone
    with pytest.raises(TraceError, match="has no routed_experts"):
        lists.trace(MoeShape(2, (0, 1), 8, 2))


@pytest.mark.parametrize(
    ("url", "error", "match"),
    [
        ("http://127.0.0.1:1", RolloutError, "no answer from http://127.0.0.1:1 .*start it, or correct the URL"),
        ("127.0.0.1:1", RolloutError, "no answer from 127.0.0.1:1 .*correct the URL"),
        ("http://[", RolloutError, "correct the URL"),
        ("another service", ConfigError, r"neither /server_info \(SGLang\) nor /version \(vLLM\)"),
        ("a locked service", RolloutError, "HTTP 401: .*no key"),
    ],
)
def test_a_url_without_an_engine_is_an_error(url: str, error: type[Exception], match: str) -> None:
    status = {"another service": 404, "a locked service": 401}.get(url)
    with serving(lambda path, body: (status or 500, {"error": "no key"})) as other, pytest.raises(error, match=match):
        show_engine(other if status else url)


def checksums_of_rounded(model: Path) -> dict[str, str]:
    tensors = load_file(model / "model.safetensors")
    return {
        name: hashlib.sha256(tensor.bfloat16().float().numpy().tobytes()).hexdigest()[:16]
        for name, tensor in tensors.items()
        if name.endswith("e_score_correction_bias")
    }
