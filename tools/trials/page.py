"""Tables of docs/evidence.md, and the page from its text in page.md and what is stored in docs/evidence/."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import Any

from trials.figures import CURVES, FIGURES, GAPS, REPLAYS, Line, save
from trials.grids import ARMS, TABLES
from trials.outcomes import Outcome
from trials.results import NotRunError, Results, Runs, count_collapsed, read_archive
from trials.rows.source_row import SourceRow
from trials.verdicts import JUDGES, read_first_k3

DOCS = Path(__file__).resolve().parents[2] / "docs"
STORE = DOCS / "evidence"
ROW = re.compile(r"^\| (P\d+) \| (.*) \| (.*) \| (.*) \|$", re.MULTILINE)


def make_page(rows: Sequence[SourceRow]) -> str:
    """Return the text of docs/evidence.md, with its tables made of what is stored."""
    results = read_archive(STORE / "outcomes.jsonl.gz")
    stored = json.loads((STORE / "rows.json").read_text())
    tables = {name: make(results) for name, make in TABLES_OF_PAGE.items()}
    tables["rows"] = "\n".join(describe_row(row, stored[str(row.number)]) for row in rows)
    text = Path(__file__).with_name("page.md").read_text("utf-8")
    return re.sub(r"^\{(\w+)\}$", lambda place: tables[place[1]], text, flags=re.MULTILINE)


def write_figures(results: Results, folder: Path) -> None:
    """Write the figures of all grids into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, plot in FIGURES.items():
        save(plot(results), folder / f"{name}.svg")


def list_predictions(results: Results) -> str:
    """The table of predictions with what was measured; those without enough runs are named below it."""
    lines = ["| | claim | expected here | measured | verdict |", "|---" * 5 + "|"]
    missing = []
    for name, claim, _, expected in ROW.findall((STORE / "preregistered.md").read_text("utf-8")):
        try:
            measured, verdict = JUDGES[name](results)
        except NotRunError:
            missing.append(name)
        else:
            lines.append(f"| {name} | {claim} | {expected} | {measured} | {verdict} |")
    if missing:
        lines += ["", f"Not judged yet, because too few seeds have run: {', '.join(missing)}."]
    return "\n".join(lines)


def list_calibration(results: Results) -> str:
    """Final rewards of the calibration."""
    [grid] = TABLES["grids"]["calibration"]
    lines = ["| arm | gap | " + " | ".join(f"{lr:g}" for lr in grid["lr"]) + " |", "|---" * (2 + len(grid["lr"])) + "|"]
    for arm, gap in product(grid["arms"], grid["gap"]):
        cells = [results.runs(arm, "none", calibrates=True, gap=gap, lr=lr) for lr in grid["lr"]]
        lines.append(f"| {ARMS[arm]['label']} | {gap} | {' | '.join(map(list_finals, cells))} |")
    return "\n".join(lines)


def list_finals(runs: Runs) -> str:
    """Each run's final reward; † is a collapse."""
    return ", ".join(f"{run.final:.2f}{'†' if run.has_collapsed else ''}" for run in runs.values()) or "–"


def list_arms(results: Results) -> str:
    """Median final reward, range and collapses of all arms and replays."""
    lines = ["| arm | " + " | ".join(REPLAYS.values()) + " |", "|---" * 4 + "|"]
    for arm in TABLES["grids"]["trust_regions"][0]["arms"]:
        lines.append(
            f"| {ARMS[arm]['label']} | " + " | ".join(sum_up(results.runs(arm, replay)) for replay in REPLAYS) + " |"
        )
    return "\n".join(lines)


def sum_up(runs: Runs) -> str:
    """Median final reward [range]; collapsed runs of all, with their interval."""
    if not runs:
        return "–"
    finals = [run.final for run in runs.values()]
    return f"{median(finals):.2f} [{min(finals):.2f}, {max(finals):.2f}]; {count_collapsed(runs)}"


def list_gaps(results: Results) -> str:
    """k3 and flips of the first step and final rewards of MiniRL (C = 5), by gap and replay."""
    lines = ["| gap | replay | k3 | flips | final reward |", "|---" * 5 + "|"]
    for gap in GAPS:
        for replay, label in REPLAYS.items():
            if runs := results.runs("minirl_c5", replay, gap=gap):
                flips = median(run.series["flip"][0] for run in runs.values())
                divergence = median(map(read_first_k3, runs.values()))
                lines.append(f"| {gap} | {label} | {divergence:.1e} | {flips:.1%} | {sum_up(runs)} |")
    return "\n".join(lines)


def list_cells(results: Results, columns: Mapping[str, Sequence[Line]]) -> str:
    """The cells of a figure: median final reward, entropy of the last quarter, growth of k3, last held-out score."""
    lines = ["| | final reward | entropy, last quarter | growth of k3 | held-out score at the end |", "|---" * 5 + "|"]
    for column, line in ((column, line) for column, cells in columns.items() for line in cells):
        if runs := results.runs(line.arm, line.replay, **line.axes):
            every = list(runs.values())
            entropy, growth = median(map(last_entropy, every)), median(run.growth for run in every)
            score = median(run.scores[-1] for run in every)
            lines.append(f"| {column}, {line.label} | {sum_up(runs)} | {entropy:.2f} | {growth:.1f} | {score:.2f} |")
    return "\n".join(lines)


def last_entropy(run: Outcome) -> float:
    """Mean entropy of the last quarter that ran."""
    return mean(run.series["entropy"][-run.window :])


TABLES_OF_PAGE: dict[str, Callable[[Results], str]] = {
    "predictions": list_predictions, "calibration": list_calibration, "arms": list_arms, "gaps": list_gaps,
} | {name: partial(list_cells, columns=columns) for name, columns in CURVES.items()}  # fmt: skip


def describe_row(row: SourceRow, data: dict[str, Any]) -> str:
    """The part of the page about one of the smaller experiments."""
    kind = "Exact." if row.is_exact else "A direction."
    command = f"`python tools/evidence.py row {row.number}`"
    picture = f"![{row.title}](evidence/row{row.number}.svg)"
    conclusion = f"{kind} {row.conclude(data)} Again: {command}."
    return f"### {row.number}. {row.title}\n\n{row.claim}\n\n{picture}\n\n{conclusion}\n"
