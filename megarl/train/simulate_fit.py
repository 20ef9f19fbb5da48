"""Pass rates of imagined prompts: a mixture of Beta distributions, fitted to pass@k points or given.

    pass@k = sum_c w_c (1 - E_c[(1 - p)^k]),   E_c[(1 - p)^k] = B(a, b + k) / B(a, b)

What the weights leave over are prompts that are never solved, p = 0.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megarl.errors import ConfigError

_LOG_BOUND = math.log(1e3)
"""a and b stay between 1e-3 and 1e3: beyond, a Beta is a point or two, and its quadrature loses digits."""
_NEVER_GAIN = 1e-3
"""A point mass at 0 must lower the largest error of the fit by more than this."""
_RIDGE = 1e-4
"""Holds what fewer points than parameters leave free near a = b = 1 and equal weights."""


@dataclass(frozen=True, slots=True)
class BetaMixture:
    """A law of pass rates. ConfigError unless weights are 0 or more, add up to 1, and a and b are positive."""

    weights: tuple[float, ...]
    """Share of the prompts in each Beta."""
    alphas: tuple[float, ...]
    """First parameter of each."""
    betas: tuple[float, ...]
    """Second parameter of each."""
    never: float = 0.0
    """Share of the prompts with p = 0."""

    def __post_init__(self) -> None:
        shares = (*self.weights, self.never)
        if not all(0 <= share <= 1 for share in shares) or abs(sum(shares) - 1) > 1e-6:
            raise ConfigError(
                f"pass rates: weights {list(self.weights)} and {self.never} never solved add up to {sum(shares):.6g}; "
                "expected 0 or more each, and 1 in all"
            )
        if not all(1e-3 <= value <= 1e3 for value in (*self.alphas, *self.betas)):
            raise ConfigError(
                f"pass rates: Beta parameters a = {list(self.alphas)}, b = {list(self.betas)}; expected 0.001 to 1000"
            )

    def pass_at(self, ks: Sequence[float] | np.ndarray) -> np.ndarray:
        """Return the expected pass@k at each k, float64 [len(ks)]."""
        solved = [
            sum(w * (1 - _missed(a, b, k)) for w, a, b in zip(self.weights, self.alphas, self.betas, strict=True))
            for k in np.asarray(ks, dtype=np.float64).tolist()
        ]
        return np.array(solved, dtype=np.float64)

    def draw(self, number: int, rng: np.random.Generator) -> np.ndarray:
        """Return pass rates of so many prompts, float64 [number]."""
        shares = np.array([*self.weights, self.never])
        kinds = rng.choice(shares.size, size=number, p=shares / shares.sum())
        rates = np.zeros(number)
        for kind, (a, b) in enumerate(zip(self.alphas, self.betas, strict=True)):
            rates[kinds == kind] = rng.beta(a, b, size=int((kinds == kind).sum()))
        return rates

    def quadrature(self, degree: int) -> tuple[np.ndarray, np.ndarray]:
        """Return pass rates and weights, float64 [Q] each, that average polynomials up to ``degree`` exactly.

        What a capped rule costs is such a polynomial in p, of the degree of its cap.
        """
        nodes, weights = [np.zeros(1)], [np.array([self.never])]
        for share, a, b in zip(self.weights, self.alphas, self.betas, strict=True):
            points, parts = _gauss_jacobi(degree // 2 + 1, a, b)
            nodes.append(points)
            weights.append(share * parts)
        return np.concatenate(nodes), np.concatenate(weights)

    def density(self, rates: np.ndarray) -> np.ndarray:
        """Return the density of those that can be solved, float64 [P]; rates: more than 0 and less than 1."""
        total = np.zeros_like(rates)
        for share, a, b in zip(self.weights, self.alphas, self.betas, strict=True):
            norm = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
            total += share * np.exp(norm + (a - 1) * np.log(rates) + (b - 1) * np.log1p(-rates))
        return total

    def __str__(self) -> str:
        parts = [
            f"{w:.3g} Beta({a:.4g}, {b:.4g})" for w, a, b in zip(self.weights, self.alphas, self.betas, strict=True)
        ]
        return " + ".join(parts + ([f"{self.never:.3g} never solved"] if self.never else []))


def parse_points(words: Sequence[str]) -> dict[int, float]:
    """Read ``4:0.627 32:0.796`` as pass@k by k, ascending. ConfigError for anything that no set of prompts can have."""
    points: dict[int, float] = {}
    for word in words:
        k, rate = _numbers("--passk", word, "K:RATE, such as 4:0.627", 2)
        if k != int(k) or k < 1 or not 0 < rate <= 1 or int(k) in points:
            raise ConfigError(f"--passk {word}: expected a whole K of 1 or more, once, and a rate above 0, at most 1")
        points[int(k)] = rate
    ordered = dict(sorted(points.items()))
    for (k, low), (more, high) in itertools.pairwise(ordered.items()):
        if high < low:
            raise ConfigError(f"--passk: pass@{more} = {high} is below pass@{k} = {low}; more tries never solve less")
    return ordered


def parse_betas(words: Sequence[str], never: float) -> BetaMixture:
    """Read ``0.8:0.5:2`` as 0.8 of the prompts with p ~ Beta(0.5, 2). ConfigError for what is no mixture."""
    rows = [_numbers("--beta", word, "WEIGHT:A:B, such as 0.8:0.5:2", 3) for word in words]
    weights, alphas, betas = zip(*rows, strict=True)
    return BetaMixture(weights, alphas, betas, never)


def fit(points: dict[int, float], components: int = 1) -> BetaMixture:
    """Return the mixture of ``components`` Betas nearest to the points, by least squares of pass@k.

    With prompts that are never solved only if the points want them: if that lowers the largest error by more than
    0.001. Where several mixtures fit, one near Beta(1, 1). Starts are fixed, so equal points give equal mixtures.
    """
    if components < 1 or not points:
        raise ConfigError(f"{len(points)} pass@k points, {components} components: expected at least one of each")
    plain, with_never = (_best(points, components, never) for never in (False, True))
    gain = max_error(plain, points) - max_error(with_never, points)
    return with_never if gain > _NEVER_GAIN else plain


def max_error(mixture: BetaMixture, points: dict[int, float]) -> float:
    """Return the largest distance from the points."""
    return float(np.abs(mixture.pass_at(list(points)) - list(points.values())).max())


def _best(points: dict[int, float], components: int, never: bool) -> BetaMixture:
    ks, rates = list(points), np.array(list(points.values()))
    spread = np.linspace(-1.0, 1.0, components) if components > 1 else np.zeros(1)

    def residuals(x: np.ndarray) -> np.ndarray:
        return np.concatenate([_mixture(x, components, never).pass_at(ks) - rates, _RIDGE * x])

    found: list[tuple[float, np.ndarray]] = []
    for log_a, log_b, ceiling in itertools.product((-1.5, 0.0), (-1.0, 0.5, 2.0), (-2.0, 0.0) if never else (0.0,)):
        start = np.concatenate([log_a + spread, log_b - spread, np.zeros(components - 1), [ceiling] * never])
        x = _levenberg_marquardt(residuals, start)
        found.append((float(np.sum(residuals(x) ** 2)), x))
    return _mixture(min(found, key=lambda pair: pair[0])[1], components, never)


def _mixture(x: np.ndarray, components: int, never: bool) -> BetaMixture:
    """x: log a [C], log b [C], logits of the weights against the first [C - 1], and of p = 0 where ``never``."""
    alphas, betas = np.exp(np.clip(x[: 2 * components], -_LOG_BOUND, _LOG_BOUND)).reshape(2, components).clip(1e-3, 1e3)
    logits = np.concatenate([[0.0], np.clip(x[2 * components :], -40.0, 40.0)])
    shares = np.exp(logits - logits.max())
    shares /= shares.sum()
    weights = tuple(shares[:components].tolist())
    return BetaMixture(weights, tuple(alphas.tolist()), tuple(betas.tolist()), float(shares[-1]) if never else 0.0)


def _levenberg_marquardt(residuals: Callable[[np.ndarray], np.ndarray], x: np.ndarray, steps: int = 80) -> np.ndarray:
    damping, value = 1e-3, residuals(x)
    for _ in range(steps):
        jacobian = np.stack([(residuals(x + e) - residuals(x - e)) / 2e-6 for e in 1e-6 * np.eye(x.size)], axis=1)
        curvature, slope = jacobian.T @ jacobian, jacobian.T @ value
        move = -np.linalg.solve(curvature + damping * (np.diag(np.diag(curvature)) + 1e-12 * np.eye(x.size)), slope)
        tried = residuals(x + move)
        if np.sum(tried**2) < np.sum(value**2):
            small = np.abs(move).max() < 1e-9
            x, value, damping = x + move, tried, damping / 5
            if small:
                break
        else:
            damping *= 4
            if damping > 1e9:
                break
    return x


def _missed(a: float, b: float, k: float) -> float:
    """E[(1 - p)^k] of Beta(a, b)."""
    return math.exp(math.lgamma(b + k) + math.lgamma(a + b) - math.lgamma(b) - math.lgamma(a + b + k))


def _gauss_jacobi(size: int, a: float, b: float) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights, [size] each, of averages under Beta(a, b), by its Jacobi matrix (Golub, Welsch)."""
    low, high = a - 1, b - 1
    n = np.arange(1, size, dtype=np.float64)
    both = 2 * n + low + high
    middle = np.concatenate([[(low - high) / (low + high + 2)], (low**2 - high**2) / (both * (both + 2))])
    # At n = 1 the factor (n + low + high) / (both - 1) is 1, also where both are 0.
    ratio = np.ones_like(n)
    ratio[1:] = (n[1:] + low + high) / (both[1:] - 1)
    side = 4 * n * (n + low) * (n + high) * ratio / (both**2 * (both + 1))
    nodes, vectors = np.linalg.eigh(np.diag(middle) + np.diag(np.sqrt(side), 1) + np.diag(np.sqrt(side), -1))
    return np.clip((nodes + 1) / 2, 0.0, 1.0), vectors[0] ** 2


def _numbers(flag: str, word: str, form: str, count: int) -> list[float]:
    try:
        values = [float(part) for part in word.split(":")]
    except ValueError:
        values = []
    if len(values) != count or not all(math.isfinite(value) for value in values):
        raise ConfigError(f"{flag} {word}: expected {form}")
    return values
