"""The seeds of a run's responses, by purpose."""

import numpy as np

TRAIN, EVALUATE, PRESAMPLE, KEEP = 0, 1, 2, 3
"""Purposes of a seed. Different purposes keep evaluation, for example, from repeating the noise of training."""


def sampling_seed(run_seed: int, purpose: int, step: int, group: int, sample: int) -> int:
    """Return the seed of a response of a run, independent of the drawing rank."""
    words = np.random.SeedSequence([run_seed, purpose, step, group, sample]).generate_state(1, np.uint64)
    return int(words[0])
