"""Evaluation of an engine on benchmarks: shared by runs (between two steps) and ``megarl eval``.

    benchmark -> ``draw`` (samples of this rank) -> ``Samples`` [P, S] of all ranks -> ``score`` -> figures

Each response has a separate seed: figures depend neither on the number of ranks nor on further benchmarks. Seeds do not
depend on the step: a change of the figures comes from the weights.

A response is correct if its reward is above ``reward.threshold``. A response without a reward, because the reward
function or the environment failed, counts as wrong: a share of the judged responses would be no pass rate.
"""

import math
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import iscoroutinefunction
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from megarl.config import Config, EnvironmentConfig
from megarl.config.plugs import check_function, load_plug
from megarl.core.choices.records import call_own
from megarl.core.choices.stopping import POSITIVE
from megarl.core.sampling.collector import FixedSamples, Key
from megarl.core.sampling.pass_at_k import mean_interval, pass_at_k, wilson_interval
from megarl.data.benchmarks import HELDOUT, Benchmark, choose, load
from megarl.data.judge import Judge
from megarl.data.prompts import ChatTemplate, Prompt, load_prompts
from megarl.data.tokenizer import count_rows, load_model_tokenizer
from megarl.engines.agents import ForeignAgent
from megarl.engines.player import Agent, Draw, EpisodeLimits, Player, Sample
from megarl.engines.protocol import Engine
from megarl.engines.tools.calculator import CalculatorTool
from megarl.engines.tools.environment import Block, Hermes, ToolEnvironment
from megarl.engines.tools.protocol import Environment, Tool
from megarl.engines.tools.python_tool import PythonTool
from megarl.engines.tools.sandbox import Limits
from megarl.errors import ConfigError, refusal, reworded
from megarl.files.foreign_json import read_object
from megarl.models.shapes import read_shape
from megarl.run.progress import Advance
from megarl.trainer.sampling import requests
from megarl.trainer.sampling.step_rollouts import SampleTable


@dataclass(frozen=True, slots=True)
class PlayedBenchmark:
    """A benchmark with prompts, and the player that judges responses."""

    name: str
    prompts: Sequence[Prompt]
    player: Player
    threshold: float
    """A response with a larger reward is correct."""

    @classmethod
    def of(
        cls, benchmark: Benchmark, prompts: Sequence[Prompt], config: Config, tokenizer: PreTrainedTokenizerBase,
        player: Player | None = None,
    ) -> "PlayedBenchmark":  # fmt: skip
        """Make judge and player of the benchmark, unless a player is given."""
        if player is None:
            player = make_player(config, tokenizer, Judge(benchmark.reward, **config.judge_options(benchmark.reward)))
        return cls(benchmark.name, prompts, player, benchmark.threshold)


def load_benchmarks(config: Config, tokenizer: PreTrainedTokenizerBase, player: Player) -> dict[str, PlayedBenchmark]:
    """Return ``data.heldout`` and ``eval.sets`` by name; known benchmarks bring template and reward.

    player: the player of the run, for all benchmarks that are judged by ``reward.function``.
    """
    players, played = {config.reward.function: player}, dict[str, PlayedBenchmark]()
    for benchmark in choose((), config) if config.benchmarks else ():
        prompts, name = load(benchmark, tokenizer, config), benchmark.name
        played[name] = PlayedBenchmark.of(benchmark, prompts, config, tokenizer, players.get(benchmark.reward))
        players[benchmark.reward] = played[name].player
    return played


def draw(
    config: Config, engine: Engine, benchmark: PlayedBenchmark, num_samples: int, stop_tokens: tuple[int, ...],
    on_finish: Advance | None = None,
) -> dict[Key, Sample]:  # fmt: skip
    """Return this rank's share of ``num_samples`` responses per prompt; a collective call.

    Errors of a reward or an environment are in the samples; errors of the engine are raised.
    """
    places = range(dist.get_rank(), len(benchmark.prompts) * num_samples, dist.get_world_size())
    keys = [divmod(place, num_samples) for place in places]
    # Independent of further benchmarks.
    number = 0 if benchmark.name == HELDOUT else zlib.crc32(benchmark.name.encode())
    request_of = requests.make_requests(config.run.seed, requests.EVALUATE, number, benchmark.prompts.__getitem__)
    params, work = requests.eval_params(config, stop_tokens), f"the evaluation on {benchmark.name}"
    drawn = Draw(FixedSamples(keys), request_of, benchmark.player)
    return requests.sample_together(engine, partial(drawn.run, engine, params, on_finish), work)


