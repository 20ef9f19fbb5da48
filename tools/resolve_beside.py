"""Asks a resolver whether megarl's extras fit beside what other RL libraries pin; writes docs/neighbours.md.

    pip install uv                                        # the resolver; nothing else is installed
    python tools/resolve_beside.py                        # about six minutes, asks the package index
    python tools/resolve_beside.py slime miles            # these alone; the other rows stay as they were recorded
    python tools/resolve_beside.py --page                 # the page alone, from the records

A neighbour is ``docs/neighbours/NAME.toml``: where its pins were read, and the pins. The answer is recorded beside it
in ``NAME.json``. uv reads the metadata of packages and installs none of them.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "neighbours"
PAGE = ROOT / "docs" / "neighbours.md"
PLATFORM = "x86_64-manylinux_2_35"
TIMEOUT_S = 120
SHOWN = ("megatron-core", "torch", "transformers", "numpy", "transformer-engine", "sglang")
CORE = "core"
"""Stands for megarl without an extra."""
ALONE = "alone"
"""Stands for the pins without megarl, so that a conflict among them is not blamed on megarl."""
EMPTY = "empty"
"""The neighbour without pins: its row is what an extra brings into an empty environment."""

Answer = dict[str, Any]
"""{"versions": {name: version}, "packages": N, "download_mb": N}, or {"conflict": text}.

A record keeps the versions of SHOWN alone, and in "moved" {name: [alone, with megarl]}.
"""


class ResolverError(Exception):
    """The resolver could not be asked, or its answer was neither versions nor a conflict."""


@dataclass(frozen=True, slots=True)
class Neighbour:
    """What one library pins, as its file in ``docs/neighbours`` says."""

    title: str
    source: str
    """Repository and commit, or the package index."""
    date: str
    """Of the commit, or empty for what the package index has when it is asked."""
    python: str
    pins: tuple[str, ...]
    left_out: tuple[str, ...]
    """What it installs besides and no resolver of wheels can judge."""
    extras: tuple[str, ...] = (CORE, "megatron", "train")


def read_neighbour(path: Path) -> Neighbour:
    table = tomllib.loads(path.read_text())
    return Neighbour(**{name: tuple(value) if isinstance(value, list) else value for name, value in table.items()})


def neighbours() -> dict[str, Neighbour]:
    return {path.stem: read_neighbour(path) for path in sorted(FOLDER.glob("*.toml"))}


# The resolver


def find_uv() -> str:
    beside = Path(sys.executable).with_name("uv")
    uv = str(beside) if beside.exists() else shutil.which("uv")
    if uv is None:
        raise ResolverError("found no uv beside this Python or in PATH, expected one: pip install uv")
    return uv


def ask(uv: str, neighbour: Neighbour, extra: str) -> Answer:
    megarl = {ALONE: [], CORE: [f"megarl-moe @ {ROOT.as_uri()}"]}.get(extra, [f"megarl-moe[{extra}] @ {ROOT.as_uri()}"])
    with tempfile.TemporaryDirectory() as name:
        lock = Path(name) / "pylock.toml"
        target = ("--python-version", neighbour.python, "--python-platform", PLATFORM)
        output = ("--quiet", "--no-python-downloads", "--format", "pylock.toml", "--output-file", str(lock))
        given = "\n".join([*neighbour.pins, *megarl])
        try:
            done = subprocess.run(
                [uv, "pip", "compile", "-", *target, *output],
                **{"input": given, "capture_output": True, "text": True, "cwd": name, "timeout": TIMEOUT_S},
            )
        except subprocess.TimeoutExpired as error:
            what = f"{neighbour.title} with {extra}: found no answer within {TIMEOUT_S} s"
            raise ResolverError(f"{what}; ask again, or ask other neighbours by name") from error
        if done.returncode == 0:
            return read_lock(tomllib.loads(lock.read_text()))
    return {"conflict": read_conflict(done.stderr)}


def read_lock(lock: dict[str, Any]) -> Answer:
    packages = [package for package in lock.get("packages", []) if package["name"] != "megarl-moe"]
    return {
        "versions": {package["name"]: package["version"] for package in packages},
        "packages": len(packages),
        "download_mb": round(sum(map(_download_bytes, packages)) / 1e6),
    }


def _download_bytes(package: dict[str, Any]) -> int:
    """Of the largest wheel that fits, or of the source distribution where no wheel does."""
    files = package.get("wheels") or [package["sdist"]]
    return max(file["size"] for file in files)


def read_conflict(stderr: str) -> str:
    """Returns the facts of uv's explanation in one line: who depends on what, without its conclusions."""
    if "No solution found" not in stderr:
        raise ResolverError(f"uv gave no answer, expected versions or a conflict: {stderr.strip()}")
    told = " ".join(line.strip(" │╰─▶") for line in stderr.splitlines())
    clauses = [
        clause.strip()
        for reasons in re.findall(r"[Bb]ecause (.*?),? we can conclude", told)
        for clause in reasons.split(" and ")
    ]
    facts = [clause for clause in clauses if re.search(r" depends on | has no | needs ", clause)]
    return "; ".join(dict.fromkeys(facts)) or told.strip()


def record(uv: str, name: str, neighbour: Neighbour) -> None:
    alone = ask(uv, neighbour, ALONE)
    answers = {extra: shorten(ask(uv, neighbour, extra), alone) for extra in neighbour.extras}
    kept = {"asked": f"{datetime.now(UTC):%Y-%m-%d}", ALONE: shorten(alone, alone), **answers}
    (FOLDER / f"{name}.json").write_text(json.dumps(kept, indent=1) + "\n")


