"""Costs of sampling rules that follow from their laws: samples drawn with a clip, and passes of a step.

Both rows take means over the pass rates of ``prompt_bandit.fit_mixture``, by the exact law of each rule
(``simulate.stopping_law``).
"""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure
from simulate import stopping_law

from megarl.core.choices.stopping import SamplingRule, Uniform, ada_seq_balance, ada_seq_pos
from megarl.core.sampling import allocate, expected_samples
from megarl.core.sampling.pass_at_k import mean_interval
from trials.intervals import describe, median_interval
from trials.rows.prompt_bandit import PromptBandit, Recipe, fit_mixture, train
from trials.rows.sampling_rows import SEEDS
from trials.rows.source_row import BLUE, GREEN, ORANGE, RED, Data, SourceRow

# Row 9: variance-reduced log p against Balance, clip 256

CLIP, HALVES = 256, (8, 16, 32, 64, 128)
GRID_SIZE, NUM_POINTS = 33, 40
"""Pass rates of the curve, and of means over the mixture."""
CHECKED, CHECK_RATES, CHECK_SIZE = 16, (0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95), 2000


def measure_clipped_costs() -> Data:
    """Return E[n] of Balance over p by law and simulation, and costs of both rules over the mixture of pass rates."""
    rule = ada_seq_balance(2 * CHECKED, round_size=1, max_samples=CLIP)
    grid = np.linspace(0.02, 0.98, GRID_SIZE)
    simulated = [simulate_balance(rate, CHECKED, CHECK_SIZE, seed) for seed, rate in enumerate(CHECK_RATES)]
    intervals = [mean_interval(counts) for counts in simulated]
    rates, weights = fit_mixture().points(NUM_POINTS)
    drawn = {}
    for half in HALVES:
        balance = ada_seq_balance(2 * half, max_samples=CLIP)
        laws = [stopping_law(balance, rate).expected_samples for rate in rates.tolist()]
        drawn[str(half)] = float(weights @ laws)
    sampled = fit_mixture().draw(512, np.random.default_rng(0))
    shares = {str(mean): allocate(sampled, mean * sampled.size, "log", 1, CLIP) for mean in (128, 256)}
    return {
        "grid": grid.tolist(),
        "law": [stopping_law(rule, rate).expected_samples for rate in grid.tolist()],
        "uncapped": [expected_samples(rate, CHECKED, CHECKED) for rate in grid.tolist()],
        "post": (CHECKED / (grid * (1 - grid))).tolist(),
        "simulated": [(interval.value, interval.low, interval.high) for interval in intervals],
        "law_at_simulated": [stopping_law(rule, rate).expected_samples for rate in CHECK_RATES],
        "balance_drawn": drawn,
        "log_at_clip": {mean: float((counts == CLIP).mean()) for mean, counts in shares.items()},
    }


def simulate_balance(rate: float, half: int, size: int, seed: int) -> np.ndarray:
    """Return int64 [size], the samples until ``half`` right and ``half`` wrong ones, at most CLIP."""
    is_right = np.random.default_rng([seed, 9]).random((size, CLIP)) < rate
    unfinished = (is_right.cumsum(1) < half) | ((~is_right).cumsum(1) < half)
    return np.minimum(unfinished.sum(1) + 1, CLIP)


def draw_clipped_costs(figure: Figure, data: Data) -> None:
    left, right = figure.subplots(1, 2)
    left.plot(data["grid"], data["post"], color=RED, linestyle="--", label="post: k / (p (1 - p))")
    left.plot(data["grid"], data["uncapped"], color=GREEN, linestyle=":", label="exact, no clip")
    left.plot(data["grid"], data["law"], color=BLUE, label="exact, clip 256")
    middles, lows, highs = np.array(data["simulated"]).T
    errors = [middles - lows, highs - middles]
    left.errorbar(CHECK_RATES, middles, yerr=errors, fmt="x", color="black", markersize=4, label="simulated")
    left.set(xlabel="pass rate p", ylabel=f"samples drawn, {CHECKED} of each class", ylim=(0, 420))
    left.legend(fontsize=8, loc="upper center")
    drawn = np.array(list(data["balance_drawn"].values()))
    right.plot([0, CLIP], [0, 2 * CLIP], color=ORANGE, label="log p, trains all")
    right.plot(drawn, drawn + 2 * np.array(HALVES), color=BLUE, marker="o", markersize=4, label="Balance, k + k")
    for half, count in zip(HALVES[:-1], drawn.tolist(), strict=False):
        right.annotate(f"k = {half}", (count + 6, count + 2 * half - 20), fontsize=7, color=BLUE)
    right.plot([256, 255], [512, 383], "s", color=RED, markersize=5, label="post: 512 and 383")
    right.set(xlabel="mean samples drawn", ylabel="drawn + trained", xlim=(0, 280), ylim=(0, 560))
    right.legend(fontsize=8, loc="upper left")


def conclude_clipped_costs(data: Data) -> str:
    inside = sum(
        low <= law <= high for (_, low, high), law in zip(data["simulated"], data["law_at_simulated"], strict=True)
    )
    drawn = data["balance_drawn"][str(CHECKED)]
    return (
        f"Balance with {CHECKED} + {CHECKED} draws {drawn:.0f} samples per prompt and costs {drawn + 2 * CHECKED:.0f} "
        f"(drawn + trained), against {2 * drawn:.0f} for log p with as many drawn and all trained: the difference is "
        f"samples that do not train. The post's 512 needs {data['log_at_clip']['256']:.0%} of the prompts at the clip, "
        "where nothing is left to allocate, and its stated average of 128 costs 256, less than 383: its comparison "
        f"cannot be repeated. ({inside} of {len(CHECK_RATES)} simulated means have the law in their normal 95 % "
        "interval.)"
    )


