"""Routes of SGLang's answers for loops of one's own: every way to be wrong."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

from megarl.errors import TraceError
from megarl.files.hf_config import MoeShape
from megarl.routes import RoutingTrace
from megarl.routes.answers import read_routes, routes_from_sglang
from megarl.routes.codec import encode

SHAPE = MoeShape(num_layers=4, moe_layers=(1, 3), num_experts=16, topk=3)
PROMPT, RESPONSE = 5, 4
TOTAL = PROMPT + RESPONSE


def routes(rows: int = TOTAL - 1, shape: MoeShape = SHAPE, seed: int = 0) -> np.ndarray:
    """int32 [rows, all layers, K], zeros in dense layers."""
    scores = np.random.default_rng(seed).random((rows, shape.num_layers, shape.num_experts))
    found = scores.argsort(2)[..., : shape.topk]
    found[:, list(shape.dense_layers)] = 0
    return found.astype("<i4")


def shape_of(layers: int, experts: int, topk: int) -> MoeShape:
    return MoeShape(layers, tuple(range(layers)), experts, topk)


LARGE, SMALL = shape_of(48, 128, 8), shape_of(4, 16, 2)


def filled(shape: MoeShape, rows: slice, value: Any = None) -> np.ndarray:
    """11 rows, some of them the same: those of padding, missing, or of another token."""
    found = routes(11, shape, seed=3)
    found[rows] = found[5] if value is None else value
    return found


def padded(shape: MoeShape, rows: slice = slice(None)) -> np.ndarray:
    return filled(shape, rows, np.arange(shape.topk))


def sglang(rows: np.ndarray | None, prompt: Any = PROMPT, response: Any = RESPONSE) -> dict[str, Any]:
    """As /generate answers, with what it says beside the routes."""
    meta = {"id": "x", "finish_reason": {"type": "stop"}, "prompt_tokens": prompt, "completion_tokens": response}
    text = None if rows is None else base64.b64encode(rows.tobytes()).decode()
    return {"text": "abc", "output_ids": [1] * RESPONSE, "meta_info": {**meta, "routed_experts": text}}


def check(trace: RoutingTrace, rows: np.ndarray, present: list[bool] | None = None) -> None:
    """``rows``: all layers, of all tokens but the last."""
    wanted = [True] * len(rows) + [False] if present is None else present
    assert trace.experts.shape == (len(rows) + 1, 2, 3)
    assert trace.present.tolist() == wanted
    assert np.array_equal(trace.experts[:-1][wanted[:-1]], rows[:, [1, 3]][wanted[:-1]])
    assert trace.num_experts == 16


def test_turns_of_sglang_add_up() -> None:
    """The second turn continues the first one's 9 tokens, and leaves out the 8 rows that are known."""
    whole = routes(15)
    first = routes_from_sglang(sglang(whole[:8]), SHAPE)
    check(first, whole[:8])  # a row for all tokens but the last
    for sent in (whole[8:], whole):  # servers before 0.5.12 send known rows too
        second = routes_from_sglang(sglang(sent, prompt=12), SHAPE, 8)
        check(second, whole, [False] * 8 + [True] * 7 + [False])


