"""The verdict of ``megarl gap``: the meaning of the measured gaps, by the limits of docs/gap.md. No torch."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megarl.errors import refusal
from megarl.text_table import text_table
from megarl.watch.limits import GAP, GapLimits


@dataclass(frozen=True, slots=True)
class Gap:
    """Two engines on the same tokens, with or without replay."""

    k1: float
    """Estimate of KL[rollout || training], nats per token; may be negative."""
    k3: float
    """Estimate of the same divergence, never negative."""
    extreme: float
    """Share of tokens whose probability differs by more than a factor of 2."""


@dataclass(frozen=True, slots=True)
class PairGap:
    """The gaps of a pair of precisions."""

    rollout: str
    """fp32, bf16 or fp8; or the words of the configuration."""
    training: str
    is_configured: bool
    num_tokens: int
    """Response tokens compared."""
    native: Gap
    replayed: Gap | None
    """None without routes: a dense model, or an engine without records."""
    flips: tuple[float, ...] | None
    """By MoE layer, the share of tokens with other experts than the rollout's, without replay."""

    @property
    def flip(self) -> float:
        """Mean of ``flips``; 0 without routes."""
        return sum(self.flips) / len(self.flips) if self.flips else 0.0


@dataclass(frozen=True, slots=True)
class GapReport:
    """All pairs of a model, and the meaning of the gaps."""

    pairs: tuple[PairGap, ...]
    is_healthy: bool
    findings: tuple[str, ...]
    """The first finding is the verdict; further findings give cause and remedy."""
    limits: GapLimits

    def to_json(self) -> dict[str, Any]:
        """Return plain data of everything."""
        gaps = [{**asdict(pair), "flip": pair.flip} for pair in self.pairs]
        return {"healthy": self.is_healthy, "findings": self.findings, "limits": asdict(self.limits), "gaps": gaps}

    def to_text(self) -> str:
        """Return a table of gaps, and the verdict."""
        rows = []
        for pair in self.pairs:
            name = f"{pair.rollout} *" if pair.is_configured else pair.rollout
            for replay, gap in (("none", pair.native), ("r3", pair.replayed)):
                if gap is not None:
                    flip = "-" if pair.flips is None or replay == "r3" else f"{pair.flip:.2%}"
                    numbers = f"{gap.k1:.1e}", f"{gap.k3:.1e}", f"{gap.extreme:.2%}", flip, str(pair.num_tokens)
                    rows.append((name, pair.training, replay, *numbers))
        heads = ("rollouts", "training", "replay", "KL (k1)", "k3", "extreme", "other experts", "tokens")
        note = "* as configured; KL[rollout || training] in nats per token"
        return f"{text_table(rows, heads, words=3)}\n{note}\n\n" + "\n  ".join(self.findings)


def judge(pairs: Sequence[PairGap], replay: str, limits: GapLimits = GAP) -> GapReport:
    """Judge all pairs of a model, the configured pair included. replay: train.replay of the configuration."""
    (configured,) = (pair for pair in pairs if pair.is_configured)
    native, replayed = configured.native, configured.replayed
    used = replayed if replay == "r3" and replayed is not None else native
    for control in (pair for pair in pairs if pair.rollout == pair.training == "fp32"):
        if control.native.k3 > limits.control_k3 or control.flip > limits.control_flip:
            findings = refusal("gap_in_fp32", control=control, limits=limits), refusal("compare_engines")
            return GapReport(tuple(pairs), False, findings, limits)
    causes = list(_causes(pairs, configured, replay, limits))
    size = f"k3 {used.k3:.1e} (limit {limits.k3:.0e}), {used.extreme:.2%} extreme tokens (limit {limits.extreme:.0%})"
    setting = f'{configured.rollout} rollouts, {configured.training} training, replay = "{replay}"'
    if _is_within(used, limits):
        return GapReport(tuple(pairs), True, (f"healthy: {size}, with {setting}", *causes), limits)
    if used is native and replayed is not None and _is_within(replayed, limits):
        causes.insert(0, f'within the limits with train.replay = "r3": k3 {replayed.k3:.1e}')
    causes = causes or [refusal("gap_without_cause")]
    return GapReport(tuple(pairs), False, (f"BAD: the gap is too large: {size}, with {setting}", *causes), limits)


def _is_within(gap: Gap, limits: GapLimits) -> bool:
    return gap.k3 <= limits.k3 and gap.extreme <= limits.extreme


def _causes(pairs: Sequence[PairGap], configured: PairGap, replay: str, limits: GapLimits) -> Iterator[str]:
    """Yield the causes of most of the configured gap."""
    k3 = configured.native.k3
    if not k3 > 0:
        return
    if configured.replayed is not None and (removed := 1 - configured.replayed.k3 / k3) >= limits.cause:
        todo = "" if replay == "r3" else ': set train.replay = "r3"'
        yield f"replay of the rollout's routes removes {removed:.0%} of the gap{todo}"
    for pair in pairs:
        is_exact = pair.rollout == "fp32" and pair.training == configured.training and not pair.is_configured
        if is_exact and (explained := 1 - pair.native.k3 / k3) >= limits.cause:
            problem = f"rollout precision explains {explained:.0%} of the gap"
            yield f"{problem}: it is {pair.native.k3:.1e} with fp32 rollouts"