def shorten(answer: Answer, alone: Answer) -> Answer:
    """What is recorded: the versions that the page shows, and the packages that megarl moves."""
    if "conflict" in answer:
        return answer
    before, after = alone.get("versions", {}), answer["versions"]
    moved = {name: [before[name], after[name]] for name in before if after.get(name, before[name]) != before[name]}
    return answer | {"versions": {name: after[name] for name in SHOWN if name in after}, "moved": moved}


# The page


HEAD = """\
# Beside other libraries

Written by `tools/resolve_beside.py` from the pins in `docs/neighbours/NAME.toml` and the answers in `NAME.json`.

A resolver (`uv pip compile`, Linux on x86-64 with glibc 2.35) was given the pins of a library and an extra of megarl.
The resolver reads the metadata of packages and installs nothing: a row lists versions accepted by all packages, and
does not say that the versions ran. Installed and tried combinations are [at the end](#installed-together).

"""

MEANING = """\

- **Core** is `megarl-moe` without an extra. Versions are of the whole environment, packages of the library included.
- **Moves** names packages whose version changes if megarl is installed too. Rows without the word move no package.
- **`[sglang]`** was asked for libraries that install SGLang into the environment of the trainer. The extra is for
  a new environment of servers alone. Beside an older SGLang install `megarl-moe` without an extra
  ([releases that megarl samples with](sglang.md#releases)).
- A library that brings Megatron-Core itself (a fork, a submodule, a source tree) needs no extra of megarl: install
  `megarl-moe` alone. `megarl.replay` imports the installed torch and Megatron-Core. Working releases of Megatron-Core:
  [the version matrix](version_matrix.md).

"""


def page(found: dict[str, Neighbour], answers: dict[str, dict[str, Any]]) -> str:
    others = {name: neighbour for name, neighbour in found.items() if name != EMPTY}
    pins = [
        (n.title, _source(n, answers[name]), n.python, _code(n.pins), "; ".join(n.left_out) or "nothing")
        for name, n in others.items()
    ]
    beside = [
        (n.title, *(cell(answers[name], extra) for extra in (CORE, "megatron", "train", "sglang")))
        for name, n in others.items()
    ]
    empty = [
        (f"`{_install(extra)}`", *_size(answers[EMPTY][extra]), _versions(answers[EMPTY][extra]))
        for extra in found[EMPTY].extras
    ]
    return "".join(
        (
            HEAD,
            "## What was resolved\n\n",
            _table(("beside", "core", "`[megatron]`", "`[train]`", "`[sglang]`"), beside),
            MEANING,
            "## What they pin\n\n",
            _table(("library", "source", "Python", "resolved pins", "left out"), pins),
            f"\n## In an empty environment\n\nPython {found[EMPTY].python}, torch from PyPI (for CUDA). ",
            "Nothing was installed: the sizes are those of the wheels in the package index.\n\n",
            _table(("extra", "packages", "MB to download", "brings"), empty),
            "\n",
            (FOLDER / "installed.md").read_text(),
        )
    )


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in [head, ("---",) * len(head), *rows])


def _source(neighbour: Neighbour, answers: dict[str, Any]) -> str:
    return f"{neighbour.source}, {neighbour.date or answers['asked']}"


def _code(words: tuple[str, ...]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def _install(extra: str) -> str:
    return "megarl-moe" if extra == CORE else f"megarl-moe[{extra}]"


def _size(answer: Answer) -> tuple[str, str]:
    return ("", "") if "conflict" in answer else (f"{answer['packages']}", f"{answer['download_mb']:,}")


def _versions(answer: Answer) -> str:
    if "conflict" in answer:
        return f"**conflict**: {answer['conflict']}"
    return ", ".join(f"{name} {version}" for name, version in answer["versions"].items())


def cell(answers: dict[str, Any], extra: str) -> str:
    """Versions, and the packages that megarl moves; or the conflict, and whether the pins have it without megarl."""
    if extra not in answers:
        return "not asked"
    if "conflict" in answers[ALONE]:
        return f"the pins conflict without megarl: {answers[ALONE]['conflict']}"
    moved = answers[extra].get("moved", {})
    told = "; moves " + ", ".join(f"{name} {old} to {new}" for name, (old, new) in moved.items()) if moved else ""
    return _versions(answers[extra]) + told


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="neighbours to ask for; all without a name")
    parser.add_argument("--page", action="store_true", help="write the page alone")
    parser.add_argument("--out", type=Path, default=PAGE, help="the page")
    given = parser.parse_args()
    found = neighbours()
    if unknown := set(given.names) - set(found):
        parser.error(f"found {', '.join(sorted(unknown))}, expected some of {', '.join(found)}")
    try:
        for name in () if given.page else given.names or found:
            record(find_uv(), name, found[name])
            print(f"asked: {name}", flush=True)
    except ResolverError as error:
        print(f"resolve_beside: error: {error}", file=sys.stderr)
        return 2
    given.out.write_text(page(found, read_answers(found)))
    print(f"written: {given.out}")
    return 0


def read_answers(found: dict[str, Neighbour]) -> dict[str, dict[str, Any]]:
    return {name: json.loads((FOLDER / f"{name}.json").read_text()) for name in found}


if __name__ == "__main__":
    sys.exit(main())
