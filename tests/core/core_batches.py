"""Random packed batches for the tests of the core, in float64."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any, get_args

import torch
from hypothesis import strategies as st
from oracles import reference_objectives
from torch import Tensor

from megarl.core.choices import parts
from megarl.core.objectives import OBJECTIVES, Factor, Gate, Mask, Objective, Penalty, TokenColumns, TopK


def random_columns(seed: int, lengths: list[int], masked: float = 0.3) -> TokenColumns:
    """Packed columns of sequences with the given lengths; about a share `masked` of the tokens has no loss."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    old = -3 * torch.rand(total, generator=generator, dtype=torch.float64) - 8.0  # far enough below 0 for any gap
    gap = torch.randn(2, total, generator=generator, dtype=torch.float64)
    per_sequence = torch.randn(len(lengths), generator=generator, dtype=torch.float64)
    return TokenColumns(
        logprobs=old + 0.3 * gap[0],
        old_logprobs=old,
        rollout_logprobs=old + 0.8 * gap[1],
        advantages=per_sequence.repeat_interleave(torch.tensor(lengths, dtype=torch.int64)),
        loss_mask=torch.rand(total, generator=generator) >= masked,
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0),
        ref_logprobs=old + 0.5 * torch.randn(total, generator=generator, dtype=torch.float64),
        router_drift=0.4 * torch.rand(total, generator=generator, dtype=torch.float64),
    )


