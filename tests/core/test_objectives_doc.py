from __future__ import annotations

import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from megarl.core.choices.parts import AdvantageName
from megarl.core.objectives import OBJECTIVES, Factor, Gate, Mask, Objective, Penalty

ROOT = Path(__file__).parent.parent.parent
TOOL = runpy.run_path(str(ROOT / "tools" / "objectives_doc.py"))


def test_the_page_is_what_the_table_gives():
    assert (ROOT / "docs" / "objectives.md").read_text() == TOOL["document"](), "run python tools/objectives_doc.py"


@pytest.mark.parametrize(
    ("name", "parts", "expected"),
    [
        ("minirl", {}, r"\tfrac1N\sum_{i,t} M^{[0.8,\,1.27]}(r_t)\,\min(w_t,5)\,(R-\bar R)\,\nabla\log\pi_\theta"),
        ("reinforce", {}, r"\tfrac1N\sum_{i,t} (R-\bar R)\,\nabla\log\pi_\theta"),
        (
            "ctpo",
            {},
            r"\tfrac{1}{\sum_i\lvert y_i\rvert}\sum_{i,t} M^{[e^{-0.025\sqrt t},\,e^{0.05\sqrt t}]}(\rho_t)\,"
            r"M_-[\rho_t\le e^{0.05\sqrt t}]\,\rho_t\,\tfrac{R-\bar R}{\sigma}\,\nabla\log\pi_\theta",
        ),
        (
            "deepseek_v32",
            {"norm_length": 9, "aggregation": "seq-mean-token-sum-norm", "selection": "mixed_groups"},
            r"\tfrac1{NL}\sum_{i,t} \big[M^{[0.8,\,1.2]}(r_t)\,M_-[e^{-0.5}\le \bar w]\,r_t\,(R-\bar R)"
            r"-\beta\,r_t\ln\tfrac{\pi_\theta}{\pi_{ref}}\big]\,\nabla\log\pi_\theta"
            r"\ \text{(only groups with contrast)}",
        ),
        (
            "icepop",
            {"aggregation": "token-mean", "factors": (Factor("theta_mu", "sequence_mean", low=0.5),)},
            r"\tfrac{1}{\sum_i\lvert y_i\rvert}\sum_{i,t} M^{[0.8,\,1.2]}(r_t)\,1[0.5\le g_t\le 5]\,\max(\bar w,0.5)\,"
            r"\tfrac{R-\bar R}{\sigma}\,\nabla\log\pi_\theta",
        ),
        (
            "raft",
            {"masks": (Mask("old_mu", high=2.0, denominator="leave"),)},
            r"\tfrac1N\sum_i\tfrac1{\lvert y_i\rvert}\sum_t 1[g_t\le 2]\,1[\text{correct}]\,\nabla\log\pi_\theta"
            r"\ \text{(masked tokens leave D)}",
        ),
    ],
)
def test_a_formula_is_printed_from_its_record(name: str, parts: dict[str, Any], expected: str):
    assert TOOL["formula"](replace(OBJECTIVES[name], **parts)) == f"${expected}$"


def test_no_row_is_told_apart_by_its_name():
    assert len({TOOL["formula"](objective) for objective in OBJECTIVES.values()}) == len(OBJECTIVES)


def test_every_advantage_has_a_formula():
    assert set(TOOL["ADVANTAGES"]) == set(get_args(AdvantageName))


def test_every_part_is_described():
    for kind in (Objective, Mask, Factor, Gate, Penalty):
        assert set(TOOL["field_descriptions"](kind)) == set(kind.__dataclass_fields__)
