"""New weights into a running SGLang server, so that no token is ever sampled from a mixture of old and new ones.

    pause (abort) -> tensors, broadcasts [in a session] or a folder -> flush, verified -> version, verified -> continue

Pausing with ``abort`` is the consistent way: the other modes let requests that were under way mix the log-probabilities
of one version with the routes of another. A server that has refused any of the steps stays paused, so that it cannot
answer with what it may hold.
"""

from __future__ import annotations

from typing import Any

import httpx

from megarl.errors import WeightSyncError
from megarl.rollout.sglang.http import MODEL_INFO, authorization
from megarl.rollout.sglang.versions import Version, can
from megarl.rollout.sglang.weights.buckets import Bucket
from megarl.rollout.sglang.weights.process_group import BroadcastGroup, in_thread

BEGIN_TIMEOUT_S = 60.0
"""How long a server may take to give up what runs; one that hangs is found out before anything is sent to it."""
GROUP_TIMEOUT_S = 60.0
"""How long a server may take to join a group, and to take part in one broadcast."""


MEMORY = ("kv_cache", "weights")
"""What a server can give back."""


class WeightSender:
    """Sends weights to one server over HTTP."""

    def __init__(
        self, url: str, version: Version, *, tp: int = 1, api_key: str | None = None, timeout_s: float = 600.0
    ) -> None:
        """``version`` and ``tp`` are the server's release and tensor-parallel size."""
        self.url = url
        self._release = version
        self._tp = tp
        self._in_session = False
        self._named: str | None = None
        self._group: BroadcastGroup | None = None
        headers = authorization(api_key)
        # A connection that is kept may be closed by the server in the moment that a request goes out.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._http = httpx.Client(base_url=url, timeout=timeout_s, headers=headers, limits=limits, trust_env=False)

    def close(self) -> None:
        self._leave_group()
        self._http.close()

    def begin(self) -> None:
        """Abort what runs, and keep new requests waiting.

        Ends a session that an update has left open which did not get to its end, of a trainer that is gone too.
        """
        self._post("pause_generation", {"mode": "abort"}, BEGIN_TIMEOUT_S)
        if can(self._release, "update_session"):
            self._ask("POST", "end_weight_update", {}, BEGIN_TIMEOUT_S)  # HTTP 400 if none is open, as usual
            self._in_session = False
        if self._group is not None and self.weight_version() != self._named:
            self._leave_group()  # somebody has started the server again: it is in no group

    def send(self, bucket: Bucket) -> None:
        """Some tensors under their Hugging Face names, by value."""
        self._open_session()
        # One of the entries goes to each tensor-parallel rank.
        body = {"serialized_named_tensors": [bucket.payload] * self._tp}
        self._post("update_weights_from_tensor", body | {"load_format": "flattened_bucket", "flush_cache": False})

    def broadcast(self, bucket: Bucket) -> None:
        """The same through a process group, gloo from a CPU and NCCL from a GPU; the server joins it at first."""
        self._open_session()
        names = {"names": bucket.names, "dtypes": bucket.dtypes, "shapes": bucket.shapes}
        try:
            group = self._group or self._new_group(bucket)
            body = {**names, "group_name": group.name, "load_format": "flattened_bucket", "flush_cache": False}
            group.broadcast(bucket.flat, in_thread(lambda: self._post("update_weights_from_distributed", body)))
        except WeightSyncError:
            self._leave_group()
            raise

    def _new_group(self, bucket: Bucket) -> BroadcastGroup:
        self._group = group = BroadcastGroup(self.url, self._tp, bucket.flat.device, GROUP_TIMEOUT_S)
        body = {
            "master_address": group.address,
            "master_port": group.port,
            "rank_offset": 1,
            "world_size": group.world_size,
            "group_name": group.name,
            "backend": group.backend,
        }
        group.join(in_thread(lambda: self._post("init_weights_update_group", body)))
        return group

    def _leave_group(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    def _open_session(self) -> None:
        if not self._in_session and can(self._release, "update_session"):
            self._post("begin_weight_update", {})
            self._in_session = True

    def load_from_disk(self, folder: str) -> None:
        """All tensors from a checkpoint folder that the server can read."""
        body = {"model_path": folder, "load_format": "auto", "flush_cache": False}  # not the one it was started with
        self._post("update_weights_from_disk", body)

    def finish(self, version: int) -> None:
        """Close the update, drop what was computed with old weights, and name the new version.

        Requests wait until ``resume`` is called: nothing is sampled before the weights have been looked at.
        """
        if self._in_session:
            self._post("end_weight_update", {})
            self._in_session = False
        flushed = self._ask("POST", "flush_cache")
        if flushed.status_code != 200:
            raise WeightSyncError(
                f"{self.url} refuses to flush its cache, HTTP {flushed.status_code}: {flushed.text[:300]}; it would "
                "serve keys, values and routes of old weights and stays paused"
            )
        self._post("update_weight_version", {"new_version": str(version), "abort_all_requests": True})
        found = self.weight_version()
        if found != str(version):
            raise WeightSyncError(f"{self.url} says its weights are version {found!r} after an update to {version}")
        self._named = found

    def resume(self) -> None:
        """Let requests in."""
        self._post("continue_generation", {})

    def release_memory(self) -> None:
        """Stop, and give back the memory of weights and cache. The weights are lost: an update must follow."""
        self._post("pause_generation", {"mode": "abort"}, BEGIN_TIMEOUT_S)
        self._post("release_memory_occupation", {"tags": list(MEMORY)})

    def take_memory(self, kind: str) -> None:
        """Take one of ``MEMORY`` again."""
        self._post("resume_memory_occupation", {"tags": [kind]})

    def checksums(self) -> list[dict[str, str]]:
        """What the server computes of each of its own tensors, one mapping per tensor-parallel rank."""
        answer = self._ask("POST", "weights_checker", {"action": "checksum"})
        ranks = answer.json().get("ranks") if answer.status_code == 200 else None
        if not ranks:
            raise WeightSyncError(
                f"{self.url} gives no checksums, HTTP {answer.status_code}: {answer.text[:300]}; take a release "
                "that has /weights_checker, or set sglang.checksums = false"
            )
        return [dict(rank["checksums"]) for rank in ranks]

    def weight_version(self) -> str:
        """What the server calls the version of its weights."""
        for path in MODEL_INFO:
            answer = self._ask("GET", path)
            if answer.status_code == 200:
                return str(answer.json().get("weight_version"))
        raise WeightSyncError(f"{self.url} does not say the version of its weights, HTTP {answer.status_code}")

    def _post(self, path: str, body: dict[str, Any], timeout_s: float | None = None) -> None:
        answer = self._ask("POST", path, body, timeout_s)
        is_json = answer.headers.get("content-type", "").startswith("application/json")
        said = answer.json() if is_json else None  # null from some
        if answer.status_code != 200 or (isinstance(said, dict) and said.get("success") is False):
            told = f"HTTP {answer.status_code}: {answer.text[:300]}"
            raise WeightSyncError(f"{self.url}/{path} failed, {told}; the server stays paused")

    def _ask(
        self, method: str, path: str, body: dict[str, Any] | None = None, timeout_s: float | None = None
    ) -> httpx.Response:
        timeout = self._http.timeout if timeout_s is None else httpx.Timeout(timeout_s)
        try:
            return self._http.request(method, f"/{path}", json=body, timeout=timeout)
        except httpx.HTTPError as error:
            raise WeightSyncError(f"{self.url}/{path}: {type(error).__name__}: {error}") from error
