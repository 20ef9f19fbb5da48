"""The page about other libraries is what was recorded and their pins can be read."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

import environments
import resolve_beside
from resolve_beside import ALONE, FOLDER

ROOT = Path(__file__).parents[1]
FOUND = resolve_beside.neighbours()
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def test_every_neighbour_has_a_record():
    assert {path.stem for path in FOLDER.glob("*.json")} == set(FOUND)


@pytest.mark.parametrize("name", FOUND)
def test_every_extra_was_asked_for_and_every_pin_can_be_read(name):
    neighbour, answers = FOUND[name], resolve_beside.read_answers(FOUND)[name]
    assert set(neighbour.extras) - {"core"} <= set(EXTRAS)
    assert set(answers) == {"asked", ALONE, *neighbour.extras}
    pins = {pin.name: pin for pin in map(Requirement, neighbour.pins)}
    assert len(pins) == len(neighbour.pins)
    for extra in {ALONE, *neighbour.extras} - {"asked"}:
        for package, version in answers[extra].get("versions", {}).items():
            assert package not in pins or Version(version) in pins[package].specifier


def test_the_extras_of_the_repository_accept_what_was_resolved():
    """A bound that was narrowed since makes the page wrong. SGLang's begins with the oldest release of the tests."""
    (sglang,) = map(Requirement, EXTRAS["sglang"])
    assert str(sglang.specifier) == f">={min(environments.SGLANG_RELEASES, key=Version)}"
    for name, answers in resolve_beside.read_answers(FOUND).items():
        for extra in set(FOUND[name].extras) & set(EXTRAS):
            versions = answers[extra].get("versions", {})
            python = {"python_version": ".".join(FOUND[name].python.split(".")[:2])}
            for needed in map(Requirement, EXTRAS[extra]):
                asked = needed.marker is None or needed.marker.evaluate(python)
                if asked and needed.name in versions:
                    assert Version(versions[needed.name]) in needed.specifier, (name, extra)
