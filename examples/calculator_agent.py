"""An agent that knows nothing of megarl: it multiplies with a calculator, through the package ``openai``.

The model writes ``(123*456)``, the agent answers with the product, and the model writes the result. A model with a chat
template for tools would get ``tools`` instead, and answer with ``tool_calls``.
"""

from __future__ import annotations

import re
import sys

from openai import BadRequestError, OpenAI


def main() -> None:
    client = OpenAI()  # OPENAI_BASE_URL and OPENAI_API_KEY
    messages: list = [{"role": "user", "content": sys.stdin.read()}]
    while True:
        try:
            choice = client.chat.completions.create(model="policy", messages=messages).choices[0]
        except BadRequestError as error:
            if error.code == "context_length_exceeded":  # the turns or the tokens are used up
                return
            raise
        text = choice.message.content or ""
        _, begin, call = text.rpartition("(")
        if not begin:
            return
        messages += [choice.message, {"role": "tool", "content": multiply(call.partition(")")[0])}]


def multiply(call: str) -> str:
    """Return the product in a call such as 123*456; ? for any other text."""
    factors = re.fullmatch(r"(\d+)\*(\d+)", call)
    return str(int(factors[1]) * int(factors[2])) if factors else "?"


if __name__ == "__main__":
    main()