def score_table(table: SampleTable, benchmark: PlayedBenchmark) -> dict[str, float]:
    """Return the metrics of a benchmark; RewardError, or RolloutError, if no response has a reward."""
    table.require_rewards(f"evaluation on {benchmark.name}")
    rewards = np.where(table.is_judged, table.column("reward"), np.nan)
    columns = rewards, table.column("generated").astype(np.int64), table.column("cut") > 0
    rewards, lengths, cut = (column.reshape(len(benchmark.prompts), -1) for column in columns)
    figures = score(Samples(rewards, lengths, cut, benchmark.threshold), ks=())
    metrics = {"reward": figures["reward_mean"], "pass_rate": figures["avg"]["value"]}
    return metrics | {name: float(figures[name]) for name in ("length_mean", "judged", "responses")}


def pool(metrics_of: Mapping[str, Mapping[str, float]], num_prompts: Sequence[int]) -> dict[str, float]:
    """Return the metrics of all benchmarks: averages weighted by number of prompts, sums of counts, and the metrics of
    each benchmark.

    The metrics of a single benchmark carry no name.
    """
    metrics: dict[str, float] = {}
    for key in next(iter(metrics_of.values())):
        values = [of_benchmark[key] for of_benchmark in metrics_of.values()]
        is_count = key in ("judged", "responses") or len(values) == 1
        metrics[f"eval/{key}"] = float(sum(values) if is_count else np.average(values, weights=num_prompts))
    if len(metrics_of) == 1:
        return metrics
    by_name = ((f"eval/{name}/{key}", value) for name, table in metrics_of.items() for key, value in table.items())
    return metrics | dict(by_name)


@dataclass(frozen=True, slots=True)
class RunInputs:
    """What a run reads before sampling. ``megarl doctor`` reads it too."""

    tokenizer: PreTrainedTokenizerBase
    prompts: Sequence[Prompt]
    judge: Judge
    player: Player
    benchmarks: dict[str, PlayedBenchmark]
    stop_tokens: tuple[int, ...]

    def warnings(self) -> Iterator[str]:
        """Yield a line for each benchmark with prompts of the training data."""
        trained = {prompt.text for prompt in self.prompts}
        for name, benchmark in self.benchmarks.items():
            if num := sum(prompt.text in trained for prompt in benchmark.prompts):
                key = "data.heldout" if name == HELDOUT else f"eval.sets.{name}"
                yield refusal("heldout_is_trained", key=key, num=num, total=len(benchmark.prompts))

    def close(self) -> None:
        """End the processes of the rewards."""
        for player in (self.player, *(benchmark.player for benchmark in self.benchmarks.values())):
            player.close()


def read_inputs(config: Config) -> RunInputs:
    """Read tokenizer, prompts and benchmarks; make reward and environment.

    ConfigError or DataError, naming the key or the file and line, for what cannot be used.
    """
    tokenizer = load_model_tokenizer(config.model)
    prompts = load_prompts(config.data, tokenizer)
    judge = Judge(config.reward.function, **config.judge_options(config.reward.function))
    player = make_player(config, tokenizer, judge)
    benchmarks = load_benchmarks(config, tokenizer, player)
    return RunInputs(tokenizer, prompts, judge, player, benchmarks, turn_ends(config, tokenizer))


