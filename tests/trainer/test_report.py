from __future__ import annotations

import json
import re
import time
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects
import pytest
from train_world import World

from megarl import __version__, cli
from megarl.errors import DataError, MegarlError
from megarl.files.texts import read_table
from megarl.ops.report import series
from megarl.ops.report.facts import short_names
from megarl.ops.report.figures import COLORS, Run, make_figures
from megarl.ops.report.report import render_verdicts, write_report
from megarl.ops.report.series import Curve, Panel, make_curves, read_panels, thin
from megarl.run.metrics_log import MetricsLog, read_metrics
from megarl.run.starts import record_start
from megarl.trainer.loop import train

PANELS = read_panels()
SPECIAL = {name for key in ("estimates", "episodes", "masks", "paused", "servers") for name in PANELS[key].needs} | {
    "eval/NAME/pass_rate"
}
"""Metrics that only some runs have."""
CONFIG = """
[run]
name = "sort <6> digits"
[train]
objective = "minirl"
replay = "r3"
[parallel]
tp = 2
ep = 4
sequence_parallel = true
"""


def write_run(run_dir: Path, steps: int = 12) -> None:
    """A short run in which every metric of the report is recorded."""
    step_names = [name for panel in PANELS.values() for name in panel.needs if "XX" not in name]
    with MetricsLog(run_dir) as log:
        for step in range(1, steps + 1):
            for minibatch in range(2):
                log.write("minibatch", step, {"grad_norm": 0.5 + minibatch, "ratio/std": 0.1}, minibatch=minibatch)
            values = {name: 0.1 + 0.01 * step for name in step_names if not name.startswith(("eval/", "grad_norm"))}
            values |= {f"router/flip/layer_{layer:02d}": 0.01 * layer for layer in (1, 2, 10)}
            log.write(
                "step",
                step,
                values | {"speed/tokens_per_s": 1000.0 * step, "reward/judged": 97.5, "reward/responses": 100},
            )
            if step % 4 == 0:
                log.write("eval", step, {"eval/pass_rate": {4: 0.25, 8: 0.875}.get(step, 0.75)})


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("run")
    write_run(run_dir)
    (run_dir / "config.toml").write_text(CONFIG)
    assert write_report(run_dir) == run_dir / "report" / "index.html"
    return run_dir


def embedded(page: str, name: str) -> Any:
    """The JSON that a page holds under this name."""
    (text,) = re.findall(rf'id="data-{name}">(.*?)</script>', page)
    return json.loads(text)


def cells_of(page: str) -> dict[str, str]:
    return dict(re.findall(r"<tr><th>(.*?)</th><td>(.*?)</td></tr>", page))


def test_the_page_stands_alone_and_tells_the_headline(whole_run: Path) -> None:
    page = (whole_run / "report" / "index.html").read_text()
    # Nothing is fetched: no address is in the page, as plotly.js is packed, and its policy forbids what plotly.js asks.
    assert not re.search(
        r"https?:|//[a-z]+\.|<link|<img|<iframe|@import|url\(| src=", page.partition('id="data-plotly"')[0]
    )
    assert re.findall(r"default-src '([^']*)'", page) == ["none"]
    assert "connect-src" not in page
    assert "showSendToCloud: false" in page
    assert len(page) < 3_000_000
    assert [path.name for path in (whole_run / "report").glob("[!.]*")] == ["index.html"]
    assert "sort &lt;6&gt; digits" in page
    cells = cells_of(page)
    assert cells["Held-out pass rate, first"] == "25.0% (step 4)"
    assert cells["Held-out pass rate, best"] == "87.5% (step 8)"
    assert cells["Held-out pass rate, last"] == "75.0% (step 12)"
    assert cells["Steps"] == "12"
    assert cells["Tokens per second (median)"] == "6,500"
    assert cells["Responses with a reward"] == "1170 of 1200 judged"
    assert cells["Objective"] == "minirl"
    assert cells["Routing replay"] == "r3"


