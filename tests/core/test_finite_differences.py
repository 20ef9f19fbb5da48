"""Every row of the table against central differences of its objective, written out in numpy.

A case is a function of the log-probabilities of theta, and of the batch at the point: what stands under a stop-gradient
is computed from the batch, all else from the argument. Masks are stop-gradients too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
from core_batches import ROWS, one_far_token
from differences import Batch, Case, Rows, batch_of, compare, fresh, ppo, token, total, window

from megarl.core.objectives import Factor, Objective, Penalty, coefficients


def kl2(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """KL of two classes, of log-probabilities."""
    p, q = np.exp(p), np.exp(q)
    return p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))


def away(a: np.ndarray, w: np.ndarray, far: np.ndarray) -> np.ndarray:
    """DPPO: 0 where an update leads further from mu, and the divergence is above its bound."""
    return ~((((a > 0) & (w > 1)) | ((a < 0) & (w < 1))) & far)


def dppo(far: Callable[..., np.ndarray]) -> Case:
    return token(
        "seq-mean-token-sum",
        lambda lp, at, old, mu, a: away(a, np.exp(at - mu), far(at, mu)) * np.exp(lp - mu) * a,
    )


def dppo_topk(lp: Rows, b: Batch) -> float:
    terms = []
    for now, at, mu, a, top_mu, top in zip(lp, b.lp, b.mu, b.a, b.top_mu, b.top, strict=True):
        mine = np.abs(np.exp(at) - np.exp(mu))
        theirs = np.abs(np.exp(top) - np.exp(top_mu)).sum(1)
        rest = np.abs((1 - np.exp(at) - np.exp(top).sum(1)) - (1 - np.exp(mu) - np.exp(top_mu).sum(1)))
        terms.append(away(a, np.exp(at - mu), (mine + theirs + rest) / 2 > 0.15) * np.exp(now - mu) * a)
    return total("seq-mean-token-sum", terms)


def reinforce(kind: str = "seq-mean-token-sum") -> Case:
    return token(kind, lambda lp, at, old, mu, a: lp * a)


def grpo(kind: str, high: float = 1.2, constant: float = 1.0) -> Case:
    return token(kind, lambda lp, at, old, mu, a: ppo(np.exp(lp - old), a, 0.8, high), constant)


def minirl(kind: str, masked: bool = True, weight: Callable[..., np.ndarray] | None = None) -> Case:
    def term(lp, at, old, mu, a):
        mask = window(np.exp(at - old), a, 0.8, 1.27) if masked else 1.0
        return mask * np.minimum(np.exp(at - mu), 5.0) * a * lp

    return token(kind, term if weight is None else weight)


def future_mean(logs: np.ndarray) -> np.ndarray:
    return np.array([logs[t:].mean() for t in range(len(logs))])


def kl_grpo(lp, at, old, mu, a):
    rho = np.exp(future_mean(at - old))
    return window(rho, a) * fresh(rho, lp, at) * a


def ctpo_mask(log_rho: np.ndarray, a: np.ndarray) -> np.ndarray:
    widths = np.sqrt(np.arange(1, len(log_rho) + 1))
    high = (a > 0) & (log_rho > 0.05 * widths)
    low = (a < 0) & ((log_rho < -0.025 * widths) | (log_rho > 0.05 * widths))
    return ~(high | low)


def ctpo(lp, at, old, mu, a):
    log_rho = np.cumsum(at - old)
    return ctpo_mask(log_rho, a) * fresh(np.exp(np.minimum(log_rho, 10.0)), lp, at) * a


def ess_exponent(b: Batch, target: float = 0.5) -> float:
    """The largest q in [0, 1] with (sum r^q)^2 / (T sum r^2q) >= target, by bisection."""
    logs = np.concatenate([lp - old for lp, old in zip(b.lp, b.old, strict=True)])

    def share(q: float) -> float:
        return np.exp(q * logs).sum() ** 2 / (len(logs) * np.exp(2 * q * logs).sum())

    if share(1.0) >= target:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if share(middle) >= target else (low, middle)
    return low


def adaptive(lp: Rows, b: Batch, target: float = 0.5) -> float:
    q = ess_exponent(b, target)
    return token("seq-mean-token-mean", lambda lp, at, old, mu, a: np.exp(q * (at - old)) * a * lp)(lp, b)


def drpo(lp, at, old, mu, a):
    w = np.exp(lp - mu)
    return w * a - np.abs(a) / (2 * 0.15) * np.exp(mu) * (w - 1) ** 2


def icepop(lp, at, old, mu, a):
    g = np.exp(old - mu)
    return ((g >= 0.5) & (g <= 5)) * g * ppo(np.exp(lp - old), a)


def kpop(lp, at, old, mu, a):
    return (np.maximum(kl2(old, mu), kl2(mu, old)) <= 0.5) * ppo(np.exp(lp - old), a)


def deepseek(lp, at, old, mu, a):
    drop = (a < 0) & (np.mean(mu - at) > 0.5)
    return ~drop * ppo(np.exp(lp - old), a)


def seq_mis(lp, at, old, mu, a):
    product = np.exp(np.sum(old - mu))
    return (product <= 2) * product * ppo(np.exp(lp - old), a)


def geo_rs(lp: Rows, b: Batch) -> float:
    parts = list(zip(lp, b.old, b.mu, b.a, strict=True))
    stay = [np.full(len(old), 0.999 <= np.exp(np.mean(old - mu)) <= 1.001) for _, old, mu, _ in parts]
    terms = [here * ppo(np.exp(now - old), a) for here, (now, old, _, a) in zip(stay, parts, strict=True)]
    return total("token-mean", terms, counted=stay)


def sapo(lp, at, old, mu, a):
    tau = np.where(a > 0, 1.0, 1.05)
    return 4 / tau / (1 + np.exp(-tau * (np.exp(lp - old) - 1))) * a


def ce_gppo(lp, at, old, mu, a):
    r, r0 = np.exp(lp - old), np.exp(at - old)
    below, above = (a < 0) & (r0 < 0.8), (a > 0) & (r0 > 1.2)
    return np.where(below, 0.5 * 0.8 * r / r0, np.where(above, 1.2 * r / r0, r)) * a


def topr(lp, at, old, mu, a):
    return np.where(a < 0, min(np.exp(np.sum(at - mu)), 1.0), 1.0) * a * lp


def vespo(lp, at, old, mu, a):
    product = np.exp(np.sum(at - mu))
    k, decay = np.where(a >= 0, 2.0, 3.0), np.where(a >= 0, 3.0, 2.0)
    return product**k * np.exp(decay * (1 - product)) * a * lp


def gmpo(lp: Rows, b: Batch, floor: float = 1.0) -> float:
    """Differentiated as it is: the geometric mean of clipped ratios, each times RSPO's max(e^-D, floor)."""
    values = []
    for now, old, a, drift in zip(lp, b.old, b.a, b.drift, strict=True):
        if not len(now):
            continue
        logs = now - old + np.log(np.maximum(np.exp(-drift), floor))
        clipped = np.where(a > 0, np.minimum(logs, 0.4), np.where(a < 0, np.maximum(logs, -0.4), logs))
        values.append(a[0] * np.exp(clipped.mean()))
    return sum(values) / len(values)


