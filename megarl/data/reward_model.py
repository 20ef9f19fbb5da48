"""Rewards from a reward model behind HTTP, with further attempts after a server's fault.

    POST <url>/classify   {"text": [text], "rid": [id]}   ->   [{"embedding": [score], ...}]

This is SGLang's API for reward models and classifiers. A text without a score raises an error: the response has no
reward, and is counted. No failure becomes a score.
"""

import asyncio
import itertools
import math
import os
import random
import re
import uuid
from typing import Any
from weakref import WeakKeyDictionary

import aiohttp
from pydantic import BaseModel, TypeAdapter

from megarl.config.tables.data import RewardModelConfig
from megarl.errors import ConfigError, RolloutError, refuse_if
from megarl.files.foreign_json import UNPACKED, check_types, parse_json, read_body

BACKOFF_S, MAX_BACKOFF_S = 0.5, 8.0
"""Longest wait before the second attempt, which doubles with each attempt; and the longest wait of all."""
_FIELDS = re.compile(r"\{(prompt|response|answer)\}")
MAX_BYTES = 1 << 20
"""Size of an answer."""


class _Scores(BaseModel):
    """The answer of ``/classify`` for a text."""

    embedding: list[float | None]
    meta_info: dict[str, Any] = {}


_ANSWER = TypeAdapter(list[_Scores])


class RewardModel:
    """A reward function that asks the servers of a [reward_model] table; call ``score`` from your own functions.

    ``concurrency`` requests run at a time, each with one text.

    ConfigError if the variable of the API key is missing, and from a call if a server refuses the key, has no
    /classify, or returns several scores. RolloutError or TimeoutError if no attempt gave a score.
    """

    limits_itself = True
    """Waiting for a place does not count as time of the reward: a judge sets no time-out."""

    def __init__(self, config: RewardModelConfig) -> None:
        self.config, self._turns = config, itertools.count()
        self._key = "" if config.api_key_env is None else os.environ.get(config.api_key_env, "")
        refuse_if(config.api_key_env is not None and not self._key, ConfigError, "no_api_key", config=config)
        self._places = WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]()

    async def __call__(self, *, prompt: str, response: str, answer: str) -> float:
        """Return the score of the response."""
        values = {"prompt": prompt, "response": response, "answer": answer}
        # In a single pass: "{answer}" inside a response is not replaced.
        return await self.score(_FIELDS.sub(lambda match: values[match[1]], self.config.text))

    async def score(self, text: str) -> float:
        """Return the score of a text, after several attempts, each at the next server; the last error without one."""
        urls, first = self.config.urls, next(self._turns)
        failure: Exception = RolloutError("the reward model was not asked")
        async with self._places.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.config.concurrency)):
            for attempt in range(self.config.attempts):
                if attempt:  # with a random pause, to spread the requests of ranks
                    pause_s = min(BACKOFF_S * 2 ** (attempt - 1), MAX_BACKOFF_S)
                    await asyncio.sleep(random.uniform(pause_s / 2, pause_s))
                url = urls[(first + attempt) % len(urls)]
                try:
                    async with asyncio.timeout(self.config.timeout_s):
                        return await self._post(url, text)
                except TimeoutError:
                    failure = TimeoutError(f"reward model: {url} took more than {self.config.timeout_s:g} s")
                except ConfigError:
                    raise
                except (aiohttp.ClientError, OSError, ValueError) as error:
                    failure = RolloutError(f"reward model: {url}: {self._describe(error)}")
        raise failure

    async def _post(self, url: str, text: str) -> float:
        """Return the score of an attempt. RolloutError if the server will refuse the text again."""
        rid, place = uuid.uuid4().hex, f"{url}/classify"
        headers = UNPACKED | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        # A session per request: no connection outlives a loop. trust_env: no proxy is used.
        options = {"timeout": aiohttp.ClientTimeout(None), "trust_env": False, "auto_decompress": False}
        async with (
            aiohttp.ClientSession(headers=headers, **options) as http,
            http.post(place, json={"text": [text], "rid": [rid]}, allow_redirects=False) as response,
        ):
            status, data = response.status, await read_body(response, place, MAX_BYTES)
        answer = f"HTTP {status}: {' '.join(self._describe(data.decode(errors='replace')).split())[:200]}"
        refuse_if(status in (401, 403, 404, 405), ConfigError, "reward_server", place=place, answer=answer)
        if status != 200:
            is_final = 400 <= status < 500 and status not in (408, 429)
            raise RolloutError(f"reward model: {url}: {answer}") if is_final else ValueError(answer)
        rows = check_types(_ANSWER, parse_json(data, place, MAX_BYTES), place)
        refuse_if(len(rows) != 1 or rows[0].meta_info.get("id") not in (None, rid), ValueError, "other_request")
        refuse_if(len(scores := rows[0].embedding) != 1, ConfigError, "several_scores", place=place, num=len(scores))
        if scores[0] is None or not math.isfinite(scores[0]):
            raise RolloutError(f"reward model: {url} gave {scores[0]}")
        return scores[0]

    def _describe(self, error: object) -> str:
        text = f"{type(error).__name__}: {error}" if isinstance(error, Exception) else str(error)
        return text.replace(self._key, "***") if self._key else text
