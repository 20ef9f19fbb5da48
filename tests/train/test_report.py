from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image
from train_world import World

from megarl.errors import DataError, MegarlError
from megarl.report.panel import render
from megarl.report.panels import PANELS
from megarl.report.plots import PHASES, plot_time
from megarl.report.report import write_report
from megarl.report.series import Curve, layer_curves, make_curves, smooth
from megarl.run.metrics_log import MetricsLog, read_metrics
from megarl.train.loop import train

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
    with MetricsLog(run_dir, tensorboard=False) as log:
        for step in range(1, steps + 1):
            for minibatch in range(2):
                log.write("minibatch", step, {"grad_norm": 0.5 + minibatch, "ratio/std": 0.1}, minibatch=minibatch)
            values = {name: 0.1 + 0.01 * step for name in step_names if not name.startswith(("eval/", "grad_norm"))}
            for kind in ("router", "replay_bias"):
                values |= {f"{kind}/flip/layer_{layer:02d}": 0.01 * layer for layer in (1, 2, 10)}
            log.write("step", step, values | {"speed/tokens_per_s": 1000.0 * step, "reward/error_fraction": 0.025})
            if step % 4 == 0:
                log.write("eval", step, {"eval/pass_rate": {4: 0.25, 8: 0.875}.get(step, 0.75)})


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("run")
    write_run(run_dir)
    (run_dir / "config.toml").write_text(CONFIG)
    assert write_report(run_dir) == run_dir / "report" / "index.html"
    return run_dir


def test_the_page_stands_alone_and_tells_the_headline(whole_run: Path) -> None:
    page = (whole_run / "report" / "index.html").read_text()
    # Nothing is fetched: every image is inside, and no attribute or style points outward.
    assert set(re.findall(r'src="([^"]{0,21})', page)) == {"data:image/png;base64"}
    assert not re.search(r"https?://|<link|<script|@import|url\(", page)
    assert "sort &lt;6&gt; digits" in page
    cells = dict(re.findall(r"<tr><th>(.*?)</th><td>(.*?)</td></tr>", page))
    assert cells["Held-out pass rate, first"] == "25.0% (step 4)"
    assert cells["Held-out pass rate, best"] == "87.5% (step 8)"
    assert cells["Held-out pass rate, last"] == "75.0% (step 12)"
    assert cells["Steps"] == "12"
    assert cells["Tokens per second (median)"] == "6,500"
    assert cells["Rewards that failed"] == "2.5% of responses"
    assert cells["Objective"] == "minirl"
    assert cells["Routing replay"] == "r3"
    assert cells["Layout"] == "TP 2 · EP 4"
    assert "Not recorded in this run" not in page


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

    monkeypatch.setattr("megarl.report.report.make_curves", lambda records: Listening(make_curves(records)))
    page = write_report(tmp_path).read_text()
    assert {"reward/mean", "ratio/std", "time/step_s", "speed/tokens_per_s"} <= asked.keys()
    optional = {name for panel in PANELS.values() if panel.optional for name in panel.needs}
    assert {name for name, found in asked.items() if not found} <= optional
    records = read_metrics(tmp_path / "metrics.jsonl")
    written = {name for record in records for name in record}
    assert {name for panel in PANELS.values() for name in panel.needs if "XX" not in name} <= written | optional
    assert {name for name in written if name.startswith("time/")} == {f"time/{phase}_s" for phase in (*PHASES, "step")}
    assert "Not recorded in this run" not in page
    failed = [record["reward/error_fraction"] for record in records if record["kind"] == "step"]
    assert 0 < np.mean(failed) < 1
    assert f"<td>{100 * np.mean(failed):.3g}% of responses</td>" in page


def test_every_panel_becomes_a_png_with_something_in_it(whole_run: Path) -> None:
    files = {path.stem: path for path in (whole_run / "report").glob("*.png")}
    assert set(files) == set(PANELS)
    for path in files.values():
        pixels = np.asarray(Image.open(path).convert("RGB"))
        assert min(pixels.shape[:2]) > 300
        # A curve or an area in colour; text, grid and axes are nearly grey.
        assert (pixels.max(axis=2).astype(int) - pixels.min(axis=2) > 60).sum() > 200, path.name
    assert sorted(path.suffix for path in (whole_run / "report").iterdir()) == [".html", *[".png"] * len(files)]


