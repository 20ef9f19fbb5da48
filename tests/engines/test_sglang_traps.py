"""What a server does that would ruin training in silence, shown on a real one: the reasons for what megarl refuses."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from rollout_oracle import Oracle
from sglang_fixtures import START_DEADLINE_S
from sglang_oracle import CLOSE, Weights, logprob_gap, noisy, oracle_of, same_sets

from megarl.core.types import Rollout, SampleRequest
from megarl.engines.buckets import Bucket
from megarl.engines.sglang import spec as server_spec
from megarl.engines.sglang.answers import parse_answer
from megarl.engines.sglang.server import Server
from megarl.engines.sglang.spec import ServerSpec
from megarl.engines.sglang.transports.protocol import payload_of, send_tensors
from megarl.engines.sglang.transports.sender import WeightSender
from megarl.files.moe_shape import MoeShape

pytestmark = pytest.mark.sglang

OLD, NEW = 1, 2
NUM_UNDER_WAY = 64
FULL_SUPPORT = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}


@pytest.fixture(scope="module")
def weights(hostile_model: Path) -> list[Weights]:
    return [noisy(hostile_model, seed) for seed in range(3)]


@pytest.fixture(scope="module")
def oracles(hostile_model: Path, weights: list[Weights]) -> list[Oracle]:
    return [oracle_of(hostile_model, tensors) for tensors in weights]


@pytest.fixture
def sender(updated_server: Server, weights: list[Weights]) -> Iterator[WeightSender]:
    """The server has the OLD weights."""
    sender = WeightSender(updated_server.url)
    sender.begin()
    send_tensors(sender, Bucket(weights[OLD].items()))
    sender.finish(OLD)
    sender.resume()
    yield sender
    sender.close()


def body_of(index: int, new_tokens: int) -> dict[str, Any]:
    return {
        "input_ids": [5, 6 + index // 16, 2 + index % 16],
        "sampling_params": {"max_new_tokens": new_tokens, "ignore_eos": True} | FULL_SUPPORT,
        "return_logprob": True,
        "return_routed_experts": True,
    }


def under_way(server: Server, pool: ThreadPoolExecutor, is_paused: threading.Event) -> list[Future[dict[str, Any]]]:
    """Long responses to different prompts, of which one has some tokens. Each prompt's last response.

    They are asked for again until ``is_paused``: on a busy machine those of the first time may be over before.
    """
    some = threading.Event()
    # One for all: a client loads certificates, which takes longer than a request.
    http = httpx.Client(timeout=60.0, limits=httpx.Limits(max_keepalive_connections=0))

    def ask(index: int) -> dict[str, Any]:
        answer: dict[str, Any] = {}
        for _ in range(20):
            answer = http.post(f"{server.url}/generate", json=body_of(index, 55)).raise_for_status().json()
            if is_paused.is_set() or answer["meta_info"]["finish_reason"]["type"] == "abort":
                break
        return answer

    def listen() -> None:
        body = body_of(0, 55) | {"stream": True}
        with http.stream("POST", f"{server.url}/generate", json=body) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {") and json.loads(line[6:])["meta_info"]["completion_tokens"] >= 4:
                    some.set()

    answers = [pool.submit(ask, index) for index in range(NUM_UNDER_WAY)]
    pool.submit(listen)
    assert some.wait(60.0)
    return answers


def rollouts_of(answers: Sequence[dict[str, Any]], model: Path) -> list[Rollout]:
    shape = MoeShape.of(json.loads((model / "config.json").read_text()))
    return [
        parse_answer(SampleRequest(np.array(body_of(index, 0)["input_ids"], np.int32), index, 0, 0), answer, NEW, shape)
        for index, answer in enumerate(answers)
        if answer["meta_info"]["finish_reason"]["type"] != "abort"
    ]


def made_with(rollout: Rollout) -> set[int]:
    return set(rollout.weight_versions[rollout.loss_mask].tolist())


def logprob_gaps(rollout: Rollout, oracle: Oracle) -> np.ndarray:
    """float [T]; of each response token to the oracle's log-probability, 0 for the prompt."""
    logprobs = oracle.logits(rollout.tokens)[:-1].log_softmax(-1)
    expected = logprobs.gather(-1, torch.as_tensor(rollout.tokens[1:].astype(np.int64))[:, None])[:, 0].numpy()
    return np.where(rollout.loss_mask[1:], np.abs(expected - rollout.rollout_logprobs[1:]), 0.0)