def test_a_run_writes_every_metric_that_the_report_reads(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a run with all phases and with rewards that fail; the other way round, every phase it times is drawn."""
    settings = world.settings(
        run__dir=str(tmp_path),
        train__objective="kl_grpo",
        reward__function="train_rewards:sometimes_raises",
        eval__every=1,
        checkpoint__every=1,
    )
    train(settings)
    asked: dict[str, bool] = {}

    class Listening(dict):
        def get(self, name: str, default: Any = None) -> Any:
            asked[name] = name in self
            return super().get(name, default)

    monkeypatch.setattr("megarl.ops.report.report.make_curves", lambda records: Listening(make_curves(records)))
    page = write_report(tmp_path).read_text()
    assert {"reward/mean", "ratio/std", "time/train_s", "speed/tokens_per_s"} <= asked.keys()
    assert {name for name, found in asked.items() if not found} <= SPECIAL
    records = read_metrics(tmp_path / "metrics.jsonl")
    written = {name for record in records for name in record}
    assert {name for panel in PANELS.values() for name in panel.needs if "XX" not in name} <= written | SPECIAL
    assert {name for name in written if name.startswith("time/")} == {*PANELS["time"].needs, "time/step_s"}
    judged, drawn = (
        sum(record[f"reward/{name}"] for record in records if record["kind"] == "step")
        for name in ("judged", "responses")
    )
    assert f"<td>{judged:.0f} of {drawn:.0f} judged</td>" in page
    assert 0 < judged < drawn


def test_every_panel_has_a_figure_and_links_into_the_glossary(whole_run: Path) -> None:
    page = (whole_run / "report" / "index.html").read_text()
    cards = dict(re.findall(r'(?s)<figure class="card[^"]*" id="(\w+)">(.*?)</figure>', page))
    assert list(cards) == list(PANELS)
    figures = embedded(page, "figures")
    anchors = {unescape(name) for name in re.findall(r'<div id="(metric-[^"]*)"><dt>', page)}
    assert anchors == {f"metric-{name}" for name in read_table(series.__file__, "glossary.toml")}
    placed = []
    for key, card in cards.items():
        links = re.findall(r'<a href="#([^"]*)"', card)
        assert [link.removeprefix("metric-") for link in links] == list(PANELS[key].needs), key
        assert anchors.issuperset(links)
        (place,) = (int(number) for number in re.findall(r'data-figure="(\d+)"', card))
        placed.append(place)
        traces = plotly.graph_objects.Figure(figures[place]).data
        assert any(value is not None for trace in traces for value in (trace.y if trace.y is not None else ())), key
    assert placed == list(range(len(figures)))


def test_absent_panels_are_left_out(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        log.write("step", 0, {"reward/mean": 0.5, "rollout/k3": float("nan")})
    page = write_report(tmp_path).read_text()
    assert re.findall(r'<figure class="card[^"]*" id="(\w+)"', page) == ["reward"]
    cells = cells_of(page)
    assert cells["Held-out pass rate"] == cells["Objective"] == "not recorded"


def test_runs_are_overlaid_with_a_colour_each_and_a_dash_per_series(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page of three runs: one whole, one shorter, and one with two metrics."""
    monkeypatch.chdir(tmp_path)
    folders = [Path(name) for name in ("r3", "none", "o<i>ther")]
    for folder, steps in zip(folders[:2], (12, 5), strict=True):
        write_run(folder, steps)
    with MetricsLog(folders[2]) as log:
        log.write("step", 3, {"entropy": 0.5, "reward/mean": 1.0})
    page = write_report(*folders, out=tmp_path / "page.html").read_text()
    figures = embedded(page, "figures")
    cards = dict(re.findall(r'(?s)<figure class="card[^"]*" id="(\w+)">(.*?)</figure>', page))

    def of(key: str) -> list[dict]:
        return [figures[int(place)] for place in re.findall(r'data-figure="(\d+)"', cards[key])]

    (figure,) = of("entropy")
    lines = [(trace["name"], trace["line"]["color"], trace["line"]["dash"]) for trace in figure["data"]]
    assert lines == [
        ("r3: training engine", COLORS["blue"], "solid"),
        ("r3: start of the step", COLORS["blue"], "dash"),
        ("none: training engine", COLORS["orange"], "solid"),
        ("none: start of the step", COLORS["orange"], "dash"),
        ("o&lt;i&gt;ther: training engine", COLORS["teal"], "solid"),
    ]
    assert [len(trace["x"]) for trace in figure["data"]] == [12, 12, 5, 5, 1]
    assert [one["layout"]["title"]["text"] for one in of("router_layers")] == ["r3", "none"]
    assert len({one["data"][0]["zmax"] for one in of("router_layers")}) == 1
    rows = [re.findall(r"<td>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", page)]
    assert rows[0] == ["r3", "none", "o&lt;i&gt;ther"]
    assert ["12", "5", "1"] in rows


def test_training_and_held_out_lines_differ_in_colour_dash_and_marker() -> None:
    names = ["reward/pass_rate", "reward/mean", "eval/pass_rate", "eval/reward", "eval/a/pass_rate", "eval/b/pass_rate"]
    curves = {name: Curve(np.arange(3.0), np.arange(3.0) / 3) for name in names}
    for color in (None, *COLORS.values()):
        (figure,) = make_figures(PANELS["reward"], [Run("r3", curves, color)])
        looks = [(t["line"]["color"], t["line"]["dash"], t["marker"].get("symbol")) for t in figure["data"]]
        assert len({*looks}) == len(looks) == 6
        for training in looks[:2]:
            for held_out in looks[2:]:
                assert all(one != other for one, other in zip(training, held_out, strict=True))


def write_settings(folder: Path, **changes: Any) -> None:
    settings = {"run.seed": 0, "run.name": folder.name, "run.dir": str(folder), "data.train": f"{folder}/train.jsonl"}
    tables: dict[str, dict[str, Any]] = {}
    for key, value in {**settings, **{key.replace("__", "."): value for key, value in changes.items()}}.items():
        table, _, name = key.partition(".")
        tables.setdefault(table, {})[name] = value
    lines = [f"[{table}]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in tables[table].items()) for table in tables]
    (folder / "config.toml").write_text("".join(lines))


def test_the_keys_in_which_runs_differ_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [tmp_path / name / "run" for name in ("a", "b", "c")]
    for folder in folders:
        write_run(folder, 1)
    write_settings(folders[0], train__objective="minirl", train__replay="r3", megatron__text="x" * 99)
    write_settings(folders[1], train__objective="<i>grpo", train__replay="r3", run__seed=1)
    assert cli.main(["report", *map(str, folders[:2])]) == 0
    out = folders[0] / "report" / "compare.html"
    assert capsys.readouterr().out == f"report: {out}\n"
    page = out.read_text()
    differing = page.partition('class="differences"')[2].partition("</details>")[0]
    rows = {
        key: re.findall(r"<td.*?>(.*?)</td>", row)
        for key, row in re.findall(r"<tr><th>(.*?)</th>(.*?)</tr>", differing)
    }
    assert rows == {
        "": ["a", "b"],
        "megatron.text": ["x" * 47 + "…", "not set"],
        "run.seed": ["0", "1"],
        "train.objective": ["minirl", "&lt;i&gt;grpo"],
    }
    assert f'title="{"x" * 99}"' in differing
    assert "<th>Objective</th>" not in page
    assert "<th>Routing replay</th><td>r3</td><td>r3</td>" in page
    assert "<title>a against b - megarl report</title>" in page
    for folder, digest in zip(folders[:2], "12", strict=True):  # the same name, another content
        (folder / "inputs.json").write_text(json.dumps({"data.train": {"content": digest}}))
    assert "<th>data.train (content)</th>" in write_report(*folders[:2]).read_text()
    page = write_report(*folders).read_text()  # the third run has no configuration
    assert "<th>run.seed</th><td>0</td><td>1</td><td>not recorded</td>" in page
    assert "0 configuration keys differ" in write_report(folders[0], folders[2]).read_text()


def test_the_head_tells_name_version_seed_and_dates(tmp_path: Path) -> None:
    write_run(tmp_path, 1)
    (head,) = re.findall(r'<p class="sub">(.*?)</p>', write_report(tmp_path).read_text())
    assert head == f'megarl (version not recorded) · seed not recorded<span class="where"> · {tmp_path}</span>'
    write_settings(tmp_path, run__name="a <name>", run__seed=7)
    starts = [
        ("2026-01-01", "0.0", True),
        ("2026-02-01", "0.1", True),
        ("2026-02-02", "0.1", False),
        ("x", "0.2", False),
    ]
    lines = [json.dumps({"time": f"{day} 12:34:56 +0100", "version": v, "new": new}) for day, v, new in starts]
    (tmp_path / "starts.jsonl").write_text("\n".join([*lines[:3], "[]", "{", '{"time": 1}', lines[3][:-3]]))
    (tmp_path / "status.json").write_text(json.dumps({"state": "stopped", "updated": 1_770_100_000.0}))
    page = write_report(tmp_path).read_text()
    (head,) = re.findall(r'<p class="sub">(.*?)</p>', page)
    stopped = time.strftime("%Y-%m-%d %H:%M %z", time.localtime(1_770_100_000))
    started, resumed = "started 2026-02-01 12:34 +0100", "resumed 2026-02-02 12:34 +0100"
    assert (
        head
        == f'megarl 0.1 · seed 7 · {started} · {resumed} · stopped {stopped}<span class="where"> · {tmp_path}</span>'
    )
    assert "<h1>a &lt;name&gt;</h1>" in page
    record_start(tmp_path, is_new=False)
    assert f"megarl 0.1 then {__version__} ·" in write_report(tmp_path).read_text()


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["/x/run"], ["run"]),
        (["/s/r3/run", "/s/none/run"], ["r3", "none"]),
        (["/s/r3/run", "/s/r3/other"], ["run", "other"]),
        (["/a/r3/x/run", "/a/none/x/run", "/b/r3/x/run"], ["a/r3", "a/none", "b/r3"]),
        (["/x/run", "/run"], ["x", "/"]),
        (["/x/run", "/x"], ["run", "x"]),
    ],
)
def test_runs_have_the_shortest_names_that_differ(paths: list[str], names: list[str]) -> None:
    assert short_names([*map(Path, paths)]) == names


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["run", "./run"], "is given twice"),
        ([f"run{number}" for number in range(9)], "found 9 runs, expected at most 8"),
        (["run", "--out", "run"], "--out: found run, expected the name of a file"),
        (["run", "empty"], "no such file"),
    ],
)
def test_a_mistake_in_a_comparison_costs_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run", steps=1)
    (tmp_path / "empty").mkdir()
    assert cli.main(["report", *words]) == 2
    seen = capsys.readouterr()
    assert len(seen.err.splitlines()) == 1
    assert expected in seen.err
    assert not list(tmp_path.rglob("*.html"))