def test_absent_panels_are_named_and_their_old_images_go(tmp_path: Path) -> None:
    (tmp_path / "report").mkdir()
    for key in PANELS:
        (tmp_path / "report" / f"{key}.png").write_bytes(b"of an earlier run")
    with MetricsLog(tmp_path, tensorboard=False) as log:
        log.write("step", 0, {"reward/mean": 0.5, "rollout/k3": float("nan")})
    page = write_report(tmp_path).read_text()
    assert {path.stem for path in (tmp_path / "report").glob("*.png")} == {"reward"}
    (note,) = re.findall(r"Not recorded in this run: (.*?)</p>", page)
    for key, panel in PANELS.items():
        assert (panel.title.lower() in note) == (key != "reward" and not panel.optional)
    assert "rollout/k3" in note
    cells = dict(re.findall(r"<tr><th>(.*?)</th><td>(.*?)</td></tr>", page))
    assert cells["Held-out pass rate"] == cells["Objective"] == cells["Layout"] == "not recorded"


def test_no_metrics_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(MegarlError, match="no such file"):
        write_report(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(MegarlError, match="is empty"):
        write_report(tmp_path)
    write_run(tmp_path, steps=1)
    (tmp_path / "config.toml").write_text("[train\n")
    with pytest.raises(DataError, match=r"config\.toml: not valid TOML"):
        write_report(tmp_path)
    assert not (tmp_path / "report" / "index.html").exists()


@pytest.mark.parametrize("values", [[0.0], [-1.0, np.nan, np.inf, 1e-9], [0.5] * 130])
@pytest.mark.parametrize("panel", PANELS.values(), ids=PANELS)
def test_panels_draw_degenerate_runs(panel: object, values: list[float]) -> None:
    names = [name.replace("XX", "03") for name in panel.needs]  # type: ignore[attr-defined]
    records = [
        {"kind": "step", "step": step, "minibatch": None, "wall_s": 1.0} | dict.fromkeys(names, value)
        for step, value in enumerate(values)
    ]
    image = Image.open(io.BytesIO(render(panel, make_curves(records))))  # type: ignore[arg-type]
    assert image.size[0] > 600


@pytest.mark.parametrize("num_steps", [3, 130])
def test_a_step_without_training_has_no_whole_step(num_steps: int) -> None:
    """The evaluation before training lies at step 0; above 100 steps, bars and line are means over several steps."""
    records = [{"kind": "eval", "step": 0, "minibatch": None, "wall_s": 1.0, "time/eval_s": 5.0}]
    records += [
        {"kind": "step", "step": step, "minibatch": None, "wall_s": 1.0, "time/train_s": 1.0, "time/step_s": 2.0}
        for step in range(1, num_steps)
    ]
    axes = Figure().add_subplot()
    plot_time(axes, make_curves(records))
    (line,) = axes.lines
    whole = np.asarray(line.get_ydata())
    np.testing.assert_array_equal(whole, [np.nan, 2.0, 2.0] if num_steps == 3 else np.full(65, 2.0))


def test_minibatches_lie_between_steps_and_are_summed_up_per_step() -> None:
    rows = [(3, 0, 1.0), (3, 1, 2.0), (3, 2, np.nan), (4, 0, -1.0), (5, 0, np.nan)]
    records = [{"kind": "minibatch", "step": s, "minibatch": m, "wall_s": 0.0, "loss": v} for s, m, v in rows]
    curve = make_curves(records)["loss"]
    np.testing.assert_allclose(curve.x, [3, 3 + 1 / 3, 3 + 2 / 3, 4, 5])
    mean, low, high = curve.per_step()
    assert mean.x.tolist() == [3.0, 4.0, 5.0]
    np.testing.assert_array_equal(mean.y, [1.5, -1.0, np.nan])
    np.testing.assert_array_equal(low.y, [1.0, -1.0, np.nan])
    np.testing.assert_array_equal(high.y, [2.0, -1.0, np.nan])


def test_smooth_is_a_centred_mean_without_the_missing() -> None:
    np.testing.assert_allclose(smooth(np.array([0.0, 3.0, 6.0, 30.0]), 3), [1.5, 3.0, 13.0, 18.0])
    np.testing.assert_allclose(smooth(np.array([1.0, np.nan, 3.0]), 3), [1.0, np.nan, 3.0])
    assert np.isnan(smooth(np.full(4, np.nan), 3)).all()


def test_layers_are_ordered_by_number() -> None:
    names = ["router/flip/layer_10", "router/flip/layer_02", "router/flip"]
    point = Curve(np.array([1.0]), np.array([0.5]))
    assert list(layer_curves(dict.fromkeys(names, point))) == [2, 10]
