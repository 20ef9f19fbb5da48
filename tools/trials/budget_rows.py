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
from trials.intervals import compare, describe, first_reach, median_interval
from trials.prompt_bandit import Course, PromptBandit, Recipe, train
from trials.sampling_rows import BLUE, GRAY, GREEN, ORANGE, RED, SEEDS, share_samples
from trials.source_row import Data, SourceRow

TRAIN_COSTS = (0.0, 1.0, 4.0)
"""c of the cost: a trained sample in units of a drawn one."""


def run_seeds(recipe: Recipe, num_steps: int, learning_rate: float) -> list[Course]:
    """Return one training run per seed."""
    return [train(PromptBandit.make(seed), recipe, num_steps, seed, learning_rate) for seed in SEEDS]


# Row 7: group size per step and per cost

GROUP_SIZES, GROUP_PROMPTS, GROUP_SAMPLES = (4, 8, 16), 16, 19_200
GROUP_RATES = (0.03, 0.06)
TARGET = 0.6


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


def conclude_group_sizes(data: Data) -> str:
    sentences = []
    for learning_rate, by_size in data["curves"].items():
        steps = reach_target(by_size)
        small, large = steps[GROUP_SIZES[0]], steps[GROUP_SIZES[-1]]
        ratio = median_interval(large * GROUP_SIZES[-1] / (small * GROUP_SIZES[0]))
        fixed = GROUP_PROMPTS * (GROUP_SIZES[-1] * large - GROUP_SIZES[0] * small) / (small - large)
        sentences.append(
            f"At learning rate {learning_rate}, n = 16 reaches accuracy {TARGET} in "
            f"{describe(median_interval(large / small))} of the steps of n = 4, and with {describe(ratio)} times its "
            f"samples; a fixed cost of {describe(median_interval(fixed), 0)} samples per step would make them equal "
        )
    return (
        "; ".join(sentences).replace("; At", "; at")
        + "(in units of 1 + c). Because all drawn samples train, c rescales "
        "the cost of every n alike: no c changes the order."
    )


# Row 10: rules at equal trained samples

EQUAL_STEPS, EQUAL_RATE = 100, 0.03
EQUAL_ARMS = (
    Recipe("n4", 32, lambda rates: Uniform(4)),
    Recipe("n8", 16, lambda rates: Uniform(8)),
    Recipe("Pos", 32, lambda rates: ada_seq_pos(4), "dapo", Credit()),
    Recipe("Bal", 32, lambda rates: ada_seq_balance(4), "dapo", Credit()),
    Recipe("Est", 16, share_samples("ada_est"), "dapo", Credit(scale="root_rate", rate_eps=1e-3)),
    Recipe("16, train 4", 32, lambda rates: Uniform(16, 4, "balance"), "dapo", Credit()),
)
PUBLISHED_SCORES = {"n4": 45.3, "n8": 46.1, "Pos": 46.1, "Bal": 47.6, "Est": 46.6}
"""1.5B, post 'Adaptive Sampling and Curriculum Methods'."""


def measure_equal_training() -> Data:
    """Return final accuracy and drawn samples by arm and seed, after equally many trained samples."""
    arms: Data = {}
    for recipe in EQUAL_ARMS:
        courses = run_seeds(recipe, EQUAL_STEPS, EQUAL_RATE)
        arms[recipe.name] = {
            "accuracy": [course.accuracy[-1] for course in courses],
            "drawn_per_trained": [course.drawn[-1] / course.trained[-1] for course in courses],
            "trained": [course.trained[-1] for course in courses],
        }
    return {"arms": arms}


def gain_over_n4(data: Data, name: str) -> tuple[float, float, float]:
    """Return the paired difference of final accuracy to n4 in points [3]."""
    return median_interval(100 * np.subtract(data["arms"][name]["accuracy"], data["arms"]["n4"]["accuracy"]))


def draw_equal_training(figure: Figure, data: Data) -> None:
    left, right = figure.subplots(1, 2)
    names = [name for name in data["arms"] if name != "n4"]
    middles, lows, highs = np.array([gain_over_n4(data, name) for name in names]).T
    rows = np.arange(len(names))
    left.errorbar(middles, rows, xerr=[middles - lows, highs - middles], fmt="o", color=BLUE, capsize=2, label="bandit")
    gains = [PUBLISHED_SCORES[name] - PUBLISHED_SCORES["n4"] if name in PUBLISHED_SCORES else np.nan for name in names]
    left.plot(gains, rows, "s", color=RED, label="source, 1.5B")
    left.axvline(0, color=GRAY, linewidth=1)
    left.set(yticks=rows, yticklabels=names, xlabel="points above n4, equal trained samples")
    left.invert_yaxis()
    left.legend(fontsize=8)
    costs = [np.median(data["arms"][name]["drawn_per_trained"]) for name in data["arms"]]
    bars = right.barh(list(data["arms"]), costs, color=BLUE)
    right.bar_label(bars, [f"{cost:.1f}" for cost in costs], padding=2, fontsize=8)
    right.set(xlabel="samples drawn per trained one", xlim=(0, 1.2 * max(costs)))
    right.invert_yaxis()


