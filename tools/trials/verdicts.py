"""The predictions of docs/evidence/preregistered.md, judged by its rules from stored outcomes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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


def compare_finals(results: Results, pairs: Mapping[str, tuple[Runs, Runs]]) -> Verdict:
    """Compare the final rewards of pairs of cells, first minus second, by label."""
    differences = {label: results.compare(*pair, final) for label, pair in pairs.items()}
    words = [f"{label} {describe(difference)}".strip() for label, difference in differences.items()]
    verdicts = [f"{label} {judge(difference)}".strip() for label, difference in differences.items()]
    return "; ".join(words), "; ".join(verdicts)


def judge_gap(results: Results) -> Verdict:
    """P1."""
    words, verdicts = [], []
    for gap in list(GAPS)[1:]:
        native, name = results.require("minirl_c5", "none", gap=gap), gap.replace("_", " ")
        replayed, old = (results.require("minirl_c5", replay, 3, gap=gap) for replay in ("r3", "r2"))
        factors = [
            median([k3(runs[seed]) / k3(native[seed]) for seed in runs.keys() & native.keys()])
            for runs in (replayed, old)
        ]
        divergence = median(map(k3, native.values()))
        words.append(f"{name} {divergence:.1e}, times {factors[0]:.2f} with R3, {factors[1]:.2f} with R2")
        shown = judge(results.compare(native, replayed, k3))
        verdicts.append(f"{name} R3 {shown}, R2 {expect(1 / 1.5 < factors[1] < 1.5)}")
    return f"k3: {'; '.join(words)}", "; ".join(verdicts)


def judge_pg_is(results: Results) -> Verdict:
    """P2."""
    runs = results.require("pg_is", "none")
    return f"{count_collapsed(runs)} collapsed", expect(share(runs) >= 0.75)


def judge_rescue(results: Results) -> Verdict:
    """P3."""
    native, replayed = results.require("pg_is", "none"), results.require("pg_is", "r3")
    words, verdict = compare_finals(results, {"": (replayed, native)})
    counts = f"{count_collapsed(replayed)} against {count_collapsed(native)} collapsed"
    return f"{counts}; final reward {words}", verdict


def judge_native(results: Results) -> Verdict:
    """P4."""
    runs = results.require("minirl_c5", "none")
    return f"{count_collapsed(runs)} collapsed", expect(share(runs) <= 1 / 3)


def judge_replay(replay: str) -> Callable[[Results], Verdict]:
    """P5 and P6."""

    def judge_final(results: Results) -> Verdict:
        pair = results.runs("minirl_c5", replay), results.runs("minirl_c5", "none")
        words, verdict = compare_finals(results, {"": pair})
        return f"final reward {words}", verdict

    return judge_final


def judge_anchors(replay: str) -> Callable[[Results], Verdict]:
    """P7 and P8."""

    def judge_differences(results: Results) -> Verdict:
        cells = {name: (results.runs(mu, replay), results.runs(old, replay)) for name, (mu, old) in ANCHORS.items()}
        pairs = {name: pair for name, pair in cells.items() if all(pair)}
        if not pairs:
            raise NotRunError("no pair of arms has run")
        words, verdicts = compare_finals(results, pairs)
        counts = ", ".join(f"{name} {count(at_mu)} and {count(at_old)}" for name, (at_mu, at_old) in pairs.items())
        return f"mu minus old: {words}. Collapsed at mu and at old: {counts}", verdicts

    return judge_differences


def judge_minimal(results: Results) -> Verdict:
    """P9."""
    native, masked = results.require("pg_is", "none"), results.require("minimal", "none")
    words, verdict = compare_finals(results, {"": (masked, native)})
    return f"{count_collapsed(masked)} collapsed; final reward minus that of PG-IS {words}", verdict


def judge_caps(results: Results) -> Verdict:
    """P10."""
    uncapped = results.runs("minirl", "none")
    capped = {f"C = {cap}": (results.runs(f"minirl_c{cap}", "none"), uncapped) for cap in (3, 5)}
    words, verdicts = compare_finals(results, capped)
    return f"minus no cap: {words}", verdicts


def judge_others(results: Results) -> Verdict:
    """P11."""
    drpo, icepop = (results.require(arm, "none", seeds=3) for arm in ("drpo", "icepop"))
    words = f"DRPO {count_collapsed(drpo)}, IcePop {count_collapsed(icepop)} collapsed"
    return words, expect(max(share(drpo), share(icepop)) <= 1 / 3)


def judge_mask(results: Results) -> Verdict:
    """P12."""
    cells = {"no mask": ("no_clip", "none"), "no mask, R2": ("no_clip", "r2"), "mask": ("minirl_c5", "none")}
    runs = {name: results.require(*cell, 3 if cell[1] == "r2" else 6, updates=8) for name, cell in cells.items()}
    words = "; ".join(f"{name} {count_collapsed(of_cell)}" for name, of_cell in runs.items())
    return f"N = 8, collapsed: {words}", expect(share(runs["no mask"]) >= 0.75 and share(runs["mask"]) <= 1 / 3)


def judge_crossover(results: Results) -> Verdict:
    """P13."""
    replayed, old = ({n: results.runs("minirl_c5", replay, updates=n) for n in (2, 4, 8)} for replay in ("r3", "r2"))
    words, verdicts = compare_finals(results, {f"N = {n}": (replayed[n], old[n]) for n in replayed})
    return f"R3 minus R2: {words}", verdicts


def judge_on_policy(results: Results) -> Verdict:
    """P14."""
    native, replayed = (results.require("minirl_c5", replay, updates=1) for replay in ("none", "r3"))
    bare = results.require("no_is", "none", updates=1)
    words, verdicts = compare_finals(results, {"R3": (replayed, native), "without the weight": (bare, native)})
    collapsed = f"without the weight {count_collapsed(bare)} collapsed"
    return f"minus MiniRL without replay: {words}; {collapsed}", f"{verdicts}; collapses {expect(count(bare) == 0)}"


def judge_length_norm(results: Results) -> Verdict:
    """P15."""
    pair = results.runs("length_norm", "none", updates=1), results.runs("minirl_c5", "none", updates=1)
    words, verdict = compare_finals(results, {"": pair})
    return f"minus MiniRL {words}", verdict


def judge_gains(results: Results) -> Verdict:
    """P16."""
    replayed, native = ({gap: results.runs("minirl_c5", replay, gap=gap) for gap in GAPS} for replay in ("r3", "none"))
    words, verdicts = compare_finals(results, {gap.replace("_", " "): (replayed[gap], native[gap]) for gap in GAPS})
    return f"R3 minus no replay: {words}", verdicts


def judge_cold_starts(results: Results) -> Verdict:
    """P17."""
    lengths, cell = (280, 320, 420), {"updates": 2, "steps": 80}
    cells = [results.require("minirl_c5", "r2", 3, **cell, cold_start=length) for length in lengths]
    medians = [(median([run.rewards[0] for run in runs.values()]), median(map(final, runs.values()))) for runs in cells]
    words = [
        f"{length}: first {first:.2f}, final {last:.2f}" for length, (first, last) in zip(lengths, medians, strict=True)
    ]
    finals = [last for _, last in medians]
    return "; ".join(words), expect(finals == sorted(finals))


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
JUDGES: dict[str, Callable[[Results], Verdict]] = {
    "P1": judge_gap, "P2": judge_pg_is, "P3": judge_rescue, "P4": judge_native, "P5": judge_replay("r3"),
    "P6": judge_replay("r2"), "P7": judge_anchors("none"), "P8": judge_anchors("r3"), "P9": judge_minimal,
    "P10": judge_caps, "P11": judge_others, "P12": judge_mask, "P13": judge_crossover, "P14": judge_on_policy,
    "P15": judge_length_norm, "P16": judge_gains, "P17": judge_cold_starts,
}  # fmt: skip
