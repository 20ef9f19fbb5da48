"""Requests and answers in the form of OpenAI's chat completions.

``ChatRequest`` lists the keys that are read. Keys that would need another distribution or several answers are refused.
Temperature and the like are those of the run; the values of a request are ignored.
"""

import json
import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, Json, PositiveInt

Text = Annotated[str, Field(min_length=1)]


class Function(BaseModel):
    """Name and arguments of a call."""

    name: str
    arguments: Json[Any]


class ToolCall(BaseModel, extra="allow"):
    """A call in an assistant's message."""

    function: Function


class Message(BaseModel, extra="allow"):
    """A message; a template may read further keys."""

    role: str
    content: str | list[dict[Literal["type", "text"], str]] | None = None
    """A text, or parts of text."""
    tool_calls: list[ToolCall] | None = None

    def for_template(self) -> dict[str, Any]:
        """Return the message as chat templates take it: the content is a text, and the arguments are no JSON text."""
        parts = [{"text": self.content}] if isinstance(self.content, str) else self.content or ()
        role = "system" if self.role == "developer" else self.role
        content = "".join(part.get("text", "") for part in parts)
        return self.model_dump(exclude_none=True) | {"role": role, "content": content}


class ChatRequest(BaseModel):
    """The keys that are read, and the values of other keys that change nothing."""

    messages: list[Message] = Field(min_length=1)
    model: str = "policy"
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    max_tokens: PositiveInt | None = None
    max_completion_tokens: PositiveInt | None = None
    stop: Text | list[Text] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    logprobs: bool | None = None
    n: Literal[1] | None = None
    top_logprobs: Literal[0] | None = None
    response_format: dict[Literal["type"], Literal["text"]] | None = None
    logit_bias: dict[str, Literal[0]] | None = None
    functions: None = None

    @property
    def stops(self) -> list[str]:
        """Texts that end the answer."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


def name_answer(content: str, calls: Sequence[tuple[str, Any]]) -> str:
    """Return equal texts for answers that differ in outer white space or in the form of the JSON.

    calls: name and arguments of each call.
    """
    return json.dumps([content.strip(), calls], sort_keys=True)


def write_answer(
    asked: ChatRequest, index: int, content: str, calls: Sequence[tuple[str, Any]], finish_reason: str,
    num_context: int, tokens: Sequence[tuple[str, float]],
) -> dict[str, Any]:  # fmt: skip
    """Return a chat completion.

    index: number of the request; calls: name and arguments of each; num_context: tokens of the prompt; tokens: text and
    log-probability of each token.
    """
    message: dict[str, Any] = {"role": "assistant", "content": content}
    for number, (name, arguments) in enumerate(calls):
        call = {"name": name, "arguments": json.dumps(arguments)}
        message.setdefault("tool_calls", []).append(
            {"id": f"call_{index}_{number}", "index": number, "type": "function", "function": call}
        )
    columns = [{"token": t, "logprob": p, "bytes": list(t.encode()), "top_logprobs": []} for t, p in tokens]
    logprobs = {"content": columns} if asked.logprobs else None
    choice = {"index": 0, "message": message, "logprobs": logprobs, "finish_reason": finish_reason}
    total = num_context + len(tokens)
    usage = {"prompt_tokens": num_context, "completion_tokens": len(tokens), "total_tokens": total}
    answer = {"id": f"chatcmpl-{index}", "object": "chat.completion", "created": int(time.time())}
    return answer | {"model": asked.model, "choices": [choice], "usage": usage}


def write_stream(asked: ChatRequest, answer: dict[str, Any]) -> bytes:
    """Return a chat completion as events: the whole message, the reason of its end, the usage if it is asked for."""
    usage, (choice,) = answer["usage"], answer["choices"]
    message = {"index": 0, "delta": choice["message"], "logprobs": choice["logprobs"], "finish_reason": None}
    choices = [[message], [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]]
    chunk = answer | {"object": "chat.completion.chunk", "usage": None}
    chunks = [chunk | {"choices": choice} for choice in choices]
    if (asked.stream_options or {}).get("include_usage"):
        chunks.append(chunk | {"choices": [], "usage": usage})
    return "".join(f"data: {text}\n\n" for text in [*map(json.dumps, chunks), "[DONE]"]).encode()
