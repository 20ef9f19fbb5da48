"""The page about other libraries is what was recorded, their pins can be read, and a conflict is told in one line."""

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
from resolve_beside import ALONE, FOLDER, PAGE, ResolverError, read_conflict

ROOT = Path(__file__).parents[1]
TOLD = """\
error: No solution found when resolving dependencies
  cause: Because sglang==0.5.8 depends on transformers==4.57.1 and megarl-moe[train]==0.1.0 depends on transformers>=5.3,<5.25, we can conclude that megarl-moe[train]==0.1.0 and sglang==0.5.8 are incompatible.
         And because only megarl-moe[train]==0.1.0 is available, we can conclude that sglang==0.5.8 and all versions of megarl-moe[train] are incompatible.
         And because you require megarl-moe[train] and sglang==0.5.8, we can conclude that your requirements are unsatisfiable.
"""  # noqa: E501
FOUND = resolve_beside.neighbours()
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def test_the_page_is_what_was_recorded():
    assert PAGE.read_text() == resolve_beside.page(FOUND, resolve_beside.read_answers(FOUND))


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
    """A bound that was narrowed since makes the page wrong."""
    for name, answers in resolve_beside.read_answers(FOUND).items():
        for extra in set(FOUND[name].extras) & set(EXTRAS):
            versions = answers[extra].get("versions", {})
            python = {"python_version": ".".join(FOUND[name].python.split(".")[:2])}
            for needed in map(Requirement, EXTRAS[extra]):
                asked = needed.marker is None or needed.marker.evaluate(python)
                if asked and needed.name in versions:
                    assert Version(versions[needed.name]) in needed.specifier, (name, extra)


def test_the_sglang_extra_begins_with_the_oldest_release_that_the_tests_run():
    (needed,) = map(Requirement, EXTRAS["sglang"])
    assert str(needed.specifier) == f">={min(environments.SGLANG_RELEASES, key=Version)}"


def test_a_conflict_is_told_in_one_line():
    assert read_conflict(TOLD) == (
        "sglang==0.5.8 depends on transformers==4.57.1; megarl-moe[train]==0.1.0 depends on transformers>=5.3,<5.25"
    )


def test_what_is_neither_versions_nor_a_conflict_is_an_error():
    with pytest.raises(ResolverError, match=r"gave no answer.*failed to lookup"):
        read_conflict("error: failed to lookup address information")


def test_folder_has_a_record_for_each_neighbour():
    assert {path.stem for path in FOLDER.glob("*.json")} == set(FOUND)
