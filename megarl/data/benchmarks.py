"""The benchmarks of an evaluation: known benchmarks by short name, and files and hub data sets.

transformers is imported when prompts are loaded, so that a wrong name is reported at once.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.config import Config
from megarl.config.tables.data import FILES
from megarl.core.choices.stopping import POSITIVE
from megarl.errors import ConfigError, refusal
from megarl.files.texts import read_table

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megarl.data.prompts import Prompt

HELDOUT = "heldout"
"""Name of the benchmark of ``data.heldout``."""
BOXED = "{prompt}\n\nReason step by step, and write the final answer inside \\boxed{}."
"""Template of the mathematics benchmarks; math_strict reads the box."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A set of problems, with the form of the prompt and the reward."""

    name: str
    """Name of the folder and of the table row; the seeds depend on the name."""
    source: str
    """File, folder or hub name for ``megarl.data.records.read_records``."""
    split: str | None = None
    prompt_field: str = "problem"
    answer_field: str = "answer"
    """Column of the answer: text, or a whole number."""
    template: str | None = BOXED
    """Text around a plain-text problem, with ``{prompt}`` for the problem; None: the problem alone."""
    reward: str = "math_strict"
    threshold: float = POSITIVE
    """A response is correct if the reward is above the threshold."""


BENCHMARKS = {name: Benchmark(name, **table) for name, table in read_table(__file__).items()}
"""By short name."""


def choose(words: Sequence[str], config: Config, template: str | None = None) -> tuple[Benchmark, ...]:
    """Return the benchmarks of a command line; without words, ``data.heldout`` and ``eval.sets``.

    A word is

    - a short name
    - a file, a folder, or a hub name ("owner/name", "owner/name:config"), with the configuration's fields, split and
      reward
    - NAME=SOURCE, a source under the given name; if NAME is a short name, with the fields of that benchmark

    template: replaces the template of every benchmark.

    ConfigError for an unknown or repeated name, and if there is no benchmark.
    """
    if template is not None and template.count("{prompt}") != 1:
        raise ConfigError(f"--template: found {template!r}, expected a text with {{prompt}} in it, once")
    uses_config = not words
    words = words or [f"{name}={source}" for name, source in config.eval.sets.items()]
    benchmarks = [_read_word(word, config) for word in words]
    if uses_config and config.data.heldout is not None:
        heldout = _from_config(HELDOUT, config.data.heldout, config)
        benchmarks.insert(0, replace(heldout, split=config.data.resolved_heldout_split))
    if not benchmarks:
        raise ConfigError(refusal("nothing_to_evaluate", names=", ".join(BENCHMARKS)))
    names = [benchmark.name for benchmark in benchmarks]
    for index, benchmark in enumerate(benchmarks):
        if benchmark.name in names[:index]:
            raise ConfigError(refusal("benchmark_twice", name=benchmark.name, source=benchmark.source))
    changes = {} if template is None else {"template": template}
    return tuple(replace(benchmark, **changes) for benchmark in benchmarks)


def load(benchmark: Benchmark, tokenizer: "PreTrainedTokenizerBase", config: Config) -> "list[Prompt]":
    """Return the prompts of a benchmark, at most ``eval.max_prompts``. DataError if the hub cannot be reached."""
    from megarl.data.prompts import load_prompts  # needs transformers

    fields = {name: getattr(benchmark, name) for name in ("prompt_field", "answer_field", "split")}
    data = config.data.model_copy(update={"train": benchmark.source, **fields})
    return load_prompts(data, tokenizer, config.eval.max_prompts, benchmark.template)


def _read_word(word: str, config: Config) -> Benchmark:
    name, equals, source = word.partition("=")
    if not equals or Path(word).exists():
        if word in BENCHMARKS:
            return BENCHMARKS[word]
        name, source = "", word
    elif not source or not _NAME.fullmatch(name):
        raise ConfigError(refusal("benchmark_name", word=word))
    is_file, path = source.endswith(FILES), Path(source)
    if not (is_file or "/" in source or path.exists()):  # a misspelt short name
        raise ConfigError(refusal("benchmark_source", source=source, sets=", ".join(BENCHMARKS), ends=", ".join(FILES)))
    if name in BENCHMARKS:
        split = None if is_file or path.is_dir() else BENCHMARKS[name].split
        return replace(BENCHMARKS[name], source=source, split=split)
    # The stem of a file, or the whole hub name.
    derived = path.stem if is_file else path.name if path.is_dir() else source
    name = name or re.sub(r"[^A-Za-z0-9_.-]+", "--", derived).lstrip(".-")
    if not name:
        raise ConfigError(f"--data: found {source!r}, from which no name can be made; pass NAME={source}")
    return _from_config(name, source, config)


def _from_config(name: str, source: str, config: Config) -> Benchmark:
    data = config.data
    split = None if source.endswith(FILES) else data.split
    fields = data.prompt_field, data.answer_field
    return Benchmark(name, source, split, *fields, None, config.reward.function, config.reward.threshold)
