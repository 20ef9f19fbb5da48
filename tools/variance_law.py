"""Plot how importance weights of whole sequences explode.

    python tools/variance_law.py OUT.png [--samples 20000] [--seed 0]

For independent token ratios with log rho ~ N(-sigma^2/2, sigma^2), the product over H tokens has variance
e^(H sigma^2) - 1 and an effective sample size of e^(-H sigma^2) per sample. Lines show the law, crosses a simulation.
A cross leaves the line if the few samples that dominate the mean were not drawn.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

SIGMAS = (0.02, 0.05, 0.1, 0.2)
LENGTHS = (1, 3, 10, 30, 100, 300, 1000)
COLORS = ("#4c72b0", "#55a868", "#dd8452", "#c44e52")


@dataclass(frozen=True, slots=True)
class RatioSpread:
    """How widely the product of H independent token ratios scatters."""

    variance: float
    """Var of the product, in units of its mean 1."""
    ess_fraction: float
    """Effective sample size per sample."""


def variance_law(sigma: float, length: int) -> RatioSpread:
    """Return ``Var prod rho = exp(H sigma^2) - 1`` and ``ESS / N = exp(-H sigma^2)``: sequence weights explode.

    For log rho ~ N(-sigma^2 / 2, sigma^2) per token, so that E[rho] = 1. sigma: standard deviation of a token's
    log-ratio; length: H tokens. The variance is inf where float64 ends (H sigma^2 above 709).
    """
    exponent = length * sigma**2
    try:
        return RatioSpread(math.expm1(exponent), math.exp(-exponent))
    except OverflowError:
        return RatioSpread(math.inf, math.exp(-exponent))


def simulate_variance(sigma: float, length: int, samples: int, generator: torch.Generator) -> RatioSpread:
    """Return the same from random draws: samples products of length token ratios each.

    The estimate of the variance is useless once exp(H sigma^2) nears the number of samples: the few draws that make
    up the mean are then not among them, which is just what happens to a policy gradient.
    """
    log_products = torch.zeros(samples, dtype=torch.float64)
    for _ in range(length):
        log_products += sigma * torch.randn(samples, dtype=torch.float64, generator=generator) - sigma**2 / 2
    products = log_products.exp()
    # The mean is known to be 1; an estimated one would hide what is missing.
    variance = float((products - 1).square().mean())
    return RatioSpread(variance, float(products.sum().square() / products.square().sum()) / samples)


Simulations = dict[tuple[float, int], RatioSpread]


def simulate(samples: int, seed: int) -> Simulations:
    """The spread for every sigma and length."""
    generator = torch.Generator().manual_seed(seed)
    return {(s, length): simulate_variance(s, length, samples, generator) for s in SIGMAS for length in LENGTHS}


def plot(simulated: Simulations, samples: int) -> Figure:
    """Two panels: variance, and effective sample size, against the number of tokens."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    fine = sorted({round(10 ** (i / 20)) for i in range(61)})
    for sigma, color in zip(SIGMAS, COLORS, strict=True):
        label = f"σ = {sigma:g}"
        law = [variance_law(sigma, length) for length in fine]
        points = [simulated[sigma, length] for length in LENGTHS]
        left.plot(fine, [spread.variance for spread in law], color=color, label=label)
        left.plot(LENGTHS, [spread.variance for spread in points], "x", color=color)
        right.plot(fine, [spread.ess_fraction for spread in law], color=color, label=label)
        right.plot(LENGTHS, [spread.ess_fraction for spread in points], "x", color=color)
    left.set(xscale="log", yscale="log", ylim=(1e-4, 1e6), ylabel="variance of the product of ratios")
    right.set(xscale="log", ylim=(0, 1.05), ylabel="effective sample size per sample")
    for axes in (left, right):
        axes.set_xlabel("tokens H")
        axes.grid(alpha=0.3)
    left.legend()
    left.set_title(f"lines $e^{{H\\sigma^2}}-1$, crosses {samples} samples", fontsize=10)
    right.set_title(r"lines $e^{-H\sigma^2}$; below 1/samples nothing is left", fontsize=10)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="PNG file to write")
    parser.add_argument("--samples", type=int, default=20_000, help="sequences per cross")
    parser.add_argument("--seed", type=int, default=0, help="of the simulation")
    options = parser.parse_args()
    simulated = simulate(options.samples, options.seed)
    print("sigma  tokens       variance  (simulated)      ESS/N  (simulated)")
    for (sigma, length), spread in simulated.items():
        law = variance_law(sigma, length)
        print(
            f"{sigma:5g} {length:7d} {law.variance:14.5g} {spread.variance:12.5g} "
            f"{law.ess_fraction:10.5f} {spread.ess_fraction:12.5f}"
        )
    plot(simulated, options.samples).savefig(options.out, dpi=110)


if __name__ == "__main__":
    main()
