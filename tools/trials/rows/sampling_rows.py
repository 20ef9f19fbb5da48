"""Claims on groups without contrast, on tiers of samples, and on how samples are shared among prompts.

All rows have the pass rates of ``prompt_bandit.fit_mixture``, which has the pass@k of a published model. Rows with
training run the bandit of ``prompt_bandit`` with ten seeds: a seed sets prompts, order and random numbers, equally for
all rules. Intervals are order statistics that hold the median over seeds with at least 95 %.
"""

from __future__ import annotations

import itertools

import numpy as np
from matplotlib.figure import Figure
from simulate import stopping_law

from megarl.core.advantages import group_mean, grpo
from megarl.core.choices.credit import Credit
from megarl.core.choices.stopping import Allotted, SamplingRule, Uniform, ada_seq_balance, pass_tiers
from megarl.core.sampling.allocation import allocate_by_weights, budget_weights
from trials.intervals import Interval, describe, median_interval, plot_intervals
from trials.rows.prompt_bandit import PUBLISHED_PASS_AT_K, PromptBandit, Recipe, fit_mixture, train
from trials.rows.source_row import BLUE, GRAY, GREEN, ORANGE, RED, Data, SourceRow

SEEDS = range(10)

# Row 5: share of mixed groups over a run

NUM_STEPS, WINDOW = 200, 20
MIXED_ARMS = (
    Recipe("uniform, n = 4", 32, lambda rates: Uniform(4)),
    Recipe("Ada-Seq-Balance, 2 + 2 of up to 32", 32, lambda rates: ada_seq_balance(4), "dapo", Credit()),
)


def measure_mixed_shares() -> Data:
    """Return the share of mixed groups by arm, seed and window of steps, and the samples drawn per prompt."""
    shares: Data = {}
    costs: Data = {}
    for recipe in MIXED_ARMS:
        courses = [train(PromptBandit.make(seed), recipe, NUM_STEPS, seed) for seed in SEEDS]
        shares[recipe.name] = [np.reshape(course.mixed, (-1, WINDOW)).mean(1).tolist() for course in courses]
        drawn = [course.drawn[-1] / (NUM_STEPS * recipe.num_prompts) for course in courses]
        costs[recipe.name] = median_interval(drawn)
    return {"shares": shares, "samples_per_prompt": costs}


def draw_mixed_shares(figure: Figure, data: Data) -> None:
    axes = figure.subplots()
    middles = np.arange(WINDOW / 2, NUM_STEPS, WINDOW)
    for (name, by_seed), color in zip(data["shares"].items(), (BLUE, ORANGE), strict=True):
        shares = np.array(by_seed)
        axes.plot(middles, np.median(shares, 0), color=color, marker="o", markersize=3, label=name)
        axes.fill_between(middles, shares.min(0), shares.max(0), color=color, alpha=0.2, linewidth=0)
    axes.axhline(0.3, color=GRAY, linestyle="--", linewidth=1, label="lowest in the source, about 30 %")
    axes.set(xlabel="step", ylabel="share of mixed groups", ylim=(0, 1))
    axes.legend(fontsize=8, title="median and range of 10 seeds", title_fontsize=8)


def conclude_mixed_shares(data: Data) -> str:
    uniform, balance = (np.array(by_seed) for by_seed in data["shares"].values())
    first, last = (100 * np.array(median_interval(uniform[:, window])) for window in (0, -1))
    ratio = median_interval(balance[:, -1] / uniform[:, -1])
    cost = describe(list(data["samples_per_prompt"].values())[1], 1)
    trend = "falls" if first[1] > last[2] else "goes"
    return (
        f"With four samples per prompt, the share of mixed groups {trend} from {describe(first, 0, ' %')} in the first "
        f"{WINDOW} steps to {describe(last, 0, ' %')} in the last; the source's 30 % depends on its data. With "
        f"Ada-Seq-Balance it ends {describe(ratio, 1, ' times')} as high, at {cost} samples per prompt."
    )


# Row 6: pass@k and the cost of tiers

TIERS = (4, 32, 256)


