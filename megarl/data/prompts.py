"""Prompts with answers for RL, demonstrations for the cold start, and the order of prompts.

Plain text is tokenized with the tokenizer's special tokens. Chat messages, and plain text with ``chat_template`` on,
pass through the tokenizer's chat template, which adds the special tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from megarl.config import Config
from megarl.config.tables.data import DataConfig
from megarl.data.records import Record, get_field, read_records, type_name
from megarl.data.tokenizer import count_rows, tokenize
from megarl.errors import ConfigError, DataError, refusal, refuse_if, reworded
from megarl.files.bounded_process import BoundedProcess

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MOST_MARK_TOKENS = 32
"""Tokens at the end of a prompt in which a mark of the response is looked for."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A problem with its answer."""

    index: int
    """Position in the source, 0..P-1."""
    tokens: np.ndarray
    """int32 [length], not empty."""
    text: str
    """The tokenized text: the plain text, or the chat after the template."""
    answer: str
    """Text for the reward function; not blank."""
    source: str
    """Place in the source: "train.jsonl:17" or "train.parquet row 16"."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A prompt, the response to imitate, and the end token, as a sequence; of a chat, several turns."""

    tokens: np.ndarray
    """int32 [T]."""
    loss_mask: np.ndarray
    """bool [T], True on responses and their end tokens."""
    source: str


def load_prompts(
    data: DataConfig, tokenizer: PreTrainedTokenizerBase, limit: int | None = None, template: str | None = None
) -> list[Prompt]:
    """Read and tokenize all prompts of ``data.train``. No prompt is dropped or shortened.

    limit: as in :func:`megarl.data.records.read_records`. Fields may be dotted. The answer is text or a whole number;
    write other numbers as text, because 0.10 and 1e-1 would be compared as text. template: text around a plain-text
    prompt, with ``{prompt}`` in its place; applied before the chat template.

    Raises:
        DataError: with file and line; a broken line, missing field, wrong type, empty prompt, no answer, prompt longer
            than ``data.max_prompt_tokens``, chat messages together with ``template``, a text that went through a chat
            template before and would get its marks again, or a token that the model has no row for.
        ConfigError: ``chat_template`` is on, but the tokenizer has none; an argument that the template never reads.
    """
    reader = PromptReader(tokenizer, data, template)

    def read(place: str, record: Record) -> tuple[Text, str]:
        text = reader.text(record, place)
        return text, answer_text(get_field(record, data.answer_field, place), data.answer_field, place)

    rows = [read(place, record) for place, record in read_records(data.train, split=data.split, limit=limit)]
    encoded = reader.encode([text for text, _ in rows], data.max_prompt_tokens)
    columns = enumerate(zip(rows, (np.array(tokens, np.int32) for tokens in encoded), strict=True))
    return [Prompt(index, ids, text.text, answer, text.place) for index, ((text, answer), ids) in columns]


def load_demonstrations(config: Config, tokenizer: PreTrainedTokenizerBase, max_positions: int) -> list[Demonstration]:
    """Read demonstrations for supervised training: prompt, response, end token; loss on response and end token.

    A record with ``sft.messages_field`` in the place of the prompt is a chat. All its turns are one sequence, unless
    the chat template writes earlier turns differently later (Qwen3 removes thoughts): then several, as in sampling.

    Prompt and response are tokenized apart, so that the response begins as in sampling. A response that ends with the
    end token gets no second end token. Limits are ``data.max_prompt_tokens``, ``rollout.
    max_response_tokens`` with the end token, and ``max_positions`` of both together.

    DataError with file and line, as in :func:`load_prompts`, for a length above a limit, and for a response that begins
    with the end of its prompt. ConfigError as in :func:`load_prompts`, and without an end token.
    """
    sft, data = config.sft, config.data
    assert sft is not None, "there is an [sft] table"
    reader = PromptReader(tokenizer, data.model_copy(update={"prompt_field": sft.prompt_field}))
    end_token = tokenizer.eos_token_id
    if not isinstance(end_token, int):
        raise ConfigError("the tokenizer has no eos_token: set one, otherwise the model never learns to stop")
    if reader.num_rows is not None and end_token >= reader.num_rows:
        raise ConfigError(refusal("end_token_without_row", token=end_token, rows=reader.num_rows))

    def read(place: str, record: Record) -> Iterator[list[tuple[Text, Text]]]:
        if sft.prompt_field not in record and sft.messages_field in record:
            yield from reader.turns(record, sft.messages_field, place)
            return
        text = reader.text(record, place)
        response = get_field(record, sft.response_field, place)
        if not isinstance(response, str):
            raise DataError(f"{place}: {sft.response_field!r} is {type_name(response)}, expected text")
        refuse_if(not response, DataError, "empty_response", place=place, sft=sft)
        yield [(text, Text(place, response, plain=False))]

    demonstrations: list[Demonstration] = []
    rows = [turns for place, record in read_records(sft.data) for turns in read(place, record)]
    prompts = reader.encode([text for turns in rows for text, _ in turns], data.max_prompt_tokens)
    texts = [response for turns in rows for _, response in turns]
    parts = zip(prompts, reader.encode_responses(texts, prompts, sft.response_field), strict=True)
    for turns in rows:
        place, tokens, loss_mask = turns[0][0].place, list[int](), list[bool]()
        for number, (prompt, ids) in enumerate(islice(parts, len(turns)), start=1):
            if number == len(turns) and ids[-1] != end_token:
                ids.append(end_token)
            limit = ("the response with its end", "rollout.max_response_tokens")
            _check_length(len(ids), config.rollout.max_response_tokens, *limit, place)
            tokens += [*prompt, *ids]
            loss_mask += [False] * len(prompt) + [True] * len(ids)
        _check_length(len(tokens), max_positions, "prompt with response", "the model's positions", place)
        demonstrations.append(Demonstration(np.array(tokens, np.int32), np.array(loss_mask), place))
    return demonstrations


