"""Rows 4, 13 and 16: what becomes of the ratio of two policies.

- Row 4: routing replay changes the numerator of a ratio, or leaves it alone.
- Row 13: the product of token ratios explodes with the number of tokens, their geometric mean does not.
- Row 16: the ratio of a prefix leaves a fixed window, while a window that grows with the position keeps it.

All intervals are [smallest, median, largest] over independent seeds; they hold without an assumption on distributions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor
from variance_law import variance_law

from megarl.core.metrics import Stat
from megarl.core.objectives import OBJECTIVES, Mask, coefficients
from megarl.core.ratios import aggregate
from trials.rows.replay_effects import NUM_MINI_BATCHES, replay_effects
from trials.rows.source_row import BLUE, GREEN, PURPLE, RED, Data, SourceRow
from trials.rows.tool_episodes import NUM_EPISODES, make_episodes

COLORS = BLUE, RED, GREEN, PURPLE
MARKERS = ("o", "s", "^", "D")


def span(values: Sequence[float] | Tensor) -> list[float]:
    """Return [smallest, median, largest] of one value per seed."""
    column = np.asarray(values, dtype=np.float64)
    return [float(column.min()), float(np.median(column)), float(column.max())]


def plot_spans(
    axes: Axes, places: Sequence[float], spans: Sequence[Sequence[float]], index: int, label: str, line: str = "-"
) -> None:
    """Plot medians with bars from the smallest to the largest value, in the colour and marker of an index."""
    low, middle, high = np.array(spans).T
    options: dict[str, Any] = {"color": COLORS[index], "marker": MARKERS[index], "markersize": 5, "capsize": 3}
    options |= {"linestyle": line, "linewidth": 1.3}
    axes.errorbar(places, middle, [middle - low, high - middle], label=label, **options)


# Row 4.
MODES = ("r2", "r3")
NUM_MODELS = 5


def measure_replay() -> Data:
    """Train one step of four mini-batches with R2 and with R3, and look at each mini-batch just before its update."""
    effects = {mode: [replay_effects(mode, seed) for seed in range(NUM_MODELS)] for mode in MODES}
    by_batch = {mode: list(zip(*of_models, strict=True)) for mode, of_models in effects.items()}
    names = ("largest_gap", "flip", "repeat_gap")
    return {
        mode: {name: [span([getattr(effect, name) for effect in batch]) for batch in batches] for name in names}
        for mode, batches in by_batch.items()
    }


def draw_replay(figure: Figure, data: Data) -> None:
    """Two panels by mini-batch: the largest change of a log-probability, and the share of changed routes."""
    panels, places = figure.subplots(1, 2), np.arange(1, NUM_MINI_BATCHES + 1)
    labels = {
        "largest_gap": "largest change of a\nlog-probability",
        "flip": "share of (token, layer)\nwith other experts",
    }
    for axes, (name, label) in zip(panels, labels.items(), strict=True):
        for index, mode in enumerate(MODES):
            plot_spans(axes, places + 0.1 * index - 0.05, data[mode][name], index, mode.upper())
        axes.set(xlabel="mini-batch of the step", ylabel=label, xticks=places)
        axes.set_ylim(bottom=-0.02 * axes.get_ylim()[1])
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right")


def conclude_replay(data: Data) -> str:
    """Say whether each replay mode alters the first and the later mini-batches."""
    sentences = []
    for mode in MODES:
        first, *later = zip(data[mode]["largest_gap"], data[mode]["flip"], strict=True)
        is_same = first[0][2] == first[1][2] == 0
        least, most = min(gap[0] for gap, _ in later), max(gap[2] for gap, _ in later)
        begin = (
            "the first mini-batch unaltered, routes and log-probabilities to the bit"
            if is_same
            else f"no mini-batch unaltered (in the first, {first[0][0]:.2g} to {first[0][2]:.2g})"
        )
        later_ones = f"in later ones, the largest change of a log-probability is {least:.2g} to {most:.2g}"
        sentences.append(f"{mode.upper()} leaves {begin}; {later_ones}.")
    return f"Over {NUM_MODELS} models: " + " ".join(sentences)


# Row 13: log-ratios of independent tokens, N(-sigma^2 / 2, sigma^2), so that each ratio has mean 1.
SIGMA, LENGTHS, NUM_RESPONSES, NUM_SEEDS = 0.1, (1, 10, 100, 300, 1000), 2000, 12
KINDS = {"product": "sequence_sum", "geometric": "sequence_mean"}


def measure_explosion() -> Data:
    """Compare simulated weights of responses with the law of the product, and of the geometric mean, by length."""
    weights = [response_weights(seed) for seed in range(NUM_SEEDS)]
    data: Data = {"laws": {kind: [weight_law(kind, length) for length in LENGTHS] for kind in KINDS}}
    for kind in KINDS:
        spreads = [[spread_of(kind, length, of_seed[kind][length]) for length in LENGTHS] for of_seed in weights]
        by_length = np.array(spreads).transpose(1, 2, 0)
        data[kind] = [[span(row) for row in of_length] for of_length in by_length]
    # The widget draws N(0, sigma^2): each product is larger by the factor exp(H sigma^2 / 2), and so is its mean.
    data["widget_means"] = [math.exp(length * SIGMA**2 / 2) for length in LENGTHS]
    return data | past_in_future_means()


def response_weights(seed: int) -> dict[str, dict[int, Tensor]]:
    """Return kind -> length -> the weights of responses, float64 [N], aggregated by megarl."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(NUM_RESPONSES, max(LENGTHS), dtype=torch.float64, generator=generator)
    log_ratios = SIGMA * noise - SIGMA**2 / 2
    by_kind: dict[str, dict[int, Tensor]] = {kind: {} for kind in KINDS}
    for kind, scope in KINDS.items():
        for length in LENGTHS:
            packed = log_ratios[:, :length].flatten()
            bounds = torch.arange(0, packed.numel() + 1, length)
            by_token = aggregate(scope, packed, torch.ones_like(packed, dtype=torch.bool), bounds)
            by_kind[kind][length] = by_token[::length].exp()
    return by_kind


