#!/usr/bin/env python
"""Counts the lines of megarl that an import of each part of the kit brings along, and fails above a budget.

The kit must stay small enough to be taken out and read: a loop of your own imports these parts and nothing else. Lines
are all lines of the files, docstrings and blanks included. ``make check`` runs this.
"""

from __future__ import annotations

import json
import subprocess
import sys

BUDGETS = {
    "megarl.core.objectives": 3500,
    "megarl.routes, megarl.routes.answers, megarl.routes.turns": 1800,
    "megarl.replay": 3000,
    "megarl.plugin": 7000,
}
"""Lines, by what is imported."""
OUTSIDE_THE_KIT = ("config", "data", "models", "megatron", "engines", "trainer", "ops", "run", "stand_ins")
_COUNT = """
import json, sys
import {modules}
files = {{name: module.__file__ for name, module in sys.modules.items() if name.partition(".")[0] == "megarl"}}
print(json.dumps({{name: len(open(file, "rb").readlines()) for name, file in files.items() if file}}))
"""


def count_lines(modules: str) -> dict[str, int]:
    """Return the lines of each module of megarl that is loaded after this import, in a fresh interpreter."""
    words = [sys.executable, "-W", "ignore", "-c", _COUNT.format(modules=modules)]
    return json.loads(subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[-1])


def main() -> int:
    """Print a line for each part; 1 if one is too large, or imports a package outside the kit."""
    failed = False
    for modules, budget in BUDGETS.items():
        lines = count_lines(modules)
        foreign = [name for name in lines if name.split(".")[1:2] and name.split(".")[1] in OUTSIDE_THE_KIT]
        total = sum(lines.values())
        failed |= total > budget or bool(foreign)
        verdict = f"imports {', '.join(foreign)}" if foreign else "too large" if total > budget else "ok"
        print(f"{modules}: {total} lines in {len(lines)} modules, at most {budget}: {verdict}")
        if total > budget:
            largest = sorted(lines.items(), key=lambda item: -item[1])[:8]
            print("  largest:", ", ".join(f"{name} {count}" for name, count in largest))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
