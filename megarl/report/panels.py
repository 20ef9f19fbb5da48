"""The panels of a run's report: which metrics each one plots, and how to read it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from megarl.report import plots
from megarl.report.plots import GREY, ORANGE, PHASES, PURPLE, RED, TEAL, Line, Scale
from megarl.report.series import LAYER_PREFIXES, Curves, layer_curves


@dataclass(frozen=True, slots=True)
class Panel:
    """One figure of the report."""

    title: str
    caption: str
    """How to read it, one or two sentences."""
    y_label: str
    lines: tuple[Line, ...] = ()
    """The metrics it plots, for a panel that is nothing but lines."""
    scale: Scale = "free"
    plot: Callable[[Axes, Curves], None] | None = None
    """Plots the panel instead of ``lines``."""
    plotted: tuple[str, ...] = ()
    """The metrics that ``plot`` reads."""
    layers: tuple[str, ...] = ()
    """Plots a map of layers: the first of these prefixes that has metrics."""
    wide: bool = False
    """Whether it takes the whole width of the page."""
    optional: bool = False
    """Whether only some runs have it, so that the page does not mention its absence."""

    @property
    def needs(self) -> tuple[str, ...]:
        """Its metrics; one of them is enough."""
        return self.plotted or tuple(line.metric for line in self.lines) or (self.layers[-1] + "XX",)

    def is_recorded(self, curves: Curves) -> bool:
        """Whether any of its metrics has a value that can be plotted."""
        if self.layers:
            return bool(layer_curves(curves, self.layers))
        return any(name in curves for name in self.needs)

    def fill(self, axes: Axes, curves: Curves) -> None:
        """Plot its curves, and set the axes."""
        if self.plot is not None:
            self.plot(axes, curves)
        elif self.layers:
            plots.plot_layers(axes, curves, self.layers)
        else:
            plots.plot_lines(axes, curves, self.lines)
        plots.scale_y(axes, self.scale)
        if not axes.get_ylabel():
            axes.set_ylabel(self.y_label)
        axes.set_xlabel("global step")


def render(panel: Panel, curves: Curves) -> bytes:
    """Return the panel as a PNG."""
    return plots.render_png((10.4, 3.9) if panel.wide else (6.2, 3.5), lambda figure: _fill(figure, panel, curves))


def _fill(figure: Figure, panel: Panel, curves: Curves) -> None:
    axes = figure.add_subplot()
    panel.fill(axes, curves)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10, steps=[1, 2, 5, 10]))
    axes.margins(x=0.012)
    handles = sorted(
        zip(*axes.get_legend_handles_labels(), strict=True), key=lambda entry: isinstance(entry[0], Line2D)
    )
    if handles:
        # Areas before lines; above the axes, where no curve can run behind it.
        place = {"loc": "outside upper left", "ncols": 8 if panel.wide else 4}
        figure.legend(*zip(*handles, strict=True), **place, handlelength=1.4, columnspacing=1.4)


PANELS = {
    "reward": Panel(
        "Reward and pass rate",
        "Training curves are over the sampled responses of each step; dots are evaluations on held-out problems.",
        "share of responses, mean reward",
        plot=plots.plot_reward,
        plotted=("reward/mean", "reward/pass_rate", "eval/pass_rate", "eval/reward"),
        wide=True,
    ),
    "effective_prompts": Panel(
        "Prompts that teach",
        "Only prompts whose responses differ in reward have a gradient. All solved or none solved: nothing to learn.",
        "share of prompts",
        (
            Line("sampling/contrast_fraction", "of those drawn", GREY, "dashed"),
            Line("prompts/effective_ratio", "of those that train"),
        ),
        "whole percent",
    ),
    "samples": Panel(
        "What sampling costs",
        "Responses drawn per prompt, and the number of rounds. An adaptive rule draws more responses to hard prompts.",
        "responses, rounds",
        (
            Line("sampling/samples_per_prompt", "drawn, per prompt"),
            Line("sampling/rounds", "rounds", ORANGE),
        ),
        "zero",
    ),
    "estimates": Panel(
        "Estimates that divide the budget",
        "Ada-Est: estimated pass rates, and their distance from the observed ones. GVM: the rates of its first stage.",
        "share",
        (
            Line("estimate/rate_mean", "estimated pass rate"),
            Line("estimate/error", "distance to what was drawn", ORANGE),
            Line("gvm/acceptance_rate", "accepted in the first stage"),
            Line("gvm/hopeless_fraction", "prompts without an accepted one", ORANGE),
        ),
        "whole percent",
        optional=True,
    ),
    "episodes": Panel(
        "Episodes",
        "Turns of the model per response; failed are those whose environment raised, or that took too long.",
        "turns, share",
        (
            Line("episode/turns_mean", "turns"),
            Line("episode/failed_fraction", "share that failed", ORANGE),
        ),
        "zero",
        optional=True,
    ),
    "length": Panel(
        "Response length",
        "Tokens that the model generated, end token included.",
        "response length (tokens)",
        (
            Line("response/length_max", "longest", GREY, "dashed"),
            Line("response/length_mean", "mean"),
            Line("eval/length_mean", "mean (held-out)", ORANGE, "dots"),
        ),
        "zero",
    ),
    "truncated": Panel(
        "Cut-off responses",
        "Responses that reached the length limit without ending.",
        "share of responses",
        (Line("response/truncated_fraction", "cut off at the length limit", ORANGE),),
        "percent",
    ),
    "entropy": Panel(
        "Entropy",
        "Mean over generated tokens, full vocabulary. A fast fall to zero is a collapse; a rise, a loss of control.",
        "entropy (nats per token)",
        (
            Line("entropy", "training engine"),
            Line("rollout/entropy", "start of the step", ORANGE),
        ),
        "zero",
    ),
    "kl": Panel(
        "Gap between sampling and training",
        "Both engines hold the same weights: this is rounding, routing and, with top_p below 1, the probability "
        "outside of the nucleus. k3 is never negative; k1 may be.",
        "KL[rollout || old] (nats per token)",
        plot=plots.plot_kl,
        plotted=("rollout/k1", "rollout/k3"),
    ),
    "first_order": Panel(
        "First-order error",
        "What the objective of tokens leaves out of that of sequences: |prod w - (1 + sum (w - 1))| over a response, "
        "w = new policy / rollout. Near or above 1, the gradient is no longer that of the sequence's reward.",
        "error of a response",
        (
            Line("first_order/error/max", "largest", GREY, "dashed"),
            Line("first_order/error/mean", "mean"),
            Line("first_order/error/p50", "median", TEAL),
        ),
        "log",
    ),
    "factors": Panel(
        "The two factors of the importance weight",
        "Their spread over the tokens of a mini-batch, with the range over the mini-batches of a step. Replay and more "
        "precise engines close the gap; fewer mini-batches and a smaller learning rate lower the staleness.",
        "standard deviation",
        (
            Line("gap/ratio/std", "gap: old / rollout", ORANGE),
            Line("ratio/std", "staleness: new / old"),
        ),
        "log",
    ),
    "extreme": Panel(
        "Extreme tokens",
        "Tokens of which a factor of the importance weight is above 2 or below 1/2.",
        "share of tokens, F(2)",
        (
            Line("rollout/extreme_2", "gap: old / rollout", RED),
            Line("ratio/extreme_2", "staleness: new / old"),
        ),
        "percent",
    ),
    "ess": Panel(
        "Effective sample size",
        "(sum w)² / (n sum w²): 100 % if all importance weights are alike.",
        "effective sample size (share)",
        plot=plots.plot_ess,
        plotted=("rollout/ess/fraction", "tis/ess/fraction"),
    ),
    "router": Panel(
        "Router disagreement",
        "Experts of the rollout engine against those used in training (zero under replay), and against those that the "
        "training routers would have chosen by themselves.",
        "share that differs",
        (
            Line("router/native/token_any", "own, any layer", ORANGE),
            Line("router/native/flip", "own, per layer", PURPLE),
            Line("router/token_any", "in use, any layer"),
            Line("router/flip", "in use, per layer", TEAL),
        ),
        "percent",
    ),
    "missing_rows": Panel(
        "Missing routes",
        "Tokens for which the rollout engine gave no route; they are routed natively.",
        "share of tokens",
        (Line("rollout/missing_rows_fraction", "tokens without a recorded route", RED),),
        "percent",
    ),
    "router_layers": Panel(
        "Router disagreement by layer",
        "Share of tokens for which rollout and training routers choose different experts, per MoE layer and step.",
        "MoE layer",
        layers=LAYER_PREFIXES,
        wide=True,
    ),
    "ratio": Panel(
        "Policy ratio",
        "How far each mini-batch has moved from the policy that started the step.",
        "ratio of new to old policy",
        plot=plots.plot_ratio,
        plotted=("ratio/mean", "ratio/min", "ratio/max"),
    ),
    "clip": Panel(
        "Clipping",
        "Tokens whose gradient the trust region stops, by sign of the advantage, and weights at the cap.",
        "share of tokens",
        (
            Line("clip/high", "above, A > 0"),
            Line("clip/low", "below, A < 0", ORANGE),
            Line("tis/truncated", "weight capped (TIS)", PURPLE),
        ),
        "percent",
    ),
    "grad_norm": Panel(
        "Gradient norm",
        "Over all parameters, before clipping.",
        "gradient norm",
        (Line("grad_norm", "before clipping"),),
        "zero",
    ),
    "loss": Panel(
        "Loss",
        "A surrogate: its gradient matters, its value says little.",
        "loss",
        (Line("loss", "surrogate loss"),),
    ),
    "time": Panel(
        "Where the time goes",
        "Seconds of each phase. The gap between the phases of a step and the line is time outside of all phases. An "
        "evaluation, and the checkpoint of the step before, come on top.",
        "seconds per step",
        plot=plots.plot_time,
        plotted=tuple(f"time/{phase}_s" for phase in PHASES),
        wide=True,
    ),
    "speed": Panel(
        "Throughput",
        "Tokens of all ranks per second of a whole step.",
        "tokens per second",
        (Line("speed/tokens_per_s", "tokens of a step / its time", TEAL),),
        "zero",
    ),
}
"""By name of the PNG file."""
