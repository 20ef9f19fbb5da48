from __future__ import annotations

import runpy
from pathlib import Path

from megarl.core.objectives import OBJECTIVES

ROOT = Path(__file__).parent.parent.parent
TOOL = runpy.run_path(str(ROOT / "tools" / "objectives_doc.py"))


def test_the_page_is_what_the_table_gives():
    assert (ROOT / "docs" / "objectives.md").read_text() == TOOL["document"](), "run python tools/objectives_doc.py"


def test_formulas_come_from_the_parts():
    formula = TOOL["formula"]
    assert r"M^{[0.8,\,1.27]}(r_t)\,\min(w_t,5)\,(R-\bar R)" in formula(OBJECTIVES["minirl"])
    assert r"(\rho_t)\,\rho_t" in formula(OBJECTIVES["ctpo"])
    assert r"r_t^{0.5}" in formula(OBJECTIVES["power"])
    # Rows with the same mathematics must have the same parts, and the other way round: none is told apart by name.
    by_formula = {formula(objective): name for name, objective in OBJECTIVES.items()}
    assert set(OBJECTIVES) - set(by_formula.values()) == set()


def test_every_part_is_described():
    described = TOOL["field_descriptions"]()
    assert set(described) == set(type(OBJECTIVES["minirl"]).__dataclass_fields__)
