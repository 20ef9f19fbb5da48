"""The engine on SGLang servers: requests over HTTP, and weights through the fleet.

Every rank of the trainer sends requests to all servers. The rank with the fleet sends the weights.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from megarl.config.tables.rollout import Reread, SGLangConfig
from megarl.core.types import Rollout, SampleRequest
from megarl.engines.protocol import Begin, Engine, OnFinish, SamplingParams, check_prompt, limit_response
from megarl.engines.sglang.answers import MOST_DRAWN_FROM, Bounds, longest_answer, parse_answer
from megarl.engines.sglang.client import Call, SGLangClient, Tell
from megarl.engines.sglang.fleet import Fleet
from megarl.engines.sglang.http import authorization
from megarl.engines.sglang.plugin.compact import make_header
from megarl.engines.sglang.transports.ipc import Helper
from megarl.engines.weights import WeightForm
from megarl.errors import ConfigError, MegarlError, RolloutError, WeightSyncError, refusal
from megarl.files.hf_config import MoeShape
from megarl.models.shapes import find_indexers

_UNCHANGED = {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""Sampling parameters with which the distribution is the model's."""
_ALWAYS = {"return_logprob": True, "logprob_start_len": -1, "return_prompt_token_ids": True, "stream": False}
"""Of every request."""


class SGLangEngine(Engine):
    """Samples with the servers at ``urls``.

    Two runs with the same seeds draw different responses: SGLang samples deterministically only with some GPU attention
    backends.
    """

    def __init__(
        self, urls: Sequence[str], config: Mapping[str, Any], *,
        fleet: Fleet | None, helper: Helper | None = None, agree: Callable[[MegarlError | None], None] | None = None,
        settings: SGLangConfig | None = None, api_key: str | None = None, form: WeightForm | None = None,
        reread: Reread = "replay", tell: Tell = print,
    ) -> None:  # fmt: skip
        """config: the model's config.json. fleet: sends the weights, in ``form`` (default bf16); absent on all ranks
        but the sender. helper: makes handles of the rank's memory for the servers. agree: a barrier of the ranks that
        share the servers; an error on any rank is raised on all ranks. reread: use of routes after a retraction. tell:
        gets a line about wrong answers."""
        settings = settings or SGLangConfig()
        self._shape = MoeShape.of(config)
        self._client = SGLangClient(urls, settings, authorization(api_key) | make_header(self._shape), tell)
        all_sparse = config.get("model_type") in ("qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_vl_moe")
        if all_sparse and self._shape.dense_layers:
            raise ConfigError(refusal("sparse_qwen", layers=self._shape.moe_layers, num=self._shape.num_layers))
        sizes = int(config.get("vocab_size") or 1 << 31), int(config.get("max_position_embeddings") or 1 << 30)
        ends, topk = config.get("eos_token_id"), config.get("index_topk") or 0
        end_tokens = frozenset([] if ends is None else np.ravel(ends).tolist())
        self._bounds = Bounds(*sizes, end_tokens, find_indexers(config) if topk else (), topk)
        self._fleet, self._helper, self._agree = fleet, helper, agree or _raise
        self._form, self._reread = form or WeightForm(torch.bfloat16), reread
        self.receives_weights = fleet is not None or helper is not None
        self.answer_counts = self._client.counts
        self._sampling = self._complete = False

    def converse(self, begin: Begin, params: SamplingParams, on_finish: OnFinish = None) -> None:
        """See ``Engine.converse``. WeightSyncError while an update is incomplete."""
        if not self._complete:
            raise WeightSyncError("the servers have no complete weights: update_weights first, and look for its error")
        shape = self._shape if params.return_routed_experts else None
        if shape is not None and not shape.moe_layers:
            raise RolloutError("the servers' model has no experts: set return_routed_experts to False")

        version = self.weight_version

        def decode(request: SampleRequest, answer: Any, rid: str, stopped: bool) -> Rollout:
            rollout = parse_answer(request, answer, version, shape, rid, params, self._bounds, stopped)
            self._client.counts["retractions"] += answer["meta_info"].get("num_retractions") or 0
            if self._reread == "drop" and rollout.reread_mask is not None and rollout.routed_mask is not None:
                return replace(rollout, routed_mask=rollout.routed_mask & ~rollout.reread_mask)
            return rollout

        self._sampling = True
        try:
            body = partial(self._make_body, params=params)
            most_bytes = partial(longest_answer, shape=shape, params=params, bounds=self._bounds)
            self._client.converse(begin, Call(body, decode, on_finish, str(version), most_bytes, self._reread == "ask"))
        finally:
            self._sampling = False

    def update_weights(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """See ``Engine.update_weights``; collective over the ranks that share the servers. Tensors have the shapes
        of the checkpoint.

        The update waits for every rank, because an update aborts all running requests. WeightSyncError on all ranks if
        a rank still samples in another thread.
        """
        self._agree(WeightSyncError(refusal("sampling_goes_on")) if self._sampling else None)
        self._complete = False
        outstanding, sender = iter(tensors), self._fleet or self._helper
        failure = self._try(lambda: sender and sender.update(outstanding, version, self._form))
        for _ in outstanding:  # gathering a sharded model is collective: every rank must reach the end
            pass
        self._agree(failure)
        self.weight_version, self._complete = version, True

    def prove_weights(self) -> bool:
        return self._fleet is not None and self._fleet.prove()

    def rest(self) -> None:
        self._complete, self.weight_version = False, -1
        self._agree(self._try(lambda: self._fleet and self._fleet.rest()))

    def close(self) -> None:
        """Stop the rank's own servers."""
        if self._fleet is not None:
            self._fleet.close()

    def _try(self, step: Callable[[], object]) -> MegarlError | None:
        """Run a step of the rank; return the step's error, for all ranks to raise."""
        try:
            step()
        except (RolloutError, WeightSyncError) as error:
            return error
        return None

    def _make_body(self, request: SampleRequest, params: SamplingParams) -> dict[str, Any]:
        # The last position stays free: a server refuses a request that could fill the last position.
        check_prompt(request, params, self._bounds.vocabulary)
        limit = limit_response(request, params, self._bounds.positions - 1)
        return {
            "input_ids": request.prompt_tokens.tolist(),
            "sampling_params": {
                # All values are named: the server takes missing values from the model's generation_config.json.
                "temperature": params.temperature,
                "top_p": params.top_p if params.has_nucleus else 1.0,
                # SGLang returns ids of a top_p below 1 with a top_k only.
                "top_k": min(MOST_DRAWN_FROM, self._bounds.vocabulary) if params.has_nucleus else -1,
                **_UNCHANGED,
                "max_new_tokens": limit,
                "stop_token_ids": list(params.stop_token_ids),
                "ignore_eos": not params.stop_token_ids,  # else the server stops at the model's own eos, too
                "skip_special_tokens": False,
            },
            **_ALWAYS,
            "return_sampling_mask": params.has_nucleus,
            "return_routed_experts": params.return_routed_experts,
            "routed_experts_start_len": request.known_rows,
            **({"return_indexer_topk": True} if params.return_indexer_topk else {}),
        }


def _raise(failure: MegarlError | None) -> None:
    if failure is not None:
        raise failure
