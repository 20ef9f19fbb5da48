from __future__ import annotations

import runpy
from pathlib import Path

from megarl.core.objectives import OBJECTIVES, Factor, Gate, Mask, Objective, Penalty

ROOT = Path(__file__).parent.parent.parent
TOOL = runpy.run_path(str(ROOT / "tools" / "objectives_doc.py"))


def test_the_page_is_what_the_table_gives():
    assert (ROOT / "docs" / "objectives.md").read_text() == TOOL["document"](), "run python tools/objectives_doc.py"


def test_formulas_come_from_the_parts():
    formula = TOOL["formula"]
    assert r"M^{[0.8,\,1.27]}(r_t)\,\min(w_t,5)\,(R-\bar R)" in formula(OBJECTIVES["minirl"])
    assert r"(\rho_t)\,M_-[\rho_t\le e^{0.05\sqrt t}]\,\rho_t" in formula(OBJECTIVES["ctpo"])
    assert r"1[0.5\le g_t\le 5]\,r_t\,g_t" in formula(OBJECTIVES["icepop"])
    assert r"r_t^{0.5}" in formula(OBJECTIVES["power"])
    # Rows with the same mathematics must have the same parts, and the other way round: none is told apart by name.
    by_formula = {formula(objective): name for name, objective in OBJECTIVES.items()}
    assert set(OBJECTIVES) - set(by_formula.values()) == set()


def test_every_part_is_described():
    for kind in (Objective, Mask, Factor, Gate, Penalty):
        assert set(TOOL["field_descriptions"](kind)) == set(kind.__dataclass_fields__)
