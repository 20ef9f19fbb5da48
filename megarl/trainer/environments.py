"""Builds environment and tools of a configuration, and the player of episodes."""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from megarl.config import Config, EnvironmentConfig
from megarl.config.plugs import load_plug
from megarl.core.choices.records import call_own
from megarl.data.judge import Judge
from megarl.data.tokenizer import count_rows
from megarl.engines.episodes import EpisodeLimits
from megarl.engines.player import Player
from megarl.engines.tools.calculator import CalculatorTool
from megarl.engines.tools.environment import Block, Hermes, ToolEnvironment
from megarl.engines.tools.protocol import Environment, Tool
from megarl.engines.tools.python_tool import PythonTool
from megarl.engines.tools.sandbox import Limits
from megarl.errors import ConfigError
from megarl.files.foreign_files import read_object
from megarl.models.shapes import read_shape


def make_player(config: Config, tokenizer: PreTrainedTokenizerBase, judge: Judge) -> Player:
    """Return the player that draws and judges samples; errors as in ``make_environment``."""
    settings = config.environment
    limits = EpisodeLimits(
        response_tokens=config.rollout.max_response_tokens,
        turns=settings.max_turns,
        turn_tokens=settings.max_turn_tokens,
        positions=read_shape(config.model.path).max_sequence_length,
        vocabulary=count_rows(tokenizer),
        step_s=settings.step_s,
        episode_s=settings.episode_s,
    )
    return Player(tokenizer, judge, limits, make_environment(settings), settings.concurrency)


def turn_ends(config: Config, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the tokens that end a turn: the model's end tokens and ``environment.stop``; ConfigError as for each."""
    ends = (*stop_tokens(config.model.path, tokenizer), *stop_ids(tokenizer, config.environment.stop))
    num_rows = count_rows(tokenizer) or math.inf
    if absent := [token for token in ends if not 0 <= token < num_rows]:
        raise ConfigError(
            f"model.path: {config.model.path} ends turns with token {absent[0]}, but the model has {num_rows} rows "
            "(vocab_size in config.json), so that it never writes it; correct generation_config.json, the tokenizer or "
            "environment.stop"
        )
    return ends


def make_environment(config: EnvironmentConfig) -> Environment | None:
    """Return the environment, if any; ConfigError if it or a tool cannot work here."""
    if config.function is None:
        return None
    if config.function == "tools":
        template = {} if config.observation is None else {"template": config.observation}
        form = (
            Hermes(**template) if config.format == "hermes" else Block(config.call_open, config.call_close, **template)
        )
        return ToolEnvironment([_tool(name, config) for name in config.tools], form)
    environment = _make("environment.function", config.function, config.options, "tools")
    if not callable(getattr(environment, "begin", None)):
        raise ConfigError(
            f"environment.function {config.function!r} made a {type(environment).__name__} without "
            "begin(prompt, seed); expected an environment, see docs/environments.md"
        )
    return environment


def stop_tokens(model_path: str, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the end tokens of the checkpoint's generation config and tokenizer; ConfigError without end tokens."""
    tokens: set[int] = set()
    file = Path(model_path) / "generation_config.json"
    if os.path.lexists(file):  # it is optional
        eos = read_object(file).get("eos_token_id")
        ends = eos if isinstance(eos, list) else [] if eos is None else [eos]
        if not all(type(token) is int and token >= 0 for token in ends):
            raise ConfigError(f"{file}: eos_token_id is {eos!r:.80}, expected a token id or a list of them")
        tokens.update(ends)
    if isinstance(tokenizer.eos_token_id, int):
        tokens.add(tokenizer.eos_token_id)
    if not tokens:
        raise ConfigError(f"{model_path} names no end token, neither in generation_config.json nor in the tokenizer")
    return tuple(sorted(tokens))


def stop_ids(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> tuple[int, ...]:
    """Return the token of each text; ConfigError for a text of several tokens: engines stop at single tokens."""
    ids: list[int] = []
    for text in texts:
        try:
            tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        except Exception as error:  # tokenizers refuse texts with errors of any type
            raise ConfigError(f"environment.stop: the tokenizer cannot read {text!r}: {error}") from error
        if len(tokens) != 1:
            raise ConfigError(
                f"environment.stop: {text!r} is {len(tokens)} tokens of this tokenizer, expected one: a turn ends with "
                "a token; leave it out, and the turn ends with the end token"
            )
        ids.append(int(tokens[0]))
    return tuple(ids)


def _tool(name: str, config: EnvironmentConfig) -> Tool:
    if name == "calculator":
        return CalculatorTool()
    if name == "python":
        limits = Limits(
            wall_s=config.python_s,
            cpu_s=max(1, round(config.python_s)),
            memory_bytes=config.python_memory_mb << 20,
            num_processes=None if config.python_processes < 0 else config.python_processes,
            output_bytes=config.python_output_kb << 10,
        )
        return PythonTool(limits, limits_alone=config.python_limits_alone)
    tool: Tool = _make("environment.tools", name, {}, "calculator, python")
    if not callable(tool) or not isinstance(getattr(tool, "name", None), str):
        raise ConfigError(f"environment.tools: {name!r} made a {type(tool).__name__}, expected a tool with a name")
    return tool


def _make(key: str, path: str, options: Mapping[str, Any], built_in: str) -> Any:
    """Return what "package.module:factory" makes."""
    return call_own(key, load_plug(key, path, built_in), **options)
