"""Requests to a running SGLang or vLLM server; the answers of both in the form of SGLang's ``/generate``.

vLLM was read, not run: ``/v1/completions`` in its protocol at commit 002032ee (``routed_experts``: base64 of an .npy
file, [tokens - 1, layers, K]). Needs httpx, of the extra ``train``.
"""

import base64
import io
from dataclasses import dataclass
from typing import Any

import numpy as np

from megarl.errors import ConfigError, RequestError, RolloutError, TraceError, refuse_if, reworded
from megarl.files.foreign_json import UNPACKED
from megarl.files.hf_config import MoeShape
from megarl.routes.answers import routes_from_sglang
from megarl.routes.trace import RoutingTrace

TOP_K = 4000
"""SGLang records kept sets with a finite top_k only."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One sequence, with SGLang's ``meta_info``."""

    prompt: list[int]
    output: list[int]
    meta: dict[str, Any]
    start: int
    """First row that was asked for."""

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *self.output]

    @property
    def versions(self) -> set[str | None]:
        """Weight versions of the response."""
        spans = self.meta.get("weight_versions") or [{"version": self.meta.get("weight_version")}]
        return {span["version"] for span in spans}

    def logprobs(self, part: str = "output") -> np.ndarray:
        """Return float64 [T] of the "output", or of the "input", whose first token has NaN."""
        return np.array([entry[0] for entry in self.meta.get(f"{part}_token_logprobs") or ()], np.float64)

    def trace(self, shape: MoeShape) -> RoutingTrace:
        """Return the routes; TraceError as ``routes_from_sglang``."""
        counts = {"prompt_tokens": len(self.prompt), "completion_tokens": len(self.output)}
        meta = {"routed_experts": _as_sglang(self.meta.get("routed_experts"), shape), **counts}
        return routes_from_sglang({"meta_info": meta}, shape, start=self.start, tokens=self.tokens, label="the answer")


def _as_sglang(text: Any, shape: MoeShape) -> Any:
    """Return vLLM's routes, of all layers or of the MoE layers, in SGLang's form; other text as it is."""
    if not isinstance(text, str) or not text.startswith("k05VTVBZ"):  # base64 of how an .npy file begins
        return text
    rows = np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False).astype("<i4")
    if rows.ndim != 3 or rows.shape[1] not in (shape.num_layers, len(shape.moe_layers)) or rows.shape[2] != shape.topk:
        raise TraceError(f"routes are {list(rows.shape)}, expected [rows, {shape.num_layers}, {shape.topk}]")
    whole = np.zeros((len(rows), shape.num_layers, shape.topk), "<i4")
    whole[:, shape.moe_layers if rows.shape[1] < shape.num_layers else slice(None)] = rows
    return base64.b64encode(whole.tobytes()).decode()


class EngineClient:
    """The server at ``url``. RolloutError without an answer, RequestError if it refuses a request."""

    def __init__(self, url: str, api_key: str | None = None, timeout_s: float = 600.0) -> None:
        import httpx  # here: the kit does not need it

        self.url, self._errors = url, (httpx.HTTPError, httpx.InvalidURL, ValueError)
        headers = UNPACKED | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
        # SGLang closes an idle connection even while a request is on its way: no connection is used twice.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._http = httpx.Client(headers=headers, timeout=timeout_s, limits=limits, trust_env=False)
        self.name, self.info = "vLLM", self.call("/version")
        if self.info is None:
            self.name, self.info = "SGLang", self.call("/server_info")
        refuse_if(not isinstance(self.info, dict) or "version" not in self.info, ConfigError, "other_service", url=url)

    def call(self, path: str, body: Any = None) -> Any:
        """Return the JSON of an answer, to a POST if there is a body; None without such a page. RolloutError without an
        answer, RequestError for a refusal."""
        problem, advice = f"no answer from {self.url} (", "): start it, or correct the URL"
        with reworded(self._errors, RolloutError, problem, advice, repr):
            answer = self._http.request("GET" if body is None else "POST", f"{self.url.rstrip('/')}{path}", json=body)
            if answer.is_success or answer.status_code == 404:
                return answer.json() if answer.is_success else None
        raise RequestError(f"{answer.url}: HTTP {answer.status_code}: {answer.text[:300]}")

    def ask(
        self, prompts: list[list[int]], num_tokens: int, salt: str, start: int = 0, top_p: float = 1.0, **more: Any
    ) -> list[Answer]:
        """Return the answers of ``num_tokens`` tokens to one request, greedy if ``top_p`` is 1.

        Prompts of different salts share no prefix cache. more: ``ignore_eos``, default True; ``scores_prompt``: ask for
        log-probabilities of the prompts, which keeps them out of the prefix cache.
        """
        params = {"temperature": float(top_p < 1), "top_p": top_p, "min_p": 0.0, "repetition_penalty": 1.0}
        params |= {"ignore_eos": more.get("ignore_eos", True)}
        scores = {"logprob_start_len": 0, "prompt_logprobs": 0} if more.get("scores_prompt") else {}
        if self.name == "vLLM":
            body = {"prompt": prompts, "max_tokens": num_tokens, "logprobs": 0, "return_token_ids": True, **params}
            body |= {"cache_salt": salt, "routed_experts_prompt_start": start, **scores}
            return [_read_vllm(choice, start) for choice in self.call("/v1/completions", body)["choices"]]
        params |= {"max_new_tokens": num_tokens, "top_k": TOP_K if top_p < 1 else -1}
        body = {"input_ids": prompts, "sampling_params": params, "return_logprob": True, "extra_key": salt, **scores}
        body |= {"return_routed_experts": True, "routed_experts_start_len": start, "return_sampling_mask": top_p < 1}
        found = zip(self.call("/generate", body), prompts, strict=True)
        return [Answer(prompt, answer["output_ids"], answer["meta_info"], start) for answer, prompt in found]


def _read_vllm(choice: dict[str, Any], start: int) -> Answer:
    prompt, scored = choice["prompt_token_ids"], choice.get("prompt_logprobs") or []
    scores = [[entry and entry[str(token)]["logprob"]] for entry, token in zip(scored, prompt, strict=False)]
    sampled = [[logprob] for logprob in choice["logprobs"]["token_logprobs"]]
    meta = {"input_token_logprobs": scores, "output_token_logprobs": sampled}
    return Answer(prompt, choice["token_ids"], meta | {"routed_experts": choice.get("routed_experts")}, start)
