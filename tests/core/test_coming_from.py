"""docs/coming_from.md: each line of its table against the other projects' losses, written out and differentiated.

The objectives come from the page: its last column names a row and overrides. A line, or a trap, without a test fails.
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from core_batches import columns_of_probabilities as tokens
from differences import Batch, Case, Rows, batch_of, compare, differences, ppo, token, total
from test_finite_differences import dual, gmpo, gspo, sapo

from megarl.core import advantages
from megarl.core.choices.records import override
from megarl.core.objectives import OBJECTIVES, Factor, Mask, Objective, Penalty, TokenColumns, coefficients

PAGE, RUN = (Path(__file__).parents[2] / "docs" / "coming_from.md").read_text().split("## As run")
LINES = {
    key: (row, overrides)
    for key, row, overrides in re.findall(r"^\| `([\w-]+)`.*\| `(\w+)`(?:: (.*?))? \|$", PAGE, re.MULTILINE)
}
TRAPS = re.findall(r"^- \*\*`([\w-]+)`\*\*", PAGE, re.MULTILINE)
AS_RUN = re.findall(r"^\| `([\w-]+)` \| ([^|]+) \| [^|]+ \|$", RUN, re.MULTILINE)
MEAN = "seq-mean-token-mean"


def of_page(key: str) -> Objective:
    """The objective that a line of the page names."""
    row, overrides = LINES[key]
    changes = tomllib.loads("\n".join(re.findall(r"`([^`]+)`", overrides)))
    return override(OBJECTIVES[row], changes, lambda part, name: None)


def ratio(term: Callable[..., np.ndarray], kind: str = "token-mean", constant: float = 1.0) -> Case:
    """A loss of the ratio theta/old and the advantage."""
    return token(kind, lambda lp, at, old, mu, a: term(np.exp(lp - old), a), constant)


def gspo_through_the_mean(lp, at, old, mu, a):
    """TRL, slime, OpenRLHF, NeMo-RL: the mean is differentiated."""
    return ppo(np.exp(np.mean(lp - old)), a, 1 - 3e-4, 1 + 4e-4)


def cispo(low: float | None, high: float) -> Case:
    return token("token-mean", lambda lp, at, old, mu, a: np.clip(np.exp(at - old), low, high) * a * lp)


def vespo(lp, at, old, mu, a):
    w = np.exp(np.clip(np.sum(at - mu), np.log(1e-8), 20))
    k, decay = np.where(a >= 0, 2.0, 3.0), np.where(a >= 0, 3.0, 2.0)
    return np.exp(decay + k * np.log(w) - decay * w) * a * lp


def dppo(kind: str, bound: float, anchor: str) -> Case:
    def term(lp, at, old, mu, a):
        base = old if anchor == "old" else mu
        p, q = np.exp(at), np.exp(base)
        if kind == "tv":
            valid = np.where(a > 0, p - q <= bound, p - q >= -bound)
        else:
            kl = q * (base - at) + (1 - q) * np.log((1 - q + 1e-8) / (1 - p + 1e-8))
            valid = (kl <= bound) | np.where(a > 0, p <= q, p >= q)
        return valid * np.minimum(np.exp(at - base), 3.0) * a * lp

    return token("token-mean", term)


def bypass_ppo(lp, at, old, mu, a):
    return ppo(np.exp(lp - mu), a)


def opsm(anchor: str) -> Case:
    def term(lp, at, old, mu, a):
        keep = (a >= 0) | (np.mean((old if anchor == "old" else mu) - at) <= 0.5)
        return keep * ppo(np.exp(lp - old), a)

    return token(MEAN, term)


def corrected(weight: Callable[[np.ndarray], Any], kind: str = MEAN) -> Case:
    """A weight of ln old/mu times PPO's loss."""
    return token(kind, lambda lp, at, old, mu, a: weight(old - mu) * ppo(np.exp(lp - old), a))


def kept(weights: np.ndarray, low: float, high: float) -> np.ndarray:
    return np.where((weights >= low) & (weights <= high), weights, 0.0)


def geometric_mask(logs: np.ndarray) -> np.ndarray:
    return (0.999 <= np.exp(np.mean(logs)) <= 1.002) * np.exp(logs)


def rejected(keep: Callable[[np.ndarray], Any]) -> Case:
    """verl: the mask of the loss is rewritten, k1 = -ln old/mu."""

    def value(lp: Rows, b: Batch) -> float:
        masks = [np.ones(len(old)) * keep(-(old - mu)) for old, mu in zip(b.old, b.mu, strict=True)]
        terms = [m * ppo(np.exp(now - old), a) for m, now, old, a in zip(masks, lp, b.old, b.a, strict=True)]
        return total("token-mean", terms, counted=masks)

    return value


