"""The predictions of docs/evidence/preregistered.md, judged by its rules from stored outcomes."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from trials.figures import ANCHORS, GAPS
from trials.intervals import Difference
from trials.outcomes import Outcome
from trials.results import NotRunError, Results, Runs, count_collapsed

Verdict = tuple[str, str]
"""What was measured, and "shown", "not shown", "opposite" or "as expected" / "not as expected" for counts."""


def final(run: Outcome) -> float:
    """The run's final reward."""
    return run.final


def k3(run: Outcome) -> float:
    """The run's mean k3 between the engines."""
    return run.average("k3")


def describe(difference: Difference, digits: str = "+.2f") -> str:
    """The median difference with its interval."""
    low, high = f"{difference.low:{digits}}", f"{difference.high:{digits}}"
    return f"{difference.median:{digits}} [{low}, {high}], {difference.pairs} pairs"


def judge(difference: Difference, sign: int = 1) -> str:
    """Whether a difference of the expected sign is shown."""
    if not difference.is_shown:
        return "not shown"
    return "shown" if difference.median * sign > 0 else "opposite"


def compare(results: Results, first: Runs, second: Runs, what: str = "") -> str:
    """Words for a comparison of final rewards: what, difference, verdict."""
    difference = results.compare(first, second, final)
    return f"{what} {describe(difference)}: {judge(difference)}".strip()


def judge_gap(results: Results) -> Verdict:
    """P1."""
    words, verdicts = [], []
    for gap in list(GAPS)[1:]:
        native = results.require("minirl_c5", "none", gap=gap)
        of_gap = [f"{gap.replace('_', ' ')}: {median(map(k3, native.values())):.1e}"]
        for replay in ("r3", "r2"):
            runs = results.require("minirl_c5", replay, 3, gap=gap)
            seeds = runs.keys() & native.keys()
            factor = median([k3(runs[seed]) / k3(native[seed]) for seed in seeds])
            of_gap.append(f"times {factor:.2f} with {replay.upper()}")
            is_equal = expect(1 / 1.5 < factor < 1.5)
            verdict = is_equal if replay == "r2" else judge(results.compare(native, runs, k3))
            verdicts.append(f"{gap.replace('_', ' ')} {replay.upper()} {verdict}")
        words.append(", ".join(of_gap))
    return "; ".join(words), "; ".join(verdicts)


def judge_pg_is(results: Results) -> Verdict:
    """P2."""
    runs = results.require("pg_is", "none")
    return f"{count_collapsed(runs)} collapsed", expect(share(runs) >= 0.75)


def judge_rescue(results: Results) -> Verdict:
    """P3."""
    native, replayed = results.require("pg_is", "none"), results.require("pg_is", "r3")
    counts = f"{count_collapsed(replayed)} against {count_collapsed(native)} collapsed"
    return f"{counts}; final reward {compare(results, replayed, native)}", compare(
        results, replayed, native
    ).rpartition(": ")[2]


def judge_native(results: Results) -> Verdict:
    """P4."""
    runs = results.require("minirl_c5", "none")
    return f"{count_collapsed(runs)} collapsed", expect(share(runs) <= 1 / 3)


def judge_replay(replay: str) -> Callable[[Results], Verdict]:
    """P5 and P6."""

    def judge_final(results: Results) -> Verdict:
        words = compare(results, results.runs("minirl_c5", replay), results.runs("minirl_c5", "none"))
        return f"final reward {words.rpartition(': ')[0]}", words.rpartition(": ")[2]

    return judge_final


def judge_anchors(replay: str) -> Callable[[Results], Verdict]:
    """P7 and P8."""

    def judge_differences(results: Results) -> Verdict:
        cells = {name: [results.runs(arm, replay) for arm in arms] for name, arms in ANCHORS.items()}
        pairs = {name: pair for name, pair in cells.items() if all(pair)}
        if not pairs:
            raise NotRunError("no pair of arms has run")
        words = [compare(results, at_mu, at_old, name) for name, (at_mu, at_old) in pairs.items()]
        parts = [text.rpartition(": ") for text in words]
        counts = ", ".join(f"{name} {count(at_mu)} and {count(at_old)}" for name, (at_mu, at_old) in pairs.items())
        measured = f"mu minus old: {'; '.join(text for text, _, _ in parts)}. Collapsed at mu and at old: {counts}"
        return measured, ", ".join(verdict for _, _, verdict in parts)

    return judge_differences


def judge_minimal(results: Results) -> Verdict:
    """P9."""
    native, masked = results.require("pg_is", "none"), results.require("minimal", "none")
    words = compare(results, masked, native)
    return f"{count_collapsed(masked)} collapsed; final reward {words.rpartition(': ')[0]}", words.rpartition(": ")[2]