def spread_of(kind: str, length: int, weights: Tensor) -> tuple[float, float]:
    """Return variance (around the exact mean: an estimate would hide what is missing) and ESS / N of weights [N]."""
    mean = 1.0 if kind == "product" else math.exp(-(SIGMA**2) / 2 + SIGMA**2 / (2 * length))
    fraction = Stat.ess_of(Stat.summary(weights)).values()["fraction"]
    return float((weights - mean).square().mean()), fraction


def weight_law(kind: str, length: int) -> list[float]:
    """Return the exact variance and ESS / N: exp(H s^2) - 1 and exp(-H s^2) for the product.

    The mean of H log-ratios is N(-s^2 / 2, s^2 / H), so the geometric mean has exp(s^2 / H - s^2) (exp(s^2 / H) - 1)
    and exp(-s^2 / H).
    """
    if kind == "product":
        law = variance_law(SIGMA, length)
        return [law.variance, law.ess_fraction]
    share = SIGMA**2 / length
    return [math.exp(share - SIGMA**2) * math.expm1(share), math.exp(-share)]


def past_in_future_means() -> Data:
    """Change the first half of a response, and return the largest change of the second half's aggregated log-ratios."""
    generator = torch.Generator().manual_seed(0)
    before, half = torch.randn(2, 40, dtype=torch.float64, generator=generator), 20
    after = torch.cat([before[0, :half] + before[1, :half], before[0, half:]])
    mask, bounds = torch.ones(40, dtype=torch.bool), torch.tensor([0, 40])

    def change(scope: str) -> float:
        first, second = (aggregate(scope, column, mask, bounds)[half:] for column in (before[0], after))
        return float((first - second).abs().max())

    return {"past_in_future_mean": change("future_mean"), "past_in_sequence_mean": change("sequence_mean")}


def draw_explosion(figure: Figure, data: Data) -> None:
    """Two panels by length: variance, and effective sample size per response; lines are laws."""
    labels = {"product": "product", "geometric": "geometric mean"}
    fine = sorted({round(10 ** (step / 20)) for step in range(61)})
    for column, axes in enumerate(figure.subplots(1, 2)):
        for index, (kind, label) in enumerate(labels.items()):
            law = [weight_law(kind, length)[column] for length in fine]
            axes.plot(fine, law, color=COLORS[index], linewidth=1, linestyle="--")
            axes.set(xscale="log", xlabel="tokens H of a response")
            plot_spans(axes, LENGTHS, [pair[column] for pair in data[kind]], index, label, line="none")
        axes.grid(alpha=0.3)
    left, right = figure.axes
    left.set(yscale="log", ylabel="variance of the weight")
    right.set(ylim=(-0.03, 1.05), ylabel="effective sample size\nper response")
    left.legend(loc="upper left", title="dashed: exact law", fontsize=8, title_fontsize=8)