def with_kl(estimate: Callable[..., np.ndarray]) -> Case:
    """REINFORCE, a sum over tokens, minus 0.1 times an estimate of (d, theta/old, lp, lp at the point)."""

    def value(lp: Rows, b: Batch) -> float:
        terms = []
        for now, at, old, ref, a in zip(lp, b.lp, b.old, b.ref, b.a, strict=True):
            terms.append(now * a - 0.1 * estimate(now - ref, np.exp(now - old), now, at))
        return total("seq-mean-token-sum", terms)

    return value


def k3(d: np.ndarray) -> np.ndarray:
    return np.exp(-d) + d - 1


LOSSES: dict[str, list[Case]] = {
    "grpo-dual": [token("token-mean", dual)],
    "grpo": [ratio(ppo, MEAN)],
    "dapo": [ratio(lambda r, a: ppo(r, a, 0.8, 1.28))],
    "dr-grpo": [ratio(ppo, "seq-mean-token-sum-norm", 64)],
    "gspo": [token(MEAN, gspo), token(MEAN, gspo_through_the_mean)],
    "cispo-two-sided": [cispo(0.8, 1.2)],
    "cispo-upper": [cispo(None, 5.0)],
    "sapo": [token(MEAN, sapo)],
    "gmpo": [gmpo],
    "vespo": [token("token-mean", vespo)],
    "gpg": [token("token-mean", lambda lp, at, old, mu, a: lp * a)],
    "dppo-tv-old": [dppo("tv", 0.2, "old")],
    "dppo-kl-old": [dppo("kl", 0.05, "old")],
    "dppo-tv-mu": [dppo("tv", 0.2, "mu")],
    "bypass-ppo": [token("token-mean", bypass_ppo)],
    "bypass-reinforce": [token("token-mean", lambda lp, at, old, mu, a: np.minimum(np.exp(at - mu), 2.0) * a * lp)],
    "opsm-mu": [opsm("mu")],
    "opsm-old": [opsm("old")],
    "tis": [corrected(lambda logs: np.clip(np.exp(logs), 0.5, 2.0))],
    "tis-sequence": [corrected(lambda logs: min(np.exp(np.sum(logs)), 2.0))],
    "icepop": [corrected(lambda logs: kept(np.exp(logs), 0.5, 5.0))],
    "seq-mis": [corrected(lambda logs: kept(np.exp(np.sum(logs)), 0.0, 3.0))],
    "seq-mask-tis": [corrected(geometric_mask)],
    "geo-rs": [rejected(lambda k1: np.log(0.999) <= np.mean(k1) <= np.log(1.001))],
    "token-rs": [rejected(lambda k1: (k1 >= np.log(0.8)) & (k1 <= np.log(2.0)))],
    "kl-k1": [with_kl(lambda d, u, lp, at: d)],
    "kl-k2": [
        with_kl(lambda d, u, lp, at: d**2 / 2),
        with_kl(lambda d, u, lp, at: np.exp(lp - at) * k3(d)),  # NeMo-RL's k3
    ],
    "kl-k3": [with_kl(lambda d, u, lp, at: k3(d))],
    "kl-k3-clamped": [with_kl(lambda d, u, lp, at: np.clip(k3(np.clip(d, -20, 20)), -10, 10))],
    "kl-unbiased": [with_kl(lambda d, u, lp, at: u * k3(d))],
}


def test_every_line_of_the_page_has_a_loss() -> None:
    assert set(LINES) == set(LOSSES)
    columns = [line for line in PAGE.splitlines() if line.startswith("| `")]
    assert len(columns) == len(LINES), "a line of the table that was not read"
    assert {key for key, _ in AS_RUN} <= set(LINES)


@pytest.mark.parametrize("key", LINES)
def test_the_line_has_the_gradient_of_the_loss(key: str) -> None:
    objective = of_page(key)
    for case in LOSSES[key]:
        assert np.concatenate([compare(objective, case, seed) for seed in range(6)]).any()


@pytest.mark.parametrize("key", LINES)
def test_the_overrides_matter(key: str) -> None:
    row, overrides = LINES[key]
    if overrides and key != "geo-rs":  # its bounds differ by 1e-6: see trap_k1_bounds
        batches = [batch_of(seed)[0] for seed in range(6)]
        pairs = [[coefficients(one, each).values for one in (of_page(key), OBJECTIVES[row])] for each in batches]
        assert not all(torch.equal(*pair) for pair in pairs)


