"""The inputs of a run, read before sampling. ``megarl doctor`` calls the same function."""

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from megarl.config import Config
from megarl.data.judge import Judge
from megarl.data.prompt_table import PromptTable
from megarl.data.tokenizer import load_model_tokenizer
from megarl.engines.player import Player
from megarl.trainer.environments import make_player, turn_ends
from megarl.trainer.sampling.evaluation import PlayedBenchmark, load_benchmarks
from megarl.trainer.sampling.requests import load_run_prompts


@dataclass(frozen=True, slots=True)
class RunInputs:
    tokenizer: PreTrainedTokenizerBase
    prompts: PromptTable
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
