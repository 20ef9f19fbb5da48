"""The local engine with answers that are well-formed and wrong, for some requests or all, from some weights on.

``rollout.engine = "tampered_engine:late"`` and so on; ``TAMPERED`` says what has been done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig

from megarl.config import Config
from megarl.config.plugs import EngineKind
from megarl.core.types import Rollout, SampleRequest
from megarl.engines.local.engine import LocalEngine

TAMPERED: set[tuple[int, int, int]] = set()
"""(weight version, group, sample) of all answers that are wrong."""
FROM_VERSION = [0]
"""Answers are wrong from these weights on."""
Answers = dict[tuple[int, int], Rollout]


def is_chosen(key: tuple[int, int]) -> bool:
    """Four of the 32 responses of a step, each of another prompt."""
    return key[0] < 4 and key[1] == 1


def glue(prompt: Rollout, answer: Rollout) -> Rollout:
    """The answer of one request below the prompt of another, all columns with it."""
    cut, begin = prompt.prompt_length, answer.prompt_length
    columns = "tokens", "loss_mask", "rollout_logprobs", "routed_experts", "weight_versions", "gate_weights"
    joined = {
        name: np.concatenate([getattr(prompt, name)[:cut], getattr(answer, name)[begin:]])
        for name in columns
        if getattr(prompt, name) is not None
    }
    return replace(prompt, **joined, routed_mask=np.arange(len(joined["tokens"])) < len(joined["tokens"]) - 1)


def shift_routes(rollout: Rollout) -> Rollout:
    assert rollout.routed_experts is not None
    return replace(rollout, routed_experts=np.roll(rollout.routed_experts, 1, 0))


def routes_of(rollout: Rollout, other: Rollout) -> Rollout:
    assert other.routed_experts is not None
    shape = (rollout.num_tokens, *other.routed_experts.shape[1:])
    return replace(rollout, routed_experts=np.resize(other.routed_experts, shape))


def swapped(answers: Answers, chosen: Sequence[tuple[int, int]], _: Answers) -> Answers:
    others = [*chosen[1:], chosen[0]]
    return {key: glue(answers[key], answers[other]) for key, other in zip(chosen, others, strict=True)}


def late(answers: Answers, chosen: Sequence[tuple[int, int]], _: Answers) -> Answers:
    return {key: shift_routes(answers[key]) for key in chosen}


def foreign_routes(answers: Answers, chosen: Sequence[tuple[int, int]], _: Answers) -> Answers:
    others = [*chosen[1:], chosen[0]]
    return {key: routes_of(answers[key], answers[other]) for key, other in zip(chosen, others, strict=True)}


def replayed(answers: Answers, chosen: Sequence[tuple[int, int]], earlier: Answers) -> Answers:
    versions = {key: answers[key].weight_versions[-1] for key in chosen}
    old = {key: glue(answers[key], earlier[key]) for key in chosen if key in earlier}
    return {key: replace(r, weight_versions=np.full_like(r.weight_versions, versions[key])) for key, r in old.items()}


class TamperedEngine(LocalEngine):
    """See the module; without ``tamper`` the weights are another policy's."""

    def __init__(self, config: Config, tamper: Callable[..., Answers] | None) -> None:
        super().__init__(AutoConfig.from_pretrained(config.model.path), fp8_rounding=config.rollout.fp8_rounding)
        self._tamper, self._earlier = tamper, Answers()

    @torch.no_grad()
    def update_weights(self, tensors: Any, version: int) -> None:
        super().update_weights(tensors, version)
        if self._tamper is None and version >= FROM_VERSION[0]:
            generator = torch.Generator().manual_seed(0)
            for view in self._views.values():
                view += 0.2 * torch.randn(view.shape, generator=generator)

    def _sample(self, requests: Sequence[SampleRequest], *rest: Any) -> list[Rollout]:
        made = super()._sample(requests, *rest)
        answers = {(rollout.group, rollout.sample): rollout for rollout in made}
        changed: Mapping[tuple[int, int], Rollout] = {}
        if self.weight_version >= FROM_VERSION[0]:
            chosen = sorted(filter(is_chosen, answers))
            changed = answers if self._tamper is None else self._tamper(answers, chosen, self._earlier)
        TAMPERED.update((self.weight_version, *key) for key in changed)
        self._earlier = answers
        return list({**answers, **changed}.values())


def _kind(tamper: Callable[..., Answers] | None) -> EngineKind:
    return EngineKind(lambda config, tell: TamperedEngine(config, tamper), routes=True, fp8=True)


KINDS = {"swapped": swapped, "late": late, "foreign_routes": foreign_routes, "replayed": replayed}
other_weights = _kind(None)
engines = {name: _kind(tamper) for name, tamper in KINDS.items()}


def __getattr__(name: str) -> EngineKind:
    if name.startswith("with_") and name[5:] in engines:
        return engines[name[5:]]
    raise AttributeError(name)
