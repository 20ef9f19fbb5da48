"""The pages name files and pages that exist."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import preloaded
import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)")
FILE = re.compile(r"`([a-z_0-9]+(?:/[a-z_0-9]+)*(?:\.py|/))`")


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in LINK.findall(page.read_text()):
        path = page if not target else (page.parent / target)
        assert path.exists(), f"{page.name} links to {target}, which does not exist"
        assert not anchor or anchor in anchors(path), f"{page.name} links to {target}#{anchor}: no such heading"


def test_the_version_matrix_is_what_was_measured(tmp_path: Path) -> None:
    words = [sys.executable, str(ROOT / "tools" / "version_matrix.py"), "--releases", "--out", str(tmp_path / "page")]
    done = preloaded.run(words, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "page").read_text() == (ROOT / "docs" / "version_matrix.md").read_text()


NAMED = ("README.md", "docs/architecture.md", "docs/sampling.md", "docs/rewards.md", "docs/replay.md")
ELSEWHERE = {"traces/", "adapters/", "verify/"}
"""Folders of a run, and packages that a page says are not there."""


@pytest.mark.parametrize("name", NAMED)
def test_named_files_exist(name: str) -> None:
    """A file is named from the root of the repository or of the package, or after another one of its folder."""
    for line in (ROOT / name).read_text().splitlines():
        folders = {ROOT, ROOT / "megarl"}
        for file in FILE.findall(line):
            places = [folder / file for folder in folders if (folder / file).exists()]
            assert places or file in ELSEWHERE, f"{name} names {file}, which does not exist: {line.strip()}"
            folders |= {place if place.is_dir() else place.parent for place in places}
