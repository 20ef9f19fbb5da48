from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from families import byte_level, sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from megarl.data.rewards import StepReward, Steps, Verdict, read_verdict
from megarl.data.tokenizer import step_tokens

CORPUS = [
    "the step ends here. so it is: 1 + 2 = 3\n\n",
    "Straße, naïve Ärzte, déjà vu",
    "数学 は 楽しい",
    "🙂🙃 👩‍👩‍👧 ok",
]


TOKENIZERS = {
    make.__name__: PreTrainedTokenizerFast(
        tokenizer_object=make(), eos_token="<e>", pad_token="<e>", additional_special_tokens=["<tool>"]
    )
    for make in (byte_level, sentencepiece)
}
"""The bytes of most characters are several tokens; those of Llama 2 read as nothing until a run of them is complete."""


def read(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> str:
    return tokenizer.decode(tokens, skip_special_tokens=True)


def slow(tokenizer: PreTrainedTokenizerBase, tokens: list[int], ends: list[int]) -> list[int]:
    """All prefixes one after the other; the first that reads as the step, whatever later ones do."""
    text = read(tokenizer, tokens)
    found = []
    for end in ends:
        prefixes = (k for k in range(len(tokens)) if read(tokenizer, tokens[: k + 1]).startswith(text[:end]))
        found.append(len(tokens) - 1 if end == len(text) else next(prefixes))
    return found


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_tokens_that_a_model_may_sample(name: str, data: st.DataObject) -> None:
    """Also bytes that are no characters, special tokens in between: still ascending, and each covers its step."""
    tokenizer = TOKENIZERS[name]
    words = st.lists(st.one_of(st.sampled_from([*CORPUS, "<tool>", "the ", "é", "\ufffd", "<e>"]), st.text(max_size=6)))
    tokens = tokenizer("".join(data.draw(words)), add_special_tokens=False)["input_ids"]
    tokens += data.draw(st.lists(st.integers(0, len(tokenizer) - 1), min_size=1, max_size=20))
    text = read(tokenizer, tokens)
    ends = sorted(data.draw(st.sets(st.integers(1, len(text)), max_size=6))) if text else []
    found = step_tokens(tokenizer, np.array(tokens, dtype=np.int32), ends).tolist()
    assert found == sorted(found)
    assert found == slow(tokenizer, tokens, ends)


def test_a_step_at_the_end_takes_the_end_token_with_it(make_tokenizer: Callable[..., PreTrainedTokenizerFast]) -> None:
    tokenizer = make_tokenizer()
    tokens = np.array([*tokenizer("abc", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id])
    assert step_tokens(tokenizer, tokens, [2, 3]).tolist() == [1, 3]
    assert step_tokens(tokenizer, tokens, []).tolist() == []


def test_verdicts_of_steps() -> None:
    good = Steps(1, [StepReward(np.int64(2), True), StepReward(3, np.float32(0.5))])  # type: ignore[arg-type]
    assert read_verdict(good, "abc") == Verdict(1.0, (StepReward(2, 1.0), StepReward(3, 0.5)))
    one = StepReward(1, 0.0)
    for wrong, error, told in (
        (Steps(float("nan"), [one]), ValueError, "the outcome of the steps is nan"),
        (Steps(1.0, [StepReward(1, float("inf"))]), ValueError, "the reward of step 0 is inf"),
        (Steps(1.0, [one, one]), ValueError, r"step 1 ends at character 1, expected 2\.\.3"),
        (Steps(1.0, [StepReward(4, 1.0)]), ValueError, r"expected 1\.\.3"),
        (Steps(1.0, [StepReward(0, 1.0)]), ValueError, r"expected 1\.\.3"),
        (Steps(1.0, [StepReward(1.0, 1.0)]), TypeError, "expected a number of characters"),  # type: ignore[arg-type]
        (Steps(1.0, [(1, 1.0)]), TypeError, "expected a StepReward"),  # type: ignore[list-item]
        (Steps(1.0, []), ValueError, "without a step"),
        ([1.0], TypeError, "expected a number"),
    ):
        with pytest.raises(error, match=told):
            read_verdict(wrong, "abc")
