"""Seeds of many responses at once against numpy's SeedSequence, one by one."""

import numpy as np
import pytest

from megarl.data.prompts import Prompt
from megarl.trainer.sampling.requests import make_requests
from megarl.trainer.sampling.seeds import sampling_seed, sampling_seeds

WIDE = [0, 1, 2**32 - 1, 2**32, 2**40 + 3, 2**70]


def of_numpy(*words: int) -> int:
    return int(np.random.SeedSequence([*words]).generate_state(1, np.uint64)[0])


@pytest.mark.parametrize("run_seed", WIDE)
@pytest.mark.parametrize("step", [0, 5, 2**32 - 1, 2**33])
@pytest.mark.parametrize("purpose", [0, 3])
def test_seeds_are_those_of_numpys_seed_sequence(run_seed: int, step: int, purpose: int) -> None:
    groups, samples = np.array([0, 1, 31, 2**32 - 1]), np.array([0, 1, 9])
    expected = [[of_numpy(run_seed, purpose, step, group, sample) for sample in samples] for group in groups.tolist()]
    assert sampling_seeds(run_seed, purpose, step, groups, samples).tolist() == expected
    assert sampling_seed(run_seed, purpose, step, 31, 9) == expected[2][2]


@pytest.mark.parametrize("num_prompts", [1, 32, 1500])
def test_a_request_has_the_seed_of_its_prompt_and_sample(num_prompts: int) -> None:
    prompts = [Prompt(row, np.array([row], np.int32), str(row), "", "") for row in range(num_prompts)]
    request_of = make_requests(7, 0, 3, prompts)
    last = num_prompts - 1
    for number, sample in ((0, 0), (0, 15), (0, 16), (min(1023, last), 3), (min(1024, last), 3), (last, 47), (0, 0)):
        request, prompt = request_of(number, sample)
        assert (request.group, request.sample) == (number, sample)
        assert request.seed == of_numpy(7, 0, 3, number, sample)
        assert prompt is prompts[number]
        assert request.prompt_tokens is prompt.tokens
