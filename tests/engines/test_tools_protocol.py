"""The protocols hold together: an environment of a few lines around a tool, driven as they say."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import numpy as np

from megarl.engines.tools.calculator import CalculatorTool
from megarl.engines.tools.protocol import Environment, Episode, ModelTurn, Observation, Tool


@dataclass(frozen=True)
class Sums:
    """Answers what stands after "calc:", and ends with a turn that has none or was cut."""

    tool: Tool

    def begin(self, prompt: str, seed: int) -> Episode:
        return SumsEpisode(self.tool)


@dataclass
class SumsEpisode:
    tool: Tool
    closed: bool = False

    async def step(self, turn: ModelTurn) -> Observation:
        _, call, argument = turn.text.partition("calc:")
        if not call or turn.finish_reason == "length":
            return Observation("", done=True)
        result = await self.tool(argument)
        return Observation(f"\n{result.output}\n", done=False)

    async def close(self) -> None:
        self.closed = True


def turn(index: int, text: str, cut: bool = False) -> ModelTurn:
    return ModelTurn(index, np.zeros(len(text), np.int32), text, "length" if cut else "stop")


def test_an_environment_answers_turns_until_it_is_done() -> None:
    environment: Environment = Sums(CalculatorTool())

    async def played(*turns: ModelTurn) -> list[Observation]:
        episode = environment.begin("What is 6 * 7?", seed=0)
        try:
            return [await episode.step(turn) for turn in turns]
        finally:
            await episode.close()

    found = asyncio.run(played(turn(0, "calc: 6 * 7"), turn(1, "calc: 1 / 0"), turn(2, "It is 42.")))
    assert [one.text for one in found] == ["\n42\n", "\nerror: division by zero\n", ""]
    assert [one.done for one in found] == [False, False, True]
    assert asyncio.run(played(turn(0, "calc: 6 *", cut=True)))[0].done