def likely_columns(seed: int, lengths: list[int], masked: float = 0.3) -> TokenColumns:
    """As ``random_columns``, with probabilities between 0.01 and 0.99, advantages of single tokens, 0 among them, and
    the sampler's two most likely tokens, of which the sampled one may be the first."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)

    def draw(scale: float) -> Tensor:
        return scale * torch.randn(total, generator=generator, dtype=torch.float64)

    logit = draw(1.5)
    theta, old, mu, ref = (torch.nn.functional.logsigmoid(logit + draw(0.6)) for _ in range(4))
    has_token = torch.rand(total, generator=generator) < 0.5

    def top(own: Tensor) -> Tensor:
        """The sampled token and half of the rest, or two shares of the rest."""
        rest = torch.log(-torch.expm1(own))
        shares = torch.tensor([0.5, 0.3], dtype=torch.float64).log() + 0.1 * torch.randn(
            total, 2, generator=generator, dtype=torch.float64
        )
        tops = rest[:, None] + shares
        return torch.where(has_token[:, None], torch.stack([own, tops[:, 0]], 1), tops)

    return TokenColumns(
        theta,
        old,
        mu,
        draw(1.0) * (torch.rand(total, generator=generator) < 0.9),
        torch.rand(total, generator=generator) >= masked,
        torch.tensor([0, *lengths]).cumsum(0),
        ref,
        TopK(top(mu), top(theta), has_token),
        draw(0.2).abs(),
    )


def columns_of(
    theta: Any, old: Any = 0.0, mu: Any = 0.0, advantages: Any = 1.0, mask: Any = None, cu_seqlens: Any = None,
    ref: Any = None, below: float = 30.0, drift: Any = None,
) -> TokenColumns:  # fmt: skip
    """Columns of log-probabilities, all moved down so that each is one; numbers stand for all tokens."""
    size = len(theta)

    def column(values: Any, shift: float) -> Tensor:
        return torch.as_tensor(values, dtype=torch.float64).expand(size) - shift

    return TokenColumns(
        *(column(values, below) for values in (theta, old, mu)),
        column(advantages, 0.0),
        torch.tensor([True] * size if mask is None else mask),
        torch.as_tensor([0, size] if cu_seqlens is None else cu_seqlens),
        None if ref is None else column(ref, below),
        router_drift=None if drift is None else column(drift, 0.0),
    )


def columns_of_probabilities(
    theta: Any, old: Any = None, mu: Any = None, advantages: Any = 1.0, lengths: Any = None, ref: Any = None
) -> TokenColumns:
    """One response unless lengths are given; old and mu are theta where they are left out."""
    theta, old, mu, ref = (
        None if values is None else torch.as_tensor(values, dtype=torch.float64).log()
        for values in (theta, theta if old is None else old, theta if mu is None else mu, ref)
    )
    bounds = torch.tensor([0, *([len(theta)] if lengths is None else lengths)]).cumsum(0)
    return columns_of(theta, old, mu, advantages, None, bounds, ref, below=0.0)


def one_far_token(size: int = 200) -> TokenColumns:
    """A response whose engines agree but for a token, of which the mean over the response shows little."""
    trained = [0.225, *[0.5] * (size - 1)]
    return columns_of_probabilities(trained, trained, [0.5] * size, -1.0, ref=trained)


ROWS = {
    name: dataclasses.replace(row, advantage="group_mean") if row.advantage in parts.NON_NEGATIVE_ADVANTAGES else row
    for name, row in OBJECTIVES.items()
}
"""The table, where every row takes advantages of both signs: its formula does not depend on where they are from."""


def variant(name: str, **changes: Any) -> Objective:
    """A row of ``ROWS`` with parts replaced."""
    return dataclasses.replace(ROWS[name], **changes)


def rows(column: Tensor, cu_seqlens: Tensor) -> list[list]:
    """The column as one list per sequence."""
    offsets = cu_seqlens.tolist()
    return [column[a:b].tolist() for a, b in pairwise(offsets)]


def take(columns: TokenColumns, sequences: list[int]) -> TokenColumns:
    """The columns of some sequences, in the given order, by slicing each one out."""
    offsets = columns.cu_seqlens.tolist()
    pieces = [slice(offsets[n], offsets[n + 1]) for n in sequences]
    lengths = [piece.stop - piece.start for piece in pieces]
    taken = {
        name: torch.cat([column[piece] for piece in pieces])
        for name, column in {**columns.float_columns(), "loss_mask": columns.loss_mask}.items()
    }
    topk = columns.topk
    if topk is not None:
        names = ("rollout_logprobs", "logprobs", "has_token")
        topk = TopK(*(torch.cat([getattr(topk, name)[piece] for piece in pieces]) for name in names))
    return TokenColumns(**taken, cu_seqlens=torch.tensor([0, *lengths]).cumsum(0), topk=topk)


def with_logprobs(columns: TokenColumns, logprobs: Tensor) -> TokenColumns:
    return dataclasses.replace(columns, logprobs=logprobs)


def slow_coefficients(objective: Objective, columns: TokenColumns) -> Tensor:
    """The reference's coefficients of a packed batch, packed again."""
    names = ("logprobs", "old_logprobs", "rollout_logprobs", "advantages", "loss_mask", "ref_logprobs")
    topk = None
    if columns.topk is not None:
        given = (columns.topk.rollout_logprobs, columns.topk.logprobs, columns.topk.has_token)
        parts_of = [rows(column, columns.cu_seqlens) for column in given]
        topk = [list(zip(*of_sequence, strict=True)) for of_sequence in zip(*parts_of, strict=True)]
    nested = reference_objectives.coefficients(
        objective,
        *(rows(getattr(columns, name), columns.cu_seqlens) for name in names),
        topk=topk,
        router_drift=None if columns.router_drift is None else rows(columns.router_drift, columns.cu_seqlens),
    )
    return torch.tensor([value for row in nested for value in row], dtype=torch.float64)


lengths_strategy = st.lists(st.integers(0, 6), min_size=1, max_size=5)
seed_strategy = st.integers(0, 2**31)


BOUNDS = {
    "ratio": (0.3, 3.0), "log_ratio": (-1.0, 1.0), "difference": (-0.3, 0.3), "tv": (0.01, 0.3), "topk_tv": (0.01, 0.3)
}  # fmt: skip
"""Statistic -> between which values the bounds of a random mask lie."""
OF_RATIOS = [scope for scope in get_args(parts.Scope) if scope not in parts.DIVERGENCE_SCOPES]