def conclude_explosion(data: Data) -> str:
    """Say at which lengths the law lies in the interval of the seeds, and what both weights come to."""
    laws, spans = data["laws"]["product"], data["product"]
    is_within = [
        all(low <= exact <= high for exact, (low, _, high) in zip(law, seen, strict=True))
        for law, seen in zip(laws, spans, strict=True)
    ]
    within = ", ".join(str(length) for length, is_in in zip(LENGTHS, is_within, strict=True) if is_in)
    low, _, high = spans[-1][0]
    at_the_end = f"{NUM_RESPONSES} responses show {low:.3g} to {high:,.0f}"
    if not is_within[-1]:
        at_the_end += ", since the few that make it up are seldom drawn"
    return (
        f"At sigma = {SIGMA:g} the exact variance e^(H sigma^2) - 1 and ESS of the product are within the seeds' "
        f"intervals at H = {within}; at H = {LENGTHS[-1]} the variance is {laws[-1][0]:,.0f} ({at_the_end}), while the "
        f"geometric mean's is {data['geometric'][-1][0][1]:.1g}. Log-ratios of mean 0, as the widget draws them, give "
        f"products a mean of {data['widget_means'][2]:.3g} at H = {LENGTHS[2]} in place of 1; a mean over the future "
        f"holds no past (change {data['past_in_future_mean']:g}), although the source says so."
    )


# Row 16.
DRIFT_SEEDS = 12
SIGMAS = (0.01, 0.02, 0.0387, 0.08)
"""Standard deviation of a token's log-ratio; 0.0387 is CTPO's fit at its step 100."""
REPORTED = 2
EDGES = (0, 4, 16, 64, 256, 1024, 4096)
_CTPO = OBJECTIVES["ctpo"]
FIXED, PRINTED, RELEASED = "fixed [0.5, 5]", "ctpo, as printed", "ctpo, as released"
WINDOWS = {
    FIXED: replace(_CTPO, masks=(Mask("theta_old", scope="prefix", low=0.5, high=5.0, sign="outward"),)),
    PRINTED: replace(_CTPO, masks=_CTPO.masks[:1]),
    RELEASED: _CTPO,
}
"""Name -> objective; the fixed bounds are those that CTPO compares with."""
SOURCE = {FIXED: (0.2, 0.2), PRINTED: (0.05, 0.1), RELEASED: (0.05, 0.1)}


def measure_windows() -> Data:
    """Return the share of tokens without gradient by position, and over all positions by the drift of the policy."""
    shares = np.array([[clipped_shares(sigma, seed) for seed in range(DRIFT_SEEDS)] for sigma in SIGMAS])
    named = {name: shares[:, :, index] for index, name in enumerate(WINDOWS)}
    return {
        "by_position": {name: [span(of_range) for of_range in of[REPORTED, :, :-1].T] for name, of in named.items()},
        "overall": {name: [span(of_drift) for of_drift in of[:, :, -1]] for name, of in named.items()},
        "fixed_minus_printed": span(named[FIXED][REPORTED, :, -1] - named[PRINTED][REPORTED, :, -1]),
        "implied": normal_share(SIGMAS[REPORTED]),
    }


def clipped_shares(sigma: float, seed: int) -> np.ndarray:
    """Return float64 [windows, ranges + 1]: shares of dropped tokens in each range of positions, and in all."""
    columns = make_episodes(sigma, seed)
    shares = []
    for objective in WINDOWS.values():
        is_dropped = (coefficients(objective, columns).values == 0)[columns.loss_mask].view(NUM_EPISODES, -1).double()
        ranges = [float(is_dropped[:, low:high].mean()) for low, high in pairwise(EDGES)]
        shares.append([*ranges, float(is_dropped.mean())])
    return np.array(shares)


