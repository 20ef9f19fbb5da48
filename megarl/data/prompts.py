"""Prompts with answers for RL, demonstrations for the cold start, and the order in which prompts are taken.

Plain text is tokenized with the tokenizer's special tokens. Chat messages, and plain text when ``chat_template`` is on,
pass through the tokenizer's chat template, which adds the special tokens itself.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from megarl.data.prompt_table import Prompt as Prompt
from megarl.data.prompt_table import PromptTable, share
from megarl.data.records import Record, get_field, place_prefix, read_records, type_name
from megarl.errors import ConfigError, DataError, describe

_BATCH = 1024
"""Texts that are tokenized at a time."""
_Row = TypeVar("_Row")


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A prompt, the response to imitate, and the end token, as one sequence."""

    tokens: np.ndarray
    """int32 [T]."""
    loss_mask: np.ndarray
    """bool [T], True on the response and its end token."""
    source: str


def load_tokenizer(folder: str | Path, key: str) -> PreTrainedTokenizerBase:
    """The tokenizer in a folder; ConfigError, naming the key or flag, if transformers can read none."""
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers and tokenizers raise many kinds
        raise ConfigError(
            f"{key}: {folder} holds no tokenizer that can be read ({describe(error)}); expected a Hugging Face folder "
            "with tokenizer.json"
        ) from error


def load_prompts(
    source: str | Path,
    *,
    tokenizer: PreTrainedTokenizerBase,
    prompt_field: str,
    answer_field: str,
    chat_template: bool,
    max_prompt_tokens: int,
    split: str | None = None,
    limit: int | None = None,
    template: str | None = None,
) -> PromptTable:
    """Read and tokenize all prompts of a source. Nothing is dropped or shortened.

    One process of a node tokenizes a large file, and the others map what it has written: see
    ``megarl.data.prompt_table``. Folders and hub names are tokenized by every process.

    source, split, limit: as in :func:`megarl.data.records.read_records`. Fields may be dotted. The answer is text or a
    whole number; write other numbers as text, because 0.10 and 1e-1 would be compared as text. template: text around a
    plain-text prompt, with ``{prompt}`` in its place; applied before the chat template.

    Raises:
        DataError: with file and line; a broken line, missing field, wrong type, empty prompt, no answer, prompt longer
            than ``max_prompt_tokens``, or chat messages together with ``template``.
        ConfigError: ``chat_template`` is on, but the tokenizer has none.
    """
    _check_template(tokenizer, chat_template)

    def read(place: str, record: Record) -> tuple[Text, str]:
        text = prompt_text(tokenizer, record, prompt_field, chat_template, place, template)
        return text, answer_text(get_field(record, answer_field, place), answer_field, place)

    prefix = place_prefix(source)

    def tokenize() -> Iterator[tuple[list[int], list[list[int]], list[str], list[str]]]:
        for rows in in_batches(read_records(source, split=split, limit=limit), read):
            texts, answers = [text for text, _ in rows], [answer for _, answer in rows]
            tokens = encode_prompts(tokenizer, texts, prompt_field, max_prompt_tokens)
            numbers = [int(text.place.removeprefix(prefix)) for text in texts]
            yield numbers, tokens, [text.text for text in texts], answers

    def build() -> PromptTable:
        return PromptTable.of(tokenize(), prefix)

    if limit is None and split is None and Path(source).is_file():
        settings = (prompt_field, answer_field, chat_template, max_prompt_tokens, template)
        return share(Path(source), tokenizer, settings, build)
    return build()


def load_demonstrations(
    path: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    prompt_field: str = "prompt",
    response_field: str = "response",
    *,
    chat_template: bool = False,
    max_prompt_tokens: int | None = None,
    max_response_tokens: int | None = None,
    max_positions: int | None = None,
) -> list[Demonstration]:
    """Read demonstrations for supervised training: prompt + response + one end token, with loss on the last two.

    The prompt is tokenized as in RL and apart from the response, so that the response begins where sampling would. A
    response that already ends with the end token gets no second one. Limits are in tokens (None: no limit): of the
    prompt, of the response with its end token, and of both together.

    Raises DataError with file and line, as :func:`load_prompts` does, and for a length above a limit. Raises
    ConfigError if the tokenizer has no end token, or has no chat template although ``chat_template`` is on.
    """
    _check_template(tokenizer, chat_template)
    end_token = tokenizer.eos_token_id
    if not isinstance(end_token, int):
        raise ConfigError("the tokenizer has no eos_token: set one, otherwise the model never learns to stop")

    def read(place: str, record: Record) -> tuple[Text, Text]:
        text = prompt_text(tokenizer, record, prompt_field, chat_template, place)
        response = get_field(record, response_field, place)
        if not isinstance(response, str):
            raise DataError(f"{place}: {response_field!r} is {type_name(response)}, expected text")
        if not response:
            raise DataError(f"{place}: {response_field!r} is empty: there is nothing to imitate")
        return text, Text(place, response, plain=False)

    demonstrations: list[Demonstration] = []
    for rows in in_batches(read_records(path), read):
        prompts = encode_prompts(tokenizer, [text for text, _ in rows], prompt_field, max_prompt_tokens)
        responses = _encode(tokenizer, [response for _, response in rows], f"response ({response_field!r})")
        for (text, _), prompt, ids in zip(rows, prompts, responses, strict=True):
            place = text.place
            if not ids or ids[-1] != end_token:
                ids.append(end_token)
            tokens = np.array([*prompt, *ids], dtype=np.int32)
            _check_length(
                len(ids), max_response_tokens, "the response with its end", "rollout.max_response_tokens", place
            )
            _check_length(len(tokens), max_positions, "prompt with response", "the model's positions", place)
            demonstrations.append(Demonstration(tokens, np.arange(len(tokens)) >= len(prompt), place))
    return demonstrations


