"""New weights into a running SGLang server, so that no token is ever sampled from a mixture of old and new ones.

    pause (abort) -> tensors [in a session] or a folder -> flush, verified -> version, verified -> continue

Pausing with ``abort`` is the consistent way: the other modes let requests that were under way mix the log-probabilities
of one version with the routes of another. A server that has refused any of the steps stays paused, so that it cannot
answer with what it may hold.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import httpx
import torch

from megarl.errors import WeightSyncError
from megarl.rollout.fp8 import is_fp8_weight, round_through_fp8
from megarl.rollout.sglang_http import MODEL_INFO, authorization
from megarl.rollout.sglang_versions import Version, can

Named = tuple[str, torch.Tensor]


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
        headers = authorization(api_key)
        # A connection that is kept may be closed by the server in the moment that a request goes out.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._http = httpx.Client(base_url=url, timeout=timeout_s, headers=headers, limits=limits, trust_env=False)

    def close(self) -> None:
        self._http.close()

    def begin(self) -> None:
        """Abort what runs, and keep new requests waiting.

        Ends a session that an update has left open which did not get to its end, of a trainer that is gone too.
        """
        self._post("pause_generation", {"mode": "abort"})
        if can(self._release, "update_session"):
            self._ask("POST", "end_weight_update", {})  # HTTP 400 where none is open, as is usual
            self._in_session = False

    def send(self, bucket: list[Named]) -> None:
        """Some tensors under their Hugging Face names, by value."""
        if not self._in_session and can(self._release, "update_session"):
            self._post("begin_weight_update", {})
            self._in_session = True
        whole = [(name, tensor.detach().cpu().contiguous()) for name, tensor in bucket]
        text = base64.b64encode(pickle.dumps(whole, protocol=pickle.HIGHEST_PROTOCOL)).decode()
        body = {"serialized_named_tensors": [text] * self._tp, "flush_cache": False}
        self._post("update_weights_from_tensor", body)

    def load_from_disk(self, folder: str) -> None:
        """All tensors from a checkpoint folder that the server can read."""
        self._post("update_weights_from_disk", {"model_path": folder, "flush_cache": False})

    def finish(self, version: int) -> None:
        """Close the update, drop what was computed with old weights, name the new version, and let requests in."""
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
        self._post("continue_generation", {})

    def weight_version(self) -> str:
        """What the server calls the version of its weights."""
        for path in MODEL_INFO:
            answer = self._ask("GET", path)
            if answer.status_code == 200:
                return str(answer.json().get("weight_version"))
        raise WeightSyncError(f"{self.url} does not say the version of its weights, HTTP {answer.status_code}")

    def _post(self, path: str, body: dict[str, Any]) -> None:
        answer = self._ask("POST", path, body)
        is_json = answer.headers.get("content-type", "").startswith("application/json")
        if answer.status_code != 200 or (is_json and answer.json().get("success") is False):
            told = f"HTTP {answer.status_code}: {answer.text[:300]}"
            raise WeightSyncError(f"{self.url}/{path} failed, {told}; the server stays paused")

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        try:
            return self._http.request(method, f"/{path}", json=body)
        except httpx.HTTPError as error:
            raise WeightSyncError(f"{self.url}/{path}: {type(error).__name__}: {error}") from error


def buckets(tensors: Iterable[Named], max_bytes: int) -> Iterator[list[Named]]:
    """Tensors in their order, in groups of at most ``max_bytes``, or of one larger tensor."""
    bucket: list[Named] = []
    size = 0
    for name, tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        if bucket and size + nbytes > max_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += nbytes
    if bucket:
        yield bucket


def as_engine_holds_them(tensors: Iterable[Named], dtype: torch.dtype, fp8_rounding: bool) -> Iterator[Named]:
    """In the engine's dtype; linear weights rounded through FP8 blocks of 128 x 128 if it has no FP8 kernels."""
    for name, tensor in tensors:
        held = tensor.detach()
        if fp8_rounding and is_fp8_weight(name):
            held = round_through_fp8(held.float())
        yield name, held.to(dtype)


def each_exactly_once(tensors: Iterable[Named], shapes: Mapping[str, tuple[int, ...]], version: int) -> Iterator[Named]:
    """The tensors as they come, provided that they are those of ``shapes`` (name -> shape), each once and finite.

    A server answers "success" to names that it does not know and to updates that lack some, and dies of wrong shapes:
    WeightSyncError here instead, at the latest when the last tensor has been taken.
    """
    outstanding = set(shapes)
    for name, tensor in tensors:
        if name not in shapes:
            raise WeightSyncError(f"{name} is unknown to the served model: send the names of its HF checkpoint")
        if name not in outstanding:
            raise WeightSyncError(f"{name} arrived twice in one update (version {version})")
        if tuple(tensor.shape) != shapes[name]:
            raise WeightSyncError(f"{name} has shape {tuple(tensor.shape)}, expected {shapes[name]}")
        if not torch.isfinite(tensor).all():
            raise WeightSyncError(f"{name} holds NaN or infinite values: look at the trainer's weights")
        outstanding.remove(name)
        yield name, tensor
    if outstanding:
        raise WeightSyncError(
            f"{len(outstanding)} of {len(shapes)} tensors are missing from the update to version {version}, for "
            f"example {', '.join(sorted(outstanding)[:3])}: send every tensor of the checkpoint"
        )
