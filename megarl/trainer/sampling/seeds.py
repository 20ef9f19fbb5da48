"""The seeds of a run's responses, and what each of them is for."""

import numpy as np

TRAIN, EVALUATE, PRESAMPLE, KEEP = 0, 1, 2, 3
"""Purposes of a seed. They differ so that evaluation, for example, never repeats the noise of training."""
_WORD = 2**32 - 1


def sampling_seed(run_seed: int, purpose: int, step: int, group: int, sample: int) -> int:
    """Return the seed of one response of a run. It does not depend on the rank that draws it."""
    words = np.random.SeedSequence([run_seed, purpose, step, group, sample]).generate_state(1, np.uint64)
    return int(words[0])


def sampling_seeds(run_seed: int, purpose: int, step: int, groups: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """Return ``sampling_seed`` of each pair, uint64 [groups, samples]: numpy's SeedSequence for all of them at once.

    groups, samples: uint32.
    """
    words = [np.array([[word & _WORD]], np.uint32) for number in (run_seed, purpose, step) for word in _words(number)]
    entropy = [*words, groups.astype(np.uint32)[:, None], samples.astype(np.uint32)[None, :]]
    factor = 0x43B0D7E5

    def spread(value: np.ndarray) -> np.ndarray:
        nonlocal factor
        value = value ^ np.uint32(factor)
        factor = factor * 0x931E8875 & _WORD
        value = value * np.uint32(factor)
        return value ^ (value >> np.uint32(16))

    def mix(pool: np.ndarray, value: np.ndarray) -> np.ndarray:
        mixed = pool * np.uint32(0xCA01F9DD) - spread(value) * np.uint32(0x4973F715)
        return mixed ^ (mixed >> np.uint32(16))

    pool = [spread(word) for word in entropy[:4]]
    for source in range(4):
        for place in range(4):
            if place != source:
                pool[place] = mix(pool[place], pool[source])
    for word in entropy[4:]:
        pool = [mix(value, word) for value in pool]
    halves, factor = [], 0x8B51F9DD
    for value in pool[:2]:
        value = value ^ np.uint32(factor)
        factor = factor * 0x58F38DED & _WORD
        value = value * np.uint32(factor)
        halves.append((value ^ (value >> np.uint32(16))).astype(np.uint64))
    return halves[0] | halves[1] << np.uint64(32)


def _words(number: int) -> list[int]:
    """The number in words of 32 bits, the lowest first; 0 is one word."""
    return [number >> shift for shift in range(0, max(number.bit_length(), 1), 32)]
