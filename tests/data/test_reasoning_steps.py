from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from megarl.data.rewards import StepReward, Steps, Verdict, read_verdict
from megarl.data.tiny import write_tiny_model
from megarl.data.tokenizer import step_tokens

CORPUS = [
    "the step ends here. so it is: 1 + 2 = 3\n\n",
    "Straße, naïve Ärzte, déjà vu",
    "数学 は 楽しい",
    "🙂🙃 👩‍👩‍👧 ok",
]


def byte_level() -> PreTrainedTokenizerFast:
    """Trained on too little for most characters to be one token: their bytes are spread over several."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, special_tokens=["<e>", "<tool>"])
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<e>", pad_token="<e>", additional_special_tokens=["<tool>"]
    )


def byte_fallback() -> PreTrainedTokenizerFast:
    """As in Llama 2: characters without a token are bytes, and a run of bytes reads as nothing until it is complete."""
    names = ["<e>", "<tool>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdehinorst.,"]
    vocabulary = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<e>", pad_token="<e>", additional_special_tokens=["<tool>"]
    )


TOKENIZERS = {"byte_level": byte_level(), "byte_fallback": byte_fallback()}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    path: Path = tmp_path_factory.mktemp("tiny") / "model"
    return AutoTokenizer.from_pretrained(write_tiny_model(path, hidden_size=16, num_layers=1, num_experts=4))


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


def drawn_ends(data: st.DataObject, text: str) -> list[int]:
    return sorted(data.draw(st.sets(st.integers(1, len(text)), max_size=6))) if text else []


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_against_all_prefixes(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    words = st.lists(st.one_of(st.sampled_from([*CORPUS, "<tool>", "the ", "é", "\ufffd", "<e>"]), st.text(max_size=6)))
    tokens = tokenizer("".join(data.draw(words)), add_special_tokens=False)["input_ids"]
    if data.draw(st.booleans()):
        tokens.append(tokenizer.eos_token_id)
    ends = drawn_ends(data, read(tokenizer, tokens))
    assert step_tokens(tokenizer, np.array(tokens, dtype=np.int32), ends).tolist() == slow(tokenizer, tokens, ends)


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_tokens_that_a_model_may_sample(name: str, data: st.DataObject) -> None:
    """Bytes that are no characters, special tokens in between: still ascending, and each covers its step."""
    tokenizer = TOKENIZERS[name]
    tokens = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), min_size=1, max_size=30))
    text = read(tokenizer, tokens)
    ends = drawn_ends(data, text)
    found = step_tokens(tokenizer, np.array(tokens), ends).tolist()
    assert found == sorted(found)
    assert found == slow(tokenizer, tokens, ends)


def test_a_run_of_bytes_that_is_valid_before_it_is_not() -> None:
    """0xC2 0x80 is a character; 0xC2 0x80 0x80 is none, so its three bytes read as three replacement characters."""
    tokens = [196, 130, 130]
    assert step_tokens(TOKENIZERS["byte_fallback"], np.array(tokens), [1]).tolist() == [0]


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
