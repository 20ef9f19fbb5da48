"""The pages name files, pages and commands that exist, and the site has every page."""

from __future__ import annotations

import re
import shlex
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

import generated_pages
import preloaded

from megarl.cli import main
from megarl.commands import COMMANDS
from megarl.files.hf_config import FAMILIES, LACKING

ROOT = Path(__file__).parents[1]
FOLDERS = [ROOT / "docs" / name for name in ("", "api", "evidence")]
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(path for folder in FOLDERS for path in folder.glob("*.md"))]
)
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)")


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


@pytest.mark.parametrize("name", generated_pages.PAGES)
def test_a_generated_page_is_what_its_tool_gives(name: str, tmp_path: Path) -> None:
    words = generated_pages.words_for(name, tmp_path / "page")
    done = preloaded.run(words, timeout=3600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert (tmp_path / "page").read_text() == (ROOT / "docs" / name).read_text(), "run make docs"


def test_every_page_that_a_tool_writes_is_made_anew_or_measured() -> None:
    says = re.compile(r"(?:Generated|Written) by [^\n]*tools/\w+\.py|writes this page")
    pages = {path.name for path in PAGES if says.search(path.read_text()) and path.name != "log.md"}
    measured = {*generated_pages.MEASURED}
    assert pages == {*generated_pages.PAGES} | (measured & pages)
    assert all((ROOT / "docs" / name).is_file() for name in measured)


def test_a_stale_page_fails_the_check_and_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generated_pages, "DOCS", tmp_path)
    page, whole = tmp_path / "config.md", (ROOT / "docs" / "config.md").read_text()
    page.write_text(whole.replace("## [train]", "## [trein]"))
    assert generated_pages.main(["--check", "config.md"]) == 1
    assert "[trein]" in page.read_text()
    assert generated_pages.main(["config.md"]) == 0
    assert page.read_text() == whole
    assert generated_pages.main(["--check", "config.md"]) == 0


def test_the_families_page_lists_every_family() -> None:
    page = (ROOT / "docs" / "families.md").read_text()
    families, refused = (
        page.partition(f"## {head}")[2].partition("## ")[0] for head in ("Model types", "What remains")
    )
    assert re.findall(r"^\| `(\w+)` \|", families, re.MULTILINE) == [*FAMILIES]
    assert dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", refused, re.MULTILINE)) == LACKING


def test_the_example_of_another_family_is_the_family_that_the_tests_run() -> None:
    page = (ROOT / "docs" / "convert.md").read_text().partition("## Another family")[2]
    for language, file in (("toml", "megarl/files/families.toml"), ("python", "tests/tiny_families.py")):
        block = re.search(rf"^    ```{language}\n(.*?)^    ```$", page, re.MULTILINE | re.DOTALL)
        assert block, language
        indent = "" if language == "toml" else "    "
        example = textwrap.indent(textwrap.dedent(block[1]), indent)
        assert "dots1" in example.splitlines()[0]
        assert example in (ROOT / file).read_text(), f"docs/convert.md shows another text than {file}"


def test_the_site_has_every_page_once() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    listed = re.findall(r"^ +- (?:[^:\n]+: )?(\S+\.md)$", nav, re.MULTILINE)
    assert sorted(listed) == sorted(path.relative_to(ROOT / "docs").as_posix() for path in PAGES if path.parent != ROOT)


PROGRAM = re.compile(r"\s*(?:\$ )?(?:\S*/)?(?:megarl|(?:torchrun|python)\S*(?: [^#]*)? -m megarl\.cli) (?P<words>.*)")
Mention = tuple[int, str, bool]


def mentions(text: str) -> Iterator[Mention]:
    """Line, words and whether it is a whole command (in a block of code), of all that begins with megarl in a page."""
    fenced = False
    for number, line in enumerate(re.sub(r"\\\n *", lambda end: " " * len(end[0]), text).splitlines(), start=1):
        fenced ^= line.startswith("```")
        is_code = fenced or line.startswith("    ")
        for part in re.split(r"; |&& ", line) if is_code else re.findall(r"`([^`]+)`", line):
            if found := PROGRAM.fullmatch(part):
                yield number, found["words"], is_code


def words_of(text: str) -> list[str]:
    """The words of a command: what stands in brackets is given, of alternatives the first; no redirection."""
    text = re.sub(r" >>? .*", "", text)
    text = re.sub(r"\[--table\.key value \.\.\.\]|\.\.\.", "", text)
    text = re.sub(r"(?<=\w)( \| \w+)+", "", text)
    return [word.strip("[]") for word in shlex.split(text, comments=True)]


ALL_MENTIONS = [
    pytest.param(words, is_code, id=f"{page.name}:{number}")
    for page in PAGES
    for number, words, is_code in mentions(page.read_text())
]


@pytest.mark.parametrize(("text", "is_code"), ALL_MENTIONS)
def test_commands_are_those_of_the_command_line(
    text: str, is_code: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The real command line reads every command of a block of code. One within a sentence may be a part of one."""
    words = words_of(text)
    for command in COMMANDS.values():
        monkeypatch.setattr(command, "run", lambda self, overrides: 0)
    if is_code:
        assert main(words) == 0, capsys.readouterr().err
        return
    command = next(name for name in (" ".join(words[:2]), words[0]) if name in COMMANDS or name == words[0])
    assert command in COMMANDS or command in ("COMMAND", "--help", "--version"), f"there is no megarl {command}"
    if command in COMMANDS:
        known = {f"--{name.replace('_', '-')}" for name in COMMANDS[command].__pydantic_fields__} | {"--help"}
        flags = {word for word in words if word.startswith("--") and "." not in word}
        assert flags <= known, f"megarl {command} has no {flags - known}"


def test_the_cluster_page_can_be_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its commands run in its order, as far as they need neither the model nor a network."""
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "cluster.md").read_text()
    ran = [words_of(words) for _, words, _ in mentions(text) if words.startswith(("recipes copy ", "plan "))]
    assert [words[0] for words in ran] == ["recipes", "recipes", "plan", "recipes"]
    for words in ran:
        assert main(words) == 0, capsys.readouterr().err
    assert "45.92 GiB  of 79 GiB" in capsys.readouterr().out
    submitted = re.search(r"^    sbatch .*--nodes (\d+) .*? (\S+\.sbatch) (\S+)$", text, re.MULTILINE)
    assert submitted
    assert int(submitted[1]) == 8
    assert all((tmp_path / name).is_file() for name in submitted.groups()[1:])
