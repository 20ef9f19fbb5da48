"""Rows 14, 15 and 17: estimated gradients against exact ones, on problems small enough for exact answers.

- Row 14: how far the ratio of an old batch should count, on chains of 16 tokens with an exact pass rate.
- Row 15: what a random length does to the gradient with a token-level KL, by enumeration of all responses.
- Row 17: how many samples each prompt should get, by the exact error of the gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

from megarl.core.choices.parts import Scope
from megarl.core.objectives import OBJECTIVES, Objective
from megarl.core.sampling import allocate, gvm_allocate
from megarl.core.sampling.allocation import allocate_by_weights
from trials.intervals import median_interval
from trials.rows.allocation_bandit import PromptBandit, estimate, gradient_error, make_bandit
from trials.rows.chain_problem import train
from trials.rows.ratio_rows import COLORS, MARKERS, plot_spans, span
from trials.rows.source_row import Data, SourceRow
from trials.rows.stopping_problem import FORMS, bias_of_gradient


def median_span(values: Sequence[float] | Tensor) -> list[float]:
    """Return [low, median, high] of one value per seed: ``median_interval``, in the order of ``plot_spans``."""
    middle, low, high = median_interval(np.asarray(values, dtype=np.float64).tolist())
    return [low, middle, high]


# Row 14.
SCOPES: Mapping[str, str] = {"raft_pp": "token", "gspo": "sequence mean", "ctpo": "prefix", "kl_grpo": "future mean"}
"""The row of the table whose ratio is used -> its name in the picture."""
STALENESS, LEARNING_RATES = (4, 16, 64), (100.0, 300.0, 1000.0)
SHOWN = ((16, 300.0), (64, 300.0), (64, 1000.0))
DIFFERENCES = {"clip": "clip, q = 1", "half": "q = 1/2", "full": "q = 1"}


def clipped(scope: Scope) -> Objective:
    """Return RAFT++ with the ratio of a scope, in the factor and in the window [0.8, 1.28]."""
    row = OBJECTIVES["raft_pp"]
    (mask,), (factor,) = row.records, row.factors
    return replace(row, masks=(replace(mask, scope=scope),), factors=(replace(factor, scope=scope),))


def powered(scope: Scope, power: float) -> Objective:
    """Return RAFT with the weight ratio^power of a scope, without a window."""
    row = OBJECTIVES["power"]
    return replace(row, advantage="raft", factors=(replace(row.factors[0], scope=scope, power=power),))


def measure_powers() -> Data:
    """Train each weight on the same seeds, and compare the exact pass rates with those of weight 1 (q = 0)."""
    cells = [train_cell(staleness, lr) for lr, staleness in product(LEARNING_RATES, STALENESS)]
    return {"cells": cells}


def train_cell(staleness: int, lr: float) -> Data:
    """Return the differences of pass rates to q = 0, by the row whose scope is used, and by arm."""
    baseline = train(powered("token", 0.0), staleness, lr)  # a power of 0 is 1 in each scope
    differences = {}
    for name in SCOPES:
        scope = OBJECTIVES[name].factors[0].scope
        arms = {"clip": clipped(scope), "half": powered(scope, 0.5), "full": powered(scope, 1.0)}
        differences[name] = {arm: median_span(train(row, staleness, lr) - baseline) for arm, row in arms.items()}
    return {"staleness": staleness, "lr": lr, "baseline": span(baseline), "differences": differences}


def draw_powers(figure: Figure, data: Data) -> None:
    """Three of the nine settings: difference of the pass rate to that of q = 0, by scope."""
    by_setting = {(cell["staleness"], cell["lr"]): cell for cell in data["cells"]}
    for axes, setting in zip(figure.subplots(1, len(SHOWN), sharey=True), SHOWN, strict=True):
        cell = by_setting[setting]
        for index, (arm, label) in enumerate(DIFFERENCES.items()):
            spans = [cell["differences"][name][arm] for name in SCOPES]
            plot_spans(axes, np.arange(len(SCOPES)) + 0.2 * (index - 1), spans, index, label, line="none")
        axes.axhline(0, color="0.4", linewidth=1)
        axes.set_xticks(range(len(SCOPES)), [label.replace(" ", "\n") for label in SCOPES.values()], fontsize=7)
        title = f"{setting[0]} updates per batch, rate {setting[1]:g}\n(q = 0: {cell['baseline'][1]:.0%})"
        axes.set_title(title, fontsize=8)
        axes.grid(alpha=0.3, axis="y")
    figure.axes[0].set_ylabel("pass rate minus that of q = 0")
    figure.axes[1].legend(loc="upper left", fontsize=8)


def conclude_powers(data: Data) -> str:
    """Count the settings in which each half of the source's order shows by a point or more, or the opposite."""
    cells = [(cell, arms) for cell in data["cells"] for arms in cell["differences"].values()]

    def count(arm: str, sign: int) -> int:
        return sum(is_apart(arms[arm], sign) for _, arms in cells)

    both = sum(is_apart(arms["clip"], 1) and is_apart(arms["full"], -1) for _, arms in cells)
    below = {lr: [is_apart(arms["full"], -1) for cell, arms in cells if cell["lr"] == lr] for lr in LEARNING_RATES}
    by_rate = ", ".join(f"{sum(flags)} of {len(flags)} at rate {lr:g}" for lr, flags in below.items())
    return (
        f"The source's order clip > q = 0 > q = 1 showed in {both} of {len(cells)} settings at equal learning rates. "
        f"By the interval of the median difference, where that is a point of pass rate or more, clip is above q = 0 in "
        f"{count('clip', 1)} and below in {count('clip', -1)}; q = 1 is above in {count('full', 1)} and below in "
        f"{count('full', -1)} ({by_rate}). A clip shortens the steps, so that another rate may suit it."
    )