def one_token(theta: float, old: float, mu: float, advantage: float, ref: float | None = None) -> TokenColumns:
    return tokens([theta], [old], [mu], advantage, ref=None if ref is None else [ref])


def value(objective: Objective, columns: TokenColumns) -> float:
    return float(coefficients(objective, columns).values[0])


def trap_dual_clip() -> None:
    """A ratio of 3.5 on a bad token."""
    columns = one_token(0.7, 0.2, 0.2, -1.0)
    assert value(of_page("grpo-dual"), columns) == 0
    assert value(OBJECTIVES["grpo"], columns) == pytest.approx(-3.5)


def trap_k1_bounds() -> None:
    """k1 = -ln old/mu between ln 0.8 and ln 2.0."""
    for gap in (0.45, 0.51, 1.24, 1.26, 1.9):
        columns = one_token(0.4, 0.4, 0.4 / gap, 1.0)
        keeps = np.log(0.8) <= -np.log(gap) <= np.log(2.0)
        assert (value(of_page("token-rs"), columns) != 0) == keeps == (0.5 <= gap <= 1.25)
    between = one_token(0.4, 0.4, 0.4 / 0.9990005, 1.0)  # above 0.999, below 1/1.001
    assert value(of_page("geo-rs"), between) == 0 != value(OBJECTIVES["geo_rs"], between)


def trap_denominators() -> None:
    """Two responses of 2 tokens, the first is rejected: its tokens are gone, stay, or leave the token count only."""
    columns = tokens([0.5] * 4, [0.5] * 4, [0.1, 0.1, 0.5, 0.5], 1.0, [2, 2])
    kinds = {
        (where, how): float(
            coefficients(
                Objective("group_mean", how, masks=(Mask("old_mu", high=2.0, denominator=where),)), columns
            ).values[3]
        )
        for where in ("keep", "leave", "leave_tokens")
        for how in ("token-mean", MEAN)
    }
    assert kinds == {
        ("keep", "token-mean"): 1 / 4,
        ("leave", "token-mean"): 1 / 2,
        ("leave_tokens", "token-mean"): 1 / 2,
        ("keep", MEAN): 1 / 4,
        ("leave", MEAN): 1 / 2,
        ("leave_tokens", MEAN): 1 / 4,
    }


def trap_trl_cispo() -> None:
    """min(r, 0.2) is 0.2 for all ratios that occur."""
    row = dataclasses.replace(OBJECTIVES["cispo"], factors=(Factor("theta_old", high=0.2),))
    assert [value(row, one_token(p, 0.4, 0.4, 1.0)) for p in (0.2, 0.4, 0.9)] == pytest.approx([0.2] * 3)


def trap_cispo_lower() -> None:
    columns = one_token(0.2, 0.4, 0.4, -1.0)
    assert value(of_page("cispo-two-sided"), columns) == pytest.approx(-0.8)
    assert value(OBJECTIVES["cispo"], columns) == pytest.approx(-0.5)


def trap_kl_clamp() -> None:
    """k3 = 10 at a ratio of 13.6; k2 = 10 at a log-ratio of sqrt(20)."""
    free, clamped = of_page("kl-k3"), of_page("kl-k3-clamped")
    for times, has_gradient in ((13.5, True), (13.7, False)):
        columns = one_token(0.9 / times, 0.5, 0.5, 0.0, ref=0.9)
        assert value(free, columns) == pytest.approx(0.1 * (times - 1))
        assert (value(clamped, columns) != 0) == has_gradient
    k2 = dataclasses.replace(of_page("kl-k2"), penalties=(Penalty("k2", coef=0.1, max=10.0),))
    for back, has_gradient in ((4.47, True), (4.48, False)):
        assert (value(k2, one_token(0.9 * np.exp(-back), 0.5, 0.5, 0.0, ref=0.9)) != 0) == has_gradient


def trap_nemo_k3() -> None:
    """exp(x - sg x) k3 has the gradient k3 + dk3/dd = d, and exp(x - sg x) k1 has d + 1."""
    _, b = batch_of(1)
    for estimate, gradient in ((k3, lambda d: d), (lambda d: d, lambda d: 1 + d)):
        case = with_kl(lambda d, u, lp, at, estimate=estimate: np.exp(lp - at) * estimate(d))
        found = differences(case, b)
        responses = sum(len(one) > 0 for one in b.lp)
        for each, at, ref, a in zip(found, b.lp, b.ref, b.a, strict=True):
            assert each == pytest.approx((a - 0.1 * gradient(at - ref)) / responses, abs=1e-8)


