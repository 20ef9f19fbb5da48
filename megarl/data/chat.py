"""The chat template of a tokenizer: chat messages become text, once."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import meta
from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils

from megarl.errors import ConfigError, DataError
from megarl.files.bounded_process import BoundedProcess

_SET_BY_MEGARL = ("messages", "add_generation_prompt")
"""Variables of a template that are no arguments of the user."""
_MOST_ADDED, _MOST_COPIES = 1 << 18, 4
"""Characters that a template may add, and how often a template may repeat its input."""
_WORD = re.compile(r"\w")


class ChatTemplate:
    """Renders chat messages up to the mark that opens the model's answer; refuses messages that were rendered before.

    A message was rendered before if it holds text that the template writes around messages of these roles: special
    tokens, other tokens beside the user's text, or the words before and behind the user's text, which remain where
    special tokens were removed.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any]) -> None:
        """arguments: variables of the template, as ``enable_thinking``; ConfigError for a variable without a use."""
        self._tokenizer, self._arguments = tokenizer, dict(arguments)
        self._tokens = {token.content: token.special for token in tokenizer.added_tokens_decoder.values()}
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
                raise DataError(
                    f"{place}: {name} holds {match.group()[:40]!r}, which the chat template writes itself: give the "
                    "text as it was before any template, without that; or turn data.chat_template off"
                )
        return self._apply(messages, place)

    def _apply(self, messages: Sequence[Mapping[str, str]], place: str) -> str:
        try:
            return self._process.call("render", [dict(message) for message in messages])
        except DataError as error:
            raise DataError(f"{place}: the chat template refuses these messages ({error})") from error

    def _render(self, chat: list[dict[str, str]]) -> str:
        """Return the template's text; runs in the bounded process. ValueError for a text that is too long."""
        options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True, **self._arguments}
        text = str(self._tokenizer.apply_chat_template(chat, **options))
        limit = _MOST_ADDED + _MOST_COPIES * len(str([chat, self._arguments]))
        if len(text) > limit:
            raise ValueError(f"it writes {len(text)} characters, expected at most {limit} for messages of this length")
        return text

    def _find_marks(self, roles: Sequence[str], place: str) -> re.Pattern[str]:
        """Return a pattern for the text that the template writes around messages of these roles."""
        chat = [{"role": role, "content": f"\ue000{number}\ue000"} for number, role in enumerate(roles)]
        texts = re.split("\ue000(\\d+)\ue000", self._apply(chat, place))  # template text, number, template text, ...
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
        try:
            variables = self._process.call("find_variables")
        except DataError as error:
            raise ConfigError(f"data.chat_template_args: the chat template cannot be read ({error})") from error
        if unknown := [name for name in self._arguments if name not in variables]:
            raise ConfigError(
                f"data.chat_template_args: found {unknown[0]!r}, which the chat template never reads, expected some of "
                f"{', '.join(sorted(variables)) or 'none'}; remove it"
            )

    def _find_variables(self) -> set[str]:
        source = self._tokenizer.get_chat_template(tools=self._arguments.get("tools"))
        environment = chat_template_utils._compile_jinja_template(source).environment
        return meta.find_undeclared_variables(environment.parse(source)) - {*_SET_BY_MEGARL, *environment.globals}


def check_messages(messages: list[Any], field: str, place: str) -> None:
    """Raise DataError unless the list holds chat messages with text."""
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise DataError(
                f"{place}: message {number} of {field!r} is {message!r:.80}, expected role and content, both text"
            )
    if not any(message["content"].strip() for message in messages):
        raise DataError(f"{place}: the prompt ({field!r}) has no message with content")
