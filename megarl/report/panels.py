"""The panels of a run's report: which metrics each one draws, and how to read it.

A panel is a row of ``PANELS``. Figures are made without pyplot: nothing global is touched and no display is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from megarl.report import plots as draw
from megarl.report.plots import PHASES, render_png
from megarl.report.series import LAYER_PREFIXES, Series, layer_curves


@dataclass(frozen=True, slots=True)
class Panel:
    """One figure of the report."""

    key: str
    """Name of the PNG file."""
    title: str
    caption: str
    """How to read it, one or two sentences."""
    needs: tuple[str, ...]
    """Metrics it draws; one of them is enough."""
    draw: Callable[[Axes, Series], None]
    wide: bool = False
    """Whether it takes the whole width of the page."""
    optional: bool = False
    """Whether only some runs have it, so that its absence is not told."""

    def is_recorded(self, series: Series) -> bool:
        """Whether any of its metrics has a value that can be drawn."""
        if self.key == "router_layers":
            return bool(layer_curves(series))
        return any(series.find(name) is not None for name in self.needs)


def render(panel: Panel, series: Series) -> bytes:
    """Return the panel as a PNG."""
    return render_png((10.4, 3.9) if panel.wide else (6.2, 3.5), lambda figure: _fill(figure, panel, series))


def _fill(figure: Figure, panel: Panel, series: Series) -> None:
    axes = figure.add_subplot()
    panel.draw(axes, series)
    axes.set_xlabel("global step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10, steps=[1, 2, 5, 10]))
    axes.margins(x=0.012)
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        # Areas before lines; above the axes, where no curve can run behind it.
        order = sorted(range(len(handles)), key=lambda index: isinstance(handles[index], Line2D))
        figure.legend(
            [handles[index] for index in order],
            [labels[index] for index in order],
            loc="outside upper left",
            ncols=8 if panel.wide else 4,
            handlelength=1.4,
            columnspacing=1.4,
        )


PANELS: tuple[Panel, ...] = (
    Panel(
        "reward",
        "Reward and pass rate",
        "Training curves are over the sampled responses of each step; dots are evaluations on held-out problems.",
        ("reward/mean", "reward/pass_rate", "eval/pass_rate", "eval/reward"),
        draw.draw_reward,
        wide=True,
    ),
    Panel(
        "effective_prompts",
        "Prompts that teach",
        "Only prompts whose responses differ in reward have a gradient. All solved or none solved: nothing to learn.",
        ("prompts/effective_ratio", "sampling/contrast_fraction"),
        draw.draw_effective,
    ),
    Panel(
        "samples",
        "What sampling costs",
        "Responses drawn per prompt, and the rounds that they came in: an adaptive rule draws more of hard prompts.",
        ("sampling/samples_per_prompt", "sampling/rounds"),
        draw.draw_samples,
    ),
    Panel(
        "estimates",
        "What allotment goes by",
        "Ada-Est: estimated pass rates and how far from them the drawn ones were. GVM: the rates of its first stage.",
        ("estimate/error", "estimate/rate_mean", "gvm/acceptance_rate", "gvm/hopeless_fraction"),
        draw.draw_estimates,
        optional=True,
    ),
    Panel(
        "episodes",
        "Episodes",
        "Turns of the model per response; failed are those whose environment raised, or that took too long.",
        ("episode/turns_mean", "episode/failed_fraction"),
        draw.draw_episodes,
        optional=True,
    ),
    Panel(
        "length",
        "Response length",
        "Tokens that the model generated, end token included.",
        ("response/length_mean", "response/length_max", "eval/length_mean"),
        draw.draw_length,
    ),
    Panel(
        "truncated",
        "Cut-off responses",
        "Responses that reached the length limit without ending.",
        ("response/truncated_fraction",),
        draw.draw_truncated,
    ),
    Panel(
        "entropy",
        "Entropy",
        "Mean over generated tokens, full vocabulary. A fast fall to zero is a collapse; a rise, a loss of control.",
        ("entropy", "rollout/entropy"),
        draw.draw_entropy,
    ),
    Panel(
        "kl",
        "Gap between sampling and training",
        "Both engines hold the same weights: this is rounding, routing and, with top_p below 1, the probability "
        "outside of the nucleus. k3 is never negative; k1 may be.",
        ("rollout/k1", "rollout/k3"),
        draw.draw_kl,
    ),
    Panel(
        "extreme",
        "Extreme tokens",
        "Tokens whose probability differs between the engines by more than a factor of 2.",
        ("rollout/extreme_2",),
        draw.draw_extreme,
    ),
    Panel(
        "ess",
        "Effective sample size",
        "(sum w)² / (n sum w²): 100 % if all importance weights are alike.",
        ("rollout/ess/fraction", "tis/ess/fraction"),
        draw.draw_ess,
    ),
    Panel(
        "router",
        "Router disagreement",
        "Experts of the rollout engine against those used in training (zero under replay), and against those that the "
        "training routers would have chosen by themselves.",
        ("router/flip", "router/token_any", "router/native/flip", "router/native/token_any"),
        draw.draw_router,
    ),
    Panel(
        "missing_rows",
        "Missing routes",
        "Tokens for which the rollout engine gave no route; they are routed natively.",
        ("rollout/missing_rows_fraction",),
        draw.draw_missing,
    ),
    Panel(
        "router_layers",
        "Router disagreement by layer",
        "Share of tokens for which rollout and training routers choose different experts, per MoE layer and step.",
        (LAYER_PREFIXES[-1] + "XX",),
        draw.draw_router_layers,
        wide=True,
    ),
    Panel(
        "ratio",
        "Policy ratio",
        "How far each mini-batch has moved from the policy that started the step.",
        ("ratio/mean", "ratio/min", "ratio/max"),
        draw.draw_ratio,
    ),
    Panel(
        "clip",
        "Clipping",
        "Tokens whose gradient the trust region stops, by sign of the advantage, and weights at the cap.",
        ("clip/high", "clip/low", "tis/truncated"),
        draw.draw_clip,
    ),
    Panel("grad_norm", "Gradient norm", "Over all parameters, before clipping.", ("grad_norm",), draw.draw_grad_norm),
    Panel("loss", "Loss", "A surrogate: its gradient counts, its height says little.", ("loss",), draw.draw_loss),
    Panel(
        "time",
        "Where the time goes",
        "Seconds of each phase. What lies between the phases of a step and the line is in none of them; an evaluation "
        "and the checkpoint of the step before come on top.",
        tuple(f"time/{phase}_s" for phase in PHASES),
        draw.draw_time,
        wide=True,
    ),
    Panel(
        "speed",
        "Throughput",
        "Tokens of all ranks per second of a whole step.",
        ("speed/tokens_per_s",),
        draw.draw_speed,
    ),
)