def measure_tiers() -> Data:
    """Return the fitted mixture, its pass@k, and samples per prompt of the tiers by three ways of counting."""
    mixture = fit_mixture()
    rates, weights = mixture.points()
    by_rule = sum(w * stopping_law(pass_tiers(), rate).expected_samples for rate, w in zip(rates, weights, strict=True))
    solved = [mixture.pass_at_k(k) for k in TIERS]
    newly = np.diff([0, *solved])
    never = 1 - solved[-1]
    ends = np.cumsum(TIERS)
    return {
        "mixture": {"unsolvable": mixture.unsolvable, "a": mixture.a, "b": mixture.b},
        "pass_at_k": {str(k): mixture.pass_at_k(k) for k in sorted({round(2 ** (i / 4)) for i in range(41)})},
        "cost": {
            "as in the post: solved only": float(newly @ TIERS),
            "megarl's tiers": float(by_rule),
            "tiers without reuse": float(newly @ ends + never * ends[-1]),
            "256 for all": float(TIERS[-1]),
        },
        "cost_of_never_solved": float(never * TIERS[-1]),
    }


def draw_tiers(figure: Figure, data: Data) -> None:
    left, right = figure.subplots(1, 2)
    curve = {int(k): value for k, value in data["pass_at_k"].items()}
    left.plot(list(curve), list(curve.values()), color=BLUE, label="mixture")
    left.plot(*zip(*PUBLISHED_PASS_AT_K.items(), strict=True), "o", color=RED, label="source")
    left.axhline(1 - data["mixture"]["unsolvable"], color=GRAY, linestyle="--", linewidth=1, label="limit")
    left.set(xscale="log", xlabel="tries k", ylabel="pass@k", ylim=(0, 1))
    left.legend(fontsize=8, loc="lower right")
    labels, costs = list(data["cost"]), list(data["cost"].values())
    bars = right.barh(labels, costs, color=[RED, BLUE, GRAY, GRAY])
    right.bar_label(bars, [f"{cost:.1f}" for cost in costs], padding=2, fontsize=8)
    right.set(xlabel="samples per prompt", xlim=(0, 310))
    right.invert_yaxis()
    right.tick_params(axis="y", labelsize=8)


def conclude_tiers(data: Data) -> str:
    post, tiers, again, whole = data["cost"].values()
    return (
        f"Tiers of 4, 32 and 256 cost {tiers:.2f} samples per prompt, {tiers / whole:.1%} of {whole:.0f}, and "
        f"{again:.2f} if earlier samples are thrown away. The post's {post:.3f} leaves out the prompts that are never "
        f"solved, which add {data['cost_of_never_solved']:.2f}."
    )


# Row 8: shares of samples and weights of gradients

RATE_EPS = 1e-3


def share_samples(allocation: str, low: int = 1, train_size: int | None = None):
    """Return the function of a Recipe that divides 8 samples per prompt by ``allocation`` of estimated rates [B]."""

    def make_rule(rates: np.ndarray) -> SamplingRule:
        counts = allocate_by_weights(budget_weights(rates, allocation, RATE_EPS), 8 * len(rates), low, 32)
        return Allotted(tuple(counts.tolist()), train_size=train_size, keep="any" if train_size is None else "balance")

    return make_rule


BY_ROOT = Credit(scale="root_rate", rate_eps=RATE_EPS)
SHARE_ARMS = (
    Recipe("1, 1", 16, lambda rates: Uniform(8), "dapo", Credit()),
    Recipe("1/√p, 1/√p weight", 16, share_samples("ada_est"), "dapo", BY_ROOT),
    Recipe("1/p, 1 weight", 16, share_samples("inverse:1"), "dapo", Credit()),
    Recipe("1/p, 1/√p weight", 16, share_samples("inverse:1"), "dapo", BY_ROOT),
    Recipe("1/√p, 1/√p trained", 16, share_samples("ada_est"), "dapo", Credit()),
    Recipe("1/p, 1 trained", 16, share_samples("inverse:1", 4, 4), "dapo", Credit()),
)
"""n_sample, n_grad: n_grad is a weight of the gradient, or the number of samples that train (4 of each prompt)."""
SHARE_STEPS, LAST, SHARE_RATES = 80, 20, (0.03, 0.06)


