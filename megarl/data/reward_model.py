"""Rewards from a reward model behind HTTP: texts in batches, asked again where the server was at fault.

    POST <url>/classify   {"text": [text, ...], "rid": [id, ...]}   ->   [{"embedding": [score, ...], ...}, ...]

This is SGLang's API for reward models and classifiers. A text without a score raises: its response has no reward, and
is counted. No failure becomes a score.
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

BACKOFF_S, MAX_BACKOFF_S = 0.5, 8.0
"""Longest wait before the second attempt, which doubles from one to the next; and the longest of all."""
_FIELDS = re.compile(r"\{(prompt|response|answer)\}")
MAX_WAIT_S = 30.0
"""Longest wait that a busy server may ask for."""
MAX_BYTES = 1 << 20
"""Of the answer to one text."""
_FAILURES = (aiohttp.ClientError, OSError, ValueError)
_Waiting = tuple[str, asyncio.Future[float]]


class _Meta(BaseModel):
    id: str | None = None


class _Scores(BaseModel):
    """What ``/classify`` answers to one text."""

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
    """A reward function that asks the servers of a [reward_model] table; ``score`` serves functions of the user's own.

    Texts that wait together share a request of at most ``batch_size``; ``concurrency`` requests are under way at a
    time. ConfigError if the variable of the API key is missing, and from a call if a server refuses the key, has no
    /classify, or gives other scores than ``label`` says; RolloutError or TimeoutError if no attempt gave a score.
    """

    limits_itself = True
    """Waiting for a place in a request is no time of the reward: a judge sets no time-out of its own."""

    def __init__(self, config: RewardModelConfig) -> None:
        self.config, self._turns = config, itertools.count()
        self._key = "" if config.api_key_env is None else os.environ.get(config.api_key_env, "")
        if config.api_key_env is not None and not self._key:
            raise ConfigError(f"reward_model.api_key_env: found no variable {config.api_key_env}; export it")
        self._queue: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore, deque[_Waiting]] | None = None
        self._tasks = set[asyncio.Task[None]]()

    async def __call__(self, *, prompt: str, response: str, answer: str) -> float | Steps:
        """Return the score of the response, or of each of its steps, which the model reads with all before it."""
        step, most = self.config.step, self.config.max_steps
        ends = [len(response)] if step is None else step_ends(response, step, most)
        fields = [{"prompt": prompt, "response": response[:end], "answer": answer} for end in ends]
        # In one pass: a response that holds "{answer}" is not told it.
        scores = await self.score([_FIELDS.sub(lambda found, of=of: of[found[1]], self.config.text) for of in fields])
        if step is None or not response:
            return scores[-1]
        return Steps(scores[-1], [StepReward(end, score) for end, score in zip(ends, scores, strict=True)])

    async def score(self, texts: Sequence[str]) -> list[float]:
        """Return the score of each text; raises the first error if one has none."""
        futures = [self._enqueue(text) for text in texts]
        await asyncio.gather(*futures, return_exceptions=True)
        return [float(future.result()) for future in futures]

    def _enqueue(self, text: str) -> asyncio.Future[float]:
        """Return the score to come. Texts that begin to wait together, or while no place is free, share a request."""
        loop = asyncio.get_running_loop()
        if self._queue is None or self._queue[0] is not loop:
            self._queue = loop, asyncio.Semaphore(self.config.concurrency), deque()
        self._queue[2].append((text, loop.create_future()))
        task = loop.create_task(self._send_next(*self._queue[1:]))  # a request outlives who has dropped its response
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return self._queue[2][-1][1]

    async def _send_next(self, places: asyncio.Semaphore, waiting: deque[_Waiting]) -> None:
        async with places:
            batch: list[_Waiting] = []
            while waiting and len(batch) < self.config.batch_size:
                if not (entry := waiting.popleft())[1].done():  # else nobody waits for it any more
                    batch.append(entry)
            try:
                found = await self._ask([text for text, _ in batch]) if batch else []
            except Exception as error:
                found = [error] * len(batch)
        for (_, future), score in zip(batch, found, strict=True):
            if not future.done():
                future.set_exception(score) if isinstance(score, Exception) else future.set_result(score)

    async def _ask(self, texts: Sequence[str]) -> list[float | Exception]:
        """Return score or error of each text of a request; several attempts, each at the next server."""
        urls, first, timeout_s = self.config.urls, next(self._turns), self.config.timeout_s
        headers = UNPACKED | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        options = {"headers": headers, "trust_env": False, "auto_decompress": False}  # ``read_body`` unpacks to a limit
        failed: Exception = RolloutError("the reward model was not asked")
        # One session for each request, so that nothing outlives a loop. trust_env: no proxy comes between.
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(None), **options) as http:
            for attempt in range(self.config.attempts):
                if attempt:  # after a while, and not all ranks at once
                    pause_s = min(BACKOFF_S * 2 ** (attempt - 1), MAX_BACKOFF_S)
                    await asyncio.sleep(getattr(failed.__cause__, "wait_s", 0.0) + random.uniform(pause_s / 2, pause_s))
                url = urls[(first + attempt) % len(urls)]
                try:
                    async with asyncio.timeout(timeout_s):
                        scores = await self._post(http, url, texts)
                    return [s if math.isfinite(s) else RolloutError(f"reward model: {url} gave {s}") for s in scores]
                except TimeoutError:
                    failed = TimeoutError(f"reward model: {url} took more than {timeout_s:g} s")
                except ConfigError:
                    raise
                except _FAILURES as error:
                    failed = RolloutError(f"reward model: {url}: {self._describe(error)}")
                    failed.__cause__ = error
                except _RefusedError as error:
                    if len(texts) > 1:  # perhaps one of them is too long
                        return [found for text in texts for found in await self._ask([text])]
                    return [RolloutError(f"reward model: {url}: {self._describe(error)}")]
        return [failed] * len(texts)

    async def _post(self, http: aiohttp.ClientSession, url: str, texts: Sequence[str]) -> list[float]:
        """Return the scores of one attempt; an error of _FAILURES, _RefusedError or ConfigError without them."""
        ids = [uuid.uuid4().hex for _ in texts]
        body = {"text": [*texts], "rid": ids}
        async with http.post(f"{url}/classify", json=body, allow_redirects=False) as response:
            status, wait_s, most = response.status, retry_after(response.headers, MAX_WAIT_S), MAX_BYTES * len(texts)
            data = await read_body(response, f"{url}/classify", most)
        told = f"HTTP {status}: {' '.join(self._describe(data.decode(errors='replace')).split())[:200]}"
        if status in (401, 403, 404, 405):
            raise ConfigError(
                f"reward_model.urls: {url}/classify answered {told}; expected a server with SGLang's "
                "/classify, and in reward_model.api_key_env the variable with its key"
            )
        if status != 200:
            is_final = 400 <= status < 500 and status not in (408, 429)
            raise _RefusedError(told) if is_final else _BusyError(told, wait_s)
        answers = check_types(_ANSWER, parse_json(data, f"{url}/classify", most), f"{url}/classify")
        if [answer.meta_info.id or own for answer, own in zip(answers, ids, strict=True)] != ids:
            raise ValueError("an answer to other requests")
        return [self._choose([math.nan if x is None else x for x in each.embedding]) for each in answers]

    def _choose(self, scores: Sequence[float]) -> float:
        label = self.config.label
        if len(scores) != 1 if label is None else label >= len(scores):
            expected = "one: name the one that is the reward" if label is None else f"more than {label}"
            raise ConfigError(f"reward_model.label: a text has {len(scores)} scores, expected {expected}")
        return scores[label or 0]

    def _describe(self, error: object) -> str:
        text = f"{type(error).__name__}: {error}" if isinstance(error, Exception) else str(error)
        return text.replace(self._key, "***") if self._key else text


def step_ends(response: str, step: str, most: int) -> list[int]:
    """Return where the steps of a response end, in characters: behind each run of ``step``, and at the end.

    Blanks at the beginning and the end are no steps of their own; the last of ``most`` steps takes the rest.
    """
    begin, end = len(response) - len(response.lstrip()), len(response.rstrip())
    found = [run.end() for run in re.finditer(f"(?:{re.escape(step)})+", response) if begin < run.end() < end]
    return [*found[: most - 1], len(response)]
