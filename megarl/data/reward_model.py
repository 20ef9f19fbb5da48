"""Rewards from a reward model behind HTTP: texts in batches, with further attempts after a server's fault.

    POST <url>/classify   {"text": [text, ...], "rid": [id, ...]}   ->   [{"embedding": [score, ...], ...}, ...]

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
from collections import deque
from collections.abc import Sequence

import aiohttp
from pydantic import BaseModel, TypeAdapter

from megarl.config.tables.data import RewardModelConfig
from megarl.data.rewards import StepReward, Steps
from megarl.errors import ConfigError, RolloutError
from megarl.files.foreign_json import UNPACKED, check_types, parse_json, read_body, retry_after
from megarl.files.per_loop import PerLoop

BACKOFF_S, MAX_BACKOFF_S = 0.5, 8.0
"""Longest wait before the second attempt, which doubles with each attempt; and the longest wait of all."""
_FIELDS = re.compile(r"\{(prompt|response|answer)\}")
MAX_WAIT_S = 30.0
"""Longest wait that a busy server may ask for."""
MAX_BYTES = 1 << 20
"""Size of the answer for a text."""
_FAILURES = (aiohttp.ClientError, OSError, ValueError)
_Entry = tuple[str, asyncio.Future[float]]


class _Meta(BaseModel):
    id: str | None = None


class _Scores(BaseModel):
    """The answer of ``/classify`` for a text."""

    embedding: list[float | None]
    meta_info: _Meta = _Meta()


_ANSWER = TypeAdapter(list[_Scores])


class _BusyError(ValueError):
    """The server may serve these texts after ``wait_s`` seconds."""

    def __init__(self, message: str, wait_s: float) -> None:
        super().__init__(message)
        self.wait_s = wait_s


class _RefusedError(Exception):
    """The server will refuse these texts again."""


class RewardModel:
    """A reward function that asks the servers of a [reward_model] table; call ``score`` from your own functions.

    Texts that wait together share a request of at most ``batch_size`` texts; ``concurrency`` requests run at a time.

    ConfigError if the variable of the API key is missing, and from a call if a server refuses the key, has no
    /classify, or returns scores that contradict ``label``. RolloutError or TimeoutError if no attempt gave a score.
    """

    limits_itself = True
    """Waiting for a place in a request does not count as time of the reward: a judge sets no time-out."""

    def __init__(self, config: RewardModelConfig) -> None:
        self.config, self._turns = config, itertools.count()
        self._key = "" if config.api_key_env is None else os.environ.get(config.api_key_env, "")
        if config.api_key_env is not None and not self._key:
            raise ConfigError(f"reward_model.api_key_env: found no variable {config.api_key_env}; export it")
        self._queues = PerLoop(lambda: (asyncio.Semaphore(config.concurrency), deque[_Entry]()))
        self._tasks = set[asyncio.Task[None]]()

    async def __call__(self, *, prompt: str, response: str, answer: str) -> float | Steps:
        """Return the score of the response, or of each step, which the model reads with all earlier steps."""
        step = self.config.step
        ends = [len(response)] if step is None else step_ends(response, step, self.config.max_steps)
        fields = [{"prompt": prompt, "response": response[:end], "answer": answer} for end in ends]
        # In a single pass: "{answer}" inside a response is not replaced.
        texts = [_FIELDS.sub(lambda match, values=values: values[match[1]], self.config.text) for values in fields]
        scores = await self.score(texts)
        if step is None or not response:
            return scores[-1]
        return Steps(scores[-1], [StepReward(end, score) for end, score in zip(ends, scores, strict=True)])

    async def score(self, texts: Sequence[str]) -> list[float]:
        """Return the score of each text; raises the first error if a text has no score."""
        futures = [self._enqueue(text) for text in texts]
        await asyncio.gather(*futures, return_exceptions=True)
        return [float(future.result()) for future in futures]

    def _enqueue(self, text: str) -> asyncio.Future[float]:
        """Return the future score. Texts that begin to wait together, or while no place is free, share a request."""
        loop = asyncio.get_running_loop()
        places, entries = self._queues.get()
        future = loop.create_future()
        entries.append((text, future))
        task = loop.create_task(self._send_next(places, entries))  # a request outlives a caller that gave up
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return future

    async def _send_next(self, places: asyncio.Semaphore, entries: deque[_Entry]) -> None:
        async with places:
            batch: list[_Entry] = []
            while entries and len(batch) < self.config.batch_size:
                if not (entry := entries.popleft())[1].done():  # a future that is done has no caller any more
                    batch.append(entry)
            try:
                scores = await self._ask([text for text, _ in batch]) if batch else []
            except Exception as error:
                scores = [error] * len(batch)
        for (_, future), score in zip(batch, scores, strict=True):
            if not future.done():
                future.set_exception(score) if isinstance(score, Exception) else future.set_result(score)

    async def _ask(self, texts: Sequence[str]) -> list[float | Exception]:
        """Return score or error of each text of a request; several attempts, each at the next server."""
        urls, first, timeout_s = self.config.urls, next(self._turns), self.config.timeout_s
        headers = UNPACKED | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        options = {"headers": headers, "trust_env": False, "auto_decompress": False}  # ``read_body`` unpacks to a limit
        failure: Exception = RolloutError("the reward model was not asked")
        # A session for each request, so that nothing outlives a loop. trust_env: no proxy is used.
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(None), **options) as http:
            for attempt in range(self.config.attempts):
                if attempt:  # with a random pause, so that ranks do not ask at the same time
                    pause_s = min(BACKOFF_S * 2 ** (attempt - 1), MAX_BACKOFF_S)
                    wait_s = getattr(failure.__cause__, "wait_s", 0.0)
                    await asyncio.sleep(wait_s + random.uniform(pause_s / 2, pause_s))
                url = urls[(first + attempt) % len(urls)]
                try:
                    async with asyncio.timeout(timeout_s):
                        scores = await self._post(http, url, texts)
                    return [s if math.isfinite(s) else RolloutError(f"reward model: {url} gave {s}") for s in scores]
                except TimeoutError:
                    failure = TimeoutError(f"reward model: {url} took more than {timeout_s:g} s")
                except ConfigError:
                    raise
                except _FAILURES as error:
                    failure = RolloutError(f"reward model: {url}: {self._describe(error)}")
                    failure.__cause__ = error
                except _RefusedError as error:
                    if len(texts) > 1:  # a single text may be too long
                        return [score for text in texts for score in await self._ask([text])]
                    return [RolloutError(f"reward model: {url}: {self._describe(error)}")]
        return [failure] * len(texts)

    async def _post(self, http: aiohttp.ClientSession, url: str, texts: Sequence[str]) -> list[float]:
        """Return the scores of an attempt. Raises an error of _FAILURES, _RefusedError or ConfigError."""
        ids = [uuid.uuid4().hex for _ in texts]
        body, max_bytes = {"text": [*texts], "rid": ids}, MAX_BYTES * len(texts)
        async with http.post(f"{url}/classify", json=body, allow_redirects=False) as response:
            status, wait_s = response.status, retry_after(response.headers, MAX_WAIT_S)
            data = await read_body(response, f"{url}/classify", max_bytes)
        answer = f"HTTP {status}: {' '.join(self._describe(data.decode(errors='replace')).split())[:200]}"
        if status in (401, 403, 404, 405):
            raise ConfigError(
                f"reward_model.urls: {url}/classify answered {answer}; expected a server with SGLang's "
                "/classify, and in reward_model.api_key_env the variable with its key"
            )
        if status != 200:
            is_final = 400 <= status < 500 and status not in (408, 429)
            raise _RefusedError(answer) if is_final else _BusyError(answer, wait_s)
        rows = check_types(_ANSWER, parse_json(data, f"{url}/classify", max_bytes), f"{url}/classify")
        if [row.meta_info.id or id for row, id in zip(rows, ids, strict=True)] != ids:
            raise ValueError("an answer to other requests")
        return [self._choose([math.nan if score is None else score for score in row.embedding]) for row in rows]

    def _choose(self, scores: Sequence[float]) -> float:
        label = self.config.label
        if len(scores) != 1 if label is None else label >= len(scores):
            expected = "one: name the one that is the reward" if label is None else f"more than {label}"
            raise ConfigError(f"reward_model.label: a text has {len(scores)} scores, expected {expected}")
        return scores[label or 0]

    def _describe(self, error: object) -> str:
        text = f"{type(error).__name__}: {error}" if isinstance(error, Exception) else str(error)
        return text.replace(self._key, "***") if self._key else text


def step_ends(response: str, step: str, max_steps: int) -> list[int]:
    """Return the ends of the steps of a response, in characters: behind each run of ``step``, and at the end.

    White space at the beginning and the end is no step; the last of ``max_steps`` steps takes all further text.
    """
    begin, end = len(response) - len(response.lstrip()), len(response.rstrip())
    ends = [run.end() for run in re.finditer(f"(?:{re.escape(step)})+", response) if begin < run.end() < end]
    return [*ends[: max_steps - 1], len(response)]
