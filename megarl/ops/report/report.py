"""``megarl report RUN_DIR ...``: one HTML page with the curves, verdicts and samples of a run, or of several overlaid.

The page needs no other file and no network: it holds texts, figures, samples, and plotly.js once, compressed.
"""

import base64
import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pydantic
from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from megarl.config.file import flatten, read_toml
from megarl.config.tables.health import HealthConfig
from megarl.errors import ConfigError, DataError, refusal, reworded
from megarl.files.outputs import write_output
from megarl.files.texts import read_table
from megarl.ops.report.facts import NOT_RECORDED, Settings, differing_settings, head_line, short_names
from megarl.ops.report.figures import COLORS, Figure, Run, make_figures
from megarl.ops.report.samples import for_page
from megarl.ops.report.series import Curves, Panel, benchmarks, make_curves, read_panels
from megarl.run.metrics_log import Record, describe_judged, read_metrics
from megarl.run.status import format_duration
from megarl.watch.health import CHECKS, judge_run

_SAID = {"Objective": "train.objective", "Routing replay": "train.replay"}
_RUN_COLORS = ("blue", "orange", "teal", "red", "purple", "yellow", "cyan", "brown")


_FOLDER = Path(__file__).parent
_TEMPLATES = Environment(loader=FileSystemLoader(_FOLDER), autoescape=True, trim_blocks=True)


@dataclass(frozen=True, slots=True)
class _Source:
    """The files of a run."""

    name: str
    folder: Path
    records: list[Record]
    curves: Curves
    config: dict[str, Any]


def write_report(*run_dirs: str | Path, out: Path | None = None) -> Path:
    """Write a page about a run, or a comparison of several runs; return its path.

    out: default RUN_DIR/report/index.html, for several runs report/compare.html of the first. The file appears
    complete or not at all. Raises DataError if a metrics.jsonl is missing, empty or broken, or a config.toml is broken
    (it may be missing); ConfigError for too many runs, or a run given twice.
    """
    folders = [Path(run_dir) for run_dir in run_dirs]
    if len(folders) > len(_RUN_COLORS):
        raise ConfigError(refusal("many_runs", num=len(folders), most=len(_RUN_COLORS)))
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise ConfigError("megarl report: a run is given twice")
    sources = [_read_run(*pair) for pair in zip(folders, short_names(folders), strict=True)]
    if out is None:
        out = folders[0] / "report" / ("compare.html" if len(sources) > 1 else "index.html")
    elif out.is_dir() or not out.parent.is_dir():
        raise ConfigError(f"--out: found {out}, expected the name of a file in a folder that exists")
    write_output(out, _make_page(sources))
    return out


def _read_run(folder: Path, name: str) -> _Source:
    path = folder / "metrics.jsonl"
    records = read_metrics(path)
    if not records:
        raise DataError(f"{path}: no whole record: the run has not finished its first step")
    with reworded(ConfigError, DataError, suffix="; something has changed the file since the run wrote it"):
        config = read_toml(folder / "config.toml") if (folder / "config.toml").is_file() else {}
    return _Source(name, folder, records, make_curves(records), config)


def _make_page(sources: Sequence[_Source]) -> bytes:
    is_single, names = len(sources) == 1, [source.name for source in sources]
    prefixes = [""] if is_single else names
    colors = [None] if is_single else [COLORS[name] for name in _RUN_COLORS]
    runs = [Run(source.name, source.curves, color) for source, color in zip(sources, colors, strict=False)]
    figures: list[Figure] = []
    panels: list[tuple[str, Panel, range]] = []
    for key, panel in read_panels().items():
        if any(panel.is_recorded(run.curves) for run in runs):
            first, figures = len(figures), [*figures, *make_figures(panel, runs)]
            panels.append((key, panel, range(first, len(figures))))
    folders, settings = [source.folder for source in sources], [flatten(source.config) for source in sources]
    headlines = [_make_headline(s.records, s.curves, of_run) for s, of_run in zip(sources, settings, strict=True)]
    differences = differing_settings(folders, settings)
    labels = dict.fromkeys(label for headline in headlines for label in headline if _SAID.get(label) not in differences)
    rows = [[label, *(headline.get(label, NOT_RECORDED) for headline in headlines)] for label in labels]
    verdicts = [render_verdicts(s.records, s.config, prefix) for s, prefix in zip(sources, prefixes, strict=True)]
    samples, notes = zip(*map(for_page, folders, prefixes), strict=True)
    tables = {"rows": rows, "differences": differences, "panels": panels, "notes": notes}
    facts = tables | {
        "title": settings[0].get("run.name", names[0]) if is_single else " against ".join(names),
        "heads": [*zip(prefixes, colors, settings, map(head_line, folders, settings), strict=False)],
        "verdicts": Markup().join(verdicts),
        "names": [] if is_single else names,
        "glossary": read_table(__file__, "glossary.toml"),
        "figures": _embed(figures),
        "samples": _embed([*chain(*samples)]),
        "has_samples": any(samples),
        "plotly": base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode(),
        "script": Markup((_FOLDER / "page.js").read_text("utf-8")),
    }
    return _TEMPLATES.get_template("page.html").render(facts).encode()