def is_apart(interval: Sequence[float], sign: int) -> bool:
    """Whether [low, median, high] lies on the side ``sign`` of 0, with a median of 0.01 or more."""
    low, middle, high = (sign * value for value in interval)
    return min(low, high) > 0 and middle >= 0.01


# Row 15.
NUM_PROBLEMS, BETA, BETAS = 20, 0.7, (0.01, 0.03, 0.1, 0.3, 0.7)
LABELS = {
    "printed": "as\nprinted",
    "explicit": "explicit\nterm\nadded",
    "complete": "and past\nterms\nkept",
    "constant": "constant\nH",
}


def measure_horizon() -> Data:
    """Return errors by form, one per random problem, and the relative bias of the printed form by beta."""
    errors = {form: [bias_of_gradient(seed, form, BETA) for seed in range(NUM_PROBLEMS)] for form in FORMS}
    by_beta = [span([bias_of_gradient(seed, "printed", beta)[1] for seed in range(NUM_PROBLEMS)]) for beta in BETAS]
    largest = {form: [entry for entry, _ in pairs] for form, pairs in errors.items()}
    return {"largest": largest, "relative": {f: span([r for _, r in e]) for f, e in errors.items()}, "by_beta": by_beta}


def draw_horizon(figure: Figure, data: Data) -> None:
    """Left: the largest entry of the bias, one point per problem, by form; right: the relative bias by beta."""
    left, right = figure.subplots(1, 2, width_ratios=(1.3, 1))
    for index, form in enumerate(FORMS):
        places = index + np.linspace(-0.25, 0.25, NUM_PROBLEMS)
        left.plot(places, np.maximum(data["largest"][form], 1e-18), MARKERS[index], color=COLORS[index], markersize=4)
    left.set(yscale="log", ylabel=f"largest entry of the bias, beta = {BETA}")
    left.set_xticks(range(len(FORMS)), list(LABELS.values()), fontsize=8)
    plot_spans(right, BETAS, data["by_beta"], 0, "as printed")
    right.set(xscale="log", yscale="log", xlabel="beta", ylabel="bias / gradient (norms)")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    right.legend(loc="upper left")


