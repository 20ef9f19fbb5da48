"""Repeat the experiments of docs/evidence.md.

    python tools/evidence.py run DIR                    the headline's runs, half an hour on two cores
    python tools/evidence.py run DIR --profile night    all grids; --grid NAME takes one
    python tools/evidence.py status DIR                 what has run
    python tools/evidence.py report DIR                 predictions and figures of what has run, in DIR/report
    python tools/evidence.py row [NUMBER ...]           measure the smaller experiments anew, and draw them

    python tools/evidence.py gather DIR                 store the runs of DIR, and their figures, for the documentation
    python tools/evidence.py page --out PAGE            the page, of what is stored

A killed command goes on where it stopped: give it again. A run is a function of its cell and its seed.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trials import figures, outcomes, page, testbed
from trials.grids import TABLES, Cell, runs_of
from trials.results import read_folder, write_archive

from megarl.files.writing import write_atomically


def train_grids(folder: Path, grids: list[str]) -> None:
    """Train, one after another, the runs without an outcome that no other worker trains; first their cold starts."""
    testbed.die_with_parent()
    testbed.warm_up()
    runs = [run for run in runs_of(grids) if not is_stored(folder, *run)]
    for waits in (False, True):
        for cold_start, seed in {(cell.cold_start, seed): None for cell, seed in runs}:
            with holding(folder / "claims" / f"start-{seed}-{cold_start}", waits) as is_mine:
                if is_mine:
                    testbed.make_start(folder, seed, cold_start)
    for cell, seed in runs:
        with holding(folder / "claims" / f"{cell.name}-{seed}") as is_mine:
            if is_mine and not is_stored(folder, cell, seed):
                train_run(folder, cell, seed)


def train_run(folder: Path, cell: Cell, seed: int) -> None:
    """Train one run, and store its outcome."""
    begun, digest, path = time.monotonic(), testbed.fingerprint(cell, seed), outcome_path(folder, cell, seed)
    testbed.train_cell(folder, cell, seed)
    outcome = outcomes.read_outcome(folder / "runs" / cell.name / f"seed{seed}", cell, seed, digest)
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, outcomes.to_line(outcome).encode())
    words = "collapsed" if outcome.has_collapsed else "stands"
    seconds = time.monotonic() - begun
    print(f"{cell.name} seed {seed}: {words}, last rewards {outcome.final:.2f} ({seconds:.0f} s)", flush=True)


def is_stored(folder: Path, cell: Cell, seed: int) -> bool:
    """Whether the outcome of a run is stored. SystemExit if it is of another testbed."""
    path = outcome_path(folder, cell, seed)
    if not path.exists():
        return False
    if outcomes.from_line(path.read_text()).digest != testbed.fingerprint(cell, seed):
        raise SystemExit(f"{path} is of another testbed or grid: choose another folder, or remove this one")
    return True


def outcome_path(folder: Path, cell: Cell, seed: int) -> Path:
    """Where the outcome of a run is stored."""
    return folder / "outcomes" / f"{cell.name}.seed{seed}.json"


@contextmanager
def holding(path: Path, waits: bool = False) -> Iterator[bool]:
    """Hold the lock of a file, which ends with the process; False if another process has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True


def run(folder: Path, grids: list[str], workers: int) -> None:
    """Train what is missing of the grids, with so many workers."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=train_grids, args=(folder, grids)) for _ in range(workers)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit("a worker broke off; what had finished is stored: give the command again")
    if missing := [run for run in runs_of(grids) if not is_stored(folder, *run)]:
        raise SystemExit(f"{len(missing)} runs are missing, because another process holds them: give the command again")


def print_status(folder: Path) -> None:
    """Print how many runs of each grid are stored."""
    for grid in TABLES["grids"]:
        runs = runs_of([grid])
        stored = sum(is_stored(folder, cell, seed) for cell, seed in runs)
        print(f"{grid:14} {stored:4} of {len(runs)} runs")


def measure_rows(numbers: list[int]) -> None:
    """Measure the smaller experiments, store their data, and draw them; all without numbers."""
    from trials import rows

    if unknown := {*numbers} - {row.number for row in rows.ALL}:
        raise SystemExit(f"found {unknown}, expected rows 4 to 18")
    path = page.STORE / "rows.json"
    stored = json.loads(path.read_text()) if path.exists() else {}
    for row in rows.ALL:
        if not numbers or row.number in numbers:
            stored[str(row.number)] = data = shorten(row.measure())
            figure = figures.make_figure(7, 3.2)
            row.draw(figure, data)
            figures.save(figure, page.STORE / f"row{row.number}.svg")
            ordered = {key: stored[key] for key in sorted(stored, key=int)}
            lines = ",\n".join(f'"{key}": {json.dumps(value, separators=(",", ":"))}' for key, value in ordered.items())
            write_atomically(path, f"{{\n{lines}\n}}\n".encode())
            print(f"{row.number}. {row.title}: {row.conclude(data)}", flush=True)


def shorten(value: Any) -> Any:
    """JSON values with floats of ten digits."""
    if isinstance(value, float):
        return float(f"{value:.10g}")
    if isinstance(value, dict):
        return {str(key): shorten(part) for key, part in value.items()}
    return [shorten(part) for part in value] if isinstance(value, (list, tuple)) else value


def read_words() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("run", "status", "report", "gather"):
        command = commands.add_parser(name)
        command.add_argument("folder", type=lambda text: Path(text).resolve())
        if name == "run":
            command.add_argument("--profile", choices=TABLES["profiles"], default="headline")
            command.add_argument("--grid", choices=TABLES["grids"], action="append", help="instead of a profile")
            command.add_argument("--workers", type=int, default=2)
    commands.add_parser("row").add_argument("numbers", type=int, nargs="*")
    commands.add_parser("page").add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def main() -> None:
    """Run the command."""
    args = read_words()
    match args.command:
        case "run":
            run(args.folder, args.grid or TABLES["profiles"][args.profile], args.workers)
            report(args.folder)
        case "status":
            print_status(args.folder)
        case "report":
            report(args.folder)
        case "gather":
            write_archive(args.folder, page.STORE / "outcomes.jsonl.gz")
            page.write_figures(read_folder(args.folder), page.STORE)
        case "row":
            measure_rows(args.numbers)
        case "page":
            from trials import rows

            args.out.write_text(page.make_page(rows.ALL), "utf-8")


def report(folder: Path) -> None:
    """Write figures and predictions of a folder's runs, and print the predictions."""
    results = read_folder(folder)
    page.write_figures(results, folder / "report")
    text = page.list_predictions(results)
    write_atomically(folder / "report" / "predictions.md", (text + "\n").encode())
    print(f"{text}\n\nfigures: {folder / 'report'}")


if __name__ == "__main__":
    main()
