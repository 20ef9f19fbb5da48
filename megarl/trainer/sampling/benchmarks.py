"""The benchmarks that a run is evaluated on, and their scores."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from megarl.config import Config
from megarl.data.benchmarks import choose, load
from megarl.data.judge import Judge
from megarl.data.prompts import Prompt
from megarl.engines.player import Player
from megarl.trainer.environments import make_player
from megarl.trainer.sampling.step_rollouts import SampleTable


@dataclass(frozen=True, slots=True)
class RunBenchmark:
    """One benchmark of a run."""

    prompts: Sequence[Prompt]
    player: Player
    """Plays and judges its responses."""
    threshold: float
    """A response is correct if its reward is above this."""


def load_benchmarks(config: Config, tokenizer: PreTrainedTokenizerBase, player: Player) -> dict[str, RunBenchmark]:
    """Return ``data.heldout`` and ``eval.sets`` by name; a known benchmark brings its template and reward.

    player: the run's own, for all that are judged by ``reward.function``.
    """
    players, found = {config.reward.function: player}, dict[str, RunBenchmark]()
    for benchmark in choose((), config) if config.benchmarks else ():
        prompts = load(benchmark, tokenizer, config)
        if benchmark.reward not in players:
            judge = Judge(benchmark.reward, **config.judge_options(benchmark.reward))
            players[benchmark.reward] = make_player(config, tokenizer, judge)
        found[benchmark.name] = RunBenchmark(prompts, players[benchmark.reward], benchmark.threshold)
    return found


def score(name: str, table: SampleTable, threshold: float) -> dict[str, float]:
    """Return the metrics of one benchmark; RewardError, or RolloutError, if no response has a reward."""
    table.require_rewards(f"evaluation on {name}")
    judged = table.column("reward")[table.is_judged]
    return {
        "reward": float(judged.mean()),
        "pass_rate": float((judged > threshold).sum() / len(table.rows)),
        "length_mean": float(table.column("generated").mean()),
        "judged": float(len(judged)),
        "responses": float(len(table.rows)),
    }


def pool(found: Mapping[str, Mapping[str, float]], sizes: Sequence[int]) -> dict[str, float]:
    """Return the metrics of all benchmarks: averages weighted by their prompts, sums of counts, and those of each.

    A single benchmark is the whole; it is not named.
    """
    metrics: dict[str, float] = {}
    for key in next(iter(found.values())):
        values = [of[key] for of in found.values()]
        is_count = key in ("judged", "responses") or len(values) == 1
        metrics[f"eval/{key}"] = float(sum(values) if is_count else np.average(values, weights=sizes))
    several = found if len(found) > 1 else {}
    return metrics | {f"eval/{name}/{key}": value for name, of in several.items() for key, value in of.items()}
