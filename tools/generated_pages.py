"""Writes the generated pages of docs/ anew, and says which have changed.

    python tools/generated_pages.py [PAGE ...]            # all without a name; `make docs` runs this
    python tools/generated_pages.py --check [PAGE ...]    # writes nothing; 1 if a page is not what its tool gives

The tools read the code and recorded rows, and measure nothing. MEASURED lists what needs a measurement.
"""

import argparse
import difflib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = {
    "config.md": "config_doc.py",
    "evidence.md": "evidence.py page",
    "families.md": "families.py --only",
    "health.md": "health_doc.py",
    "neighbours.md": "resolve_beside.py --page",
    "objectives.md": "objectives_doc.py",
    "verl.md": "verl_rows.py",
    "version_matrix.md": "version_matrix.py --releases",
}
"""Page, and the tool that writes it to the path behind --out."""
MEASURED = {
    "benchmarks.md": "make bench: an hour of a machine for itself, and SGLang",
    "evidence/outcomes.jsonl.gz": "tools/evidence.py run DIR --profile night, and gather DIR: two hours",
    "evidence/rows.json": "tools/evidence.py row: ten minutes",
    "minirl_question.md": "tools/minirl_question.py: hours; its tables are copied by hand",
    "quickstart.png": "tools/readme_picture.py: a run of the quickstart",
    "replay_loops.md": "tools/replay_matrix.py --loops --out docs/replay_loops.md: 15 minutes",
    "replay_matrix.md": "tools/replay_matrix.py --out docs/replay_matrix.md: an hour",
}
"""What is measured and therefore not made anew: the command, and what it needs.

The rows behind families.md, neighbours.md and version_matrix.md are measured too, by the same tools without the flag.
"""


def words_for(name: str, out: Path) -> list[str]:
    """Return the command that writes the page to ``out``."""
    tool, *flags = PAGES[name].split()
    return [sys.executable, str(ROOT / "tools" / tool), *flags, "--out", str(out)]


def generate(name: str) -> str:
    """Return the text that the page's tool gives. SystemExit, with the end of the tool's output, if the tool fails."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / name
        done = subprocess.run(words_for(name, out), cwd=ROOT, capture_output=True, text=True)
        if done.returncode or not out.is_file():
            raise SystemExit(f"docs/{name}: tools/{PAGES[name]} failed:\n{(done.stdout + done.stderr)[-2000:]}")
        return out.read_text("utf-8")


def changed_lines(old: str, new: str) -> str:
    """Return how many lines a page has gained and lost, as "+3 -1"."""
    marks = [line[0] for line in difflib.ndiff(old.splitlines(), new.splitlines())]
    return f"+{marks.count('+')} -{marks.count('-')}"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", metavar="PAGE", help=f"of {', '.join(PAGES)}; all without a name")
    parser.add_argument("--check", action="store_true", help="write nothing")
    given = parser.parse_args(words)
    if unknown := set(given.pages) - set(PAGES):
        parser.error(f"found {', '.join(sorted(unknown))}, expected some of {', '.join(PAGES)}")
    names, num_changed = given.pages or [*PAGES], 0
    with ThreadPoolExecutor(2) as pool:
        for name, text in zip(names, pool.map(generate, names), strict=True):
            page = DOCS / name
            old = page.read_text("utf-8") if page.is_file() else ""
            if old != text:
                num_changed += 1
                verb = "not what its tool gives" if given.check else "changed"
                print(f"docs: {verb}: docs/{name} ({changed_lines(old, text)})")
                if not given.check:
                    page.write_text(text, "utf-8")
    if not given.pages:
        print("docs: left alone, because they are measured: " + ", ".join(MEASURED))
    print(f"docs: {len(names) - num_changed} of {len(names)} generated pages unchanged")
    return int(given.check and num_changed > 0)


if __name__ == "__main__":
    sys.exit(main())