@dataclass(frozen=True, slots=True)
class PromptOrder:
    """The shuffled, endless order of prompts. A position is an integer, for a checkpoint.

    Epoch e visits every prompt once, in an order that depends only on (seed, e). Prompts are sorted by the raw 64-bit
    words of a Philox counter with key (seed, e). numpy guarantees these words, unlike shuffles.
    """

    num_prompts: int
    """At least 1."""
    seed: int
    """0 <= seed < 2**64."""

    def epoch(self, epoch: int) -> np.ndarray:
        """Return the permutation of 0..P-1 of an epoch, int64 [P], read-only: the next steps use the same array."""
        return _permutation(self.num_prompts, self.seed, epoch)

    def take(self, position: int, count: int) -> np.ndarray:
        """Return the prompts at positions position .. position + count - 1, int64 [count].

        Within an epoch no prompt comes twice. A call across the end of an epoch may return a prompt twice.
        """
        pieces = [np.zeros(0, dtype=np.int64)]
        while count:
            epoch, offset = divmod(position, self.num_prompts)
            pieces.append(self.epoch(epoch)[offset : offset + count])
            position, count = position + len(pieces[-1]), count - len(pieces[-1])
        return np.concatenate(pieces)


@lru_cache(maxsize=2)  # a step may cross the end of an epoch
def _permutation(num_prompts: int, seed: int, epoch: int) -> np.ndarray:
    words = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(num_prompts)
    order = np.argsort(words, kind="stable").astype(np.int64)
    order.flags.writeable = False
    return order


def _check_length(num_tokens: int, limit: int | None, label: str, limit_name: str, place: str) -> None:
    if limit is not None and num_tokens > limit:
        raise DataError(f"{place}: {label} has {num_tokens} tokens, more than {limit_name} = {limit}; shorten it")


class Text(NamedTuple):
    """A text for the tokenizer."""

    place: str
    text: str
    plain: bool
    """Whether the tokenizer adds special tokens: not after a chat template, nor to a response."""


_Check = Callable[[Text, list[int]], None]
"""Raises DataError for a text with these tokens."""


