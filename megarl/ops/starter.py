"""``megarl init``: a configuration from a few answers, from the recipe that fits or from ``starter.toml``."""

import math
import os
import re
import shlex
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pydantic

from megarl.config import Config
from megarl.config import file as config_file
from megarl.config.command import Overrides, Positional, command
from megarl.data.records import read_records
from megarl.errors import ConfigError, MegarlError, printable
from megarl.files.outputs import require_own_files, write_output
from megarl.models.fit import check_fit
from megarl.models.shapes import ModelShape, read_shape
from megarl.ops import shipped

_STARTER = Path(__file__).with_suffix(".toml")
_MINI_BATCHES = {"none": 1, "r2": 2, "r3": 4}
"""Mini-batches of a step for which arXiv 2512.01374 advises the replay."""


@command
class Init:
    """Write a configuration from the recipe that fits; a terminal is asked for missing answers."""

    out: Positional[Path] = Path("megarl.toml")
    """The file to write; its name names the run."""
    model: str | None = None
    """Folder of the model, in Hugging Face format."""
    data: str | None = None
    """Prompts: a .jsonl, .json or .parquet file, a dataset folder or a hub name; default data/train.jsonl."""
    heldout: str | None = None
    """Held-out prompts for an evaluation every 20 steps; default: no evaluation."""
    engine: Literal["local", "sglang"] | None = None
    """What samples; default sglang on GPUs."""
    gpus: int | None = pydantic.Field(None, ge=0, le=1024)
    """GPUs on each node, 0 for a CPU; default 8."""
    nodes: int | None = pydantic.Field(None, ge=1, le=100_000)
    """Nodes, those of servers too; default 1."""
    gpu_memory_gib: pydantic.PositiveFloat | None = None
    """Memory of a GPU, for megarl plan; default the recipe's."""
    objective: str | None = None
    """A row of docs/objectives.md; default minirl."""
    replay: Literal["none", "r2", "r3"] | None = None
    """Routing replay; default none, which suits one mini-batch per step."""
    mini_batches: pydantic.PositiveInt | None = None
    """Updates of a step; default 1, with r2 2, with r3 4. Prompts per step grow with it."""
    force: bool = False
    """Replace OUT if OUT is unchanged since megarl wrote the file."""

    def run(self, overrides: Overrides) -> None:
        init(self)


_QUESTIONS = {
    "model": ("folder of the model (Hugging Face format)", None, "a folder with config.json, here or on the cluster"),
    "data": (
        "prompts (.jsonl, .json, .parquet, folder or hub name; tools/prepare_data.py makes them)",
        "data/train.jsonl",
        "the name of a file, a folder or a data set on the hub",
    ),
    "gpus": ("GPUs on each node, 0 for none", "8", "a whole number from 0 to 1024"),
    "nodes": ("nodes", "1", "a whole number from 1 to 100000"),
    "replay": ("routing replay: none, r2 or r3", "none", "none, r2 or r3"),
}
"""Questions on a terminal: text, default answer, expected answer."""


def ask(answers: Init) -> Init:
    """Ask on the terminal for missing answers, and again after an unsuitable answer; without a terminal take the
    defaults.

    MegarlError for flags that contradict each other; ConfigError if the model is missing or the input ends.
    """
    asks = sys.stdin.isatty()
    if asks:
        _try(answers)  # a flag that does not fit would make every answer wrong
    for name, (question, default, expected) in _QUESTIONS.items():
        while getattr(answers, name) is None:
            try:
                answer = input(f"{question}{f' [{default}]' if default else ''}: ").strip() if asks else ""
                answered = _answer(answers, name, answer or default)
                if asks:
                    _try(answered)
                answers = answered
            except EOFError:
                print()
                raise ConfigError(f"--{name}: the input ended, expected {expected}") from None
            except (MegarlError, OSError, UnicodeDecodeError) as error:
                if not asks:
                    raise
                print(printable(f"  {error}"))
    return answers


def _try(answers: Init) -> None:
    """Raise MegarlError if no answers to the open questions complete a valid configuration."""
    nowhere = f"{os.devnull}/later"
    open_answers = {"model": nowhere, "data": nowhere, "gpus": 0, "nodes": 1, "replay": "none"}
    make_config(
        replace(answers, **{name: value for name, value in open_answers.items() if getattr(answers, name) is None})
    )


def _answer(answers: Init, name: str, answer: str | None) -> Init:
    try:
        if answer and answer.isprintable():
            return replace(answers, **{name: answer})
    except pydantic.ValidationError:
        pass
    raise ConfigError(f"--{name}: {f'found {answer!r:.80}' if answer else 'missing'}, expected {_QUESTIONS[name][2]}")


def make_config(answers: Init) -> tuple[str, Config, str | None]:
    """Return (checked configuration text, configuration, name of the matching recipe or None).

    ``answers`` has every answer of ``ask``. A recipe fits a model of the recipe's name on the recipe's number of nodes,
    servers' nodes included, and GPUs. MegarlError if the result is no valid configuration, or if an existing folder or
    file has the wrong content.
    """
    recipe, shape = _find_recipe(answers), _read_shape(Path(answers.model or ""))
    if (data := Path(answers.data or "")).is_file():
        next(read_records(data))
    text = (_STARTER if recipe is None else shipped.find(recipe)).read_text()
    for key, value in (_starter_keys(answers, shape) if recipe is None else {}).items():
        text = set_key(text, key, value)
    prompts = tomllib.loads(text)["rollout"]["prompts_per_step"]
    for key, value in _asked_keys(answers, prompts).items():
        text = set_key(text, key, value)
    config = config_file.parse(tomllib.loads(text), source="megarl init")
    config.check_world_size(config.launch.ranks)
    if shape is not None:
        check_fit(config, shape)
    return text, config, recipe


