"""``megarl simulate``: what each rule of sampling costs and gives on imagined prompts, before any is run.

Draws prompts whose pass rates fit given pass@k points, has the real rules sample them, and writes a table, its numbers
and pictures. What the columns mean: docs/simulate.md.
"""

from __future__ import annotations

import io
import json
import math
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from megarl.core.sampling import tier_cost
from megarl.data.files import write_atomically
from megarl.errors import ConfigError
from megarl.train import simulate_draw
from megarl.train.simulate_exact import Exact, exact
from megarl.train.simulate_fit import BetaMixture, fit, max_error
from megarl.train.simulate_known import Known, Shares, known_numbers, shared_budgets
from megarl.train.simulate_outcome import Outcome
from megarl.train.simulate_rules import Arm, Budget, arms, matched, run

RESULTS, TABLES = "results.json", "tables.txt"
PICTURES = ("pass_at_k.png", "cost.png", "counts.png", "rules.png")
_WIDTH = 132
_MOST = 256
"""Samples of a prompt."""
_MATCHED = ("ada-seq-pos", "ada-seq-balance")
_COUNTED = ("uniform {n}", "ada-seq-pos", "ada-seq-balance", "ada-est", "allotted, log", "gvm-raft")
"""Rules whose counts are drawn by pass rate."""

Row = tuple[Arm, Outcome, Exact | None]


@dataclass(frozen=True, slots=True)
class Settings:
    """What is imagined; ConfigError for what cannot be."""

    points: Mapping[int, float]
    """pass@k by k that the mixture is fitted to; empty if it was given."""
    mixture: BetaMixture | None = None
    """The law of pass rates; None to fit it."""
    components: int = 1
    """Betas to fit."""
    prompts: int = 2048
    """Prompts drawn from it."""
    prompts_per_step: int = 512
    """Prompts that share a budget and a batch."""
    budget: Budget = field(default_factory=Budget)
    """Numbers of the rules."""
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.mixture is None) == (not self.points):
            raise ConfigError("expected pass@k points or a mixture of Betas, one of the two")
        if not 1 <= self.components <= 4:
            raise ConfigError(f"--components {self.components}: expected 1 to 4 Betas")
        if self.prompts_per_step < 2 or not 2 <= self.prompts <= 1_000_000:
            raise ConfigError(
                f"--prompts {self.prompts}, --prompts-per-step {self.prompts_per_step}: expected 2 to 1000000 prompts, "
                "and 2 or more per step"
            )
        budget = self.budget
        if not 2 <= budget.samples <= _MOST or budget.round_size < 1:
            raise ConfigError(
                f"--samples {budget.samples}, --round-size {budget.round_size}: expected 2 to {_MOST} samples, and "
                "rounds of 1 or more"
            )
        if not 2 <= budget.train_size <= budget.max_samples <= _MOST:
            raise ConfigError(
                f"--train-size {budget.train_size}, --max-samples {budget.max_samples}: expected 2 or more to train "
                f"on, from at least as many, from at most {_MOST}"
            )
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"--seed {self.seed}: expected 0 or more")


@dataclass(frozen=True, slots=True, eq=False)
class Simulation:
    """What was found."""

    mixture: BetaMixture
    rates: np.ndarray
    """float64 [P], pass rates of the prompts."""
    rows: list[Row]
    known: list[Known]
    shares: list[Shares]


def simulate(settings: Settings, out: Path, console: Console | None = None) -> Path:
    """Simulate, print the tables and write them with ``results.json`` and pictures to the folder ``out``.

    The folder appears whole or not at all, and replaces one that an earlier simulation wrote. Equal settings give equal
    files. Raises ConfigError if ``out`` holds anything else.
    """
    _check_replaceable(out)
    begin = time.monotonic()
    found = imagine(settings)
    tables = _tables(settings, found)
    files = {RESULTS: _results(settings, found), TABLES: _plain(tables)} | _pictures(settings, found)
    _write_folder(out, files)
    console = console or Console()
    if console.width < _WIDTH:
        console = Console(file=console.file, width=_WIDTH)
    console.print(tables)
    console.print(f"simulated in {time.monotonic() - begin:.1f} s: {out}", highlight=False, soft_wrap=True)
    return out