# Row 12: step time, counted

PUBLISHED_STEP_TIMES = {"Pos": 2.2, "Bal": 2.8}
UPDATE_SHARE = 15 / 102
"""Actor update over step time, 1.5B: arXiv 2510.04996, version 3, which does not say for which rule."""
TRAIN_PASSES, UPDATE_PASSES = 4, 3
"""Forward passes of a trained sample: old log-probabilities, and in the update one, and a backward pass as two."""
TIMED_STEPS, BASE_SIZE = (0, 20, 40, 80), 4
TIMED_RULES = {"Pos": ada_seq_pos(BASE_SIZE), "Bal": ada_seq_balance(BASE_SIZE)}


def measure_step_times() -> Data:
    """Return samples drawn in units of GRPO with n = 4: over the mixture, and over prompts at later steps by seed."""
    rates, weights = fit_mixture().points()
    start = {
        name: float(weights @ [stopping_law(rule, rate).expected_samples for rate in rates.tolist()]) / BASE_SIZE
        for name, rule in TIMED_RULES.items()
    }
    base = Recipe("n4", 32, lambda rates: Uniform(BASE_SIZE))
    courses = [train(PromptBandit.make(seed), base, TIMED_STEPS[-1], seed) for seed in SEEDS]
    later: Data = {
        name: {str(step): [count_drawn(rule, course.pass_rates[step]) for course in courses] for step in TIMED_STEPS}
        for name, rule in TIMED_RULES.items()
    }
    accuracy = {str(step): [course.accuracy[step] for course in courses] for step in TIMED_STEPS}
    return {"start": start, "later": later, "accuracy": accuracy}


def count_drawn(rule: SamplingRule, rates: np.ndarray) -> float:
    """Return the expected samples per prompt in units of BASE_SIZE, at pass rates [P]."""
    return float(np.mean([stopping_law(rule, rate).expected_samples for rate in rates.tolist()])) / BASE_SIZE


def predict_step_time(drawn: float, sample_passes: float) -> float:
    """Return ``(drawn s + 4) / (s + 4)``: the passes of a step in units of those of GRPO.

    drawn: samples in units of GRPO's; sample_passes: s, the time to sample a response in forward passes over it.
    Equally many samples train.
    """
    return (drawn * sample_passes + TRAIN_PASSES) / (sample_passes + TRAIN_PASSES)


def find_sample_passes(drawn: float, step_time: float) -> float:
    """Return the s for which ``predict_step_time`` is ``step_time``."""
    return TRAIN_PASSES * (step_time - 1) / (drawn - step_time)


def draw_step_times(figure: Figure, data: Data) -> None:
    left, right = figure.subplots(1, 2)
    grid = np.geomspace(0.3, 100, 60)
    for (name, by_step), color in zip(data["later"].items(), (BLUE, ORANGE), strict=True):
        middles, lows, highs = np.array([median_interval(counts) for counts in by_step.values()]).T
        accuracy = [float(np.median(rates)) for rates in data["accuracy"].values()]
        errors = [middles - lows, highs - middles]
        left.errorbar(accuracy, middles, yerr=errors, marker="o", markersize=4, color=color, capsize=2, label=name)
        drawn, published = data["start"][name], PUBLISHED_STEP_TIMES[name]
        right.plot(grid, [predict_step_time(drawn, s) for s in grid.tolist()], color=color, label=f"{name}, counted")
        right.axhline(published, color=color, linestyle="--", linewidth=1, label=f"{name}, source")
    left.set(xlabel="exact accuracy as training goes on", ylabel="samples drawn / GRPO's", ylim=(0, 8))
    left.legend(fontsize=8, loc="upper left")
    right.set(xscale="log", xlabel="time to sample, in forward passes", ylabel="step time / GRPO's", ylim=(0.8, 4.8))
    right.legend(fontsize=8, loc="upper left", ncols=2)


def conclude_step_times(data: Data) -> str:
    pos, bal = data["start"]["Pos"], data["start"]["Bal"]
    late = [describe(median_interval(by_step[str(TIMED_STEPS[-1])]), 1) for by_step in data["later"].values()]
    passes = [find_sample_passes(drawn, PUBLISHED_STEP_TIMES[name]) for name, drawn in data["start"].items()]
    stated = UPDATE_PASSES / UPDATE_SHARE - TRAIN_PASSES
    times = [
        f"{predict_step_time(pos, s):.1f} and {predict_step_time(bal, s):.1f} times as long if sampling takes {s:.3g}"
        for s in (1, stated)
    ]
    return (
        f"With n = 4, Pos draws {pos:.2f} and Bal {bal:.2f} times GRPO's samples ({late[0]} and {late[1]} after "
        f"{TIMED_STEPS[-1]} steps of GRPO) and trains as many, so a post's 'no extra forward passes' is wrong. A step "
        f"takes {times[0]} forward pass and {times[1]} (15 of 102 s in the update); the source's order shows, and its "
        f"2.2 and 2.8 need {passes[0]:.1f} and {passes[1]:.1f}."
    )


ROWS: tuple[SourceRow, ...] = (
    SourceRow(
        9, "Log p against Balance, clip 256", "Variance-reduced log p costs 512 and Balance 383 at a clip of 256 "
        "samples (post 'Adaptive Sampling and Curriculum Methods').",
        measure_clipped_costs, draw_clipped_costs, conclude_clipped_costs,
    ),
    SourceRow(
        12, "Step time of Ada-Seq", "A step takes 2.2 (Pos) and 2.8 (Bal) times as long as GRPO's, 1.5B (arXiv "
        "2510.04996, version 3, table 3).",
        measure_step_times, draw_step_times, conclude_step_times,
    ),
)  # fmt: skip
