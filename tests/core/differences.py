"""Central differences of objectives that are written out in numpy, and the batches to take them on."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megarl.core.objectives import Objective, TokenColumns, TopK, coefficients

Rows = list[np.ndarray]
"""One array per response."""


@dataclass
class Batch:
    """The loss tokens of each response: log-probabilities at the point, and advantages."""

    lp: Rows
    old: Rows
    mu: Rows
    ref: Rows
    a: Rows
    top_mu: Rows
    """[tokens, K]."""
    top: Rows
    drift: Rows


Case = Callable[[Rows, Batch], float]
LENGTHS = (4, 1, 3, 5, 2)


def batch_of(seed: int) -> tuple[TokenColumns, Batch]:
    """Random responses with tokens of the environment between theirs; the engines agree on the second and the last."""
    generator = np.random.default_rng(seed)
    keep = generator.random(sum(LENGTHS)) > 0.2
    keep[4] = True
    owner = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    mu = np.log(generator.uniform(0.05, 0.9, len(owner)))
    gap = np.array([0.4, 1e-4, 0.3, 1.2, 3e-4])[owner]
    old = np.minimum(mu + gap * generator.normal(size=len(owner)), -0.05)
    moved, drift = np.array([[0.3, 0.3, 0.5, 0.5, 0.3], [0.0, 0.0, 1.2, -0.7, 0.0]])[:, owner]
    lp = np.minimum(old + moved * generator.normal(size=len(owner)) + drift, -0.05)
    ref = np.minimum(mu + 0.5 * generator.normal(size=len(owner)), -0.01)
    advantages = np.array([0.7, -1.1, 0.0, -0.6, 1.3])[generator.permutation(5)][owner]
    top_mu, top = np.log(generator.uniform(0.002, 0.02, (2, len(owner), 2)))
    moved_routers = generator.uniform(0.0, 0.4, len(owner))
    arrays = {"lp": lp, "old": old, "mu": mu, "ref": ref, "a": advantages, "top_mu": top_mu, "top": top}
    arrays["drift"] = moved_routers
    parts = {name: [each[(owner == n) & keep] for n in range(len(LENGTHS))] for name, each in arrays.items()}
    tensors = {name: torch.from_numpy(each) for name, each in arrays.items()}
    columns = TokenColumns(
        *(tensors[name] for name in ("lp", "old", "mu", "a")),
        torch.from_numpy(keep),
        torch.tensor([0, *itertools.accumulate(LENGTHS)]),
        tensors["ref"],
        TopK(tensors["top_mu"], tensors["top"], torch.zeros(len(owner), dtype=torch.bool)),
        tensors["drift"],
    )
    return columns, Batch(**parts)


def total(kind: str, terms: Rows, constant: float = 1.0, counted: Rows | None = None) -> float:
    """The aggregation. counted: 1 for tokens that are in denominators."""
    counted = [np.ones(len(one)) for one in terms] if counted is None else counted
    sizes = [one.sum() for one in counted]
    responses = sum(size > 0 for size in sizes)
    if kind == "token-mean":
        return sum(one.sum() for one in terms) / sum(sizes)
    if kind == "seq-mean-token-mean":
        return sum(one.sum() / size for one, size in zip(terms, sizes, strict=True) if size) / responses
    return sum(one.sum() for one in terms) / responses / constant


def token(kind: str, term: Callable[..., np.ndarray], constant: float = 1.0) -> Case:
    """A sum over tokens: term(lp, lp at the point, old, mu, a) of one response."""

    def value(lp: Rows, b: Batch) -> float:
        parts = zip(lp, b.lp, b.old, b.mu, b.a, strict=True)
        return total(kind, [term(*part) for part in parts], constant)

    return value


def ppo(r: np.ndarray, a: np.ndarray, low: float = 0.8, high: float = 1.2) -> np.ndarray:
    return np.minimum(r * a, np.clip(r, low, high) * a)


def window(r: np.ndarray, a: np.ndarray, low: float = 0.8, high: float = 1.2) -> np.ndarray:
    return ~(((a > 0) & (r > high)) | ((a < 0) & (r < low)))


def fresh(weight: Any, lp: np.ndarray, at: np.ndarray) -> np.ndarray:
    """sg[weight] * pi_theta / sg[pi_theta]: has the value of the weight and its gradient weight * grad lp."""
    return weight * np.exp(lp - at)


def differences(case: Case, b: Batch, step: float = 1e-6) -> Rows:
    """Central differences by every log-probability."""
    found = [np.zeros(len(one)) for one in b.lp]
    for n, one in enumerate(b.lp):
        for t in range(len(one)):
            ends = []
            for side in (step, -step):
                moved = [each.copy() for each in b.lp]
                moved[n][t] += side
                ends.append(case(moved, b))
            found[n][t] = (ends[0] - ends[1]) / (2 * step)
    return found


def compare(objective: Objective, case: Case, seed: int, without_advantages: bool = False) -> np.ndarray:
    columns, b = batch_of(seed)
    if without_advantages:
        columns = dataclasses.replace(columns, advantages=torch.zeros_like(columns.advantages))
    found = coefficients(objective, columns).values
    assert not found[~columns.loss_mask].any()
    expected = np.concatenate(differences(case, b))
    scale = max(np.abs(expected).max(), 1e-3 / (objective.norm_length or 1))
    actual = found[columns.loss_mask].numpy()
    np.testing.assert_allclose(actual / scale, expected / scale, rtol=0, atol=1e-7)
    return actual[np.concatenate(b.a) != 0]
