"""Claims on what sampling rules cost: per step, per sample, and for a given accuracy or entropy.

Rows with training run the bandit of ``prompt_bandit`` with ten seeds: a seed sets prompts, order and random numbers,
equally for all rules. Intervals are order statistics that hold the median over seeds with at least 95 %. A cost is
``samples drawn + c * samples trained``; a response of the bandit has one token, so samples are tokens.
"""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from megarl.core.choices.credit import Credit
from megarl.core.choices.stopping import Uniform, ada_seq_balance, ada_seq_pos
from trials.intervals import Interval, describe, first_reach, median_interval, plot_intervals
from trials.rows.prompt_bandit import Course, PromptBandit, Recipe, train
from trials.rows.sampling_rows import SEEDS, share_samples
from trials.rows.source_row import BLUE, GRAY, GREEN, ORANGE, RED, Data, SourceRow


def run_seeds(recipe: Recipe, num_steps: int, learning_rate: float) -> list[Course]:
    """Return one training run per seed."""
    return [train(PromptBandit.make(seed), recipe, num_steps, seed, learning_rate) for seed in SEEDS]


# Row 7: group size per step and per cost

GROUP_SIZES, GROUP_PROMPTS, GROUP_SAMPLES = (4, 8, 16), 16, 12_800
GROUP_RATES = (0.03, 0.06)
TARGET = 0.55


def measure_group_sizes() -> Data:
    """Return accuracy curves by learning rate, group size and seed, up to an equal number of samples."""
    curves: Data = {}
    for learning_rate in GROUP_RATES:
        curves[str(learning_rate)] = {
            str(n): [
                course.accuracy
                for course in run_seeds(
                    Recipe(f"n = {n}", GROUP_PROMPTS, lambda rates, n=n: Uniform(n)),
                    GROUP_SAMPLES // (n * GROUP_PROMPTS),
                    learning_rate,
                )
            ]
            for n in GROUP_SIZES
        }
    return {"curves": curves}


def reach_target(by_size: Data) -> dict[int, np.ndarray]:
    """Return the steps to accuracy TARGET by group size, [10 seeds]."""
    return {
        int(n): np.array([first_reach(curve, range(len(curve)), TARGET) for curve in curves])
        for n, curves in by_size.items()
    }