def set_key(text: str, dotted: str, value: Any) -> str:
    """Set a key of a TOML text with one key a line. Comments stay; a missing key or table is added."""
    table, _, key = dotted.partition(".")
    line = f"{key} = {config_file.as_toml(value)}"
    section = re.search(rf"^\[{table}\]\n(?:(?!\[).*(?:\n|\Z))*", text, re.MULTILINE)
    if section is None:
        return f"{text.rstrip()}\n\n[{table}]\n{line}\n"
    old = section.group()
    match = re.search(rf"^{key} = (?:\"[^\"]*\"|[^#\n]*[^#\s])", old, re.MULTILINE)
    new = old.rstrip() + f"\n{line}\n\n" if match is None else old[: match.start()] + line + old[match.end() :]
    return (text[: section.start()] + new + text[section.end() :]).rstrip() + "\n"


def _find_recipe(answers: Init) -> str | None:
    for name in shipped.list_recipes():
        table = tomllib.loads(shipped.find(name).read_text())
        launch = table["launch"]
        size = (launch["ranks_per_node"], launch.get("nodes", 1) + launch.get("server_nodes", 0))
        is_model = Path(table["model"]["path"]).name.lower() == Path(answers.model or "").name.lower()
        engine = table["rollout"].get("engine", "local")
        if answers.gpus and is_model and size == (answers.gpus, answers.nodes) and answers.engine in (None, engine):
            return name
    return None


def _read_shape(model: Path) -> ModelShape | None:
    """The shape of a local model or of a recipe's model; None for a model elsewhere."""
    if model.exists() and not (model / "config.json").is_file():
        raise ConfigError(f"--model: found {model}, which has no config.json; expected {_QUESTIONS['model'][2]}")
    folders = [folder for folder in (model, shipped.MODELS / model.name) if (folder / "config.json").is_file()]
    return read_shape(folders[0]) if folders else None


def _starter_keys(answers: Init, shape: ModelShape | None) -> dict[str, Any]:
    """What ``starter.toml`` does not know: ranks, experts, servers, lengths and the chat template."""
    gpus, nodes = answers.gpus or 0, answers.nodes or 1
    ranks, model = max(gpus, 1), Path(answers.model or "")
    engine = answers.engine or ("sglang" if gpus else "local")
    keys: dict[str, Any] = {"rollout.engine": engine, "launch.ranks_per_node": ranks}
    if nodes > 1:
        keys |= {"launch.layout": "colocated", "launch.nodes": nodes}
    if engine == "sglang" and gpus:
        keys |= {"sglang.gpus": list(range(gpus)), "sglang.servers": gpus, "sglang.release_memory": True}
    if not gpus:
        keys |= {"rollout.prompts_per_step": 8, "rollout.max_response_tokens": 256}
    if (model / "tokenizer_config.json").is_file():
        files = [model / "chat_template.jinja", model / "chat_template.json"]
        has_template = '"chat_template"' in (model / "tokenizer_config.json").read_text(errors="replace")
        keys["data.chat_template"] = has_template or any(file.exists() for file in files)
    if shape is not None:
        keys["parallel.ep"] = math.gcd(shape.num_experts or 1, ranks * nodes)
        if shape.max_sequence_length < 4096:
            half = shape.max_sequence_length // 2
            keys |= {"data.max_prompt_tokens": half, "rollout.max_response_tokens": half}
    return keys


def _asked_keys(answers: Init, prompts: int) -> dict[str, Any]:
    """The keys that the answers set, in a recipe too."""
    num = answers.mini_batches or _MINI_BATCHES.get(answers.replay or "none", 1)
    keys = {
        "run.name": answers.out.stem,
        "model.path": answers.model,
        "data.train": answers.data,
        "data.heldout": answers.heldout,
        "train.objective": answers.objective,
        "train.replay": answers.replay,
        "launch.gpu_memory_gib": answers.gpu_memory_gib,
    }
    if num > 1:
        keys |= {"train.mini_batches": num, "rollout.prompts_per_step": num * prompts}
    if answers.heldout:
        keys["eval.every"] = 20
    return {key: value for key, value in keys.items() if value is not None}


def init(answers: Init) -> None:
    """Ask, check, write ``answers.out``, and print the next commands.

    ConfigError if the file exists, unless forced and unchanged since an earlier call.
    """
    out = answers.out
    if out.exists() and not answers.force:
        raise ConfigError(f"{out}: exists; pass --force to replace it, or another name")
    require_own_files(out)
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"{out}: its folder does not exist; make it, or choose another")
    text, config, recipe = make_config(ask(answers))
    write_output(out, text.encode())
    name = shlex.quote(str(out))
    origin = f"the recipe {recipe}" if recipe else "no recipe has this model and these GPUs: sizes are guesses"
    print(printable(f"{out}: {origin}"))
    print(f"next:\n  megarl doctor {name}\n  megarl plan {name}\n  {_start_line(config, name)}")


def _start_line(config: Config, name: str) -> str:
    launch = config.launch
    if launch.layout == "local":
        return f"megarl launch {name}"
    script = f"{launch.layout}.sbatch"
    nodes = launch.nodes + launch.server_nodes
    return (
        f"megarl recipes copy {script} .\n  "
        f"sbatch --nodes {nodes} --gpus-per-node {launch.ranks_per_node} {script} {name}"
    )