class PromptReader:
    """Makes the text of a record's prompt, and tokens of texts; refuses texts that the model would get changed."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, data: DataConfig, template: str | None = None) -> None:
        """The parameters and ConfigError are those of :func:`load_prompts`."""
        self._tokenizer, self._field, self._template = tokenizer, data.prompt_field, template
        self._renders_text, self._needs_chat = data.chat_template, bool(data.chat_template_args)
        self._chat = ChatTemplate(tokenizer, data.chat_template_args) if tokenizer.chat_template else None
        for key, is_set in (("chat_template", data.chat_template), ("chat_template_args", self._needs_chat)):
            refuse_if(is_set and self._chat is None, ConfigError, "key_without_template", key=key)
        self.has_chat = self._chat is not None
        """Whether the tokenizer has a chat template."""
        self.num_rows = count_rows(tokenizer)
        """Rows of the model's embedding; None if unknown."""
        self._prefix = set(tokenize(tokenizer, [""], special=True)[0]).difference([tokenizer.eos_token_id])
        """Special tokens that the tokenizer puts before plain text."""
        self._added = {*tokenizer.added_tokens_decoder}

    def text(self, record: Record, place: str) -> Text:
        """Return the text to tokenize, of plain text or of chat messages. DataError for an unusable prompt."""
        prompt, name = get_field(record, self._field, place), f"the prompt ({self._field!r})"
        if isinstance(prompt, list) and self._template is None:
            check_messages(prompt, self._field, place)
            if self._chat is None:
                raise DataError(f"{place}: {name} is a list of chat messages, but the tokenizer has no chat template")
            names = [f"message {number} of {self._field!r}" for number in range(len(prompt))]
            return Text(place, self._chat.render(prompt, names, place), plain=False)
        if not isinstance(prompt, str):
            kinds = "text or a list of chat messages" if self._template is None else "text for the prompt template"
            raise DataError(f"{place}: {name} is {type_name(prompt)}, expected {kinds}")
        refuse_if(not prompt.strip(), DataError, "empty_prompt", place=place, name=name)
        # Braces of LaTeX stay, unlike with str.format.
        text = prompt if self._template is None else self._template.replace("{prompt}", prompt)
        if self._renders_text and self._chat is not None:
            return Text(place, self._chat.render([{"role": "user", "content": text}], [name], place), plain=False)
        refuse_if(self._needs_chat, DataError, "plain_prompt", place=place, name=name)
        return Text(place, text, plain=True)

    def turns(self, record: Record, field: str, place: str) -> Iterator[list[tuple[Text, Text]]]:
        """Yield the (prompt, response) pairs of each sequence of a chat; DataError for an unusable one.

        Each prompt goes on behind the response before it. A response ends with the special token behind it, if any.
        """
        chat, tools = get_field(record, field, place), record.get("tools")
        if self._chat is None or not isinstance(chat, list):
            raise DataError(refusal("no_chat", place=place, field=field, kind=type_name(chat)))
        # Parquet fills absent fields with null.
        chat = [{key: v for key, v in m.items() if v is not None} if isinstance(m, dict) else m for m in chat]
        chat = [{"content": "", **m} if isinstance(m, dict) else m for m in chat]
        check_messages(chat, field, place)
        special = self._chat.special
        if marks := [token for message in chat for token in special if token in message["content"]]:
            raise DataError(refusal("rendered_before", place=place, name=repr(field), mark=marks[0]))
        pairs, done = list[tuple[Text, Text]](), ""
        for number, turn in enumerate(chat):
            if turn["role"] != "assistant":
                continue
            history, bare = chat[:number], {**turn, "tool_calls": []}
            whole: dict[str, Any] = {"tools": tools, "add_generation_prompt": False}
            before = self._chat.apply(history, place, tools=tools)
            after = self._chat.apply([*history, turn], place, **whole)
            facts = {"place": place, "number": number, "field": field}
            if not after.startswith(before):
                raise DataError(refusal("template_of_turn", **facts, end=before[-40:]))
            if turn.get("tool_calls") and after == self._chat.apply([*history, bare], place, **whole):
                raise DataError(refusal("calls_left_out", **facts))
            if not before.startswith(done):
                yield pairs
                pairs, done = [], ""
            answer = after[len(before) :]
            # White space behind a special token is no part of the model's turn.
            answer = answer.rstrip() if answer.rstrip().endswith(special) else answer
            pairs.append((Text(place, before[len(done) :], plain=False), Text(place, answer, plain=False)))
            done = before + answer
        if not pairs:
            raise DataError(f"{place}: {field!r} has no message of the assistant: there is nothing to imitate")
        yield pairs

    def encode(self, texts: Sequence[Text], limit: int | None) -> list[list[int]]:
        """Tokenize a batch. DataError names the first text that cannot be a prompt of at most ``limit`` tokens."""
        name, end, bos = f"the prompt ({self._field!r})", self._tokenizer.eos_token, self._tokenizer.bos_token_id

        def check(text: Text, tokens: list[int]) -> None:
            refuse_if(not tokens, DataError, "prompt_without_tokens", text=text, name=name)
            if text.plain and tokens[-1] == self._tokenizer.eos_token_id and not text.text.endswith(str(end)):
                # BERT- and T5-like tokenizers. The model would have to answer after the end token.
                raise DataError(f"{text.place}: the tokenizer appends its end token {end!r} to a prompt; turn that off")
            repeated = [token for token in self._prefix if tokens.count(token) > 1] if text.plain else []
            if repeated or (bos is not None and tokens[:2] == [bos, bos]):
                mark = self._tokenizer.convert_ids_to_tokens(repeated[0] if repeated else tokens[0])
                raise DataError(refusal("mark_twice", place=text.place, name=name, mark=mark))
            _check_length(len(tokens), limit, "the prompt", "data.max_prompt_tokens", text.place)

        return self._encode(texts, f"prompt ({self._field!r})", check)

    def encode_responses(self, texts: Sequence[Text], prompts: Sequence[Sequence[int]], field: str) -> list[list[int]]:
        """Tokenize the responses to prompts. DataError names the first response that begins with its prompt's end."""
        responses = self._encode(texts, f"response ({field!r})")
        for text, prompt, tokens in zip(texts, prompts, responses, strict=True):
            refuse_if(not tokens, DataError, "response_without_tokens", text=text, field=field)
            if (mark := self._find_repeated(text.text, prompt, tokens)) is not None:
                raise DataError(refusal("response_with_mark", place=text.place, field=field, mark=mark))
        return responses

    def _find_repeated(self, response: str, prompt: Sequence[int], tokens: Sequence[int]) -> str | None:
        """Return the begin token, or the marks at the end of the prompt, if the response begins with them."""
        first = tokens[0]
        if first == self._tokenizer.bos_token_id != self._tokenizer.eos_token_id:
            return str(self._tokenizer.bos_token)
        for index in range(len(prompt) - 1, max(len(prompt) - 1 - _MOST_MARK_TOKENS, -1), -1):
            if prompt[index] == first and first in self._added:
                mark = str(self._tokenizer.decode([*prompt[index:]], skip_special_tokens=False)).strip()
                return mark if response.lstrip().startswith(mark) else None
        return None

    def _encode(self, texts: Sequence[Text], label: str, check: _Check = lambda *_: None) -> list[list[int]]:
        """Tokenize and check a batch. DataError names the first text that is wrong or cannot be tokenized."""
        tokens: dict[int, list[int]] = {}
        for plain in (True, False):
            indices = [index for index, text in enumerate(texts) if text.plain == plain]
            try:
                ids = tokenize(self._tokenizer, [texts[index].text for index in indices], plain) if indices else []
            except Exception as error:  # tokenizers raises a bare Exception for a character without a token
                if len(texts) > 1:  # find the text, and any earlier fault
                    return [self._encode([text], label, check)[0] for text in texts]
                raise DataError(f"{texts[0].place}: the tokenizer cannot read the {label}: {error}") from error
            tokens.update(zip(indices, ids, strict=True))
        for index, text in enumerate(texts):
            if self.num_rows is not None and (largest := max(tokens[index], default=0)) >= self.num_rows:
                facts = {"token": self._tokenizer.convert_ids_to_tokens(largest), "number": largest}
                facts |= {"place": text.place, "label": label, "rows": self.num_rows}
                raise DataError(refusal("token_without_row", **facts))
            check(text, tokens[index])
        return [tokens[index] for index in range(len(texts))]