def conclude_equal_training(data: Data) -> str:
    parts = [compare(name, "n4", gain_over_n4(data, name)) for name in ("n8", "Pos", "Bal", "Est")]
    arms = data["arms"]
    rest = median_interval(100 * np.subtract(arms["Bal"]["accuracy"], arms["16, train 4"]["accuracy"]))
    costs = {name: describe(median_interval(arms[name]["drawn_per_trained"]), 1) for name in ("Pos", "Bal")}
    return (
        f"After equally many trained samples, {'; '.join(parts)}. Bal draws {costs['Bal']} and Pos {costs['Pos']} "
        f"samples per trained one, n4 one; {compare('Bal', '16 drawn and 4 balanced ones trained', rest)}."
    )


# Row 11: Bal-n8 against GRPO-n16

FRONTIER_STEPS, FRONTIER_RATE, LEVELS = 120, 0.03, (0.5, 0.6, 0.7)
FRONTIER_ARMS = (
    Recipe("GRPO, n = 16", 16, lambda rates: Uniform(16)),
    Recipe("Balance, 4 + 4 of up to 32", 16, lambda rates: ada_seq_balance(8), "dapo", Credit()),
)


def measure_frontiers() -> Data:
    """Return accuracy, exact entropy and counts of both arms by seed and step."""
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


def reach_levels(arm: Data, level: float) -> dict[str, np.ndarray]:
    """Return drawn and trained samples and entropy where the accuracy first reaches ``level``, [10 seeds] each."""
    seeds = range(len(arm["accuracy"]))
    return {
        name: np.array([first_reach(arm["accuracy"][seed], arm[name][seed], level) for seed in seeds])
        for name in ("drawn", "trained", "entropy")
    }


def compare_frontiers(data: Data, level: float) -> tuple[dict[float, tuple[float, float, float]], tuple]:
    """Return Balance's cost in units of GRPO's by c, and its entropy minus GRPO's, at an equal accuracy."""
    grpo, balance = (reach_levels(arm, level) for arm in data["arms"].values())
    costs = {
        c: median_interval((balance["drawn"] + c * balance["trained"]) / (grpo["drawn"] + c * grpo["trained"]))
        for c in TRAIN_COSTS
    }
    return costs, median_interval(balance["entropy"] - grpo["entropy"])


def draw_frontiers(figure: Figure, data: Data) -> None:
    left, right = figure.subplots(1, 2, sharey=True)
    for (name, arm), color in zip(data["arms"].items(), (BLUE, ORANGE), strict=True):
        accuracy, drawn, trained = (np.array(arm[key]) for key in ("accuracy", "drawn", "trained"))
        for c, style in ((0.0, "-"), (4.0, "--")):
            cost = np.median(drawn + c * trained, 0)
            left.plot(cost / 1000, np.median(accuracy, 0), color=color, linestyle=style, label=f"{name}, c = {c:g}")
        for seed in range(len(accuracy)):
            label = name if seed == 0 else None
            right.plot(arm["entropy"][seed], accuracy[seed], color=color, linewidth=0.7, alpha=0.7, label=label)
    left.set(xlabel="1000 samples, drawn + c trained", ylabel="exact accuracy", xscale="log", xlim=(1, 150))
    right.set(xlabel="exact entropy, nats")
    figure.legend(*left.get_legend_handles_labels(), fontsize=8, loc="outside lower center", ncols=2)


def conclude_frontiers(data: Data) -> str:
    parts = []
    for level in LEVELS[1:]:
        costs, entropy = compare_frontiers(data, level)
        shown = ", ".join(f"{describe(interval)} at c = {c:g}" for c, interval in costs.items())
        parts.append(
            f"At accuracy {level}, Balance costs {shown} times GRPO's, with "
            f"{describe(entropy, signed=True)} nats of entropy"
        )
    return ". ".join(parts) + "."


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
        11, "Balance with 8 against GRPO with 16", "Balance has the better frontiers of accuracy against cost and "
        "against entropy (post 'Adaptive Sampling and Curriculum Methods'; no numbers).",
        measure_frontiers, draw_frontiers, conclude_frontiers,
    ),
)  # fmt: skip
