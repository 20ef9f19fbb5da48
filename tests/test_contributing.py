"""CONTRIBUTING.md can be followed: its two examples in a copy of the repository, its commits, and its files."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
STEP = re.compile(r'<!-- try: (append|before "(?P<mark>.*?)") (?P<file>\S+) -->\n```\w+\n(?P<code>.*?)```', re.DOTALL)


def run(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=3600)


def try_section(title: str, folder: Path) -> tuple[set[str], list[list[str]]]:
    """Edit the copy as the section says; the edited files, and the section's commands."""
    section = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    edited = set()
    for step in STEP.finditer(section):
        path, code = folder / step["file"], step["code"]
        text = path.read_text("utf-8")
        if step["mark"] is None:
            text = f"{text}\n{code}"
        else:
            mark = step["mark"].replace('\\"', '"')
            assert text.count(f"\n{mark}") >= 1, f"{step['file']} has no line that begins with {mark!r}"
            gap = "\n\n" if code.startswith("def ") else ""
            text = text.replace(f"\n{mark}", f"\n{code}{gap}{mark}", 1)
        path.write_text(text, "utf-8")
        edited.add(step["file"])
    commands = re.findall(r"^    python (.*?)(?: +#.*)?$", section, re.MULTILINE)
    return edited, [[sys.executable, "-W", "ignore", *re.findall(r'"[^"]*"|\S+', words)] for words in commands]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for name in ("megarl", "tools", "tests", "docs", "launch"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("pyproject.toml", "README.md", "CONTRIBUTING.md"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.gate
@pytest.mark.parametrize(
    ("title", "name", "files", "pages"),
    [
        ("A health check", "unjudged_share", 2, {"config.md", "health.md"}),
        ("An objective row", "grpo_wide", 2, {"objectives.md", "verl.md"}),
    ],
)
def test_a_stranger_adds(title: str, name: str, files: int, pages: set[str], copy: Path) -> None:
    edited, commands = try_section(title, copy)
    assert len(edited) == files
    generate, test = commands
    assert {*generate[4:]} == pages
    done = run([*generate, "--check"], copy)
    assert done.returncode == 1, done.stdout + done.stderr
    assert run(generate, copy).returncode == 0
    assert all(name in (copy / "docs" / page).read_text() for page in pages)
    done = run([*test, "-p", "no:cacheprovider"], copy)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    texts = [path for kind in ("py", "toml", "md") for path in copy.rglob(f"*.{kind}")]
    places = [str(path.relative_to(copy)) for path in texts if path.is_file()]
    changed = {place for place in places if (copy / place).read_bytes() != (ROOT / place).read_bytes()}
    assert changed == edited | {f"docs/{page}" for page in pages}
    for words in (["check", "--quiet"], ["format", "--quiet", "--check"]):
        done = run(
            [sys.executable, "-m", "ruff", *words, *sorted(place for place in edited if place.endswith("py"))], copy
        )
        assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_an_example_that_is_wrong_fails_its_tests(copy: Path) -> None:
    """A limit that a calm step is beyond, and a metric that no run has."""
    table = copy / "megarl" / "watch" / "limits.toml"
    text = table.read_text("utf-8")
    row = STEP.search(PAGE)
    assert row
    bad = row["code"].replace("limits = [0.1, 0.5]", "limits = [0.0]").replace('read = "unjudged"\n', "")
    table.write_text(f"{text}\n{bad}".replace("reward/judged", "reward/jugded"), "utf-8")
    done = run(
        [sys.executable, "-m", "pytest", "-q", "-x", "tests/trainer/test_health.py", "-p", "no:cacheprovider"], copy
    )
    assert done.returncode == 1
    assert "unjudged_share: no metrics are calm" in done.stdout
    assert "FAILED tests/trainer/test_health.py::test_every_metric_of_a_check_is_one_that_a_run_has" in done.stdout


def test_its_files_exist() -> None:
    names = re.findall(r"`((?:megarl|tests|tools|docs)/[\w./]+)`", PAGE)
    assert len(names) > 30
    assert not [name for name in names if not (ROOT / name).exists()]


def test_its_commits_exist_under_these_subjects() -> None:
    git = ["git", "-C", str(ROOT)]
    if subprocess.run([*git, "rev-parse", "--is-shallow-repository"], capture_output=True).stdout.strip() != b"false":
        pytest.skip("needs the history of a git checkout")
    commits = re.findall(r"\| `([0-9a-f]{8})` (.*?) \|$", PAGE, re.MULTILINE)
    assert len(commits) > 10
    logs = [
        subprocess.run([*git, "log", "-1", "--format=%s", commit], capture_output=True, text=True)
        for commit, _ in commits
    ]
    if all(done.returncode for done in logs):
        pytest.skip("needs the history of the project: the checkout has another one")
    for (commit, subject), done in zip(commits, logs, strict=True):
        assert done.stdout.strip() == subject, commit
