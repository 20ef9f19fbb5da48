"""The verdict of ``megarl gap``: what the measured gaps mean, by limits that are explained in docs/gap.md. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megarl.text_table import text_table

REMOVES = 0.5
"""Least share of a gap that a cause must account for to be named as its cause."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Above one of these a gap is bad. Lengths are in nats, per token."""

    k3: float = 1e-2
    """Of the run as configured. Weights of tokens then vary by about sqrt(2 k3) = 14 %."""
    extreme: float = 1e-2
    """Share of tokens whose probability differs by more than a factor of 2."""
    control_k3: float = 1e-6
    """With both engines in fp32, where only the order of sums differs."""
    control_flip: float = 1e-3
    """Share of (token, layer) pairs with other experts, both engines in fp32."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Two engines on the same tokens, in one way of routing."""

    k1: float
    """Estimate of KL[rollout || training], nats per token; may be negative."""
    k3: float
    """The same, never negative."""
    extreme: float
    """Share of tokens whose probability differs by more than a factor of 2."""


@dataclass(frozen=True, slots=True)
class Extreme:
    """A token on which the engines differ most."""

    group: int
    position: int
    """In the sequence of prompt and response."""
    token: str
    """Escaped."""
    rollout_logprob: float
    native_logprob: float
    """Of the training engine with its own routes."""
    replay_logprob: float | None
    """With the rollout's routes."""
    flipped_layers: int | None
    """MoE layers in which its predecessor, whose pass predicts it, has other experts."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One pair of precisions."""

    rollout: str
    """fp32, bf16 or fp8; or what the configuration says."""
    training: str
    is_configured: bool
    num_tokens: int
    """Response tokens compared."""
    native: Gap
    replayed: Gap | None
    """None without routes: a dense model, or an engine that records none."""
    flips: tuple[float, ...] | None
    """By MoE layer, the share of tokens with other experts than the rollout's, without replay."""
    extremes: tuple[Extreme, ...]

    @property
    def flip(self) -> float:
        """Mean over layers; 0 without routes."""
        return sum(self.flips) / len(self.flips) if self.flips else 0.0

    @property
    def is_control(self) -> bool:
        """Whether precision is no excuse."""
        return self.rollout == self.training == "fp32"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the gaps mean."""

    is_healthy: bool
    findings: tuple[str, ...]
    """The first one is the verdict, others say why and what to do."""


def judge(rows: Sequence[Measured], replay: str, limits: Limits) -> Verdict:
    """Judge all pairs of a model. ``replay``: train.replay of the configuration. One row is the configured one."""
    (configured,) = (row for row in rows if row.is_configured)
    used = configured.replayed if replay == "r3" and configured.replayed is not None else configured.native
    for control in (row for row in rows if row.is_control):
        if control.native.k3 > limits.control_k3 or control.flip > limits.control_flip:
            said = (
                f"BAD: the engines disagree even in fp32: k3 {control.native.k3:.1e} (limit {limits.control_k3:.0e}), "
                f"{control.flip:.2%} other experts (limit {limits.control_flip:.1%}). Something is wrong"
            )
            return Verdict(
                False,
                (
                    said,
                    "neither replay nor precision mends this: compare weights, config.json (rope, norms, top-k "
                    "normalisation, shared experts) and the chat template of the two engines before you train",
                ),
            )
    causes = _causes(rows, configured, replay)
    size = f"k3 {used.k3:.1e} (limit {limits.k3:.0e}), {used.extreme:.2%} extreme tokens (limit {limits.extreme:.0%})"
    how = f'{configured.rollout} rollouts, {configured.training} training, replay = "{replay}"'
    if _is_within(used, limits):
        return Verdict(True, (f"healthy: {size}, with {how}", *causes))
    other = configured.replayed
    if used is configured.native and other is not None and _is_within(other, limits):
        causes = [f'within the limits with train.replay = "r3": k3 {other.k3:.1e}', *causes]
    unexplained = [
        "neither replay nor the rollout's precision explains it: suspect other weights, or settings of the engine "
        "(sampling, rope, an FP8 checkpoint); both in fp32 tells"
    ]
    return Verdict(False, (f"BAD: the gap is too large: {size}, with {how}", *(causes or unexplained)))


def _is_within(gap: Gap, limits: Limits) -> bool:
    return gap.k3 <= limits.k3 and gap.extreme <= limits.extreme


def _causes(rows: Sequence[Measured], configured: Measured, replay: str) -> list[str]:
    """What removes most of the configured gap."""
    native, causes = configured.native.k3, []
    if not native > 0:
        return causes
    if configured.replayed is not None and (removed := 1 - configured.replayed.k3 / native) >= REMOVES:
        todo = "" if replay == "r3" else ': set train.replay = "r3"'
        causes.append(f"replay of the rollout's routes removes {removed:.0%} of the gap{todo}")
    alike = [row for row in rows if row.training == configured.training and not row.is_configured]
    for exact in (row for row in alike if row.rollout == "fp32"):
        if (explained := 1 - exact.native.k3 / native) >= REMOVES:
            causes.append(
                f"rollout precision explains {explained:.0%} of the gap: it is {exact.native.k3:.1e} with fp32 rollouts"
            )
    return causes


def to_text(rows: Sequence[Measured], verdict: Verdict) -> str:
    """Return the report: a table of gaps, disagreement by layer, extreme tokens, the verdict."""
    parts = [_gap_table(rows)]
    if any(row.flips for row in rows):
        parts.append(_layer_table(rows))
    (configured,) = (row for row in rows if row.is_configured)
    if configured.extremes:
        parts.append("Largest differences, as configured (log-probabilities):\n" + _extreme_table(configured.extremes))
    return "\n\n".join([*parts, "\n  ".join(verdict.findings)])


def _gap_table(rows: Sequence[Measured]) -> str:
    lines = []
    for row in rows:
        name = f"{row.rollout} *" if row.is_configured else row.rollout
        for replay, gap in (("none", row.native), ("r3", row.replayed)):
            if gap is not None:
                flip = "-" if row.flips is None or replay == "r3" else f"{row.flip:.2%}"
                numbers = f"{gap.k1:.1e}", f"{gap.k3:.1e}", f"{gap.extreme:.2%}", flip, str(row.num_tokens)
                lines.append((name, row.training, replay, *numbers))
    heads = ("rollouts", "training", "replay", "KL (k1)", "k3", "extreme", "other experts", "tokens")
    return text_table(lines, heads, words=3) + "\n* as configured; KL[rollout || training] in nats per token"


def _layer_table(rows: Sequence[Measured]) -> str:
    routed = [row for row in rows if row.flips]
    heads = ("MoE layer", *(f"{row.rollout}/{row.training}" for row in routed))
    by_layer = zip(*(row.flips or () for row in routed), strict=True)
    lines = [(str(index), *(f"{flip:.2%}" for flip in flips)) for index, flips in enumerate(by_layer)]
    return "Tokens with other experts, by layer, without replay:\n" + text_table(lines, heads, words=1)


def _extreme_table(extremes: Sequence[Extreme]) -> str:
    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.4f}"

    lines = []
    for one in extremes:
        flipped = "-" if one.flipped_layers is None else str(one.flipped_layers)
        probabilities = map(number, (one.rollout_logprob, one.native_logprob, one.replay_logprob))
        lines.append((one.token, f"{one.group}:{one.position}", *probabilities, flipped))
    heads = ("token", "prompt:position", "rollout", "training", "with r3", "flipped layers")
    return text_table(lines, heads, words=2)


def to_json(rows: Sequence[Measured], verdict: Verdict, limits: Limits) -> dict[str, Any]:
    """Return plain data of everything."""
    from dataclasses import asdict

    found = [{**asdict(row), "flip": row.flip} for row in rows]
    return {"healthy": verdict.is_healthy, "findings": verdict.findings, "limits": asdict(limits), "gaps": found}
