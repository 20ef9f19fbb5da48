"""The predictions of docs/evidence/preregistered.md, judged by its rules from stored outcomes.

Every comparison is written so that a positive difference is what the claim says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import mean, median

from trials import testbed
from trials.intervals import Difference, compare_pairs
from trials.outcomes import Outcome
from trials.results import Results, Runs, compare_runs

Verdict = tuple[str, str]
"""What was measured; and "shown", "not shown" or "opposite", with labels."""
Value = Callable[[Outcome], float]
GAPS = tuple(gap for gap in testbed.GAPS if gap != "none")
ANCHORS = {"window": ("grpo_mu", "minirl"), "TV": ("dppo_tv_mu", "dppo_tv_old"), "KL": ("dppo_kl_mu", "dppo_kl_old")}
"""Arms at mu and at old that are equal otherwise."""
SEEDS = 6


def read_final(run: Outcome) -> float:
    """The run's final reward."""
    return run.final


def read_growth(run: Outcome) -> float:
    """The growth of the run's k3."""
    return run.growth


def read_first_k3(run: Outcome) -> float:
    """k3 of the first step."""
    return run.series["k3"][0]


def describe(difference: Difference) -> str:
    """The median difference with its interval."""
    return f"{difference.median:+.2f} [{difference.low:+.2f}, {difference.high:+.2f}]"


def judge(difference: Difference) -> str:
    """Whether a positive difference is shown."""
    if not difference.is_shown:
        return "not shown"
    return "shown" if difference.median > 0 else "opposite"


def compare(pairs: Mapping[str, tuple[Runs, Runs]], value: Value = read_final) -> Verdict:
    """Compare a value of pairs of cells, first minus second, by label."""
    differences = {label: compare_runs(*pair, value) for label, pair in pairs.items()}
    words = [f"{label} {describe(difference)}".strip() for label, difference in differences.items()]
    verdicts = [f"{label} {judge(difference)}".strip() for label, difference in differences.items()]
    return "; ".join(words), "; ".join(verdicts)


def judge_first_step(results: Results) -> Verdict:
    """P1."""
    words, verdicts = [], []
    for gap in GAPS:
        native, replayed = (results.require("minirl_c5", replay, SEEDS, gap=gap) for replay in ("none", "r3"))
        old = results.require("minirl_c5", "r2", 3, gap=gap)
        factor = median(read_first_k3(replayed[seed]) / read_first_k3(native[seed]) for seed in native)
        is_equal = all(read_first_k3(old[seed]) == read_first_k3(native[seed]) for seed in old)
        words.append(f"{gap} {median(map(read_first_k3, native.values())):.1e}, times {factor:.2f}")
        shown = judge(compare_runs(native, replayed, read_first_k3))
        verdicts.append(f"{gap} {shown}, R2 {'equal' if is_equal else 'differs'}")
    return f"k3 and R3's factor: {'; '.join(words)}", "; ".join(verdicts)


def judge_growth(results: Results) -> Verdict:
    """P2."""
    arms = {"PG-IS": "pg_is", "MiniRL": "minirl_c5"}
    pairs = {label: pair_replays(results, arm, "none", "r3") for label, arm in arms.items()}
    words, verdicts = compare(pairs, read_growth)
    growths = "; ".join(
        f"{label} {median(map(read_growth, native.values())):.1f} and {median(map(read_growth, replayed.values())):.1f}"
        for label, (native, replayed) in pairs.items()
    )
    return f"without replay and with R3: {growths}; difference: {words}", verdicts


def judge_parity(results: Results) -> Verdict:
    """P3."""
    at_parity = results.require("uncorrected", "none", SEEDS, gap="none")
    return compare({"": (at_parity, results.require("uncorrected", "none", SEEDS))})


def judge_replay(replay: str, arms: Mapping[str, str]) -> Callable[[Results], Verdict]:
    """P4, P5: a replay against none."""
    return lambda results: compare({label: pair_replays(results, arm, replay, "none") for label, arm in arms.items()})


def judge_arms(first: str, second: str, **axes: int) -> Callable[[Results], Verdict]:
    """P6, P7, P10 to P12, P14, P16: an arm against another, without replay."""
    return lambda results: compare(
        {"": (results.require(first, "none", SEEDS, **axes), results.require(second, "none", SEEDS, **axes))}
    )


