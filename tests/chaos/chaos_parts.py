"""What a run under attack names in its configuration: a slow reward, an environment with a sandbox, a lying engine."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.config.plugs import EngineKind

if TYPE_CHECKING:
    from megarl.core.types import Rollout

LIES_VARIABLE = "CHAOS_LIES"
"""Environment variable with the path of a JSON file: what the lying engine does, and where its ledger is."""


def reward(prompt: str, response: str, answer: str, **rest: Any) -> float:
    """Sometimes earned by an untrained model, and slow, so that there is a middle of a step."""
    time.sleep(0.02)
    return float(len(response) % 2)


class _Episode:
    def __init__(self, tool: Any) -> None:
        self._tool = tool

    async def step(self, turn: Any) -> Any:
        from megarl.engines.tools.protocol import Observation

        if self._tool is not None:
            await self._tool("import time; time.sleep(0.2)")
        return Observation("", done=True)  # whatever the tool says: a killed call changes no number

    async def close(self) -> None:
        """Nothing is open."""


class _Environment:
    """One episode in eight runs code in a sandbox."""

    def __init__(self) -> None:
        from megarl.engines.tools.python_tool import PythonTool

        self._tool = PythonTool() if shutil.which("bwrap") else None

    def begin(self, prompt: str, seed: int) -> Any:
        return _Episode(self._tool if seed % 8 == 0 else None)


def make() -> Any:
    """The environment."""
    return _Environment()


def _lies() -> dict[str, Any]:
    """{"lie": name, "share": of the sequences, "steps": [of those drawn], "ledger": path, "seed": ...}."""
    return json.loads(Path(os.environ[LIES_VARIABLE]).read_text())


def _shift_routes(rollout: Rollout, other: Rollout) -> Rollout:
    import numpy as np

    assert rollout.routed_experts is not None
    return replace(rollout, routed_experts=np.roll(rollout.routed_experts, 1, axis=0))


def _foreign_routes(rollout: Rollout, other: Rollout) -> Rollout:
    import numpy as np

    assert rollout.routed_experts is not None
    assert other.routed_experts is not None
    rows = np.resize(other.routed_experts[:-1][::-1], rollout.routed_experts.shape)
    return replace(rollout, routed_experts=rows)


def _foreign_answer(rollout: Rollout, other: Rollout) -> Rollout:
    """The other's response, log-probabilities and routes under this prompt."""
    import numpy as np

    prompt, start = rollout.prompt_length, other.prompt_length

    def joined(name: str) -> Any:
        return np.concatenate([getattr(rollout, name)[:prompt], getattr(other, name)[start:]])

    names = ("tokens", "loss_mask", "rollout_logprobs", "routed_experts", "routed_mask", "weight_versions")
    return replace(rollout, finish_reason=other.finish_reason, **{name: joined(name) for name in names})


def _shift_logprobs(rollout: Rollout, other: Rollout) -> Rollout:
    import numpy as np

    logprobs = rollout.rollout_logprobs.copy()
    logprobs[rollout.loss_mask] = np.roll(logprobs[rollout.loss_mask], 1)
    return replace(rollout, rollout_logprobs=logprobs)


LIES: dict[str, Callable[[Any, Any], Any]] = {
    "routes one token late": _shift_routes,
    "routes of another response": _foreign_routes,
    "answer to another prompt": _foreign_answer,
    "log-probabilities one token late": _shift_logprobs,
}
"""What an engine may do to a rollout, given another one."""
WEIGHT_LIES = ("stale weights", "foreign weights")


def _make_liar(config: Any, tell: Callable[[str], None]) -> Any:
    import torch
    from transformers import AutoConfig

    from megarl.engines.local.engine import LocalEngine

    class Liar(LocalEngine):
        """The local engine, which says what it has been told to say, and keeps a ledger of it."""

        def update_weights(self, tensors: Any, version: int) -> None:
            told = _lies()
            held = {name: view.clone() for name, view in self._views.items()}
            first = self.weight_version < 0
            super().update_weights(tensors, version)
            if told["lie"] not in WEIGHT_LIES or version not in told["steps"] or first:
                return
            _record(told, version, -1, -1)
            for name, view in self._views.items():
                if told["lie"] == "stale weights":
                    view.copy_(held[name])
                elif view.is_floating_point():
                    view.mul_(1 + 0.5 * torch.randn(view.shape, generator=torch.Generator().manual_seed(version)))

        def _sample(self, requests: Any, params: Any, on_finish: Any) -> list[Rollout]:
            rollouts = super()._sample(requests, params, on_finish)
            told = _lies()
            if told["lie"] not in LIES or self.weight_version not in told["steps"]:
                return rollouts
            return [self._lie(told, rollout, rollouts) for rollout in rollouts]

        def _lie(self, told: dict[str, Any], rollout: Rollout, all_of_them: Sequence[Rollout]) -> Rollout:
            rng = random.Random(f"{told['seed']} {self.weight_version} {rollout.group} {rollout.sample}")
            if rng.random() >= told["share"]:
                return rollout
            others = [other for other in all_of_them if other.group != rollout.group]
            changed = LIES[told["lie"]](rollout, rng.choice(others))
            _record(told, self.weight_version, rollout.group, rollout.sample)
            return changed

    return Liar(AutoConfig.from_pretrained(config.model.path), dtype=torch.float32)


def _record(told: dict[str, Any], version: int, group: int, sample: int) -> None:
    with Path(told["ledger"]).open("a") as file:
        file.write(json.dumps([version, group, sample]) + "\n")


liar = EngineKind(_make_liar, routes=True)