@dataclass(frozen=True, slots=True)
class PromptOrder:
    """The shuffled, endless order of prompts. Its position is one integer, which a checkpoint can hold.

    Epoch e visits every prompt once, in an order that depends only on (seed, e). Prompts are sorted by the raw 64-bit
    words of a Philox counter with key (seed, e): numpy guarantees that these never change, unlike its shuffles.
    """

    num_prompts: int
    seed: int
    """0 <= seed < 2**64."""

    def __post_init__(self) -> None:
        if self.num_prompts < 1:
            raise DataError(f"there are {self.num_prompts} prompts to order, expected at least 1")
        if not 0 <= self.seed < 2**64:
            raise ConfigError(f"seed is {self.seed}: expected 0 <= seed < 2**64")

    def epoch(self, epoch: int) -> np.ndarray:
        """Return the permutation of 0..P-1 of one epoch, int64 [P], read-only: it is kept for the next steps."""
        return _permutation(self.num_prompts, self.seed, epoch)

    def take(self, position: int, count: int) -> np.ndarray:
        """Return the prompts at places position .. position + count - 1 of the endless order, int64 [count].

        No prompt comes twice within an epoch. A call that crosses the end of an epoch may return a prompt twice.
        """
        if position < 0 or count < 0:
            raise ValueError(f"take({position}, {count}): position and count must not be negative")
        parts = [np.zeros(0, dtype=np.int64)]
        while count:
            epoch, offset = divmod(position, self.num_prompts)
            parts.append(self.epoch(epoch)[offset : offset + count])
            position, count = position + len(parts[-1]), count - len(parts[-1])
        return np.concatenate(parts)


@lru_cache(maxsize=2)  # a step may cross the end of an epoch
def _permutation(num_prompts: int, seed: int, epoch: int) -> np.ndarray:
    words = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(num_prompts)
    order = np.argsort(words, kind="stable").astype(np.int64)
    order.flags.writeable = False
    return order


def _check_template(tokenizer: PreTrainedTokenizerBase, chat_template: bool) -> None:
    if chat_template and not tokenizer.chat_template:
        raise ConfigError("data.chat_template is on, but the tokenizer has no chat template: turn it off")


def _check_length(num_tokens: int, limit: int | None, what: str, limit_name: str, place: str) -> None:
    if limit is not None and num_tokens > limit:
        remedy = "shorten or remove it, or raise the setting" if "." in limit_name else "shorten or remove it"
        raise DataError(f"{place}: {what} has {num_tokens} tokens, more than {limit_name} = {limit}; {remedy}")


class Text(NamedTuple):
    """What goes to the tokenizer."""

    place: str
    text: str
    plain: bool
    """Whether the tokenizer adds its special tokens: not behind a chat template, nor to a response."""


def in_batches(
    records: Iterator[tuple[str, Record]], read: Callable[[str, Record], _Row | None]
) -> Iterator[list[_Row]]:
    """Yield what is read of so many records, without None; what precedes a bad record comes before its error."""
    rows: list[_Row] = []
    try:
        for place, record in records:
            if (row := read(place, record)) is not None:
                rows.append(row)
            if len(rows) == _BATCH:
                yield rows
                rows = []
    except DataError:
        if rows:
            yield rows
        raise
    if rows:
        yield rows