def imagine(settings: Settings) -> Simulation:
    """Run all rules; the same settings give the same numbers."""
    mixture = settings.mixture or fit(dict(settings.points), settings.components)
    rates = mixture.draw(settings.prompts, np.random.default_rng((settings.seed, 0)))
    steps = [
        rates[begin : begin + settings.prompts_per_step] for begin in range(0, rates.size, settings.prompts_per_step)
    ]
    rows: list[Row] = []
    for arm in arms(settings.budget):
        rows.append((arm, run(arm, steps, settings.seed), exact(arm, mixture)))
        if arm.name in _MATCHED:
            same = matched(arm, rows[-1][1].cost, settings.budget)
            rows.append((same, run(same, steps, settings.seed), exact(same, mixture)))
    return Simulation(mixture, rates, rows, known_numbers(settings.seed), shared_budgets(settings.seed))


def _tables(settings: Settings, found: Simulation) -> Group:
    about = [f"pass rates: {found.mixture}"]
    if settings.points:
        about.append(f"farthest from the pass@k points: {max_error(found.mixture, dict(settings.points)):.2g}")
    ends = list(settings.points) or [4, 32, 256]
    cost = tier_cost(ends, np.diff(found.mixture.pass_at(ends), prepend=0.0).tolist())
    about.append(f"tried in tiers of {', '.join(map(str, ends))} until solved: {cost:.2f} samples per prompt")
    missing = [f"{arm.name}: {o.missing} places stayed empty" for arm, o, _ in found.rows if o.missing]
    return Group(
        *(Text(line) for line in about),
        Text("\nRules (exact: averages over the law of pass rates, where counts need no estimates)", style="bold"),
        _rules_table(found.rows),
        *(Text(line) for line in missing),
        Text("Known numbers", style="bold"),
        _known_table(found.known),
        Text("32 samples for prompts with p = 0.1, 0.3, 0.5, 0.9", style="bold"),
        _shares_table(found.shares),
    )


def _rules_table(rows: list[Row]) -> Table:
    headings = (
        "samples",
        "in batch",
        "contrast",
        "all wrong",
        "all right",
        "variance",
        "noise",
        "x samples",
        "x batch",
    )
    table = _table("rule", *headings)
    for arm, o, e in rows:
        shares = o.kinds / max(int(o.kinds.sum()), 1)
        noise = (f"{o.noise:.2f}", f"{o.noise * o.cost:.1f}", f"{o.noise * o.train_cost:.1f}")
        cost = f"{o.cost:.2f}" + (f" ± {o.cost_error:.2f}" if o.cost_error else "")
        kinds = [f"{share:.1%}" for share in shares[:3]]
        table.add_row(arm.name, cost, f"{o.train_cost:.2f}", *kinds, f"{o.variance:.4f}", *noise)
        if e is not None:
            right = max(1 - e.effective - e.dead_wrong, 0.0)
            kinds = [f"{share:.1%}" for share in (e.effective, e.dead_wrong, right)]
            noise = (f"{e.noise:.2f}", f"{e.noise * e.cost:.1f}", "")
            table.add_row("  exact", f"{e.cost:.2f}", "", *kinds, f"{e.variance:.4f}", *noise, style="dim")
    return table


def _known_table(known: list[Known]) -> Table:
    table = _table("", "exact", "simulated", "sources")
    for row in known:
        table.add_row(row.what, f"{row.exact:.5g}", f"{row.found:.5g} ± {row.error:.2g}", row.note)
    return table