def records_of(num_steps: int, **values: float) -> list[dict[str, Any]]:
    named = {name.replace("__", "/"): value for name, value in values.items()}
    return [{"kind": "step", "step": s, "minibatch": None, "wall_s": 1.0} | named for s in range(1, num_steps + 1)]


def test_a_run_with_reward_0_is_not_calm() -> None:
    records = records_of(20, reward__mean=0.0, reward__pass_rate=0.0, prompts__effective_ratio=0.0)
    shown = render_verdicts(records, {})
    assert '<div class="verdict alarm"><strong class="level">Alarm</strong>' in shown
    assert "since step 1, zero_reward_steps" in shown
    assert "no alarm" not in shown.lower()
    calm = render_verdicts(records, {"health": {"zero_reward_steps": "off"}})
    assert "off, or nothing to judge: zero_reward_steps" in calm


def test_no_alarm_is_said_with_the_checks_that_looked() -> None:
    records = records_of(
        20, reward__mean=0.5, reward__pass_rate=0.5, prompts__effective_ratio=0.8, rollout__entropy=0.7
    )
    shown = render_verdicts(records, {}, "r<3")
    assert '<div class="verdict ok"><strong class="level">r&lt;3: no alarm</strong>' in shown
    (looked,) = re.findall(r"Checks that looked: (.*?); off, or nothing to judge: (.*?)\.</p>", shown)
    assert "zero_reward_steps" in looked[0]
    assert "entropy_fall_ratio" in looked[0]
    assert "k3_nats" in looked[1]
    assert "Not judged" in render_verdicts(records_of(3, loss=1.0), {})
    with pytest.raises(DataError, match=r"the table \[health\] is broken"):
        render_verdicts(records_of(1, loss=1.0), {"health": "text"})