def prompt_text(
    tokenizer: PreTrainedTokenizerBase,
    record: Record,
    field: str,
    chat_template: bool,
    place: str,
    template: str | None = None,
) -> Text:
    """Return the text to tokenize of plain text or of chat messages."""
    prompt = get_field(record, field, place)
    templated = chat_template or isinstance(prompt, list)
    if isinstance(prompt, list) and template is None:
        check_messages(prompt, field, place)
        text = _render(tokenizer, prompt, place)
    elif not isinstance(prompt, str):
        wanted = "text or a list of chat messages" if template is None else "text for the prompt template"
        raise DataError(f"{place}: the prompt ({field!r}) is {type_name(prompt)}, expected {wanted}")
    elif not prompt.strip():
        raise DataError(f"{place}: the prompt ({field!r}) is empty")
    else:
        # Other braces stay as they are, because LaTeX uses them.
        text = prompt if template is None else template.replace("{prompt}", prompt)
        text = _render(tokenizer, [{"role": "user", "content": text}], place) if chat_template else text
    return Text(place, text, plain=not templated)


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[Text], field: str, limit: int | None
) -> list[list[int]]:
    """Tokenize a batch; DataError names the first text that cannot be a prompt of at most ``limit`` tokens."""

    def check(text: Text, tokens: list[int]) -> None:
        if not tokens:
            raise DataError(f"{text.place}: the prompt ({field!r}) has no tokens")
        end = tokenizer.eos_token
        if text.plain and tokens[-1] == tokenizer.eos_token_id and not text.text.endswith(str(end)):
            # BERT- and T5-like tokenizers do this. The model would have to answer after its end token.
            raise DataError(f"{text.place}: the tokenizer appends its end token {end!r} to a prompt; turn that off")
        _check_length(len(tokens), limit, "the prompt", "data.max_prompt_tokens", text.place)

    return _encode(tokenizer, texts, f"prompt ({field!r})", check)


def _encode(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[Text],
    what: str,
    check: Callable[[Text, list[int]], None] = lambda text, tokens: None,
) -> list[list[int]]:
    """Tokenize and check a batch; DataError names the first text that cannot be tokenized or is wrong."""
    found: dict[int, list[int]] = {}
    for plain in (True, False):
        chosen = [index for index, text in enumerate(texts) if text.plain == plain]
        try:
            ids = _tokenize(tokenizer, [texts[index].text for index in chosen], plain) if chosen else []
        except Exception as error:  # tokenizers raises a bare Exception for a character without a token
            if len(texts) > 1:  # find it, and what else may be wrong before it
                return [_encode(tokenizer, [text], what, check)[0] for text in texts]
            raise DataError(f"{texts[0].place}: the tokenizer cannot read the {what}: {error}") from error
        found.update(zip(chosen, ids, strict=True))
    for index, text in enumerate(texts):
        check(text, found[index])
    return [found[index] for index in range(len(texts))]


def _tokenize(tokenizer: PreTrainedTokenizerBase, texts: list[str], special: bool) -> list[list[int]]:
    """What the tokenizer's own call gives, in half its time where that only calls the backend."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or type(tokenizer)._encode_plus is not PreTrainedTokenizerFast._encode_plus:
        return tokenizer(texts, add_special_tokens=special)["input_ids"]
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = tokenizer.split_special_tokens  # a call with another setting leaves it there
    return [found.ids for found in backend.encode_batch_fast(texts, add_special_tokens=special)]


def decode_all(tokenizer: PreTrainedTokenizerBase, sequences: Sequence[np.ndarray]) -> list[str]:
    """Return the text of each of several responses, int32 [R], without special tokens."""
    ids = [sequence.tolist() for sequence in sequences]
    is_plain = isinstance(tokenizer, PreTrainedTokenizerFast) and not tokenizer.clean_up_tokenization_spaces
    if is_plain and all(
        getattr(getattr(tokenizer, name), "__func__", None) is getattr(PreTrainedTokenizerFast, name)
        for name in ("decode", "_decode")
    ):
        backend: Any = tokenizer.backend_tokenizer  # in a quarter of the time that the tokenizer's own call takes
        return backend.decode_batch(ids, skip_special_tokens=True)
    return [str(tokenizer.decode(sequence, skip_special_tokens=True)) for sequence in ids]


def check_messages(messages: list[Any], field: str, place: str) -> None:
    """DataError unless these are chat messages with text."""
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise DataError(
                f"{place}: message {number} of {field!r} is {message!r:.80}, expected role and content, both text"
            )
    if not any(message["content"].strip() for message in messages):
        raise DataError(f"{place}: the prompt ({field!r}) has no message with content")


def _render(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], place: str) -> str:
    """Return the chat as text, up to the mark that opens the model's answer."""
    import jinja2

    if not tokenizer.chat_template:
        raise DataError(f"{place}: the prompt is a list of chat messages, but the tokenizer has no chat template")
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except jinja2.TemplateError as error:
        raise DataError(f"{place}: the chat template refuses these messages ({error})") from error


def answer_text(answer: Any, field: str, place: str) -> str:
    """An answer as text; DataError unless it is text or a whole number."""
    if isinstance(answer, str) and answer.strip():
        return answer
    if isinstance(answer, int) and not isinstance(answer, bool):
        return str(answer)
    if answer is None or isinstance(answer, str):
        raise DataError(f"{place}: the prompt has no answer ({field!r} is {'null' if answer is None else 'blank'})")
    raise DataError(
        f"{place}: the answer ({field!r}) is {type_name(answer)}, expected text or a whole number; write it as text"
    )