def gspo(lp, at, old, mu, a, low=0.9997, high=1.0004):
    return ppo(fresh(np.exp(np.mean(at - old)), lp, at), a, low, high)


def ipo(lp: Rows, b: Batch) -> float:
    terms = []
    for now, at, mu, a in zip(lp, b.lp, b.mu, b.a, strict=True):
        near = np.abs(np.exp(at) - np.exp(mu)) <= 0.1
        terms.append(near * np.exp(now - mu) * a - 1e-3 * (now - mu) ** 2)
    return total("token-mean", terms)


def mis_po(lp, at, old, mu, a):
    g = np.exp(old - mu)
    return (g >= 0.5) * (g <= 2) * (0.996 <= np.exp(np.mean(old - mu)) <= 1.001) * a * lp


def trm(lp, at, old, mu, a):
    kl = kl2(mu, at)
    return (np.max(kl) <= 0.05 and np.mean(kl) <= 1e-3) * np.exp(lp - mu) * a


def m2po(lp: Rows, b: Batch) -> float:
    """Algorithm 1: the token with the largest (ln w)^2 goes, one at a time."""
    logs = [at - mu for at, mu in zip(b.lp, b.mu, strict=True)]
    trust = {(n, t): x * x for n, one in enumerate(logs) for t, x in enumerate(one) if b.a[n][t] * x > 0}
    keep = [np.ones(len(one)) for one in logs]
    while trust and np.mean(list(trust.values())) > 0.04:
        n, t = max(trust, key=trust.__getitem__)
        keep[n][t] = 0
        del trust[n, t]
    return total(MEAN, [k * np.exp(now - mu) * a for k, now, mu, a in zip(keep, lp, b.mu, b.a, strict=True)])