def conclude_horizon(data: Data) -> str:
    """Say how large the bias of each form is."""
    printed, explicit, complete, constant = (
        f"{min(data['largest'][form]):.2g} to {max(data['largest'][form]):.2g}" for form in FORMS
    )
    low, _, high = data["by_beta"][0]
    return (
        f"In {NUM_PROBLEMS} random problems with beta = {BETA}, an entry of the printed gradient is wrong by up to "
        f"{printed}; with the explicit term {explicit}, with past terms too {complete}, and with a constant H "
        f"(megarl's kl_horizon) {constant}. With megarl's default beta, {BETAS[0]}, the printed form's bias is "
        f"{low:.1%} to {high:.1%} of the gradient."
    )


# Row 17: 48 prompts, 8 samples for each on average.
NUM_BANDITS, NUM_PROMPTS, PER_PROMPT, REFRESH = 24, 48, 8, 10
"""GVM estimates anew every 10 steps; those samples do not train."""
TOTAL = NUM_PROMPTS * PER_PROMPT
ARMS = {
    "ideal": "least variance",
    "gvm": "GVM, exact p and G",
    "root": "1 / sqrt(p), exact p",
    "root_8": "1 / sqrt(p), p of 8",
    "kept_8": "equal, where p of 8 is not 0",
    "gvm_32": "GVM, p and G of 32",
    "gvm_8": "GVM, p and G of 8",
    "gvm_32_paid": "GVM of 32, paid",
    "gvm_8_paid": "GVM of 8, paid",
}
"""What decides the numbers of samples -> its name in the picture. Paid: stage 1 comes out of the same budget."""
SPREADS = {"unequal": 0.8, "equal": 0.0}
"""Standard deviation of the logarithm of a prompt's gradient size."""


def measure_allocations() -> Data:
    """Return the exact error of the gradient as a share of that under uniform sampling, by spread of sizes and arm."""
    data: Data = {}
    for spread, size in SPREADS.items():
        bandits = [make_bandit(seed, NUM_PROMPTS, size) for seed in range(NUM_BANDITS)]
        counts = [allocations(bandit, seed) for seed, bandit in enumerate(bandits)]
        worlds = list(zip(bandits, counts, strict=True))
        data[spread] = {arm: median_span([error_ratio(bandit, of[arm]) for bandit, of in worlds]) for arm in ARMS}
        left_out = [float((of["gvm_8"] == 0).mean()) for _, of in worlds]
        data[f"{spread} left out"] = median_span(left_out)
        ratios = [error_ratio(bandit, of["gvm"]) / error_ratio(bandit, of["root"]) for bandit, of in worlds]
        data[f"{spread} gvm over root"] = median_span(ratios)
        data[f"{spread} bias"] = median_span([gradient_bias(bandit, of["gvm_8"]) for bandit, of in worlds])
    return data