def equal_rows(rollout: Rollout, oracle: Oracle) -> np.ndarray:
    """bool [T - 1, L]; whether the experts are the oracle's."""
    assert rollout.routed_experts is not None
    return (
        np.sort(rollout.routed_experts[:-1].astype(int), -1) == np.sort(oracle.routes(rollout.tokens)[:-1], -1)
    ).all(-1)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_an_update_under_running_requests_spoils_them(
    mode: str,
    sender: WeightSender,
    updated_server: Server,
    hostile_model: Path,
    weights: list[Weights],
    oracles: list[Oracle],
):
    """Each pause mode but ``abort``: no weights have both the log-probabilities and the routes that come back."""
    with ThreadPoolExecutor(NUM_UNDER_WAY + 1) as pool:
        answers = under_way(updated_server, pool, is_paused := threading.Event())
        sender.post("pause_generation", {"mode": mode})
        is_paused.set()
        send_tensors(sender, Bucket(weights[NEW].items()))
        sender.post("end_weight_update", {})
        sender._in_session = False
        flushed = sender._ask("POST", "flush_cache").status_code
        sender.post("update_weight_version", {"new_version": str(NEW), "abort_all_requests": False})
        sender.post("continue_generation", {})
        rollouts = rollouts_of([answer.result() for answer in answers], hostile_model)
    assert flushed == (200 if mode == "retract" else 400)
    mixed = [rollout for rollout in rollouts if made_with(rollout) == {OLD, NEW}]
    assert mixed, "all responses were over before the update"
    old_rows, new_rows = [], []
    for rollout in mixed:
        before = (rollout.weight_versions[1:] == OLD) & rollout.loss_mask[1:]
        sure = before & (np.arange(len(before)) < min(oracle.clear(rollout.tokens) for oracle in oracles))
        assert logprob_gaps(rollout, oracles[OLD])[sure].max(initial=0.0) < CLOSE
        old_rows.append(equal_rows(rollout, oracles[OLD])[sure])
        new_rows.append(equal_rows(rollout, oracles[NEW])[sure])
        if mode == "in_place" and (~before & rollout.loss_mask[1:]).sum() >= 4:  # new weights over old keys and values
            assert logprob_gaps(rollout, oracles[NEW])[~before].max() > 1e-2
    old_share, new_share = (float(np.concatenate(rows).mean()) for rows in (old_rows, new_rows))
    if mode == "retract":  # the tokens were processed again
        assert (new_share, old_share < 0.9) == (1.0, True)
    else:
        assert (old_share, new_share < 0.9) == (1.0, True)


def test_an_update_as_megarl_does_it_keeps_every_response_of_one_version(
    sender: WeightSender,
    updated_server: Server,
    hostile_model: Path,
    weights: list[Weights],
    oracles: list[Oracle],
):
    """The same load: what was under way is given up, and what comes back is whole and true."""
    with ThreadPoolExecutor(NUM_UNDER_WAY + 5) as pool:
        answers = under_way(updated_server, pool, is_paused := threading.Event())
        sender.begin()
        is_paused.set()
        late = [
            pool.submit(httpx.post, f"{updated_server.url}/generate", json=body_of(i, 8), timeout=60.0)
            for i in range(4)
        ]
        send_tensors(sender, Bucket(weights[NEW].items()))
        sender.finish(NEW)
        sender.resume()
        found = [answer.result() for answer in answers]
        after = rollouts_of([answer.result().raise_for_status().json() for answer in late], hostile_model)
    assert any(answer["meta_info"]["finish_reason"]["type"] == "abort" for answer in found)
    for rollout in rollouts_of(found, hostile_model):
        (version,) = made_with(rollout)
        assert same_sets([rollout], oracles[version]) == 1.0
        assert logprob_gap([rollout], oracles[version]) < CLOSE
    assert [made_with(rollout) for rollout in after] == [{NEW}] * 4
    assert same_sets(after, oracles[NEW]) == 1.0
    assert logprob_gap(after, oracles[NEW]) < CLOSE


