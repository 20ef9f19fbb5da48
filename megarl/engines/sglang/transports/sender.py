"""Sends new weights to a running server, without a token from a mixture of old and new weights.

    begin    pause, aborting all requests
    ...      a transport sends the weights
    finish   close the update, flush the cache, name the new version; every step is verified
    resume   let requests in

Only the pause mode ``abort`` is consistent: in other modes, running requests mix the log-probabilities of a version
with the routes of the next version. After a refused step a server stays paused: its weights are unknown.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import httpx

from megarl.engines.sglang.http import authorization, read_object, request
from megarl.engines.sglang.plugin.deltas import FORMAT
from megarl.engines.sglang.versions import NEWEST, UPDATE_SESSIONS, Version
from megarl.errors import DataError, WeightSyncError, refusal, reworded

if TYPE_CHECKING:
    from megarl.engines.sglang.transports.broadcast import BroadcastGroup

Checksums = list[dict[str, str]]
"""Checksums of each tensor-parallel rank: name -> checksum."""
CPU = -1
"""Stands for the GPU of servers on a CPU."""


@dataclass(frozen=True, slots=True)
class Message:
    """A bucket for megarl's plugin in a server (``plugin.deltas``)."""

    text: str
    """Base64 of the message."""
    receipt: str
    """The server's word after loading the bucket."""
    num_bytes: int
    """Of the whole bucket."""


class WeightSender:
    """The updates of a server."""

    def __init__(
        self, url: str, release: Version = NEWEST, *, tp: int = 1, api_key: str | None = None, gpus: Sequence[int] = ()
    ) -> None:
        """release, tp: the server's release and tensor-parallel size.

        gpus: GPU of each tensor-parallel rank; empty if the server runs on CPUs or on another machine.
        """
        self.url, self.tp = url, tp
        self.gpus = gpus or (CPU,) * tp
        self.group: BroadcastGroup | None = None
        """The process group of the server, or None."""
        self.takes_deltas: bool | None = False
        """Whether to send messages to megarl's plugin; None: ``begin`` asks the server for the plugin."""
        self._has_sessions, self._in_session = release >= UPDATE_SESSIONS, False
        self._named: str | None = None
        headers = authorization(api_key)
        # The server may close a kept connection just when a request is sent.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._http = httpx.Client(base_url=url, headers=headers, limits=limits, trust_env=False)

    def close(self) -> None:
        self.leave_group()
        self._http.close()

    def begin(self) -> None:
        """Abort running requests, and keep new requests waiting.

        Also closes the session of an interrupted update, even of an earlier trainer.
        """
        self.post("pause_generation", {"mode": "abort"})
        if self._has_sessions:
            self._ask("POST", "end_weight_update", {}, WHOLE_S)  # usually HTTP 400: no open session
        self._in_session = False
        if self.takes_deltas is None:
            # Without the plugin, releases with sessions refuse every update now; an older scheduler would end.
            self.takes_deltas = self._has_sessions and not self.offer(Message("", FORMAT, 0))
        if self.group is not None and self.weight_version() != self._named:
            self.leave_group()  # the server was restarted, and is in no group

    def leave_group(self) -> None:
        """Close the process group with the server, if one is open."""
        if self.group is not None:
            self.group.close()
            self.group = None

    def open_session(self) -> None:
        """Open the session of an update, unless a session is open or the release has no sessions."""
        if self._has_sessions and not self._in_session:
            self.post("begin_weight_update", {})
            self._in_session = True

    def load_from_disk(self, folder: str) -> None:
        """Have the server load a checkpoint folder."""
        # auto: not the server's own --load-format, which may be dummy
        body = {"model_path": folder, "load_format": "auto", "flush_cache": False}
        num_bytes = 0
        with suppress(OSError):  # if the folder is gone, the server will say so
            num_bytes = sum(file.stat().st_size for file in Path(folder).iterdir())
        self.post("update_weights_from_disk", body, deadline(num_bytes))

    def offer(self, message: Message) -> str:
        """Have megarl's plugin load a bucket; return why it has not loaded the bucket, or an empty text."""
        payloads = [message.text, *[""] * (self.tp - 1)] if message.text else []
        if payloads:
            self.open_session()
        body = {"serialized_named_tensors": payloads, "load_format": FORMAT, "flush_cache": False}
        answer = self._ask("POST", "update_weights_from_tensor", body, deadline(message.num_bytes))
        is_done = answer.status_code == 200 and self._read(answer).get("message") == message.receipt
        return "" if is_done else f"HTTP {answer.status_code}: {answer.text[:300]}"

    def load(self, message: Message) -> None:
        """Have megarl's plugin load a bucket; WeightSyncError unless it has."""
        if problem := self.offer(message):
            raise WeightSyncError(f"{self.url} has not loaded a bucket, {problem}; the server stays paused")

    def finish(self, version: int) -> None:
        """Close the update, drop all cached keys and values, and name the new version; requests wait for ``resume``.

        WeightSyncError if a step is refused.
        """
        if self._in_session:
            self.post("end_weight_update", {}, WHOLE_S)
            self._in_session = False
        flushed = self._ask("POST", "flush_cache")
        if flushed.status_code != 200:
            raise WeightSyncError(refusal("cache_not_flushed", url=self.url, answer=flushed))
        self.name(str(version))
        named_version = self.weight_version()
        if named_version != str(version):
            raise WeightSyncError(f"{self.url} says it has version {named_version!r} after an update to {version}")
        self._named = named_version

    def name(self, version: str) -> None:
        """Name the server's weights."""
        self.post("update_weight_version", {"new_version": version, "abort_all_requests": True})

    def resume(self) -> None:
        """Let requests in again."""
        self.post("continue_generation", {})

    def release_memory(self) -> None:
        """Pause, and free the memory of weights and cache. The weights are lost: an update must follow."""
        self.post("pause_generation", {"mode": "abort"})
        self.post("release_memory_occupation", {"tags": ["kv_cache", "weights"]}, WHOLE_S)

    def take_memory(self, kind: str) -> None:
        """Allocate "weights" or "kv_cache" again."""
        self.post("resume_memory_occupation", {"tags": [kind]}, WHOLE_S)

    def checksums(self) -> Checksums:
        """Return the server's own checksums, name -> checksum for each tensor-parallel rank.

        WeightSyncError if the server has none.
        """
        answer = self._ask("POST", "weights_checker", {"action": "checksum"}, WHOLE_S)
        with suppress(WeightSyncError, LookupError, TypeError, ValueError):
            if answer.status_code == 200 and (ranks := self._read(answer)["ranks"]):
                return [dict(rank["checksums"]) for rank in ranks]
        raise WeightSyncError(refusal("no_checksums", url=self.url, answer=answer))

    def weight_version(self, timeout_s: float | None = None) -> str:
        """Returns the server's name for the version of its weights; WeightSyncError without a name."""
        answer = self._ask("GET", "model_info", timeout_s=timeout_s)
        if answer.status_code != 200:
            raise WeightSyncError(f"{self.url} does not say the version of its weights, HTTP {answer.status_code}")
        return str(self._read(answer).get("weight_version"))

    def post(self, path: str, body: dict[str, Any], timeout_s: float | None = None) -> None:
        """Have the server do a step; WeightSyncError if the server refuses."""
        answer = self._ask("POST", path, body, timeout_s)
        is_json = answer.headers.get("content-type", "").startswith("application/json")
        has_failed = answer.status_code != 200
        if is_json and not has_failed and answer.text != "null":  # some answer null
            has_failed = self._read(answer).get("success") is False
        if has_failed:
            raise WeightSyncError(refusal("post_failed", url=self.url, path=path, answer=answer))

    def _read(self, answer: httpx.Response) -> dict[str, Any]:
        with reworded(DataError, WeightSyncError):
            return read_object(answer)

    def _ask(
        self, method: str, path: str, body: dict[str, Any] | None = None, timeout_s: float | None = None
    ) -> httpx.Response:
        """The server's answer; HangError without an answer in time, GoneError if the server has gone or fails."""
        timeout_s = deadline() if timeout_s is None else timeout_s
        exchange = in_thread(partial(request, self._http, method, f"/{path}", body, timeout_s))
        try:
            answer = exchange.result(timeout_s)  # httpx limits the time of each part of an answer alone
        except (TimeoutError, httpx.HTTPError, DataError) as error:
            message = f"{self.url}/{path}: {type(error).__name__}: {error}"
            kind = WeightSyncError if isinstance(error, DataError) else GoneError
            if isinstance(error, TimeoutError | httpx.TimeoutException):
                kind, message = HangError, f"{self.url}/{path}: no whole answer within {timeout_s:.0f} s"
            raise kind(message) from error.with_traceback(None)  # without frames, which would keep the bucket
        if answer.status_code >= 500:
            raise GoneError(f"{self.url}/{path}: HTTP {answer.status_code}: {answer.text[:300]}")
        return answer


