"""An environment that says "=7" once; runs name it as ``evaluation_environment:make``."""

from __future__ import annotations

from megarl.engines.tools.protocol import Episode, ModelTurn, Observation


class Sevens:
    def __init__(self, prompt: str) -> None:
        self._prompt = prompt

    async def step(self, turn: ModelTurn) -> Observation:
        if self._prompt[0] in "01234":
            raise OSError("the disk is gone")
        return Observation("=7", done=turn.index == 1)

    async def close(self) -> None:
        pass


class Environment:
    def begin(self, prompt: str, seed: int) -> Episode:
        return Sevens(prompt)


def make() -> Environment:
    return Environment()
