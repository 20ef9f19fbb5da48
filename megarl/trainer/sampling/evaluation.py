"""Evaluation of an engine on benchmarks: shared by runs (between two steps) and ``megarl eval``.

    benchmark -> ``draw`` (samples of this rank) -> ``Samples`` [P, S] of all ranks -> ``scores.score`` -> figures

Each response has a separate seed: figures depend neither on the number of ranks nor on further benchmarks. Seeds do not
depend on the step: a change of the figures comes from the weights.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from megarl.config import Config
from megarl.data.benchmarks import Benchmark, choose, load
from megarl.data.judge import Judge
from megarl.data.prompts import Prompt
from megarl.data.tokenizer import load_model_tokenizer
from megarl.engines.player import Draw, Key, Player, Sample
from megarl.engines.protocol import Engine
from megarl.run.progress import Advance
from megarl.trainer.environments import make_player, turn_ends
from megarl.trainer.sampling import requests
from megarl.trainer.sampling.assignment import FixedSamples
from megarl.trainer.sampling.requests import load_run_prompts
from megarl.trainer.sampling.scores import Samples, score
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
            judge = Judge(benchmark.reward, **config.judge_options(benchmark.reward))
            player = make_player(config, tokenizer, judge)
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
) -> tuple[dict[Key, Sample], int]:  # fmt: skip
    """Return this rank's share of ``num_samples`` responses per prompt, and the number of repeated draws.

    A collective call. Errors of a reward or an environment are in the samples; errors of the engine are raised.
    """
    places = range(dist.get_rank(), len(benchmark.prompts) * num_samples, dist.get_world_size())
    keys, number = [divmod(place, num_samples) for place in places], requests.benchmark_number(benchmark.name)
    request_of = requests.make_requests(config.run.seed, requests.EVALUATE, number, benchmark.prompts)
    params, work = requests.eval_params(config, stop_tokens), f"the evaluation on {benchmark.name}"

    def make_draw() -> Draw:
        return Draw(FixedSamples(keys), request_of, benchmark.player)

    return requests.sample_together(config, engine, make_draw, params, on_finish, work=work)


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

    def close(self) -> None:
        """End the processes of the rewards."""
        for player in (self.player, *(benchmark.player for benchmark in self.benchmarks.values())):
            player.close()


def read_inputs(config: Config) -> RunInputs:
    """Read tokenizer, prompts and benchmarks; make reward and environment.

    ConfigError or DataError, naming the key or the file and line, for what cannot be used.
    """
    tokenizer = load_model_tokenizer(config.model)
    prompts = load_run_prompts(config, tokenizer)
    judge = Judge(config.reward.function, **config.judge_options(config.reward.function))
    player = make_player(config, tokenizer, judge)
    benchmarks = load_benchmarks(config, tokenizer, player)
    return RunInputs(tokenizer, prompts, judge, player, benchmarks, turn_ends(config, tokenizer))
