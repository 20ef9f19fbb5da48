"""``megarl data``: its arguments, read without the packages that tokenize."""

from dataclasses import KW_ONLY
from pathlib import Path
from typing import Literal

import pydantic

from megarl.config.command import Overrides, Positional, command


@command
class Data:
    """Write prompts for [data] from a data set: prepare SOURCE OUT; counts what it leaves out: docs/data.md."""

    action: Positional[Literal["prepare"]]
    """What to do."""
    source: Positional[str]
    """A .jsonl or .parquet file, a dataset folder, or a hub name: OWNER/NAME or OWNER/NAME:CONFIG."""
    out: Positional[Path]
    """The folder for train.jsonl and heldout.jsonl."""
    _: KW_ONLY
    prompt_field: str = "prompt"
    """Field with the question, text or chat messages; dots reach into tables."""
    answer_field: str = "answer"
    """Field with the answer, text or a whole number."""
    answer_after: str | None = pydantic.Field(None, min_length=1)
    """Take what follows the last such text of the answer, as #### in GSM8K."""
    system: str | None = None
    """A system message before each prompt."""
    template: str | None = None
    """Text with {prompt} in it, around each plain-text prompt."""
    model: Path | None = None
    """Folder of the model: prompts are written for its chat template and measured with its tokenizer."""
    trust: bool = False
    """Let code in that folder make its tokenizer: docs/trust.md."""
    max_prompt_tokens: pydantic.PositiveInt = 2048
    """Longer prompts are left out; needs --model."""
    split: str | None = None
    """Split of a folder or hub data set."""
    limit: pydantic.PositiveInt | None = None
    """Read only the first records."""
    heldout: float = pydantic.Field(0.0, ge=0, lt=1, allow_inf_nan=False)
    """Share of prompts that go to heldout.jsonl, chosen by a hash of the prompt."""
    overwrite: bool = False
    """Replace the files of an earlier call."""
    json: bool = False
    """Print counts and files as JSON: docs/commands.md."""

    def run(self, overrides: Overrides) -> None:
        from megarl.data.prepare.prepare import prepare_and_show

        prepare_and_show(self)
