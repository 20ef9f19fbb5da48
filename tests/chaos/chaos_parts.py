"""What a run under attack names in its configuration: a slow reward, an environment with a sandbox."""

from __future__ import annotations

import shutil
import time
from typing import Any


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