def judge_anchors(results: Results) -> Verdict:
    """P8."""
    words, verdicts = compare(pair_anchors(results, "none"))
    return f"mu minus old: {words}", verdicts


def judge_favour(results: Results) -> Verdict:
    """P9."""
    native, replayed = (pair_anchors(results, replay) for replay in ("none", "r3"))

    def gain(pairs: Mapping[str, tuple[Runs, Runs]], seed: int) -> float:
        return mean(at_mu[seed].final - at_old[seed].final for at_mu, at_old in pairs.values())

    seeds = range(SEEDS)
    difference = compare_pairs([gain(native, seed) for seed in seeds], [gain(replayed, seed) for seed in seeds])
    return f"without minus with R3: {describe(difference)}", judge(difference)


def judge_crossover(results: Results) -> Verdict:
    """P13."""
    pairs = {f"N = {n}": pair_replays(results, "minirl_c5", "r3", "r2", updates=n) for n in (2, 4, 8)}
    pairs["N = 2"] = pairs["N = 2"][::-1]
    words, verdicts = compare(pairs)
    return f"R2 minus R3 at N = 2, R3 minus R2 at 4 and 8: {words}", verdicts


def judge_on_policy(results: Results) -> Verdict:
    """P15."""
    return compare({"": pair_replays(results, "minirl_c5", "r3", "none", updates=1)})


def judge_gains(results: Results) -> Verdict:
    """P17."""
    gaps = ("none", *GAPS)
    return compare({gap: pair_replays(results, "minirl_c5", "r3", "none", gap=gap) for gap in gaps})


def judge_cold_starts(results: Results) -> Verdict:
    """P18."""
    cells = {length: results.require("minirl_c5", "r2", 3, updates=2, cold_start=length) for length in (340, 420, 560)}
    finals = {length: median(map(read_final, runs.values())) for length, runs in cells.items()}
    firsts = {length: median(run.rewards[0] for run in runs.values()) for length, runs in cells.items()}
    words = [f"{length} steps: first {firsts[length]:.2f}, final {finals[length]:.2f}" for length in cells]
    spread = max(finals.values()) - min(finals.values())
    seeds = ", ".join(str(len(runs)) for runs in cells.values())
    return "; ".join(words), f"medians of {seeds} seeds, {spread:.2f} apart: no interval"


def pair_replays(results: Results, arm: str, first: str, second: str, **axes: int | str) -> tuple[Runs, Runs]:
    """The whole cells of an arm with two replays."""
    return results.require(arm, first, SEEDS, **axes), results.require(arm, second, SEEDS, **axes)


def pair_anchors(results: Results, replay: str) -> dict[str, tuple[Runs, Runs]]:
    """The whole cells of the window and of TV, at mu and at old."""
    names = ("window", "TV")
    cells = {name: [results.require(arm, replay, SEEDS) for arm in ANCHORS[name]] for name in names}
    return {name: (at_mu, at_old) for name, (at_mu, at_old) in cells.items()}


CORRECTED = {"no correction": "uncorrected", "PG-IS": "pg_is", "MiniRL": "minirl_c5"}
JUDGES: dict[str, Callable[[Results], Verdict]] = {
    "P1": judge_first_step, "P2": judge_growth, "P3": judge_parity, "P4": judge_replay("r3", CORRECTED),
    "P5": judge_replay("r2", {"": "minirl_c5"}), "P6": judge_arms("pg_is", "uncorrected"),
    "P7": judge_arms("minirl", "pg_is"), "P8": judge_anchors, "P9": judge_favour,
    "P10": judge_arms("minimal", "pg_is"), "P11": judge_arms("minirl", "minirl_c3"),
    "P12": judge_arms("minirl_c5", "no_clip", updates=8), "P13": judge_crossover,
    "P14": judge_arms("minirl_c5", "no_is", updates=1), "P15": judge_on_policy,
    "P16": judge_arms("minirl_c5", "length_norm", updates=1), "P17": judge_gains, "P18": judge_cold_starts,
}  # fmt: skip