def _make_headline(records: Sequence[Mapping[str, Any]], curves: Curves, settings: Settings) -> dict[str, str]:
    """Return the table at the top of the page, label -> value; "not recorded" where the run has no value."""
    evaluations = {record["step"]: record for record in records if record["kind"] == "eval"}
    rows = {} if "eval/pass_rate" in curves else {"Held-out pass rate": NOT_RECORDED}
    evaluated = {"Held-out pass rate": "eval/pass_rate"} if not rows else {}
    evaluated |= {f"Pass rate on {name}": f"eval/{name}/pass_rate" for name in benchmarks(curves)}
    for title, metric in evaluated.items():
        steps, values = curves[metric].x[np.isfinite(curves[metric].y)], curves[metric].finite
        for label, point in (("first", 0), ("best", int(values.argmax())), ("last", -1)):
            judged = describe_judged(evaluations.get(steps[point], {}), metric.rpartition("/")[0])
            rows[f"{title}, {label}"] = f"{values[point]:.1%}{judged and f', {judged}'} (step {steps[point]:.0f})"
    rows["Steps"] = str(len({record["step"] for record in records if record["kind"] == "step"}) or NOT_RECORDED)
    if "sampling/tokens" in curves:
        drawn = ((f"sampling/{name}", f"gvm/first_stage_{name}") for name in ("samples", "tokens"))
        samples, tokens = (sum(curves[name].finite.sum() for name in pair if name in curves) for pair in drawn)
        rows["Drawn for training"] = f"{samples:,.0f} samples, {tokens:,.0f} tokens"
    rows["Wall time"] = format_duration(max(record["wall_s"] for record in records), 1)
    speed = curves.get("speed/tokens_per_s")
    rows["Tokens per second (median)"] = NOT_RECORDED if speed is None else f"{np.median(speed.finite):,.0f}"
    all_judged = "all" if "reward/judged" in curves else NOT_RECORDED
    counts = {name: curves[name].finite.sum() for name in ("reward/judged", "reward/responses") if name in curves}
    rows["Responses with a reward"] = describe_judged(counts) or all_judged
    if (failed := curves.get("episode/failed_fraction")) is not None:
        rows["Episodes that failed"] = f"{100.0 * failed.finite.mean():.3g}%"
    return rows | {label: str(settings.get(key) or NOT_RECORDED) for label, key in _SAID.items()}


def render_verdicts(records: Sequence[Mapping[str, Any]], config: Mapping[str, Any], name: str = "") -> Markup:
    """Return the warnings and alarms of a run as HTML, and which checks looked; "no alarm" only if some did.

    config: the run's own, whose table [health] has the limits; DataError if it is broken. name: of one run of several.
    """
    kinds, problem = (TypeError, pydantic.ValidationError), "config.toml: the table [health] is broken: "
    with reworded(kinds, DataError, problem, tell=lambda error: " ".join(str(error).split())):
        settings = HealthConfig(**config.get("health", {}))
    active = [check for check in CHECKS if getattr(settings, check.name) != "off"]
    ran = [check.name for check in active if any(check.look(record)[1] is not None for record in records)]
    idle = [check.name for check in CHECKS if check.name not in ran]
    facts = {"name": name, "ran": ran, "idle": idle, "verdicts": judge_run(records, settings)}
    return Markup(_TEMPLATES.get_template("verdicts.html").render(facts))


def _embed(value: Any) -> Markup:
    """Return JSON without any end of an HTML element, for arbitrary strings."""
    return Markup(json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"))