def test_no_metrics_is_a_clear_error(tmp_path: Path) -> None:
    for text, said in ((None, "no such file"), ("", "no whole record"), ('{"kind": "st', "no whole record")):
        if text is not None:
            (tmp_path / "metrics.jsonl").write_text(text)
        with pytest.raises(MegarlError, match=said):
            write_report(tmp_path)
    assert not (tmp_path / "report" / "index.html").exists()


@pytest.mark.parametrize("values", [[0.0], [-1.0, np.nan, np.inf, 1e-9], [0.5] * 130])
@pytest.mark.parametrize("color", [None, "#112233"])
@pytest.mark.parametrize("panel", PANELS.values(), ids=PANELS)
def test_degenerate_runs_become_figures_of_plotly(panel: Panel, values: list[float], color: str | None) -> None:
    names = [name.replace("XX", "03") for name in panel.needs]
    records = [
        {"kind": "step", "step": step, "minibatch": None, "wall_s": 1.0} | dict.fromkeys(names, value)
        for step, value in enumerate(values)
    ]
    (figure,) = make_figures(panel, [Run("a", make_curves(records), color)])
    json.dumps(figure, allow_nan=False)
    plotly.graph_objects.Figure(figure)  # refuses what plotly does not know
    if figure["layout"]["yaxis"].get("type") == "log":
        assert all(value is None or value > 0 for trace in figure["data"] for value in trace["y"])