def allocations(bandit: PromptBandit, seed: int) -> dict[str, np.ndarray]:
    """Return the samples of each prompt, int64 [B], by arm; the arms share the estimates of stage 1."""
    rates = bandit.rates
    counts = {
        "ideal": allocate_by_weights(np.sqrt(bandit.variances), TOTAL),
        "gvm": gvm_allocate(rates, bandit.norms, TOTAL),
        "root": allocate(rates, TOTAL, "raft"),
    }
    for size in (8, 32):
        estimates = estimate(bandit, size, np.random.default_rng([seed, size]))
        counts[f"gvm_{size}"] = gvm_allocate(*estimates, TOTAL)
        counts[f"gvm_{size}_paid"] = gvm_allocate(*estimates, TOTAL - size * NUM_PROMPTS // REFRESH)
        counts[f"root_{size}"] = allocate(estimates[0], TOTAL, "raft")
        counts[f"kept_{size}"] = allocate_by_weights((estimates[0] > 0).astype(float), TOTAL, low=0)
    return counts


def error_ratio(bandit: PromptBandit, counts: np.ndarray) -> float:
    """Return the squared error over that of equally many samples of each prompt."""
    return gradient_error(bandit, counts) / gradient_error(bandit, np.full(NUM_PROMPTS, PER_PROMPT))


def gradient_bias(bandit: PromptBandit, counts: np.ndarray) -> float:
    """Return the norm of the missing part over that of the whole gradient."""
    missing = bandit.means[counts == 0].sum(0)
    return float(np.linalg.norm(missing) / np.linalg.norm(bandit.means.sum(0)))


def draw_allocations(figure: Figure, data: Data) -> None:
    """One panel for unequal and one for equal sizes of gradients: error over that of uniform sampling, by arm."""
    panels, places = figure.subplots(1, 2, sharex=True, sharey=True), np.arange(len(ARMS))[::-1]
    for axes, spread in zip(panels, SPREADS, strict=True):
        low, middle, high = np.array([data[spread][arm] for arm in ARMS]).T
        axes.errorbar(middle, places, xerr=[middle - low, high - middle], fmt="o", color=COLORS[0], capsize=3)
        axes.axvline(1, color=COLORS[1], linewidth=1, linestyle="--")
        axes.set_yticks(places, list(ARMS.values()), fontsize=8)
        axes.set_title(f"{spread} sizes of gradients", fontsize=9)
        axes.set(xlim=(0, 1.05), xlabel="squared error / uniform's")
        axes.grid(alpha=0.3)


def conclude_allocations(data: Data) -> str:
    """Say which arms are below uniform sampling, and at what price estimates seem to beat exact numbers."""

    def interval(spread: str, arm: str) -> str:
        return f"{data[spread][arm][0]:.2f} to {data[spread][arm][2]:.2f}"

    spreads = [spread for spread in SPREADS if all(data[spread][arm][2] < 1 for arm in ("gvm", "root"))]
    verdict = f"below 1 with {' and '.join(spreads)} sizes" if spreads else "not below 1"
    numbers = "; ".join(f"{s}: {interval(s, 'gvm')} and {interval(s, 'root')}" for s in SPREADS)
    left_out, bias = (data[f"unequal {name}"] for name in ("left out", "bias"))
    return (
        f"The error of GVM's numbers and of the square-root law over uniform sampling's is {verdict} ({numbers}); "
        f"GVM's has {compare(data, 'unequal')} with unequal sizes, {compare(data, 'equal')} with equal ones. With "
        f"estimates from 8 samples GVM's is {interval('unequal', 'gvm_8')}, but it leaves out {left_out[0]:.0%} to "
        f"{left_out[2]:.0%} of the prompts and {bias[0]:.0%} to {bias[2]:.0%} of the gradient; equal numbers for the "
        f"same prompts have {interval('unequal', 'kept_8')}."
    )


def compare(data: Data, spread: str) -> str:
    """Say whether GVM's exact numbers have a smaller error than the square-root law, in pairs of the same prompts."""
    low, _, high = data[f"{spread} gvm over root"]
    verdict = "a smaller error" if high < 1 else "a larger error" if low > 1 else "no clearly different error"
    return f"{verdict} ({low:.2f} to {high:.2f} of the law's)"


ROWS: tuple[SourceRow, ...] = (
    SourceRow(
        14,
        "How much of the ratio should count",
        "Rejection sampling on an old batch: clipped ratios beat no ratio (q = 0), which beats full importance "
        "sampling (q = 1) (RAFT++, figure 2, as told by a post on token-level KL; its values are not known).",
        measure_powers,
        draw_powers,
        conclude_powers,
    ),
    SourceRow(
        15,
        "A KL per token and a random length",
        "With H = |y|, the gradient has returns to go and no further term (the same post, which has no experiment). An "
        "earlier enumeration of another problem found a bias of .089, .0047 with the explicit term, 7e-12 with all.",
        measure_horizon,
        draw_horizon,
        conclude_horizon,
        is_exact=True,
    ),
    SourceRow(
        17,
        "Samples where the gradient varies most",
        "Numbers of samples by pass rate and gradient norm lower the variance of the gradient (GVM, arXiv 2505.02391: "
        "39.64 against RAFT++'s 36.42, and 2 to 4 times fewer steps).",
        measure_allocations,
        draw_allocations,
        conclude_allocations,
    ),
)