def test_an_update_that_flushes_by_itself_says_failure_although_the_weights_have_changed(
    sender: WeightSender, updated_server: Server, weights: list[Weights], oracles: list[Oracle]
):
    """The reason why megarl asks for no flush in an update, flushes afterwards, and looks at the answer."""
    bucket = Bucket(weights[NEW].items())
    body = {"serialized_named_tensors": [payload_of(bucket)], "load_format": "flattened_bucket", "flush_cache": True}
    with ThreadPoolExecutor(NUM_UNDER_WAY + 1) as pool:
        answers = under_way(updated_server, pool, is_paused := threading.Event())
        sender.post("pause_generation", {"mode": "in_place"})
        is_paused.set()
        sender.open_session()
        updated = sender._ask("POST", "update_weights_from_tensor", body)
        sender.post("end_weight_update", {})
        sender._in_session = False
        sender.post("continue_generation", {})
        for answer in answers:
            answer.result()
    assert updated.json()["success"] is False
    assert "flush" in updated.text.lower()
    fresh = [31, 30, 29]  # in no cache
    answer = httpx.post(
        f"{updated_server.url}/generate", json=body_of(0, 1) | {"input_ids": fresh}, timeout=60.0
    ).json()
    logprob, token, _ = answer["meta_info"]["output_token_logprobs"][0]
    assert abs(logprob - float(oracles[NEW].logits(fresh)[-1].log_softmax(-1)[token])) < CLOSE


def test_without_chunked_prefill_a_prompt_that_is_longer_than_the_buffer_ends_the_server(
    sglang_spec: ServerSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(server_spec, "check_arguments", lambda *_: None)
    arguments = ("--chunked-prefill-size", "-1", "--max-running-requests", "4")
    with Server(replace(sglang_spec, log_file=tmp_path / "log", extra_args=arguments)) as server:
        server.wait_ready(START_DEADLINE_S)
        body = body_of(0, 4) | {"input_ids": list(range(2, 13))}
        with pytest.raises(httpx.TransportError):
            httpx.post(f"{server.url}/generate", json=body, timeout=60.0)
        assert "The expanded size of the tensor (4) must match the existing size (11)" in (tmp_path / "log").read_text()


def test_logprobs_below_full_support_are_not_of_what_was_sampled_from(
    sender: WeightSender, updated_server: Server, oracles: list[Oracle]
):
    top_p, prompt = 0.5, [5, 6, 9, 4]
    body = {
        "input_ids": [prompt] * 256,
        "sampling_params": {"max_new_tokens": 1, "ignore_eos": True} | FULL_SUPPORT | {"top_p": top_p},
        "return_logprob": True,
    }
    answers = httpx.post(f"{updated_server.url}/generate", json=body, timeout=60.0).raise_for_status().json()
    whole = oracles[OLD].logits(prompt)[-1].softmax(-1).numpy()
    order = np.argsort(-whole)
    nucleus = order[: int((np.cumsum(whole[order]) < top_p).sum()) + 1]
    for answer in answers:
        logprob, token, _ = answer["meta_info"]["output_token_logprobs"][0]
        assert token in nucleus
        assert abs(logprob - np.log(whole[token])) < CLOSE
    assert whole[nucleus].sum() < 0.9  # the true probability of each is 1 / this higher
    assert len({answer["output_ids"][0] for answer in answers}) == len(nucleus) > 1