def test_thinning_keeps_a_spike_of_one_step() -> None:
    y = np.zeros(10_000)
    y[4321], y[77] = 9.0, -3.0
    y[9000:9100] = np.nan
    thinned = thin(Curve(np.arange(10_000.0), y))
    assert len(thinned.x) <= 1000
    assert (np.diff(thinned.x) > 0).all()
    assert thinned.y[thinned.x == 4321].tolist() == [9.0]
    assert thinned.y[thinned.x == 77].tolist() == [-3.0]
    assert np.isnan(thinned.y).any()
    short = Curve(np.arange(3.0), np.ones(3))
    assert thin(short) is short


def test_minibatches_lie_between_steps_and_are_summed_up_per_step() -> None:
    rows = [(3, 0, 1.0), (3, 1, 2.0), (3, 2, np.nan), (4, 0, -1.0), (5, 0, np.nan)]
    records = [{"kind": "minibatch", "step": s, "minibatch": m, "wall_s": 0.0, "loss": v} for s, m, v in rows]
    curve = make_curves(records)["loss"]
    np.testing.assert_allclose(curve.x, [3, 3 + 1 / 3, 3 + 2 / 3, 4, 5])
    mean = curve.per_step()
    assert mean.x.tolist() == [3.0, 4.0, 5.0]
    np.testing.assert_array_equal(mean.y, [1.5, -1.0, np.nan])