def cppo(lp, at, old, mu, a):
    """Algorithm 1."""
    held = weights = 0.0
    keep = np.ones(len(lp))
    for t in range(len(lp)):
        weight = 1 - 0.2 / max(len(lp) - 1, 1) * t
        z = weight * abs(np.exp(at[t]) - np.exp(mu[t]))
        keep[t] = a[t] * (at[t] - mu[t]) <= 0 or z <= min(0.15, 0.15 + 0.015 * weights - held)
        held, weights = held + z, weights + weight
    return keep * np.exp(lp - mu) * a


def capped_r(lp, at, old, mu, a):
    return np.minimum(np.exp(at - old), 1.2) * a * lp


def dual(lp, at, old, mu, a):
    value = ppo(np.exp(lp - old), a)
    return np.where(a < 0, np.maximum(value, 3.0 * a), value)


MEAN, SUM, NORM = "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
CASES: dict[str, Case] = {
    "minirl": minirl(SUM),
    "minirl_length_norm": minirl(MEAN),
    "minirl_no_is": token(
        SUM, lambda lp, at, old, mu, a: window(np.exp(at - old), a, 0.8, 1.27) * np.exp(lp - old) * a
    ),
    "minirl_no_clip": minirl(SUM, masked=False),
    "reinforce": reinforce(),
    "rloo": reinforce(),
    "grpo": grpo(MEAN),
    "dapo": grpo("token-mean", 1.28),
    "gspo": token(MEAN, gspo),
    "cispo": token("token-mean", capped_r),
    "raft": reinforce(MEAN),
    "raft_pp": grpo(MEAN, 1.28),
    "reinforce_rej": token("token-mean", dual),
    "reinforce_rej_signed": grpo(MEAN),
    "ctpo": token("token-mean", ctpo),
    "kl_grpo": token(MEAN, kl_grpo),
    "kl_grpo_token": grpo(MEAN),
    "power": token(MEAN, lambda lp, at, old, mu, a: np.sqrt(np.exp(at - old)) * a * lp),
    "upper_clip": token(MEAN, capped_r),
    "ppo_upper": token(MEAN, lambda lp, at, old, mu, a: window(np.exp(at - old), a) * capped_r(lp, at, old, mu, a)),
    "adaptive_power": adaptive,
    "dr_grpo": grpo(NORM, constant=3000),
    "grpo_mu": token(MEAN, lambda lp, at, old, mu, a: ppo(np.exp(lp - mu), a)),
    "dppo_tv": dppo(lambda at, mu: np.abs(np.exp(at) - np.exp(mu)) > 0.15),
    "dppo_kl": dppo(lambda at, mu: kl2(mu, at) > 0.05),
    "dppo_topk": dppo_topk,
    "drpo": token(NORM, drpo, 8192),
    "icepop": token(MEAN, icepop),
    "kpop": token(MEAN, kpop),
    "dis": token(
        "token-mean",
        lambda lp, at, old, mu, a: (np.exp(at - mu) > 0.8) * (np.exp(at - mu) < 1.28) * np.exp(lp - mu) * a,
    ),
    "deepseek_v32": token(MEAN, deepseek),
    "seq_mis": token("token-mean", seq_mis),
    "geo_rs": geo_rs,
    "sapo": token(MEAN, sapo),
    "ce_gppo": token("token-mean", ce_gppo),
    "topr": token(SUM, topr),
    "vespo": token("token-mean", vespo),
    "gmpo": gmpo,
    "ipo": ipo,
    "mis_po": token("token-mean", mis_po),
    "trm": token(SUM, trm),
    "luspo": token(SUM, lambda lp, at, old, mu, a: gspo(lp, at, old, mu, a, 0.998, 1.0025)),
    "flash_reinforce": token(
        MEAN, lambda lp, at, old, mu, a: (np.mean(kl2(mu, at)) <= 3e-3) * np.exp(at - mu) * a * lp
    ),
    "m2po": m2po,
    "cppo": token("token-mean", cppo),
    "rspo": lambda lp, b: gmpo(lp, b, 0.8),
    "minimal_mask": token(
        SUM,
        lambda lp, at, old, mu, a: ~((a < 0) & (np.exp(mu) - np.exp(at) >= 0.5)) * np.exp(lp - mu) * a,
    ),
}