LEVEL = 0.95
"""Confidence of all intervals."""


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples of a benchmark: S samples of each of P prompts."""

    rewards: np.ndarray
    """float64 [P, S]; NaN without a reward."""
    lengths: np.ndarray
    """int64 [P, S], tokens of the response."""
    truncated: np.ndarray
    """bool [P, S], cut off at the length limit."""
    threshold: float = POSITIVE
    """A larger reward is a correct response."""

    @property
    def num_judged(self) -> np.ndarray:
        """int64 [P], samples with a reward."""
        return np.isfinite(self.rewards).sum(axis=1)

    @property
    def num_correct(self) -> np.ndarray:
        """int64 [P], correct samples."""
        return (self.rewards > self.threshold).sum(axis=1)  # NaN is not


def score(samples: Samples, ks: Sequence[int]) -> dict[str, Any]:
    """Return all scores of a benchmark as plain numbers; None where a score is undefined."""
    (num_prompts, number), c = samples.rewards.shape, samples.num_correct
    n, judged = np.full(num_prompts, number), int(samples.num_judged.sum())
    return {
        "prompts": num_prompts,
        "samples": number,
        "responses": num_prompts * number,
        "judged": judged,
        "avg": _average(c / n, is_binary=number == 1),
        "pass": {str(k): _average(pass_at_k(n, c, k), is_binary=k == number) for k in ks},
        "reward_mean": float(np.nanmean(samples.rewards)) if judged else None,
        "length_mean": float(samples.lengths.mean()),
        "truncated": float(samples.truncated.mean()),
    }


def score_prompts(samples: Samples) -> list[dict[str, Any]]:
    """Return samples and pass rate by prompt."""
    counts = zip(samples.num_judged.tolist(), samples.num_correct.tolist(), strict=True)
    number = samples.rewards.shape[1]
    return [{"judged": judged, "correct": correct, "pass_rate": correct / number} for judged, correct in counts]


def _average(values: np.ndarray, *, is_binary: bool) -> dict[str, Any]:
    interval = None
    if is_binary:  # the normal interval would have no width where all prompts agree
        interval = wilson_interval(int(values.sum()), values.size, LEVEL)
    elif values.size > 1:
        interval = mean_interval(values, LEVEL)
    ends = None if interval is None else [max(interval.low, 0.0), min(interval.high, 1.0)]
    return {"value": float(values.mean()), "other_prompts": ends, "prompts": int(values.size)}


def make_player(config: Config, tokenizer: PreTrainedTokenizerBase, judge: Judge) -> Player:
    """Return the player that draws and judges samples; errors as in ``make_environment``."""
    settings = config.environment
    chat = ChatTemplate(tokenizer, config.data.chat_template_args) if tokenizer.chat_template else None
    environment = make_environment(settings, chat)
    # The prompts are an agent's own, and may be longer than those of data.train.
    length = config.longest_sequence if isinstance(environment, Agent) else config.rollout.max_response_tokens
    sizes = settings.max_turns, settings.max_turn_tokens, read_shape(config.model.path).max_sequence_length
    limits = EpisodeLimits(length, *sizes, count_rows(tokenizer), settings.step_s, settings.episode_s)
    return Player(tokenizer, judge, limits, environment, settings.concurrency)


def turn_ends(config: Config, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the tokens that end a turn: the model's end tokens and ``environment.stop``; ConfigError as for each."""
    ends = (*stop_tokens(config.model.path, tokenizer), *stop_ids(tokenizer, config.environment.stop))
    num_rows = count_rows(tokenizer) or math.inf
    if absent := [token for token in ends if not 0 <= token < num_rows]:
        raise ConfigError(refusal("turn_end_without_row", config=config, token=absent[0], num_rows=num_rows))
    return ends


def make_environment(config: EnvironmentConfig, chat: ChatTemplate | None = None) -> Environment | Agent | None:
    """Return the environment or agent, if any; ConfigError if it or a tool cannot work here.

    chat: the template for the messages of an agent; None: the tokenizer has none.
    """
    if config.function is None:
        return None
    if config.function == "tools":
        template = {} if config.observation is None else {"template": config.observation}
        marks = config.call_open, config.call_close
        form = Hermes(**template) if config.format == "hermes" else Block(*marks, **template)
        return ToolEnvironment([_tool(name, config) for name in config.tools], form)
    factory = load_plug("environment.function", config.function, ["tools"])
    if iscoroutinefunction(factory):
        parameters = ", ".join(["*", *config.options, "prompt", "base_url", "api_key", "seed"])
        check_function("environment.function", config.function, factory, parameters)
        if chat is None:
            raise ConfigError(refusal("agent_without_template"))
        return ForeignAgent(factory, config.options, chat)
    environment = call_own("environment.function", factory, **config.options)
    if not callable(getattr(environment, "begin", None)):
        raise ConfigError(refusal("environment_without_begin", config=config, kind=type(environment).__name__))
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
        # Tokenizers refuse texts with errors of any type.
        with reworded(Exception, ConfigError, f"environment.stop: the tokenizer cannot read {text!r}: "):
            tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(tokens) != 1:
            raise ConfigError(refusal("stop_of_tokens", text=text, count=len(tokens)))
        ids.append(int(tokens[0]))
    return tuple(ids)


def _tool(name: str, config: EnvironmentConfig) -> Tool:
    if name == "calculator":
        return CalculatorTool()
    if name == "python":
        limits = Limits(config.python_s, max(1, round(config.python_s)), num_processes=config.python_processes)
        sizes = {"memory_bytes": config.python_memory_mb << 20, "output_bytes": config.python_output_kb << 10}
        return PythonTool(replace(limits, **sizes))
    tool: Tool = call_own("environment.tools", load_plug("environment.tools", name, ["calculator", "python"]))
    if not callable(tool) or not isinstance(getattr(tool, "name", None), str):
        raise ConfigError(f"environment.tools: {name!r} made a {type(tool).__name__}, expected a tool with a name")
    return tool