def draw_group_sizes(figure: Figure, data: Data) -> None:
    left, right = figure.subplots(1, 2, sharey=True)
    by_size = data["curves"][str(GROUP_RATES[0])]
    for (n, curves), color in zip(by_size.items(), (BLUE, ORANGE, GREEN), strict=True):
        accuracy = np.array(curves)
        steps = np.arange(accuracy.shape[1])
        for axes, positions in ((left, steps), (right, steps * int(n) * GROUP_PROMPTS)):
            axes.plot(positions, np.median(accuracy, 0), color=color, label=f"n = {n}")
            axes.fill_between(positions, accuracy.min(0), accuracy.max(0), color=color, alpha=0.2, linewidth=0)
    left.set(xlabel="step", ylabel="exact accuracy", xlim=(0, GROUP_SAMPLES // (max(GROUP_SIZES) * GROUP_PROMPTS)))
    right.set(xlabel="samples (cost / (1 + c))")
    right.legend(fontsize=8, loc="lower right", title="median, range of 10 seeds", title_fontsize=8)


def compare_sizes(by_size: Data, base: int) -> tuple[Interval, Interval, Interval]:
    """Return steps and samples of the largest group in units of ``base``'s, and the fixed cost that makes them equal.

    Equal times: ``(fixed + large batch) * large steps = (fixed + small batch) * small steps``, in samples.
    """
    size, steps = GROUP_SIZES[-1], reach_target(by_size)
    large, small = steps[size], steps[base]
    fixed = GROUP_PROMPTS * (size * large - base * small) / (small - large)
    return median_interval(large / small), median_interval(size * large / (base * small)), median_interval(fixed)


def conclude_group_sizes(data: Data) -> str:
    by_base = {base: [compare_sizes(by_size, base) for by_size in data["curves"].values()] for base in (4, 8)}
    steps, samples, fixed = (
        {base: " and ".join(describe(row[column], digits) for row in rows) for base, rows in by_base.items()}
        for column, digits in ((0, 2), (1, 2), (2, 0))
    )
    shows = all(steps[2] < 1 < samples[1] for rows in by_base.values() for steps, samples, _ in rows)
    return (
        f"At learning rates {' and '.join(data['curves'])}, n = 16 reaches accuracy {TARGET} in {steps[4]} of the "
        f"steps of n = 4 ({steps[8]} of n = 8), with {samples[4]} ({samples[8]}) times the samples: the claim "
        f"{'shows' if shows else 'does not show'}. All drawn samples train, so every c gives this order; only a fixed "
        f"cost per step above {fixed[4]} samples would let n = 16 overtake n = 4."
    )


# Row 10: rules at equal trained samples

EQUAL_STEPS, EQUAL_RATES = 80, (0.03, 0.06)
EQUAL_ARMS = (
    Recipe("n4", 32, lambda rates: Uniform(4)),
    Recipe("n8", 16, lambda rates: Uniform(8)),
    Recipe("Pos", 32, lambda rates: ada_seq_pos(4), "dapo", Credit()),
    Recipe("Bal", 32, lambda rates: ada_seq_balance(4), "dapo", Credit()),
    Recipe("Est", 16, share_samples("ada_est"), "dapo", Credit(scale="root_rate", rate_eps=1e-3)),
    Recipe("16, train 4", 32, lambda rates: Uniform(16, 4, "balance"), "dapo", Credit()),
    Recipe("n8, trains twice", 32, lambda rates: Uniform(8)),
)
PUBLISHED_SCORES = {"n4": 45.3, "n8": 46.1, "Pos": 46.1, "Bal": 47.6, "Est": 46.6}
"""1.5B, post 'Adaptive Sampling and Curriculum Methods'."""


def measure_equal_training() -> Data:
    """Return final accuracy and samples by learning rate, arm and seed; all arms but the last train equally many."""
    arms: Data = {str(learning_rate): {} for learning_rate in EQUAL_RATES}
    for learning_rate, by_name in arms.items():
        for recipe in EQUAL_ARMS:
            courses = run_seeds(recipe, EQUAL_STEPS, float(learning_rate))
            by_name[recipe.name] = {
                "accuracy": [course.accuracy[-1] for course in courses],
                "drawn": [course.drawn[-1] for course in courses],
                "trained": [course.trained[-1] for course in courses],
            }
    return {"arms": arms}


def gain(arms: Data, name: str, base: str = "n4") -> Interval:
    """Return the paired difference of final accuracy of two arms, in points [3]."""
    return median_interval(100 * np.subtract(arms[name]["accuracy"], arms[base]["accuracy"]))


def count_drawn(arms: Data, name: str) -> Interval:
    """Return the samples drawn per trained sample of an arm [3]."""
    return median_interval(np.divide(arms[name]["drawn"], arms[name]["trained"]).tolist())


def draw_equal_training(figure: Figure, data: Data) -> None:
    left, right = figure.subplots(1, 2, sharey=True)
    names = [recipe.name for recipe in EQUAL_ARMS]
    rows = np.arange(len(names))
    gains = [PUBLISHED_SCORES[name] - PUBLISHED_SCORES["n4"] if name in PUBLISHED_SCORES else np.nan for name in names]
    left.plot(gains, rows, "s", color=RED, markersize=5, label="source, 1.5B")
    for (learning_rate, arms), color, shift in zip(data["arms"].items(), (BLUE, GREEN), (-0.12, 0.12), strict=True):
        label = f"bandit, learning rate {learning_rate}"
        plot_intervals(left, [gain(arms, name) for name in names], rows + shift, color=color, label=label)
    left.axvline(0, color=GRAY, linewidth=1)
    left.set(yticks=rows, yticklabels=names, xlabel="accuracy, points above n4")
    costs = [count_drawn(data["arms"][str(EQUAL_RATES[0])], name)[0] for name in names]
    bars = right.barh(rows, costs, color=BLUE)
    right.bar_label(bars, [f"{cost:.1f}" for cost in costs], padding=2, fontsize=8)
    right.set(xlabel=f"drawn per trained sample, rate {EQUAL_RATES[0]}", xlim=(0, 1.2 * max(costs)))
    right.invert_yaxis()
    figure.legend(*left.get_legend_handles_labels(), fontsize=8, loc="outside upper center", ncols=3)


def conclude_equal_training(data: Data) -> str:
    def show(name: str, base: str) -> str:
        return " and ".join(describe(gain(arms, name, base), 1, signed=True) for arms in data["arms"].values())

    names = ("n8", "Pos", "Bal", "Est")
    gains = [f"{name} {show(name, 'n4')}" for name in names]
    better = [name for name in names if all(gain(arms, name)[1] > 0 for arms in data["arms"].values())]
    cost = " and ".join(describe(count_drawn(arms, "Bal"), 1) for arms in data["arms"].values())
    return (
        f"At equal trained samples and learning rates {' and '.join(data['arms'])}, points of accuracy over n4: "
        f"{'; '.join(gains)}; n8 that trains twice as much {show('n8, trains twice', 'n4')}. Above n4 in the source "
        f"are all four, here {' and '.join(better) or 'none'}. Bal draws {cost} times "
        f"n4's samples, and is {show('Bal', '16, train 4')} points from training on a balanced 4 of 16."
    )


# Row 11: Balance against GRPO with twice the trained samples

FRONTIER_STEPS, FRONTIER_RATE, LEVEL = 90, 0.03, 0.6
FRONTIER_ARMS = (
    Recipe("GRPO, n = 16", 16, lambda rates: Uniform(16)),
    Recipe("Balance 8 of up to 32", 16, lambda rates: ada_seq_balance(8), "dapo", Credit()),
    Recipe("GRPO, n = 32", 16, lambda rates: Uniform(32)),
    Recipe(
        "Balance 16 of up to 64", 16, lambda rates: ada_seq_balance(16, round_size=16, max_samples=64), "dapo", Credit()
    ),
)
MEASURED_COSTS = {"1.5B": 15 / (102 - 15), "7B": 85 / (236 - 85)}
"""c if the source's seconds of update and step are those of GRPO (arXiv 2510.04996, version 3, does not say)."""


def measure_frontiers() -> Data:
    """Return accuracy, exact entropy and counts of the arms by seed and step."""
    arms: Data = {}
    for recipe in FRONTIER_ARMS:
        courses = run_seeds(recipe, FRONTIER_STEPS, FRONTIER_RATE)
        arms[recipe.name] = {
            "accuracy": [course.accuracy for course in courses],
            "entropy": [course.entropy for course in courses],
            "drawn": [[0, *course.drawn] for course in courses],
            "trained": [[0, *course.trained] for course in courses],
        }
    return {"arms": arms}


def reach_level(arm: Data) -> dict[str, np.ndarray]:
    """Return drawn and trained samples and entropy where the accuracy first reaches LEVEL, [10 seeds] each."""
    seeds = range(len(arm["accuracy"]))
    return {
        name: np.array([first_reach(arm["accuracy"][seed], arm[name][seed], LEVEL) for seed in seeds])
        for name in ("drawn", "trained", "entropy")
    }


def compare_costs(grpo: Data, balance: Data, c: float) -> Interval:
    """Return Balance's cost in units of GRPO's at accuracy LEVEL, for a cost c of training."""
    large, small = reach_level(grpo), reach_level(balance)
    return median_interval((small["drawn"] + c * small["trained"]) / (large["drawn"] + c * large["trained"]))


def find_equal_cost(grpo: Data, balance: Data) -> Interval:
    """Return the c at which both cost the same at accuracy LEVEL: extra samples drawn over samples not trained."""
    large, small = reach_level(grpo), reach_level(balance)
    return median_interval((small["drawn"] - large["drawn"]) / (large["trained"] - small["trained"]))


def draw_frontiers(figure: Figure, data: Data) -> None:
    left, middle, right = figure.subplots(1, 3)
    arms = list(data["arms"].values())
    for (name, arm), color, style in zip(
        data["arms"].items(), (BLUE, ORANGE, BLUE, ORANGE), ("-", "-", "--", "--"), strict=True
    ):
        accuracy, drawn, trained, entropy = (np.array(arm[k]) for k in ("accuracy", "drawn", "trained", "entropy"))
        cost = np.median(drawn + MEASURED_COSTS["1.5B"] * trained, 0) / 1000
        left.plot(cost, np.median(accuracy, 0), color=color, linestyle=style, label=name)
        right.plot(np.median(entropy, 0), np.median(accuracy, 0), color=color, linestyle=style)
    grid = np.linspace(0, 4, 41)
    for (grpo, balance), style in zip((arms[:2], arms[2:]), ("-", "--"), strict=True):
        middles, lows, highs = np.array([compare_costs(grpo, balance, c) for c in grid]).T
        middle.plot(grid, middles, color=ORANGE, linestyle=style)
        middle.fill_between(grid, lows, highs, color=ORANGE, alpha=0.2, linewidth=0)
    middle.axhline(1, color=GRAY, linewidth=1)
    for name, c in MEASURED_COSTS.items():
        middle.axvline(c, color=RED, linestyle=":", linewidth=1)
        middle.annotate(name, (c, 0.52), color=RED, fontsize=7, rotation=90, ha="right")
    left.set(xlabel="1000 samples (c of 1.5B)", ylabel="exact accuracy, median", xscale="log", xlim=(1, 60))
    middle.set(xlabel="c", ylabel=f"cost / GRPO's, accuracy {LEVEL}", ylim=(0.5, 1.8))
    right.set(xlabel="exact entropy, nats", ylabel="exact accuracy, median")
    figure.legend(*left.get_legend_handles_labels(), fontsize=8, loc="outside upper center", ncols=4)


def conclude_frontiers(data: Data) -> str:
    arms = list(data["arms"].values())
    pairs = ((arms[0], arms[1]), (arms[2], arms[3]))
    costs = " and ".join(describe(compare_costs(grpo, balance, MEASURED_COSTS["1.5B"])) for grpo, balance in pairs)
    equal = " and ".join(describe(find_equal_cost(grpo, balance)) for grpo, balance in pairs)
    gaps = [median_interval(reach_level(balance)["entropy"] - reach_level(grpo)["entropy"]) for grpo, balance in pairs]
    entropy = " and ".join(describe(gap, 3, signed=True) for gap in gaps)
    differs = all(low > 0 for _, low, _ in gaps)
    return (
        f"To accuracy {LEVEL}, Balance with 8 and with 16 costs {costs} times GRPO with 16 and with 32 at the c of the "
        f"1.5B model ({MEASURED_COSTS['1.5B']:.2f}), and is cheaper only for c above {equal}. Its exact entropy is "
        f"{entropy} nats from GRPO's at equal accuracy: a better frontier of entropy "
        f"{'shows' if differs else 'does not show'}."
    )


ROWS: tuple[SourceRow, ...] = (
    SourceRow(
        7, "Group size per step and per cost", "GRPO with n = 16 is best per step and slowest per hour, among n = 4, 8 "
        "and 16 (post 'Adaptive Sampling and Curriculum Methods').",
        measure_group_sizes, draw_group_sizes, conclude_group_sizes,
    ),
    SourceRow(
        10, "Rules at equal training", "1.5B: n4 45.3, n8 46.1, Pos 46.1, Bal 47.6, Est 46.6; 7B: 53.0, 53.2, 54.2, "
        "54.6, 53.8 (post 'Adaptive Sampling and Curriculum Methods'; the paper has 53.3 for n4, and Est 46.5 and "
        "53.7).",
        measure_equal_training, draw_equal_training, conclude_equal_training,
    ),
    SourceRow(
        11, "Balance against GRPO with larger groups", "Balance has the better frontiers of accuracy against cost and "
        "against entropy (post 'Adaptive Sampling and Curriculum Methods'; no numbers).",
        measure_frontiers, draw_frontiers, conclude_frontiers,
    ),
)  # fmt: skip