def penalty(estimator: str, to: str, coef: float = 0.3, behaviour: str = "old") -> Case:
    """Minus coef times the mean over tokens of the estimator, on top of nothing."""

    def value(lp: Rows, b: Batch) -> float:
        terms = []
        for now, other, sampler in zip(lp, getattr(b, to), getattr(b, behaviour), strict=True):
            d = now - other
            k3 = np.exp(-d) + d - 1
            each = {"k1": d, "k2": d**2 / 2, "k3": k3, "unbiased": np.exp(now - sampler) * k3}[estimator]
            terms.append(-coef * each)
        return total("token-mean", terms)

    return value


def literal(scope: str, mask: Callable[..., np.ndarray], kind: str) -> Case:
    """prefix_grad: the ratio of several tokens differentiated as it is printed."""

    def term(lp, at, old, mu, a):
        of = np.cumsum if scope == "prefix" else future_mean
        return mask(of(at - old), a) * np.exp(of(lp - old)) * a

    return token(kind, term)


ZERO = Objective("group_mean", "token-mean", factors=(Factor("theta_old", fn="power", power=0.0),))
EXTRA: dict[str, tuple[Objective, Case, bool]] = {
    **{
        f"{estimator} to {to}": (dataclasses.replace(ZERO, penalties=(Penalty(estimator, to, 0.3),)), case, True)
        for estimator in ("k1", "k2", "k3", "unbiased")
        for to in ("ref", "mu", "old")
        for case in [penalty(estimator, to)]
    },
    "unbiased, sampled by mu": (
        dataclasses.replace(ZERO, penalties=(Penalty("unbiased", "ref", 0.3, "mu"),)),
        penalty("unbiased", "ref", behaviour="mu"),
        True,
    ),
    "ctpo, literal": (
        dataclasses.replace(ROWS["ctpo"], prefix_grad=True),
        literal("prefix", ctpo_mask, "token-mean"),
        False,
    ),
    "kl_grpo, literal": (
        dataclasses.replace(ROWS["kl_grpo"], prefix_grad=True),
        literal("future_mean", lambda logs, a: window(np.exp(logs), a), MEAN),
        False,
    ),
    "adaptive_power below 1": (
        dataclasses.replace(
            ROWS["adaptive_power"], factors=(Factor("theta_old", fn="adaptive_power", ess_target=0.95),)
        ),
        lambda lp, b: adaptive(lp, b, 0.95),
        False,
    ),
}
SEEDS = range(8)


def test_every_row_has_a_case() -> None:
    """A new row needs its objective here, written out."""
    assert set(CASES) == set(ROWS)


@pytest.mark.parametrize("name", ROWS)
def test_coefficients_are_the_derivative(name: str) -> None:
    row = ROWS[name]
    found = np.concatenate([compare(row, CASES[name], seed) for seed in SEEDS])
    assert (found != 0).any()
    # Each mask is seen at work, else its case says nothing.
    assert (found == 0).any() == bool(row.masks) or any(penalty.coef for penalty in row.penalties)


@pytest.mark.parametrize("name", EXTRA)
@pytest.mark.parametrize("seed", SEEDS)
def test_penalties_and_literal_prefixes(name: str, seed: int) -> None:
    compare(EXTRA[name][0], EXTRA[name][1], seed, without_advantages=EXTRA[name][2])


@pytest.mark.parametrize("name", ROWS)
def test_each_mask_of_a_row_matters(name: str) -> None:
    """Without any one of its masks, a row is another one on these batches."""
    row = ROWS[name]
    for index, mask in enumerate(row.masks):
        fewer = dataclasses.replace(row, masks=(*row.masks[:index], *row.masks[index + 1 :]))
        batches = [batch_of(seed)[0] for seed in SEEDS] + (
            [] if row.needs_topk or row.router_shift_floor else [one_far_token()]
        )
        same = [torch.equal(coefficients(row, one).values, coefficients(fewer, one).values) for one in batches]
        assert not all(same), f"{mask} drops nothing"