def normal_share(sigma: float) -> float:
    """Return what CTPO's printed window drops at every t if log rho_t ~ N(0, sigma^2 t) and half of the A are negative.

    P = (P[Z > high / sigma] + P[Z < low / sigma]) / 2, with bounds high sqrt(t) and low sqrt(t).
    """
    (window,) = WINDOWS[PRINTED].records
    assert window.low is not None, "CTPO's window has two bounds"
    assert window.high is not None, "CTPO's window has two bounds"
    return sum(math.erfc(abs(bound) / sigma / math.sqrt(2)) / 4 for bound in (window.low, window.high))


def draw_windows(figure: Figure, data: Data) -> None:
    """Two panels: the share of dropped tokens by position at the reported drift, and over all positions by drift."""
    left, right = figure.subplots(1, 2, sharey=True)
    middles = [math.sqrt(max(low, 1) * high) for low, high in pairwise(EDGES)]
    for index, name in enumerate(WINDOWS):
        shift = 1.05 ** (index - 1)  # bars beside each other
        plot_spans(left, [place * shift for place in middles], data["by_position"][name], index, name)
        plot_spans(right, [sigma * shift for sigma in SIGMAS], data["overall"][name], index, name)
    left.set(xscale="log", xlabel="position t (tool tokens not counted)", ylabel="share of tokens without gradient")
    right.set(xscale="log", xlabel="sd of a token's log-ratio (dotted: CTPO's fit)", xticks=SIGMAS)
    right.set_xticks([], minor=True)
    right.set_xticklabels([f"{sigma:g}" for sigma in SIGMAS])
    right.axvline(SIGMAS[REPORTED], color="0.5", linewidth=1, linestyle=":")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    left.legend(loc="upper left", fontsize=8)


def conclude_windows(data: Data) -> str:
    """Say what each window drops early and late, and at which drift CTPO's two shares showed."""

    def shares(interval: Sequence[float]) -> str:
        return f"{interval[0]:.0%} to {interval[2]:.0%}"

    early_late = [f"{shares(spans[0])} and {shares(spans[-1])} ({name})" for name, spans in data["by_position"].items()]
    low, _, high = data["fixed_minus_printed"]
    places = [
        index
        for index in range(len(SIGMAS))
        if all(data["overall"][name][index][0] <= most for name, (_, most) in SOURCE.items())
        and all(data["overall"][name][index][2] >= least for name, (least, _) in SOURCE.items())
    ]
    drifts = f"at an sd of {', '.join(f'{SIGMAS[index]:g}' for index in places)}" if places else "at no sd"
    return (
        f"Of the first {EDGES[1]} tokens and of those beyond token {EDGES[-2]}, windows drop {'; '.join(early_late)}; "
        f"over all positions the fixed one drops {100 * low:+.0f} to {100 * high:+.0f} points more than the printed. "
        f"All intervals overlap the source's shares (20 %, 5 to 10 %) {drifts} (of {', '.join(map(str, SIGMAS))}); "
        f"normal log-ratios with its fit, {SIGMAS[REPORTED]:g}, and no trend would already give {data['implied']:.0%}."
    )


ROWS: tuple[SourceRow, ...] = (
    SourceRow(
        4,
        "Routing replay and the first mini-batch",
        "R2 leaves the target policy of the first mini-batch unaltered and alters later ones; R3 alters all "
        "(Zheng et al., arXiv 2512.01374, table 1).",
        measure_replay,
        draw_replay,
        conclude_replay,
        is_exact=True,
    ),
    SourceRow(
        13,
        "The product of ratios against their geometric mean",
        "The weight of a whole response, a product of token ratios, explodes with its length; the geometric mean does "
        "not (the widget of a post on token-level KL-regularised policy gradients, which shows no numbers).",
        measure_explosion,
        draw_explosion,
        conclude_explosion,
        is_exact=True,
    ),
    SourceRow(
        16,
        "Clip rate by position, with tool tokens",
        "Fixed bounds on the prefix ratio clip about 20 % of the tokens, bounds that grow with the root of the "
        "position 5 to 10 % (CTPO, arXiv 2605.07331).",
        measure_windows,
        draw_windows,
        conclude_windows,
    ),
)