def answer_text(answer: Any, field: str, place: str) -> str:
    """Return an answer as text. DataError unless the answer is text or a whole number."""
    if isinstance(answer, str) and answer.strip():
        return answer
    if isinstance(answer, int) and not isinstance(answer, bool):
        return str(answer)
    if answer is None or isinstance(answer, str):
        raise DataError(f"{place}: the prompt has no answer ({field!r} is {'null' if answer is None else 'blank'})")
    raise DataError(refusal("answer_type", place=place, field=field, kind=type_name(answer)))


_SET_BY_MEGARL = ("messages", "add_generation_prompt")
"""Variables of a template that are no arguments of the user."""
_MOST_ADDED, _MOST_COPIES = 1 << 18, 4
"""Characters that a template may add, and how often a template may repeat its input."""
_WORD = re.compile(r"\w")


class ChatTemplate:
    """Renders chat messages up to the mark that opens the model's answer; refuses messages that were rendered before.

    A message was rendered before if it holds text of the template for these roles: special
    tokens, other tokens beside the user's text, or the words before and behind the user's text, which remain where
    special tokens were removed.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any]) -> None:
        """arguments: variables of the template, as ``enable_thinking``; ConfigError for a variable without a use."""
        self._tokenizer, self._arguments = tokenizer, dict(arguments)
        self._tokens = {token.content: token.special for token in tokenizer.added_tokens_decoder.values()}
        self.special = tuple(token for token, is_special in self._tokens.items() if is_special)
        """Special tokens, as text."""
        self._marks: dict[tuple[str, ...], re.Pattern[str]] = {}
        self._process = BoundedProcess(render=self._render, find_variables=self._find_variables)
        if arguments:
            self._check_arguments()

    def render(self, messages: Sequence[Mapping[str, str]], names: Sequence[str], place: str) -> str:
        """Return the chat as text. DataError at ``place`` if the template fails, or a message holds template text.

        names: a name for each message, for errors.
        """
        roles = tuple(message["role"] for message in messages)
        if (marks := self._marks.get(roles)) is None:
            marks = self._marks[roles] = self._find_marks(roles, place)
        for message, name in zip(messages, names, strict=True):
            if match := marks.search(message["content"]):
                raise DataError(refusal("rendered_before", place=place, name=name, mark=match.group()[:40]))
        return self.apply(messages, place)

    def render_agent(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> str:
        """Return any chat as text, as a server does: messages may hold template text. DataError if the template fails.

        tools: the functions that the model may call, as in OpenAI's chat completions.
        """
        return self._process.call("render", messages, {"tools": tools} if tools else {})

    def apply(self, messages: Sequence[Mapping[str, Any]], place: str, **more: Any) -> str:
        """Return any chat as text; ``more`` are variables of the template. DataError at ``place`` if it fails."""
        with reworded(DataError, DataError, f"{place}: the chat template refuses these messages (", ")"):
            return self._process.call("render", [dict(message) for message in messages], more)

    def _render(self, chat: list[dict[str, Any]], more: Mapping[str, Any] = {}) -> str:
        """Return the template's text; runs in the bounded process. ValueError for a text that is too long."""
        options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True, **self._arguments, **more}
        text = str(self._tokenizer.apply_chat_template(chat, **options))
        limit = _MOST_ADDED + _MOST_COPIES * len(str([chat, self._arguments, more]))
        refuse_if(len(text) > limit, ValueError, "long_rendering", num=len(text), limit=limit)
        return text

    def _find_marks(self, roles: Sequence[str], place: str) -> re.Pattern[str]:
        """Return a pattern for the text that the template writes around messages of these roles."""
        chat = [{"role": role, "content": f"\ue000{number}\ue000"} for number, role in enumerate(roles)]
        texts = re.split("\ue000(\\d+)\ue000", self.apply(chat, place))  # template text, number, template text, ...
        marks = {token for token, special in self._tokens.items() if special and any(token in t for t in texts[::2])}
        special = re.compile("|".join(map(re.escape, marks)) or r"(?!)")
        closing = special.sub("", texts[-1]).rstrip()
        patterns: set[str] = set()
        for index in range(1, len(texts), 2):
            if roles[int(texts[index])] == "user":
                head, tail = texts[index - 1].rstrip(), texts[index + 1].lstrip()
                marks |= {token for token in self._tokens if head.endswith(token) or tail.startswith(token)}
                opening = re.search(r"[^\n]*\S\s*\Z", special.sub("", texts[index - 1]))
                # A single word, "user", may as well begin a question.
                if opening and re.search(r"\W", opening.group()) and all(map(_WORD.search, (opening.group(), closing))):
                    patterns.add(rf"(?:\A|\n)\s*{re.escape(opening.group())}.*{re.escape(closing)}\s*\Z")
        return re.compile("|".join([*map(re.escape, marks), *patterns]) or r"(?!)", re.DOTALL)

    def _check_arguments(self) -> None:
        with reworded(DataError, ConfigError, "data.chat_template_args: the chat template cannot be read (", ")"):
            variables = self._process.call("find_variables")
        if unknown := [name for name in self._arguments if name not in variables]:
            readable = ", ".join(sorted(variables)) or "none"
            raise ConfigError(refusal("unread_argument", argument=unknown[0], variables=readable))

    def _find_variables(self) -> set[str]:
        from jinja2 import meta
        from transformers.utils import chat_template_utils

        source = self._tokenizer.get_chat_template(tools=self._arguments.get("tools"))
        environment = chat_template_utils._compile_jinja_template(source).environment
        return meta.find_undeclared_variables(environment.parse(source)) - {*_SET_BY_MEGARL, *environment.globals}


def check_messages(messages: list[Any], field: str, place: str) -> None:
    """Raise DataError unless the list holds chat messages with text."""
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise DataError(refusal("message", place=place, number=number, field=field, value=message))
    if not any(message["content"].strip() for message in messages):
        raise DataError(f"{place}: the prompt ({field!r}) has no message with content")
