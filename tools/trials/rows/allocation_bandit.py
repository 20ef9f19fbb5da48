"""Prompts as logistic bandits, with the exact error of the gradient of rejection sampling.

A response to prompt i is right with the chance p_i = sigmoid(l_i), and has one of four styles with the chances
softmax(s_i). Logits are linear in 16 parameters that the prompts share: l_i in the direction x_i, style k in z_ik. So a
right response of style k has the gradient grad ln P = (1 - p_i) x_i + z_ik - sum_j softmax(s_i)_j z_ij.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megarl.core.sampling.gvm import gvm_estimates

NUM_STYLES, NUM_PARAMETERS = 4, 16


@dataclass(frozen=True, slots=True, eq=False)
class PromptBandit:
    """B prompts; gradients are those of accepted, i.e. right, responses by style."""

    rates: np.ndarray
    """float64 [B], p."""
    styles: np.ndarray
    """float64 [B, 4], chances of the styles."""
    gradients: np.ndarray
    """float64 [B, 4, 16]."""

    @property
    def norms(self) -> np.ndarray:
        """float64 [B], G: the mean norm of an accepted gradient."""
        return (self.styles * np.linalg.norm(self.gradients, axis=2)).sum(1)

    @property
    def means(self) -> np.ndarray:
        """float64 [B, 16], the mean accepted gradient, which is the gradient of ln p_i."""
        return np.einsum("bk,bkd->bd", self.styles, self.gradients)

    @property
    def variances(self) -> np.ndarray:
        """float64 [B], E|g|^2 / p - |E g|^2 of accepted g: the variance of one sample's ``1[right] g / p``."""
        squares = (self.styles * (self.gradients**2).sum(2)).sum(1)
        return squares / self.rates - (self.means**2).sum(1)


def make_bandit(seed: int, num_prompts: int, size_spread: float) -> PromptBandit:
    """Return random prompts, their logits with sd 2 around 0; size_spread: sd of the log of gradient sizes."""
    generator = np.random.default_rng(seed)
    rates = 1 / (1 + np.exp(-2 * generator.normal(size=num_prompts)))
    weights = np.exp(generator.normal(size=(num_prompts, NUM_STYLES)))
    styles = weights / weights.sum(1, keepdims=True)
    sizes = np.exp(size_spread * generator.normal(size=num_prompts))[:, None, None]
    outcome = sizes * generator.normal(size=(num_prompts, 1, NUM_PARAMETERS))
    style = sizes * generator.normal(size=(num_prompts, NUM_STYLES, NUM_PARAMETERS))
    return PromptBandit(rates, styles, accepted_gradients(rates, styles, outcome, style))


def accepted_gradients(rates: np.ndarray, styles: np.ndarray, outcome: np.ndarray, style: np.ndarray) -> np.ndarray:
    """Return grad ln P of right responses, [B, 4, 16], from the directions x [B, 1, 16] and z [B, 4, 16]."""
    centered = style - np.einsum("bk,bkd->bd", styles, style)[:, None]
    return (1 - rates)[:, None, None] * outcome + centered


def gradient_error(bandit: PromptBandit, counts: np.ndarray) -> float:
    """Return the exact E|error|^2 of ``sum_i 1 / (n_i p_i) sum_accepted grad ln P`` for the counts [B].

    This is the estimator of GVM's lemma 1, with its sign turned. A prompt without samples gives no gradient: its part
    of the sum is missing, a bias, while the others only add variance.
    """
    has_samples = counts > 0
    missing = bandit.means[~has_samples].sum(0)
    return float((bandit.variances[has_samples] / counts[has_samples]).sum() + missing @ missing)


def estimate(bandit: PromptBandit, size: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return megarl's estimates (pass rates, gradient norms), [B] each, from ``size`` samples of each prompt."""
    num_prompts = len(bandit.rates)
    prompts = np.repeat(np.arange(num_prompts), size)
    accepted = generator.random(prompts.size) < bandit.rates[prompts]
    levels = generator.random(prompts.size)[:, None]
    style = (levels > bandit.styles.cumsum(1)[prompts]).sum(1).clip(max=NUM_STYLES - 1)
    norms = np.linalg.norm(bandit.gradients, axis=2)[prompts, style]
    return gvm_estimates(prompts, accepted, norms, num_prompts)