@pytest.mark.parametrize(
    ("answer", "options", "message"),
    [
        ([sglang(routes()), sglang(routes())], {}, "is a list of 2, expected the JSON object of one .*call once for"),
        (sglang(None), {}, "no routed_experts: send return_routed_experts = true, to a server that was started with"),
        (sglang(routes(), prompt=None), {}, r"are \[None, 4\], expected two counts"),
        (sglang(routes(), prompt=PROMPT + 1), {}, "8 rows, expected 9"),
        (sglang(routes()[:, [1, 3]]), {}, "dense layer 0 has routes"),
        (sglang(routes()[:, :, :2]), {}, "no whole number of rows|rows, expected"),
        (sglang(np.where(routes() == 15, 16, routes())), {}, "expert id 16, expected at most 15.*physical ids.*EPLB"),
        (sglang(routes()), {"logical_ids": np.zeros((2, 18), int)}, r"experts \[0, 0, 0\]"),
        (
            sglang(routes()),
            {"logical_ids": np.zeros((4, 18), int)},
            r"\[4, 18\], expected integers \[2 MoE layers",
        ),
        (sglang(routes()), {"logical_ids": np.zeros((2, 18))}, r"float64 \[2, 18\], expected integers"),
        (sglang(routes()), {"logical_ids": np.full((2, 18), 16)}, r"physical ids\] in 0\.\.15"),
        (sglang(routes()), {"logical_ids": np.arange(30).reshape(2, 15) % 16}, "expert id 15, expected at most 14"),
        (sglang(routes() * 0), {}, r"experts \[0, 0"),
        (sglang(filled(SMALL, slice(None))[:8]), {"shape": SMALL}, "of 8 different tokens"),  # without token ids
        (sglang(routes()), {"shape": MoeShape(4, (), 0, 0)}, "has no experts"),
        (sglang(routes()), {"start": 9}, "start is 9, expected one of its 9 tokens"),
    ],
)
def test_what_is_wrong_with_an_answer_of_sglang(answer: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        routes_from_sglang(answer, **{"shape": SHAPE} | options)


def test_physical_ids_become_experts_by_the_table_of_the_engine() -> None:
    """Each layer has an order of its own, and experts 3 and 7 two copies; a missing row stays missing."""
    generator, rows, physical = np.random.default_rng(1), routes(), routes()
    table = np.stack([generator.permutation([*range(16), 3, 7]) for _ in SHAPE.moe_layers])
    for column, layer in enumerate(SHAPE.moe_layers):
        for row, slot in np.ndindex(len(rows), SHAPE.topk):
            physical[row, layer, slot] = generator.choice(np.flatnonzero(table[column] == rows[row, layer, slot]))
    rows[2] = physical[2] = -1
    assert physical.max() > 15
    check(
        routes_from_sglang(sglang(physical), SHAPE, logical_ids=table),
        rows,
        [True] * 2 + [False] + [True] * 5 + [False],
    )
    short = sglang(rows) | {}
    short["meta_info"]["routed_experts"] = base64.b64encode(encode(read_routes(rows.tobytes(), SHAPE))).decode()
    with pytest.raises(TraceError, match="plugin answers with experts"):
        routes_from_sglang(short, SHAPE, logical_ids=table)


HASHED = MoeShape(num_layers=4, moe_layers=(2, 3), num_experts=16, topk=3, exempt_layers=(0, 1))


@pytest.mark.parametrize("value", [0, -1, 7, None], ids=["zeros", "missing", "repeated", "captured"])
def test_columns_of_exempt_layers_are_left_out_whatever_they_hold(value: int | None) -> None:
    rows = routes(TOTAL - 1, HASHED)
    if value is not None:
        rows[:, :2] = value
    rows[3, 2:] = -1  # the engine lost a row
    trace = routes_from_sglang(sglang(rows), HASHED)
    present = [True] * 3 + [False] + [True] * 4 + [False]
    assert trace.present.tolist() == present
    assert np.array_equal(trace.experts[present], rows[[*present[:-1]]][:, 2:])
    with pytest.raises(TraceError, match="experts" if value != 7 else "dense layer 0 has routes"):
        routes_from_sglang(sglang(rows), MoeShape(4, (0, 1, 2, 3) if value != 7 else (2, 3), 16, 3))
    rows[5, 3] = 0  # what is left out in the exempt layers is wrong in another
    with pytest.raises(TraceError, match=r"experts \[0, 0, 0\]"):
        routes_from_sglang(sglang(rows), HASHED)


def from_sglang(rows: np.ndarray, tokens: list[int], shape: MoeShape) -> RoutingTrace:
    whole = sglang(rows, len(tokens) - 1, 1) | {"prompt_token_ids": tokens[:-1], "output_ids": tokens[-1:]}
    return routes_from_sglang(whole, shape)


OTHER_TOKENS, SAME_TOKENS = [*range(12)], [5] * 12


@pytest.mark.parametrize(
    ("rows", "tokens", "shape", "told"),
    [
        (padded(SMALL), OTHER_TOKENS, SMALL, "all 11 rows are the same"),
        (padded(SMALL)[..., ::-1], OTHER_TOKENS, SMALL, "all 11 rows are the same"),
        (padded(LARGE, slice(7, 8)), OTHER_TOKENS, LARGE, "1 of 11 rows name experts 0..7"),
        (filled(SMALL, slice(None)), OTHER_TOKENS, SMALL, "all 11 rows are the same, of 11 different tokens"),
        (filled(LARGE, slice(None)), [1, 2] + [3] * 10, LARGE, "all 11 rows are the same, of 3 different tokens"),
        (filled(SMALL, slice(None), -1), OTHER_TOKENS, SMALL, "all 11 rows of routes are missing"),
        # What an honest engine may give.
        (padded(SMALL, slice(1)), OTHER_TOKENS, SMALL, None),
        (filled(SMALL, slice(None)), SAME_TOKENS, SMALL, None),
        (filled(SMALL, slice(10)), OTHER_TOKENS, SMALL, None),
        (padded(shape_of(1, 4, 1)), OTHER_TOKENS, shape_of(1, 4, 1), None),
        (padded(shape_of(48, 4, 4)), OTHER_TOKENS, shape_of(48, 4, 4), None),
        (filled(SMALL, slice(2, 5), -1), OTHER_TOKENS, SMALL, None),
        (filled(SMALL, slice(None), -1)[:7], OTHER_TOKENS[:8], SMALL, None),
    ],
)
def test_rows_that_no_router_has_chosen_are_refused(
    rows: np.ndarray, tokens: list[int], shape: MoeShape, told: str | None
) -> None:
    if told is not None:
        with pytest.raises(TraceError, match=told):
            from_sglang(rows, tokens, shape)
        return
    trace = from_sglang(rows, tokens, shape)
    assert trace.present.tolist() == [*(rows[:, 0, 0] >= 0).tolist(), False]
    assert np.array_equal(trace.experts[:-1], np.maximum(rows, 0))