def _shares_table(shares: list[Shares]) -> Table:
    table = _table("objective", "samples", "variance", "simulated", "equal shares")
    for row in shares:
        if row.variance is None:
            table.add_row(row.what, " ".join(map(str, row.counts)), "", "", "")
        else:
            cells = f"{row.variance:.4f}", f"{row.found:.4f} ± {row.error:.4f}", f"{row.equal:.4f}"
            table.add_row(row.what, " ".join(map(str, row.counts)), *cells)
    return table


def _table(first: str, *headings: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(first, no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _plain(tables: Group) -> bytes:
    buffer = io.StringIO()
    Console(file=buffer, width=_WIDTH, color_system=None).print(tables)
    return "".join(line.rstrip() + "\n" for line in buffer.getvalue().splitlines()).encode()


def _results(settings: Settings, found: Simulation) -> bytes:
    numbers = {
        "settings": {
            "points": {str(k): rate for k, rate in settings.points.items()},
            "components": settings.components if settings.points else None,
            "prompts": settings.prompts,
            "prompts_per_step": settings.prompts_per_step,
            "seed": settings.seed,
            **asdict(settings.budget),
        },
        "mixture": asdict(found.mixture),
        "rules": [_rule_numbers(*row) for row in found.rows],
        "known": [asdict(row) for row in found.known],
        "shares": [asdict(row) for row in found.shares],
    }
    return (json.dumps(_finite(numbers), indent=1, allow_nan=False) + "\n").encode()


def _rule_numbers(arm: Arm, outcome: Outcome, known: Exact | None) -> dict[str, Any]:
    names = ("mixed", "all_wrong", "all_right", "nothing_drawn")
    return {
        "name": arm.name,
        "samples": outcome.cost,
        "samples_error": outcome.cost_error,
        "in_batch": outcome.train_cost,
        "effective": outcome.effective,
        "prompts": dict(zip(names, outcome.kinds.tolist(), strict=True)),
        "missing": outcome.missing,
        "variance": outcome.variance,
        "outcome_variance": outcome.outcome_variance,
        "signal": outcome.signal,
        "noise": outcome.noise,
        "exact": None if known is None else asdict(known),
    }


def _finite(value: Any) -> Any:
    """Numbers that JSON has not as text, as in the metrics of a run."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _pictures(settings: Settings, found: Simulation) -> dict[str, bytes]:
    by_name = {arm.name: (arm, outcome) for arm, outcome, _ in found.rows}
    wanted = [name.format(n=settings.budget.samples) for name in _COUNTED]
    outcomes = {name: by_name[name][1] for name in wanted if name in by_name}
    images = (
        simulate_draw.draw_pass_at_k(found.mixture, dict(settings.points), found.rates),
        simulate_draw.draw_cost(by_name["ada-seq-balance"][0], by_name["ada-seq-pos"][0], outcomes),
        simulate_draw.draw_counts(outcomes),
        simulate_draw.draw_rules(found.rows),
    )
    return dict(zip(PICTURES, images, strict=True))


def _check_replaceable(out: Path) -> None:
    try:
        out.absolute().parent.mkdir(parents=True, exist_ok=True)
        others = [] if not out.exists() else {path.name for path in out.iterdir()} - {RESULTS, TABLES, *PICTURES}
    except OSError as error:
        raise ConfigError(f"--out: {out} cannot be a folder ({error.strerror}); choose another one") from error
    if others:
        raise ConfigError(f"--out: {out} holds something else than a simulation; choose another folder or remove it")


def _write_folder(out: Path, files: Mapping[str, bytes]) -> None:
    out = out.absolute()
    new, old = (out.with_name(f".{out.name}.{os.getpid()}.{kind}") for kind in ("new", "old"))
    try:
        new.mkdir()
        for name, data in files.items():
            write_atomically(new / name, data)
        if out.exists():
            out.rename(old)
        new.rename(out)
    except OSError as error:
        if old.exists():
            old.rename(out)
        raise ConfigError(f"--out: cannot write {out} ({error.strerror}); choose another folder") from error
    finally:
        shutil.rmtree(new, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)
