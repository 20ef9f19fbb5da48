"""The table of SGLang releases, and what of their arguments is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megarl.engines.sglang.versions import (
    FAULTS,
    check_arguments,
    check_server,
    parse_arguments,
    parse_version,
)
from megarl.errors import ConfigError, RolloutError


def test_release_numbers() -> None:
    for text, version in (("v0.5.7", (0, 5, 7)), ("0.5.21.post1", (0, 5, 21))):
        assert parse_version(text) == version
    with pytest.raises(RolloutError, match="'main', expected a release number"):
        parse_version("main")


KEY = {"api_key": "x"}


def test_an_old_release_is_refused_and_a_newer_one_told():
    with pytest.raises(ConfigError, match=r"0\.5\.16 is too old, expected at least 0\.5\.17"):
        check_server({"version": "0.5.16"}, tp=1)
    assert check_server(KEY | {"version": "0.5.17", "device": "cuda"}, tp=1) == ((0, 5, 17), [])
    with pytest.raises(ConfigError, match=r"SGLang 0\.5\.19 does not record the ids .*take 0\.5\.20 or later"):
        check_server(KEY | {"version": "0.5.19"}, tp=1, nucleus=True)
    assert check_server(KEY | {"version": "0.5.20"}, tp=1, nucleus=True)[0] == (0, 5, 20)
    assert check_server(KEY | {"version": "0.5.23"}, tp=1) == ((0, 5, 23), [])
    _, (warning,) = check_server({"version": "0.5.21"}, tp=1)
    assert "no API key: whoever reaches the server can replace its weights" in warning
    assert check_server({"version": "0.5.21", "admin_api_key": "x"}, tp=1)[1] == []
    assert "newer than 0.5.23" in check_server(KEY | {"version": "0.6.0"}, tp=1)[1][0]
    drafts = KEY | {"version": "0.5.23", "speculative_algorithm": "EAGLE", "speculative_eagle_topk": 1}
    assert "speculative decoding" in check_server(drafts, tp=1)[1][0]
    check_server(drafts | {"speculative_algorithm": "DSPARK"}, tp=1, routes=False)
    with pytest.raises(RolloutError, match="'None', expected a release number"):
        check_server({}, tp=1)
    check_server(KEY | {"version": "0.5.23", "tp_size": float("inf"), "moe_runner_backend": ["a"]}, tp=1)


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        *(({"moe_runner_backend": name}, "routes_in_a_kernel") for name in ("triton_kernel", "flashinfer_mxfp4")),
        ({"moe_a2a_backend": "mooncake"}, "scattered_tokens"),
        ({"enable_return_routed_experts": False}, "no_routes"),
        ({"chunked_prefill_size": -1}, "unchunked_prefill"),
        ({"disaggregation_mode": "decode"}, "disaggregation"),
        ({"pp_size": 2}, "pipeline"),
        ({"enable_eplb": True, "checksums": True}, "moving_experts"),
        ({"enable_two_batch_overlap": True}, "half_batches"),
        ({"speculative_algorithm": "NGRAM"}, "tree_of_drafts"),
        ({"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 4}, "tree_of_drafts"),
        *(({"speculative_algorithm": name}, "drafts_without_routes") for name in ("DSPARK", "DFLASH", "ngram", "own")),
        ({"enable_hierarchical_cache": True}, "cache_beyond_the_gpu"),
        ({"radix_cache_backend": "mine"}, "cache_beyond_the_gpu"),
        ({"enable_watermark": True}, "watermark"),
        ({"preferred_sampling_params": {"min_new_tokens": 3}}, "preferred_sampling"),
    ],
)
def test_a_fault_is_refused_where_the_arguments_make_it_real(arguments: dict[str, Any], fault: str):
    (entry,) = [entry for entry in FAULTS if entry.name == fault]
    with pytest.raises(ConfigError, match=re.escape(f"{entry.meaning}: {entry.remedy}")):
        check_server(KEY | {"version": "0.5.23"} | arguments, tp=1)


@pytest.mark.parametrize(
    ("arguments", "last", "fault"),
    [
        ({"device": "cpu"}, "0.5.17", "wrong_rows_on_cpu"),
        ({"device": "cpu", "disable_overlap_schedule": False}, "0.5.17", "wrong_rows_on_cpu"),
        ({"api_key": None}, "0.5.20", "pickles"),
    ],
)
def test_a_fault_of_old_releases_is_refused_up_to_the_last_one(arguments: dict[str, Any], last: str, fault: str):
    (entry,) = [entry for entry in FAULTS if entry.name == fault]
    with pytest.raises(ConfigError, match=re.escape(f"{entry.meaning}: {entry.remedy}")):
        check_server(KEY | {"version": last} | arguments, tp=1)
    major, minor, patch = parse_version(last)
    check_server(KEY | {"version": f"{major}.{minor}.{patch + 1}"} | arguments, tp=1)


def test_router_weights_that_no_update_reaches_are_found_by_the_config_of_the_model(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": "glm4_moe"}')
    info = KEY | {"version": "0.5.18", "dtype": "bfloat16"}
    with pytest.raises(ConfigError, match=r"float32 copy of the router weights of GLM-4.5 .*take 0\.5\.19 or later"):
        check_server(info, tp=1, source=tmp_path)
    assert check_server(info | {"dtype": "float32"}, tp=1, source=tmp_path)[0] == (0, 5, 18)  # no copy: the weights
    assert check_server(info | {"version": "0.5.19"}, tp=1, source=tmp_path)[0] == (0, 5, 19)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe"}')
    assert check_server(info, tp=1, source=tmp_path)[0] == (0, 5, 18)


FP8_BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    ("quantization", "fp8", "fits"),
    [
        (None, False, True),
        (FP8_BLOCKS, True, True),
        (None, True, False),
        (FP8_BLOCKS, False, False),
        ({"quant_method": "mxfp4"}, False, False),
        ({"quant_method": "mxfp4"}, True, False),
        ({"quant_method": "fp8", "activation_scheme": "static"}, True, False),
        (FP8_BLOCKS | {"weight_block_size": [1, 128]}, True, False),
    ],
)
def test_a_served_model_is_in_the_form_of_the_updates(
    quantization: dict[str, Any] | None, fp8: bool, fits: bool, tmp_path: Path
):
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    info = KEY | {"version": "0.5.23", "model_path": str(tmp_path)}
    if fits:
        assert check_server(info, tp=1, fp8=fp8)[0] == (0, 5, 23)
        return
    with pytest.raises(ConfigError, match=r"with quant_method and weight_block_size .*expected .* by sglang.fp8"):
        check_server(info, tp=1, fp8=fp8)
    assert check_server(info | {"model_path": "org/elsewhere"}, tp=1, fp8=fp8)[0] == (0, 5, 23)


def test_other_arguments_are_not():
    for arguments in (
        {"device": "cuda", "disable_overlap_schedule": False, "enable_eplb": False, "init_expert_location": "trivial"},
        {"chunked_prefill_size": 4096, "disaggregation_mode": "null", "pp_size": 1, "ep_num_redundant_experts": 0},
        {"chunked_prefill_size": None, "radix_cache_backend": None, "preferred_sampling_params": None, "tp_size": 1},
        *({"moe_runner_backend": name} for name in (None, "auto", "deep_gemm", "flashinfer_trtllm_routed")),
        *({"moe_a2a_backend": name} for name in (None, "none")),
        {"speculative_algorithm": None, "speculative_eagle_topk": None, "watermark_config": "<redacted>"},
    ):
        assert check_server(KEY | {"version": "0.5.21"} | arguments, tp=1) == ((0, 5, 21), [])


def test_words_of_a_command_line():
    words = ("--a-b", "1", "--c=x=y", "--d", "--e", "first", "second", "--f", "-1", "--a-b", "2")
    assert parse_arguments(words) == {"a_b": "2", "c": "x=y", "d": True, "e": "first", "f": "-1"}
    assert parse_arguments(()) == {}
    for words, message in (  # wrong with every release
        (("--chunked-prefill-size", "-1"), "without chunked prefill"),
        (("--disaggregation-mode", "prefill"), "routes of the prompt stay"),
        (("--dp-size", "2"), "takes no weights through a process group"),
        (("--quantization", "fp8"), "nothing repeats that on an update"),
        (("--preferred-sampling-params", '{"top_k": 5}'), "fill in what a request leaves open"),
        (("--moe-runner-backend", "triton_kernel"), "a kernel chooses the experts"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_arguments(words)
    # What some release or no release gets wrong is left to the server.
    check_arguments(("--enable-eplb", "--device", "cpu", "--dtype", "bfloat16", "--pp-size", "one"))


def test_what_is_wrong_with_routes_alone_does_no_harm_without_them():
    words = ("--moe-runner-backend", "flashinfer_mxfp4", "--moe-a2a-backend", "mori")
    check_arguments(words, routes=False)
    info = KEY | parse_arguments(words) | {"version": "0.5.23", "enable_return_routed_experts": False}
    assert check_server(info, tp=1, routes=False)[0] == (0, 5, 23)
