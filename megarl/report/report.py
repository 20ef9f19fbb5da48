"""``megarl report RUN_DIR``: plot the curves of a run as PNGs, and write one HTML page with all of them.

The page needs no other file and no network: images and style sheet are embedded.
"""

import base64
import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from megarl.config.file import read_toml
from megarl.data.files import write_atomically
from megarl.errors import ConfigError, DataError
from megarl.report.panel import render
from megarl.report.panels import PANELS
from megarl.report.series import Curve, Curves, benchmarks, make_curves
from megarl.run.metrics_log import read_metrics
from megarl.run.status import format_duration

NOT_RECORDED = "not recorded"
_PAGE = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
TILES = ("Held-out pass rate, first", "Held-out pass rate, last", "Steps", "Wall time", "Tokens per second (median)")
"""Rows of the headline that are also shown as large tiles."""


def write_report(run_dir: str | Path) -> Path:
    """Plot run_dir/metrics.jsonl into run_dir/report/*.png, write run_dir/report/index.html, and return its path.

    Each file appears complete or not at all. PNGs of an earlier report without metrics in this run are removed. Raises
    DataError if metrics.jsonl is missing, empty or broken, or config.toml is broken. config.toml may be missing.
    """
    run_dir = Path(run_dir)
    records = read_metrics(run_dir / "metrics.jsonl")
    if not records:
        raise DataError(f"{run_dir / 'metrics.jsonl'}: the file is empty: the run has not finished its first step")
    curves = make_curves(records)
    config = _read_config(run_dir / "config.toml")
    report_dir = run_dir / "report"
    report_dir.mkdir(exist_ok=True)
    images: dict[str, bytes] = {}
    for key, panel in PANELS.items():
        path = report_dir / f"{key}.png"
        if panel.is_recorded(curves):
            images[key] = render(panel, curves)
            write_atomically(path, images[key])
        else:
            path.unlink(missing_ok=True)
    name = _get_setting(config, "run", "name", run_dir.resolve().name)
    page = _render_page(name, run_dir.resolve(), _make_headline(records, curves, config), images)
    write_atomically(report_dir / "index.html", page.encode())
    return report_dir / "index.html"


def _make_headline(records: Sequence[Mapping[str, Any]], curves: Curves, config: dict[str, Any]) -> dict[str, str]:
    """Return the table at the top of the page, label -> value; "not recorded" where the run has no value."""
    rows = {} if "eval/pass_rate" in curves else {"Held-out pass rate": NOT_RECORDED}
    evaluated = {"Held-out pass rate": "eval/pass_rate"} if not rows else {}
    evaluated |= {f"Pass rate on {name}": f"eval/{name}/pass_rate" for name in benchmarks(curves)}
    for title, metric in evaluated.items():
        steps, values = curves[metric].x[np.isfinite(curves[metric].y)], curves[metric].finite
        for label, point in (("first", 0), ("best", int(values.argmax())), ("last", -1)):
            rows[f"{title}, {label}"] = f"{values[point]:.1%} (step {steps[point]:.0f})"
    rows["Steps"] = str(len({record["step"] for record in records if record["kind"] == "step"}) or NOT_RECORDED)
    costs = [(curves[f"cost/{name}"], name) for name in ("samples", "tokens", "updates") if f"cost/{name}" in curves]
    rows["Cost"] = ", ".join(f"{curve.finite[-1]:,.0f} {name}" for curve, name in costs) or NOT_RECORDED
    rows["Wall time"] = format_duration(max(record["wall_s"] for record in records), 1)
    speed = curves.get("speed/tokens_per_s")
    rows["Tokens per second (median)"] = NOT_RECORDED if speed is None else f"{np.median(speed.finite):,.0f}"
    rows["Rewards that failed"] = _format_share(curves.get("reward/error_fraction"))
    if (failed := curves.get("episode/failed_fraction")) is not None:
        rows["Episodes that failed"] = _format_share(failed)
    rows["Objective"] = _get_setting(config, "train", "objective")
    rows["Routing replay"] = _get_setting(config, "train", "replay")
    sizes = {key: _get_setting(config, "parallel", key) for key in ("tp", "pp", "vpp", "cp", "ep", "etp")}
    layout = " · ".join(f"{key.upper()} {size}" for key, size in sizes.items() if size != NOT_RECORDED)
    rows["Layout"] = layout or NOT_RECORDED
    return rows


def _read_config(path: Path) -> dict[str, Any]:
    try:
        return read_toml(path) if path.is_file() else {}
    except ConfigError as error:
        raise DataError(f"{error}; something has changed the file since the run wrote it") from error


def _get_setting(config: dict[str, Any], table: str, key: str, missing: str = NOT_RECORDED) -> str:
    section = config.get(table)
    return str((section.get(key) if isinstance(section, dict) else None) or missing)


def _format_share(curve: Curve | None) -> str:
    """Return the mean over all responses; every step has the same number."""
    if curve is None:
        return NOT_RECORDED
    mean = float(curve.finite.mean())
    return f"{100.0 * mean:.3g}% of responses" if mean else "none"


def _render_page(name: str, run_dir: Path, rows: dict[str, str], images: dict[str, bytes]) -> str:
    tiles = "".join(
        f'<div class="tile"><div class="value">{html.escape(value.split(" (")[0])}</div>'
        f'<div class="label">{html.escape(label)}</div></div>'
        for label, value in rows.items()
        if value != NOT_RECORDED and label in TILES
    )
    table = "".join(
        f"<tr><th>{html.escape(label)}</th><td>{html.escape(value)}</td></tr>" for label, value in rows.items()
    )
    cards = "".join(_render_card(key, png) for key, png in images.items())
    absent = [panel for key, panel in PANELS.items() if key not in images and not panel.optional]
    missing = ", ".join(f"{panel.title.lower()} ({', '.join(panel.needs)})" for panel in absent)
    note = f'<p class="absent">Not recorded in this run: {html.escape(missing)}.</p>' if absent else ""
    texts = {"name": html.escape(name), "run_dir": html.escape(str(run_dir))}
    return _PAGE.substitute(texts, tiles=tiles, table=table, cards=cards, note=note)


def _render_card(key: str, png: bytes) -> str:
    panel, data = PANELS[key], base64.b64encode(png).decode("ascii")
    return (
        f'<figure class="card{" wide" if panel.wide else ""}" id="{key}"><h2>{html.escape(panel.title)}</h2>'
        f"<figcaption>{html.escape(panel.caption)}</figcaption>"
        f'<img alt="{html.escape(panel.title)}" src="data:image/png;base64,{data}"></figure>'
    )