def judge_caps(results: Results) -> Verdict:
    """P10."""
    uncapped = results.runs("minirl", "none")
    words = [
        compare(results, results.runs(arm, "none"), uncapped, name)
        for arm, name in (("minirl_c3", "C = 3"), ("minirl_c5", "C = 5"))
    ]
    return f"against no cap: {'; '.join(words)}", ", ".join(text.rpartition(": ")[2] for text in words)


def judge_others(results: Results) -> Verdict:
    """P11."""
    drpo, icepop = (results.require(arm, "none", seeds=3) for arm in ("drpo", "icepop"))
    words = f"DRPO {count_collapsed(drpo)}, IcePop {count_collapsed(icepop)} collapsed"
    return words, expect(max(count(drpo), count(icepop)) <= 1)


def judge_mask(results: Results) -> Verdict:
    """P12."""
    cells = {"no mask": ("no_clip", "none"), "no mask, R2": ("no_clip", "r2"), "mask": ("minirl_c5", "none")}
    runs = {name: results.require(*cell, 3 if cell[1] == "r2" else 6, updates=8) for name, cell in cells.items()}
    words = "; ".join(f"{name} {count_collapsed(of_cell)}" for name, of_cell in runs.items() if of_cell)
    return f"N = 8, collapsed: {words}", expect(share(runs["no mask"]) >= 0.75 and share(runs["mask"]) <= 1 / 3)


def judge_crossover(results: Results) -> Verdict:
    """P13."""
    words = [
        compare(
            results, results.runs("minirl_c5", "r3", updates=n), results.runs("minirl_c5", "r2", updates=n), f"N = {n}"
        )
        for n in (2, 4, 8)
    ]
    return f"R3 minus R2: {'; '.join(words)}", ", ".join(text.rpartition(": ")[2] for text in words)


def judge_on_policy(results: Results) -> Verdict:
    """P14."""
    native, replayed = (results.require("minirl_c5", replay, updates=1) for replay in ("none", "r3"))
    bare = results.require("no_is", "none", updates=1)
    words = [compare(results, replayed, native, "R3"), compare(results, bare, native, "without the weight")]
    return f"{'; '.join(words)}; without the weight {count_collapsed(bare)} collapsed", expect(
        words[0].endswith("not shown") and count(bare) == 0
    )


def judge_length_norm(results: Results) -> Verdict:
    """P15."""
    words = compare(
        results, results.runs("length_norm", "none", updates=1), results.runs("minirl_c5", "none", updates=1)
    )
    return words.rpartition(": ")[0], words.rpartition(": ")[2]


def judge_gains(results: Results) -> Verdict:
    """P16."""
    words = [
        compare(
            results,
            results.runs("minirl_c5", "r3", gap=gap),
            results.runs("minirl_c5", "none", gap=gap),
            gap.replace("_", " "),
        )
        for gap in GAPS
    ]
    return f"R3 minus no replay: {'; '.join(words)}", "; ".join(
        f"{gap} {text.rpartition(': ')[2]}" for gap, text in zip(GAPS, words, strict=True)
    )


def judge_cold_starts(results: Results) -> Verdict:
    """P17."""
    cells = {
        length: results.require("minirl_c5", "r2", 3, updates=2, steps=80, cold_start=length)
        for length in (280, 320, 420)
    }
    words = [
        f"{length}: first {median([run.rewards[0] for run in runs.values()]):.2f}, "
        f"final {median(map(final, runs.values())):.2f}"
        for length, runs in cells.items()
    ]
    medians = [median(map(final, runs.values())) for runs in cells.values()]
    return "; ".join(words), expect(medians == sorted(medians))


def count(runs: Runs) -> int:
    """The number of collapsed runs."""
    return sum(run.has_collapsed for run in runs.values())


def share(runs: Runs) -> float:
    """The share of collapsed runs."""
    return count(runs) / len(runs)


def expect(holds: bool) -> str:
    """Words for a prediction of counts."""
    return "as expected" if holds else "not as expected"


ROUNDS = {1: ("P2", "P3", "P4", "P5", "P6", "P7", "P8", "P9", "P10", "P11", "P17")}
ROUNDS[2] = ("P1", "P2", "P3", "P4", "P5", "P6", "P7", "P8", "P12", "P13", "P14", "P15", "P16")
"""Round of runs -> the predictions that it judges."""
ANCHORS_OF_ROUND = {1: ("window", "TV", "KL"), 2: ("window",)}
JUDGES: dict[str, Callable[[Results], Verdict]] = {
    "P1": judge_gap, "P2": judge_pg_is, "P3": judge_rescue, "P4": judge_native, "P5": judge_replay("r3"),
    "P6": judge_replay("r2"), "P7": judge_anchors("none"), "P8": judge_anchors("r3"), "P9": judge_minimal,
    "P10": judge_caps, "P11": judge_others, "P12": judge_mask, "P13": judge_crossover, "P14": judge_on_policy,
    "P15": judge_length_norm, "P16": judge_gains, "P17": judge_cold_starts,
}  # fmt: skip