@st.composite
def masks(draw: Any) -> Mask:
    """Any mask whose bounds lie where the statistics of ``likely_columns`` do."""
    statistic = draw(st.sampled_from(get_args(parts.Statistic)))
    signed = statistic in ("ratio", "log_ratio", "difference")
    least, most = BOUNDS.get(statistic, (0.003, 0.4))
    middle = {"ratio": 1.0}.get(statistic, 0.0) if signed else (least + most) / 2
    low, high = draw(st.none() | st.floats(least, middle)), draw(st.none() | st.floats(middle, most))
    if low is None and high is None:
        high = (middle + most) / 2
    scope = draw(st.sampled_from(OF_RATIOS if signed else get_args(parts.Scope)))
    takes_high_alone = scope in ("prefix_budget", "batch_mean")
    return Mask(
        "theta_mu" if statistic in parts.TOP_K else draw(st.sampled_from(get_args(parts.Policies))),
        statistic,
        scope,
        None if takes_high_alone else low,
        draw(st.floats(least, most)) if takes_high_alone else high,
        draw(st.sampled_from(get_args(parts.MaskSign))),
        draw(st.booleans()) and not takes_high_alone,
        draw(st.sampled_from([0.0, 0.5])) if statistic == "log_ratio" else 0.0,
        draw(st.sampled_from(get_args(parts.InDenominator))),
        draw(st.floats(0, 0.1)),
        draw(st.floats(0.1, 1)),
    )


@st.composite
def factors(draw: Any, policies: str, sign: str = "both") -> Factor:
    scope = draw(st.sampled_from(OF_RATIOS))
    fn = draw(st.sampled_from(get_args(parts.FactorFunction)))
    can_normalize = scope in ("token", "sequence_mean", "sequence_sum") and fn != "vespo"
    return Factor(
        policies,  # type: ignore[arg-type]
        scope,
        fn,
        draw(st.none() | st.floats(0.2, 0.9)),
        draw(st.none() | st.floats(1.1, 3.0)),
        draw(st.sampled_from(get_args(parts.FactorSign))) if sign == "both" else sign,
        draw(st.floats(0, 2)),
        draw(st.floats(0.3, 0.95)),  # at 1 the exponent is ill-conditioned: the ESS is flat there
        log_ratio_cap=draw(st.sampled_from([0.5, 10.0, 20.0])),
        token_clip=draw(st.none() | st.floats(0.1, 1)),
        batch_normalize=can_normalize and draw(st.booleans()),
    )


@st.composite
def objectives(draw: Any) -> Objective:
    """Any record of masks, factors, a gate and penalties, none of them a function."""
    many = draw(
        st.just(())
        | st.tuples(st.sampled_from(get_args(parts.Policies)).flatmap(factors))
        | st.tuples(factors("theta_old"), factors("old_mu"))
        | st.tuples(factors("theta_mu", "positive"), factors("theta_mu", "negative"))
    )
    gate = None
    if draw(st.booleans()):
        kind = draw(st.sampled_from(get_args(parts.GateKind)))
        gate = Gate(kind, draw(st.floats(0.2, 2)), draw(st.floats(0.2, 2)), draw(st.floats(0.1, 0.5)))
    penalty = st.builds(
        Penalty,
        st.sampled_from(get_args(parts.Estimator)),
        st.sampled_from(get_args(parts.PenaltyPolicy)),
        st.sampled_from([0.0, 0.3]),
        st.sampled_from(["old", "mu"]),
        st.none() | st.floats(0.01, 1),
    )
    aggregation = draw(st.sampled_from(get_args(parts.Aggregation)))
    tests = tuple(draw(st.lists(masks(), max_size=3)))
    can_shift = any(factor.policies == "theta_old" for factor in many)
    can_shift &= all(m.policies != "theta_old" or m.statistic in parts.RATIOS for m in tests)
    return Objective(
        "group_mean",
        aggregation,
        tests,
        many,
        gate,
        tuple(draw(st.lists(penalty, max_size=2))),
        norm_length=7 if aggregation.endswith("norm") else None,
        router_shift_floor=draw(st.none() | st.floats(0.6, 1.0)) if can_shift else None,
    )