def measure_shares() -> Data:
    """Return by learning rate, arm and seed: exact final accuracy, two mean rewards of the last steps; and the error
    of an identity."""
    arms: Data = {str(learning_rate): {} for learning_rate in SHARE_RATES}
    worst = 0.0
    for learning_rate, recipe in itertools.product(SHARE_RATES, SHARE_ARMS):
        courses = [train(PromptBandit.make(seed), recipe, SHARE_STEPS, seed, learning_rate) for seed in SEEDS]
        for course in courses:
            gap = np.subtract(course.batch_reward, course.prompt_reward)
            worst = max(worst, float(abs(gap - course.covariance).max()))
        arms[str(learning_rate)][recipe.name] = {
            "accuracy": [course.accuracy[-1] for course in courses],
            "prompt_reward": [float(np.mean(course.prompt_reward[-LAST:])) for course in courses],
            "batch_reward": [float(np.mean(course.batch_reward[-LAST:])) for course in courses],
        }
    return {"arms": arms, "identity_error": worst}


def differ(arms: Data, name: str, base: str) -> Interval:
    """Return the paired difference of final accuracy of two arms, in points [3]."""
    return median_interval(100 * np.subtract(arms[name]["accuracy"], arms[base]["accuracy"]))


def draw_shares(figure: Figure, data: Data) -> None:
    left, right = figure.subplots(1, 2, sharey=True)
    names = list(data["arms"][str(SHARE_RATES[0])])
    rows = np.arange(len(names))
    for (learning_rate, arms), color, shift in zip(data["arms"].items(), (BLUE, GREEN), (-0.12, 0.12), strict=True):
        intervals = [differ(arms, name, names[0]) for name in names]
        label = f"learning rate {learning_rate}"
        plot_intervals(left, intervals, rows + shift, color=color, label=label)
    for key, color, label in (("prompt_reward", BLUE, "over prompts"), ("batch_reward", ORANGE, "over samples")):
        arms = data["arms"][str(SHARE_RATES[0])]
        plot_intervals(right, [median_interval(arms[name][key]) for name in names], rows, color=color, label=label)
    left.axvline(0, color=GRAY, linewidth=1)
    left.set(yticks=rows, yticklabels=names, xlabel="accuracy, points above 1, 1", ylabel="n_sample, n_grad")
    left.invert_yaxis()
    right.set_xlabel(f"mean reward of the last {LAST} steps")
    figure.legend(*left.get_legend_handles_labels(), fontsize=8, loc="outside upper left", ncols=2)
    figure.legend(*right.get_legend_handles_labels(), fontsize=8, loc="outside upper right", ncols=2)


def conclude_shares(data: Data) -> str:
    by_reading = {
        reading: [differ(arms, f"1/p, 1 {reading}", f"1/√p, 1/√p {reading}") for arms in data["arms"].values()]
        for reading in ("weight", "trained")
    }
    weight, trained = (
        " and ".join(describe(interval, 1, signed=True) for interval in intervals) for intervals in by_reading.values()
    )
    names = [recipe.name for recipe in SHARE_ARMS[1:]]
    better = [name for name in names if any(differ(arms, name, "1, 1")[1] > 0 for arms in data["arms"].values())]
    wins = any(low > 0 for intervals in by_reading.values() for _, low, _ in intervals)
    arm = data["arms"][str(SHARE_RATES[0])]["1/p, 1 weight"]
    gap = median_interval(100 * np.subtract(arm["batch_reward"], arm["prompt_reward"]))
    return (
        f"At learning rates {' and '.join(data['arms'])}, 1/p, 1 is {weight} points from 1/√p, 1/√p with n_grad as a "
        f"weight, and {trained} with n_grad as the number of trained samples: the post's order "
        f"{'shows in part' if wins else 'does not show'}. {', '.join(better) or 'No arm'} is above "
        f"uniform samples without weights. Curves of batch reward cannot tell, because the mean over "
        f"samples of 1/p, 1 is {describe(gap, 1, ' points', signed=True)} from its mean over prompts, exactly the "
        f"covariance of count and reward (error {data['identity_error']:.0e})."
    )


