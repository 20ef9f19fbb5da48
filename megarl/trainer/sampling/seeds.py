"""The seeds of a run's responses, and what each of them is for."""

import numpy as np

TRAIN, EVALUATE, PRESAMPLE, KEEP = 0, 1, 2, 3
"""Purposes of a seed. They differ so that evaluation, for example, never repeats the noise of training."""


def sampling_seed(run_seed: int, purpose: int, step: int, group: int, sample: int) -> int:
    """Return the seed of one response of a run. It does not depend on the rank that draws it."""
    words = np.random.SeedSequence([run_seed, purpose, step, group, sample]).generate_state(1, np.uint64)
    return int(words[0])