Result = TypeVar("Result")
CONTROL_S = 15.0
"""Deadline of a step without weights: pause, session, flush, name, resume. A scheduler answers between two forward
passes, of which the longest, a chunk of prompts, takes a few seconds."""
JOIN_S = 0.25
"""Additional time per rank that joins a process group."""
BYTES_PER_S = 50e6
"""Slowest way of weights to a server: base64 in JSON through one Python process, or half of a gigabit network."""
WHOLE_S = 120.0
"""Deadline of a step over the GPU's whole memory: the end of a session, checksums, memory to allocate."""


def deadline(num_bytes: int = 0) -> float:
    """Seconds for a step that moves ``num_bytes`` to a server: CONTROL_S + num_bytes / BYTES_PER_S."""
    return CONTROL_S + num_bytes / BYTES_PER_S


class HangError(WeightSyncError):
    """The server has not answered by its deadline, or not joined in a group."""


class GoneError(WeightSyncError):
    """The server refuses or loses connections, or answers with HTTP 5xx."""


def in_thread(work: Callable[[], Result], daemon: bool = True) -> Future[Result]:
    """Run ``work`` in a thread of its own. Daemon threads die with the process, which must not happen inside torch."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            result = work()
        except Exception as error:  # from HTTP, gloo, NCCL or the store; the waiting thread raises it
            # Without frames, which would keep store and group alive.
            future.set_exception(error.with_traceback(None))
        else:
            future.set_result(result)

    threading.Thread(target=run, name="weight-sync", daemon=daemon).start()
    return future