def trap_openrlhf_kl() -> None:
    """k1's coefficient is the same for every token, so that its expectation under theta is the score's: 0."""
    theta = [0.5, 0.3, 0.2]
    found = coefficients(of_page("kl-k1"), tokens(theta, theta, theta, 0.0, ref=[0.1, 0.2, 0.7])).values.numpy()
    p = np.array(theta)
    assert sum(p[y] * found[y] * (np.eye(3)[y] - p) for y in range(3)) == pytest.approx(np.zeros(3), abs=1e-15)


def trap_dppo_anchor() -> None:
    """theta = old = 0.3, mu = 0.6, A < 0."""
    columns = one_token(0.3, 0.3, 0.6, -1.0)
    assert value(of_page("dppo-tv-old"), columns) == pytest.approx(-1.0)
    assert value(of_page("dppo-tv-mu"), columns) == 0


def trap_opsm_anchor() -> None:
    columns = one_token(0.3, 0.3, 0.6, -1.0)
    assert value(of_page("opsm-old"), columns) == pytest.approx(-1.0)
    assert value(of_page("opsm-mu"), columns) == 0


def trap_singletons() -> None:
    alone = (torch.tensor([0.7]), torch.tensor([0]))
    for function in (advantages.grpo, advantages.rloo, advantages.group_mean):
        assert function(*alone).tolist() == [0.0]


def trap_aborted() -> None:
    rewards, groups = torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.zeros(4, dtype=torch.int64)
    assert advantages.rloo(rewards, groups).tolist() == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])
    valid = torch.tensor([True, True, True, False])
    assert advantages.rloo(rewards, groups, valid).tolist() == [1.0, -0.5, -0.5, 0.0]


def trap_std_eps() -> None:
    rewards = np.array([1.0, 0.0, 0.0, 0.0])
    for eps in (1e-4, 1e-6, 1e-9):
        expected = (rewards - 0.25) / (rewards.std(ddof=1) + eps)
        found = advantages.grpo(torch.from_numpy(rewards), torch.zeros(4, dtype=torch.int64), eps=eps)
        assert found.tolist() == pytest.approx(expected, abs=1e-12)
    assert {row.std_eps for row in OBJECTIVES.values()} == {1e-6}


def trap_sum_norm() -> None:
    """x = [[1, 2, 3], [10]], L = 4: 2.0; without the number of responses 4.0."""
    row = Objective("group_mean", "seq-mean-token-sum-norm", norm_length=4)
    columns = tokens([0.5] * 4, [0.5] * 4, [0.5] * 4, [1.0, 2.0, 3.0, 10.0], [3, 1])
    assert float(coefficients(row, columns).values.sum()) == pytest.approx(16 / 4 / 2)


def trap_roll_token_mean() -> None:
    """Here a token that a mask drops has no gradient, whatever the aggregation."""
    for how in ("token-mean", MEAN, "seq-mean-token-sum"):
        row = Objective("group_mean", how, masks=(Mask("old_mu", high=2.0),))
        assert value(row, tokens([0.5] * 2, [0.5] * 2, [0.1, 0.5], 1.0)) == 0


def trap_roll_dual_clip() -> None:
    columns = one_token(0.3, 0.2, 0.2, -1.0)  # a ratio of 1.5
    row = dataclasses.replace(OBJECTIVES["grpo"], masks=(Mask.ppo(), Mask("theta_old", high=1.4, sign="negative")))
    assert value(row, columns) == 0
    assert value(of_page("grpo-dual"), columns) == pytest.approx(-1.5)


def trap_entropy() -> None:
    columns = tokens([0.5] * 3, [0.5] * 3, [0.5] * 3, 1.0, [2, 1])
    for how, scales in (
        ("token-mean", [1 / 3] * 3),
        (MEAN, [1 / 4, 1 / 4, 1 / 2]),
        ("seq-mean-token-sum", [1 / 2] * 3),
    ):
        found = coefficients(Objective("group_mean", how, entropy_coef=0.1), columns).entropy
        assert found is not None
        assert found.tolist() == pytest.approx([0.1 * scale for scale in scales])


TRAP_TESTS = {
    name.removeprefix("trap_").replace("_", "-"): each for name, each in globals().items() if name.startswith("trap_")
}


def test_every_trap_has_a_test() -> None:
    assert set(TRAPS) == set(TRAP_TESTS)


@pytest.mark.parametrize("key", TRAPS)
def test_the_trap(key: str) -> None:
    TRAP_TESTS[key]()