# Row 18: dead groups

DEAD_RATE, DEAD_SIZE = 0.1, 8


def measure_dead_groups() -> Data:
    """Return the probability of a group without advantages, by enumeration of all rewards, and curves over p."""
    rewards = np.array(list(itertools.product((0.0, 1.0), repeat=DEAD_SIZE)))
    chances = np.where(rewards == 1, DEAD_RATE, 1 - DEAD_RATE).prod(1)
    groups = np.repeat(np.arange(len(rewards)), DEAD_SIZE)
    dead = {}
    for name, function in (("group_mean", group_mean), ("grpo", grpo)):
        advantages = function(rewards.ravel(), groups).numpy().reshape(rewards.shape)
        dead[name] = float(chances[(advantages == 0).all(1)].sum())
    rules = {f"uniform, n = {n}": Uniform(n) for n in (4, 8, 16)} | {"Ada-Seq-Balance": ada_seq_balance(4)}
    rates = np.linspace(0.01, 0.99, 99)
    curves = {name: [1 - stopping_law(rule, p).contrast for p in rates.tolist()] for name, rule in rules.items()}
    law = 1 - stopping_law(Uniform(DEAD_SIZE), DEAD_RATE).contrast
    return {
        "all_wrong": (1 - DEAD_RATE) ** DEAD_SIZE, "dead": dead, "law": law, "rates": rates.tolist(), "curves": curves
    }  # fmt: skip


def draw_dead_groups(figure: Figure, data: Data) -> None:
    axes = figure.subplots()
    styles = ((BLUE, ":"), (BLUE, "-"), (BLUE, "--"), (ORANGE, "-"))
    for (name, curve), (color, style) in zip(data["curves"].items(), styles, strict=True):
        axes.plot(data["rates"], curve, color=color, linestyle=style, label=name)
    axes.plot([DEAD_RATE], [data["dead"]["grpo"]], "o", color=RED, label="p = 0.1, n = 8: 43 %")
    axes.set(xlabel="pass rate p", ylabel="share of dead groups", xlim=(0, 1), ylim=(0, 1))
    axes.legend(fontsize=8, loc="upper center")


def conclude_dead_groups(data: Data) -> str:
    dead = data["dead"]["grpo"]
    return (
        f"Of the groups of 8 at a pass rate of 0.1, {dead:.8f} have no advantage other than 0: {data['all_wrong']:.8f} "
        f"all wrong, the rest all right. The source's 43 % is right, the paper's 19 % for .9^8 is not."
    )


ROWS: tuple[SourceRow, ...] = (
    SourceRow(
        5, "Mixed groups over a run", "The share of prompts with different rewards dips to about 30 % in 800 steps "
        "(post 'Adaptive Sampling and Curriculum Methods').",
        measure_mixed_shares, draw_mixed_shares, conclude_mixed_shares,
    ),
    SourceRow(
        6, "Cost of pass@k tiers", "Qwen2.5-Math-1.5B solves 62.7, 79.6 and 81.3 % of the prompts in 4, 32 and 256 "
        "tries, so tiers cost 12.3 samples per prompt (post 'Adaptive Sampling and Curriculum Methods').",
        measure_tiers, draw_tiers, conclude_tiers, is_exact=True,
    ),
    SourceRow(
        8, "Shares of samples and of gradient", "n_sample 1/p with n_grad 1 wins (post 'Adaptive Sampling and "
        "Curriculum Methods', whose text also has 1/p, 1/√p and whose legend 1/√p, 1/√p); it deteriorates, and the "
        "hybrid 1/√p, 1/√p is preferred (arXiv 2510.04996, version 3).",
        measure_shares, draw_shares, conclude_shares,
    ),
    SourceRow(
        18, "Dead groups", "43 % of the groups of 8 are dead at a pass rate of 0.1 (posts 'RL on Language under "
        "Single-step Settings', 'Adaptive Sampling and Curriculum Methods').",
        measure_dead_groups, draw_dead_groups, conclude_dead_groups, is_exact=True,
    ),
)  # fmt: skip
