"""docs/coming_from.md: each line of its table against the other projects' losses, written out and differentiated.

The objectives come from the page: its last column names a row and overrides. A line without a loss here fails.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from core_batches import columns_of_probabilities
from differences import Batch, Case, Rows, batch_of, compare, ppo, token, total
from test_finite_differences import dual, gmpo, gspo, sapo

from megarl.core.choices.records import make
from megarl.core.objectives import OBJECTIVES, Objective, coefficients

PAGE = (Path(__file__).parents[2] / "docs" / "coming_from.md").read_text().split("## As run")[0]
LINES = {
    key: (row, overrides)
    for key, row, overrides in re.findall(r"^\| `([\w-]+)`.*\| `(\w+)`(?:: (.*?))? \|$", PAGE, re.MULTILINE)
}
MEAN = "seq-mean-token-mean"


def of_page(key: str) -> Objective:
    """The objective that a line of the page names."""
    row, overrides = LINES[key]
    changes = tomllib.loads("\n".join(re.findall(r"`([^`]+)`", overrides)))
    return make(Objective, changes, OBJECTIVES[row], lambda part, name: None)


def ratio(term: Callable[..., np.ndarray], kind: str = "token-mean", constant: float = 1.0) -> Case:
    """A loss of the ratio theta/old and the advantage."""
    return token(kind, lambda lp, at, old, mu, a: term(np.exp(lp - old), a), constant)


def gspo_through_the_mean(lp, at, old, mu, a):
    """TRL, slime, OpenRLHF, NeMo-RL: the mean is differentiated."""
    return ppo(np.exp(np.mean(lp - old)), a, 1 - 3e-4, 1 + 4e-4)


def luspo(lp: Rows, b: Batch) -> float:
    """TRL: the clipped term of a response at each of its tokens, summed over them, then a mean over responses."""
    terms = []
    for now, old, a in zip(lp, b.old, b.a, strict=True):
        s = np.exp(np.mean(now - old)) if len(now) else 1.0
        terms.append(np.minimum(s * a, np.clip(s, 1 - 2e-3, 1 + 2.5e-3) * a))
    return total("seq-mean-token-sum", terms)


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
    "luspo": [luspo],
    "seq-max-rs": [rejected(lambda k1: np.max(k1**2 / 2) <= 0.1)],
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


@pytest.mark.parametrize("key", LINES)
def test_the_line_has_the_gradient_of_the_loss(key: str) -> None:
    objective = of_page(key)
    for case in LOSSES[key]:
        assert np.concatenate([compare(objective, case, seed) for seed in range(6)]).any()


@pytest.mark.parametrize("key", LINES)
def test_the_overrides_matter(key: str) -> None:
    row, overrides = LINES[key]
    if overrides and key != "geo-rs":  # its bounds differ by 1e-6: see the bounds of k1
        batches = [batch_of(seed)[0] for seed in range(6)]
        pairs = [[coefficients(one, each).values for one in (of_page(key), OBJECTIVES[row])] for each in batches]
        assert not all(torch.equal(*pair) for pair in pairs)


def test_bounds_of_k1_are_of_mu_over_old() -> None:
    """k1 = -ln old/mu between ln 0.8 and ln 2.0."""
    for gap in (0.45, 0.51, 1.24, 1.26, 1.9):
        columns = columns_of_probabilities([0.4], [0.4], [0.4 / gap])
        keeps = np.log(0.8) <= -np.log(gap) <= np.log(2.0)
        assert bool(coefficients(of_page("token-rs"), columns).values) == keeps == (0.5 <= gap <= 1.25)
    between = columns_of_probabilities([0.4], [0.4], [0.4 / 0.9990005])  # above 0.999, below 1/1.001
    assert not coefficients(of_page("geo-rs"), between).values
    assert coefficients(OBJECTIVES["geo_rs"], between).values
