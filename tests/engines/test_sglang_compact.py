"""The short form of routing traces: what is asked for, how it is coded, and what a client makes of it."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megarl.engines.sglang.plugin.compact import HEADER, compact, make_header, parse_header
from megarl.engines.sglang.spec import PLUGIN
from megarl.errors import TraceError
from megarl.files.hf_config import MoeShape
from megarl.routes import RoutingTrace, encode
from megarl.routes.answers import decode_routes, is_compact

SHAPE = MoeShape(num_layers=4, moe_layers=(1, 3), num_experts=16, topk=3)


def routes(rows: int, shape: MoeShape = SHAPE) -> np.ndarray:
    """int32 [rows, all layers, K], zeros in dense layers, in the order of no sorting."""
    found = (
        np.random.default_rng(rows).random((rows, shape.num_layers, shape.num_experts)).argsort(2)[..., : shape.topk]
    )
    found[:, list(shape.dense_layers)] = 0
    return found.astype("<i4")


def text_of(raw: bytes | None) -> str:
    return base64.b64encode(raw).decode()


@pytest.mark.parametrize(
    "shape",
    [
        SHAPE,
        MoeShape(2, (0, 1), 300, 8),
        MoeShape(3, (0, 1, 2), 256, 8),
        MoeShape(2, (1,), 8, 1),
        MoeShape(4, (2, 3), 16, 3, exempt_layers=(0, 1)),
    ],
    ids=["dense", "wide", "256", "top-1", "exempt"],
)
def test_both_forms_say_the_same_experts_in_one_order(shape: MoeShape) -> None:
    whole = routes(50, shape)
    whole[:, list(shape.exempt_layers)] = -1
    assert parse_header(make_header(shape)) == shape
    short = compact(whole.tobytes(), shape)
    assert is_compact(short)
    assert not is_compact(whole.tobytes())
    plain = decode_routes(text_of(whole.tobytes()), 50, shape, "x").experts
    found = decode_routes(text_of(short), 50, shape, "x").experts
    assert found.dtype == plain.dtype
    assert np.array_equal(found, plain)
    suffix = compact(whole[20:].tobytes(), shape)
    for text in (text_of(suffix), text_of(short), text_of(whole[20:].tobytes()), text_of(whole.tobytes())):
        assert np.array_equal(decode_routes(text, 50, shape, "x", known_rows=20).experts, found[20:])


def test_a_short_form_that_is_wrong_is_an_error() -> None:
    short = compact(routes(50).tobytes(), SHAPE)

    def told(raw: bytes, rows: int = 50) -> str:
        with pytest.raises(TraceError, match="group 1: ") as caught:
            decode_routes(text_of(raw), rows, SHAPE, "group 1")
        return str(caught.value)

    assert "50 rows, expected 49" in told(short, 49)
    assert "cut off" in told(short[:-3])
    assert "does not match its checksum" in told(short[:-1] + bytes([short[-1] ^ 1]))
    assert "format version 9" in told(short[:4] + b"\x09" + short[5:])
    more = RoutingTrace(routes(50)[:, [1, 3]], 17)
    assert "layers, top-k, experts are (2, 3, 17), expected (2, 3, 16)" in told(encode(more))
    with pytest.raises(TraceError, match="cut short"):
        decode_routes(text_of(short)[:-3], 50, SHAPE, "x")


def test_an_ask_survives_its_header_and_is_none_if_it_makes_no_sense() -> None:
    good = json.loads(make_header(SHAPE)[HEADER])
    assert good["dense_layers"] == [0, 2]
    assert parse_header({HEADER: json.dumps(good)}) == SHAPE
    for change in (
        *({"version": 2}, {"topk": 0}, {"num_layers": 1 << 20}, {"num_layers": float("inf")}, {"num_experts": -1}),
        *({"dense_layers": [4]}, {"dense_layers": 3}, {"exempt_layers": [0]}, {"exempt_layers": [4]}, {"more": 1}),
    ):
        assert parse_header({HEADER: json.dumps(good | change)}) is None


def test_the_plugin_finds_megarl_alone_and_loads_nothing_that_a_server_lacks(tmp_path: Path) -> None:
    """As in SGLang's environment, where no megarl is installed and the directory of its package must stay unseen."""
    code = (
        "import importlib.util, sys\n"
        "sys.meta_path = [f for f in sys.meta_path if 'editable' not in str(f)]\n"
        "assert importlib.util.find_spec('megarl') is None\n"
        "import megarl_routes_plugin\n"
        "path = list(sys.path); megarl_routes_plugin.import_megarl(); assert sys.path == path\n"
        "from megarl.engines.sglang.plugin.compact import parse_header\n"
        "print('pydantic' in sys.modules, 'httpx' in sys.modules, parse_header({}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(PLUGIN)}, capture_output=True, text=True, cwd=tmp_path
    )
    assert done.stdout == "False False None\n", done.stderr


REGISTRY = """
from enum import Enum
HookType = Enum("HookType", "AROUND")
class HookRegistry:
    @staticmethod
    def register(target, hook, kind):
        print("registered", target)
"""


GENERATE = "    async def generate_request(self, obj, request=None):\n        yield\n"
UPDATE = "    async def update_weights_from_tensor(self, obj, request=None):\n        pass\n"


@pytest.mark.parametrize(
    ("methods", "registered"),
    [
        (GENERATE + UPDATE, True),
        (GENERATE.replace("obj, ", "") + UPDATE, False),
        (GENERATE + UPDATE.replace("async ", ""), False),
        (GENERATE, False),
        (None, False),
    ],
    ids=["as known", "other arguments", "not a coroutine", "no updates", "no hooks"],
)
def test_an_sglang_with_other_insides_is_left_alone(tmp_path: Path, methods: str | None, registered: bool) -> None:
    """Releases that are not known yet: one line in the log, and the server goes on."""
    for package in ("sglang", "sglang/srt", "sglang/srt/managers", "sglang/srt/plugins"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    manager = f"class TokenizerManager:\n{methods or '    pass'}"
    (tmp_path / "sglang/srt/managers/tokenizer_manager.py").write_text(manager)
    if methods is not None:
        (tmp_path / "sglang/srt/plugins/hook_registry.py").write_text(REGISTRY)
    done = subprocess.run(
        [sys.executable, "-c", "import megarl_routes_plugin; megarl_routes_plugin.activate()"],
        env={"PYTHONPATH": os.pathsep.join([str(PLUGIN), str(tmp_path)])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    manager = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
    names = ("generate_request", "update_weights_from_tensor") if registered else ()
    assert done.stdout == "".join(f"registered {manager}.{name}\n" for name in names)
    assert ("routing traces stay as they are" in done.stderr) != registered
    assert len(done.stderr.splitlines()) == (not registered)
