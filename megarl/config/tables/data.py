"""The tables about prompts, rewards and demonstrations: [data], [reward], [reward_model], [sft]."""

from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import Field, PositiveFloat, PositiveInt

from megarl.config.tables.base import Row, Table
from megarl.config.tables.train import DecayStyle, Schedule
from megarl.core.choices.stopping import POSITIVE

FILES = (".jsonl", ".json", ".parquet", ".csv", ".tsv")
"""Endings of prompt files; other names are folders or data sets of the hub."""


class DataConfig(Table):
    """[data]: prompts and answers."""

    train: str = Field(min_length=1)
    """JSONL, JSON, Parquet, CSV or TSV file, or the name of a data set on the Hugging Face hub."""
    heldout: str | None = None
    """Held-out prompts, in the form of train; required if eval.every > 0."""
    prompt_field: str = "prompt"
    """Field with the prompt: plain text, or a list of chat messages."""
    answer_field: str = "answer"
    """Field with the answer for the reward."""
    chat_template: bool = False
    """Wrap plain-text prompts with the tokenizer's chat template."""
    chat_template_args: dict[str, Any] = {}
    """Variables of the chat template, such as { enable_thinking = false }; a variable that the template never reads is
    an error."""
    max_prompt_tokens: PositiveInt = 2048
    """Longest prompt, in tokens; a longer prompt is an error."""
    split: str | None = None
    """Split of a hub data set or folder, e.g. "train"."""
    heldout_split: str | None = None
    """Split of heldout; default split, unless heldout is a file."""

    @property
    def resolved_heldout_split(self) -> str | None:
        """heldout_split with its default resolved; files have no splits."""
        if self.heldout_split is None and not (self.heldout or "").endswith(FILES):
            return self.split
        return self.heldout_split

    def rows(self) -> Iterable[Row]:
        return self.only_with("heldout", self.heldout, "heldout_split")


class RewardConfig(Table):
    """[reward]: how a response is scored."""

    function: str = Field(default="exact_match", min_length=1)
    """"exact_match", "math_strict", "reward_model" or "package.module:function"; see docs/rewards.md."""
    workers: PositiveInt | None = None
    """Most worker processes of a rank for the function; default the rank's share of the node's cores. exact_match needs
    no workers."""
    timeout_s: PositiveFloat = 30.0
    """Longest time for one response; seconds. A late response is not trained, and is counted. For math_strict
    and functions marked with wrong_if_stopped the limit is CPU time, and a late response is wrong."""
    max_characters: PositiveInt = 10_000
    """math_strict reads only the last characters of a response, up to this number."""
    threshold: float = POSITIVE
    """A response is correct (positive) if the reward is above the threshold. Used by adaptive sampling, RAFT, the
    advantage "signed" and pass rates."""
    weights: dict[Annotated[str, Field(pattern=r"^\w+$")], float] = {}
    """Weights of several rewards, by name: your function then returns a reward for each name, and the weighted sum
    counts. Default: the function returns one number."""

    def rows(self) -> Iterable[Row]:
        return self.only_with("a function of your own that returns several rewards", ":" in self.function, "weights")


class RewardModelConfig(Table):
    """[reward_model]: the servers of reward.function = "reward_model", which speak SGLang's /classify."""

    urls: list[str] = []
    """Servers. Requests go to the servers in turn, and a second attempt goes to the next server."""
    text: str = "{prompt}{response}"
    """Text for the model: {prompt} as the policy read the prompt, chat template included, {response} and {answer}."""
    concurrency: PositiveInt = 64
    """Requests in flight at a time, per rank; each has one text."""
    timeout_s: PositiveFloat = 60.0
    """Longest time for an attempt at a request; seconds. (reward.timeout_s is for other functions.)"""
    attempts: PositiveInt = 4
    """Attempts at a request, with growing pauses, before the responses count as failed."""
    api_key_env: str | None = None
    """Name of the environment variable with the API key of the servers; default: no key is sent."""

    def rows(self) -> Iterable[Row]:
        yield from self.urls_rules(self.urls)
        yield self.row("text_without_response", "{response}" not in self.text)


class SftConfig(Schedule):
    """[sft]: the supervised cold start of `megarl sft`. Layout, precision, chat template and longest prompt and
    response are the keys of RL."""

    data: str = Field(min_length=1)
    """File of demonstrations, in the forms of data.train; a demonstration longer than RL could sample is an error."""
    out: str | None = None
    """Folder for the trained Hugging Face checkpoint; default <run.dir>/sft."""
    steps: PositiveInt
    """Optimizer steps."""
    batch_size: PositiveInt
    """Demonstrations per step, over all ranks."""
    decay_style: DecayStyle = "linear"
    """Shape of the decay over all steps."""
    prompt_field: str = "prompt"
    """Field that holds the prompt."""
    response_field: str = "response"
    """Field that holds the response to learn."""
    messages_field: str = "messages"
    """Field of a chat, in records without the field of the prompt: the assistant's messages are learned; see
    docs/data.md."""
