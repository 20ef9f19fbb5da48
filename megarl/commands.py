"""The commands of ``megarl``: the arguments of each, and what it does.

A command is a record that ``megarl.cli`` fills from the words of the command line; its docstrings are the help texts.
``run`` imports heavy packages only after the configuration has been checked.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Protocol, TypeVar, dataclass_transform

import pydantic

from megarl.config import Config, process_environment
from megarl.config import file as config_file
from megarl.errors import ConfigError, printable
from megarl.text_table import text_table

Overrides = Mapping[str, Any]
"""Dotted key -> value, which win over the configuration file."""

POSITIONAL = "positional"
"""Marks an argument that is given without a flag."""
_T = TypeVar("_T")
Positional = Annotated[_T, POSITIONAL]


class Command(Protocol):
    """A command with its arguments."""

    def run(self, overrides: Overrides) -> int | None:
        """Do it; return the exit code, None for 0."""
        ...


COMMANDS: dict[str, type[Command]] = {}
"""By the name on the command line, in the order of the help text."""


@dataclass_transform(frozen_default=True)
def command(cls: type[_T]) -> type[_T]:
    """Make a record whose values are checked, and whose fields' docstrings can be read; a command if it can run."""
    config = pydantic.ConfigDict(use_attribute_docstrings=True)
    record: Any = pydantic.dataclasses.dataclass(frozen=True, config=config)(cls)
    if hasattr(record, "run"):
        COMMANDS[cls.__name__.lower()] = record
    return record


@command
class OnConfiguration:
    """A command that takes a configuration; only these accept overrides."""

    # Docstrings of inherited fields are not read.
    config: Positional[Path] = pydantic.Field(description="The configuration, a TOML file.")
    trust: bool = pydantic.Field(
        False, description="Let a file that others may have written run code and send data: docs/trust.md."
    )

    def load(self, overrides: Overrides) -> Config:
        """The configuration."""
        return config_file.load(self.config, overrides, trust=self.trust)

    def load_for_ranks(self, overrides: Overrides) -> Config:
        """The configuration, checked for the ranks that torchrun has started, with their environment variables set."""
        config = self.load(overrides)
        config.check_world_size(_world_size())
        process_environment.apply(config)
        return config


@command
class Train(OnConfiguration):
    """Train with RL: alone, or on many ranks under torchrun."""

    def run(self, overrides: Overrides) -> None:
        config = self.load_for_ranks(overrides)
        _require_inputs(config)
        from megarl.train.loop import train

        train(config)


@command
class Launch(OnConfiguration):
    """Train where the [launch] table says, with all ranks and servers, and keep the run going: docs/launch.md."""

    def run(self, overrides: Overrides) -> int:
        from megarl.launch.supervisor import launch

        words = [word for key, value in overrides.items() for word in (f"--{key}", config_file.as_flag(value))]
        trust = ["--trust"] if self.trust else []
        config = self.load(overrides)
        process_environment.process_environment(config, os.environ)  # contradictions are found before a rank starts
        if config.launch.layout == "local":  # elsewhere, another node may have the files
            _require_inputs(config)
        return launch(config, ["train", *trust, *words, str(self.config)])


@command
class Sft(OnConfiguration):
    """Teach the model a format from demonstrations (the [sft] table), before RL."""

    def run(self, overrides: Overrides) -> None:
        config = self.load_for_ranks(overrides)
        if config.sft is None:
            raise ConfigError(
                f"{self.config}: found no [sft] table, expected one with data, steps, batch_size and lr; add it"
            )
        _require_inputs(config, "sft")
        from megarl.train.sft import sft

        sft(config)


@command
class Eval(OnConfiguration):
    """Sample benchmarks and print avg@k and pass@k with intervals: alone, or on many ranks under torchrun."""

    checkpoint: Path | None = None
    """Step folder of a run, or a run's folder for its newest; without it the weights in model.path."""
    data: tuple[str, ...] = ()
    """aime24, aime25, hmmt25, a .jsonl or .parquet file, a hub name, or NAME=SOURCE; default data.heldout."""
    samples: int | None = None
    """Responses to each prompt; default eval.samples."""
    k: tuple[int, ...] = ()
    """The k of pass@k; default the powers of 4 up to samples, and samples."""
    template: str | None = None
    """Text with {prompt} in it, around every plain-text prompt; default that of the benchmark."""
    out: Path | None = None
    """Folder for figures and responses; default <run.dir>/eval/<checkpoint>."""
    json: bool = False
    """Print the results as JSON."""

    def run(self, overrides: Overrides) -> None:
        from megarl.evaluate.request import WITHOUT_TRAINING, eval_request

        request = eval_request(
            self.load({**WITHOUT_TRAINING, **overrides}),
            data=self.data,
            samples=self.samples,
            ks=self.k,
            template=self.template,
            checkpoint=self.checkpoint,
            out=self.out,
            json=self.json,
        )
        request.layout(_world_size())
        _require_inputs(request.config, "eval")
        process_environment.apply(request.config)
        from megarl.evaluate.evaluation import evaluate

        evaluate(request, _world_size())


@command
class Gap:
    """Compare rollout and training engine on the same responses before a run, and give a verdict: docs/gap.md."""

    takes_keys: ClassVar[bool] = True
    checkpoint: Positional[Path]
    """A Hugging Face folder, a run's folder, or one of its checkpoints."""
    config: Path | None = None
    """The configuration; default that of the run. Its keys are flags."""
    prompts: str | None = None
    """A file or hub name in the place of data.train; needed for a model without a configuration."""
    responses: int = 32
    """Responses of each precision."""
    tokens: int = 256
    """Longest response; the configuration's limit if that is lower."""
    max_k3: float = pydantic.Field(1e-2, ge=0)
    """A larger gap per token, as configured, is bad."""
    trust: bool = False
    """As for ``megarl train``."""
    json: bool = False
    """Print everything as JSON."""

    def run(self, overrides: Overrides) -> int:
        from megarl.evaluate.gap import gap_request, measure_and_show
        from megarl.evaluate.gap_verdict import Limits

        request = gap_request(
            self.checkpoint,
            self.config,
            self.prompts,
            dict(overrides),
            responses=self.responses,
            tokens=self.tokens,
            trust=self.trust,
        )
        process_environment.apply(request.config)
        return measure_and_show(request, Limits(k3=self.max_k3), self.json)


@command
class Data:
    """Write prompts for [data] from a data set: prepare SOURCE OUT; counts what it leaves out: docs/data.md."""

    action: Positional[Literal["prepare"]]
    """What to do."""
    source: Positional[str]
    """A .jsonl or .parquet file, a dataset folder, or a hub name: OWNER/NAME or OWNER/NAME:CONFIG."""
    out: Positional[Path]
    """The folder for train.jsonl and heldout.jsonl."""
    prompt_field: str = "prompt"
    """Field with the question, text or chat messages; dots reach into tables."""
    answer_field: str = "answer"
    """Field with the answer, text or a whole number."""
    answer_after: str | None = None
    """Take what follows the last such text of the answer, as #### in GSM8K."""
    system: str | None = None
    """A system message before each prompt."""
    template: str | None = None
    """Text with {prompt} in it, around each plain-text prompt."""
    model: Path | None = None
    """Folder of the model: prompts are written for its chat template and measured with its tokenizer."""
    max_prompt_tokens: int = 2048
    """Longer prompts are left out; needs --model."""
    split: str | None = None
    """Split of a folder or hub data set."""
    limit: int | None = None
    """Read only the first records."""
    heldout: float = 0.0
    """Share of prompts that go to heldout.jsonl, chosen by a hash of the prompt."""
    overwrite: bool = False
    """Replace the files of an earlier call."""

    def run(self, overrides: Overrides) -> None:
        from megarl.data.prepare import Recipe, prepare_and_show

        recipe = Recipe(**{name: getattr(self, name) for name in Recipe.__dataclass_fields__})
        options = {name: getattr(self, name) for name in ("split", "limit", "heldout", "overwrite")}
        prepare_and_show(self.source, self.out, recipe, **options)


@command
class Plan(OnConfiguration):
    """Estimate memory, bytes moved and batches from the configuration alone; refuse what cannot fit or divide."""

    model: Path | None = None
    """Folder with the model's config.json; default model.path, then the shipped one of that name."""
    json: bool = False
    """Print the numbers as JSON."""

    def run(self, overrides: Overrides) -> None:
        config = self.load(overrides)
        from megarl.plan import table
        from megarl.plan.plan import plan

        found = plan(config, self.model)
        print(table.to_json(found) if self.json else printable(table.to_text(found, config)))


@command
class Doctor:
    """Say whether this machine can train, or one configuration on it, and what is missing."""

    config: Positional[Path | None] = None
    """The configuration to check."""
    trust: bool = False
    """As for ``megarl train``."""
    json: bool = False
    """Print everything as JSON."""

    def run(self, overrides: Overrides) -> int:
        from megarl.doctor import doctor

        return doctor(self.config, overrides, trust=self.trust, json=self.json)


@command
class Report:
    """Write one HTML page about a run, or one that overlays the curves of several: docs/report.md."""

    run_dirs: Positional[tuple[Path, ...]]
    """The folder of the run, or of each run."""
    out: Path | None = None
    """The page; default RUN_DIR/report/index.html, of several runs compare.html here."""

    def run(self, overrides: Overrides) -> None:
        from megarl.report.report import write_report

        print(printable(f"report: {write_report(*self.run_dirs, out=self.out)}"))


@command
class Samples:
    """Print prompts, responses and rewards that a run has stored, by default of its newest step: docs/report.md."""

    run_dir: Positional[Path]
    """The folder of the run."""
    step: int | None = None
    """Only this step's, from 1."""
    sort: Literal["reward", "length", "gap"] | None = None
    """From the best on: the highest reward, the smallest length or gap between the engines."""
    worst: pydantic.PositiveInt | None = None
    """Only so many, from the worst on; by reward unless --sort says otherwise."""
    best: pydantic.PositiveInt | None = None
    """Only so many, from the best on."""
    search: str | None = None
    """Only those with this text in prompt, response or error, in upper or lower case."""
    json: bool = False
    """Print JSON lines."""

    def run(self, overrides: Overrides) -> None:
        from megarl.report import samples

        options = {name: getattr(self, name) for name in ("step", "sort", "worst", "best", "search")}
        samples.show(self.run_dir, **options, as_json=self.json)


@command
class Status:
    """Show how far a run is: step, phase, speed, time to go, last error, and where its ranks are."""

    run_dir: Positional[Path]
    """The folder of the run."""
    json: bool = False
    """Print status.json, with what is known of the ranks, for programs."""

    def run(self, overrides: Overrides) -> int:
        from megarl.run.status import show

        return show(self.run_dir, self.json)


@command
class Trace:
    """Look into files of routing traces: inspect FILE, stats FILE, or diff A B [--out heatmap.html]."""

    action: Positional[Literal["inspect", "stats", "diff"]]
    """What to do."""
    files: Positional[tuple[Path, ...]]
    """One file, or two for diff."""
    out: Path | None = None
    """A map of the difference, an HTML page."""
    json: bool = False
    """Print the results as JSON."""

    def run(self, overrides: Overrides) -> None:
        expected = 2 if self.action == "diff" else 1
        if len(self.files) != expected:
            raise ConfigError(f"megarl trace {self.action}: found {len(self.files)} files, expected {expected}")
        if self.out is not None and self.action != "diff":
            raise ConfigError(f"megarl trace {self.action} plots nothing: remove --out; only megarl trace diff has it")
        from megarl.report import traces

        getattr(traces, self.action)(*self.files, *([self.out] if self.action == "diff" else []), as_json=self.json)


@command
class Simulate:
    """Compare the sampling rules on prompts with given pass rates: exact cost, contrast and efficiency."""

    rates: tuple[str, ...] = ()
    """Pass rates of the prompts, P or P:PROMPTS each, such as 0:20 0.3:50 0.9:30."""
    samples: int = 8
    """Samples per prompt, for uniform sampling and rules that divide a budget."""
    train_size: int = 4
    """Samples of a prompt that train under Ada-Seq."""
    round_size: int = 8
    """Samples of a round of Ada-Seq."""
    max_samples: int = 32
    """Most samples of a prompt under Ada-Seq."""
    out: Path = Path("runs/simulate.html")
    """The figure, an HTML page."""
    json: bool = False
    """Print the results as JSON."""

    def run(self, overrides: Overrides) -> None:
        from megarl.simulate import Budget, simulate

        budget = Budget(self.samples, self.train_size, self.round_size, self.max_samples)
        simulate(self.rates, budget, self.out, self.json)


@command
class Convert:
    """Convert a Hugging Face checkpoint into Megatron's torch_dist format, or back; also under torchrun."""

    source: Positional[Path]
    """A Hugging Face folder, a torch_dist checkpoint, or a folder of Megatron-LM or megarl with some."""
    out: Positional[Path]
    """The folder to write; it appears when it is complete."""
    model: Path | None = None
    """For a Megatron source, a folder with config and tokenizer; a converted checkpoint has its own."""
    dtype: Literal["keep", "fp32", "bf16", "fp16"] = "keep"
    """Of the output."""
    layers: Literal["installed", "local", "te"] = "installed"
    """Whose names Megatron will look for: those of its local layers or of Transformer Engine's."""
    stack_layers: bool = False
    """One tensor for all layers, as Megatron-LM asks for by default under --moe-layer-freq 1."""
    drop: tuple[str, ...] = ()
    """Globs of tensors that the model does not have and that may be left out (prediction layers)."""
    verify: Literal["none", "checksums", "logits"] = "checksums"
    """Read everything back and compare bits; logits also builds both models and compares their logits."""
    shard_gib: float = pydantic.Field(2.0, gt=0, allow_inf_nan=False)
    """Size of a safetensors file."""
    overwrite: bool = False
    """Replace OUT if it exists, at the end and in one step."""
    json: bool = False
    """Print the results as JSON."""

    def run(self, overrides: Overrides) -> None:
        from megarl.convert.command import DTYPES, convert, installed_layers
        from megarl.convert.conversion import Options

        options = Options(
            dtype=DTYPES[self.dtype],
            layers=installed_layers() if self.layers == "installed" else self.layers,
            shard_bytes=int(self.shard_gib * 2**30),
            stack_layers=self.stack_layers,
            drop=self.drop,
            overwrite=self.overwrite,
        )
        convert(self.source, self.out, self.model, options, self.verify, self.json)


@command
class Quantize:
    """Write a checkpoint with FP8 weights, as SGLang and transformers read it; also under torchrun: docs/fp8.md."""

    source: Positional[Path]
    """A Hugging Face folder in high precision, or a torch_dist checkpoint, of a run or converted."""
    out: Positional[Path]
    """The folder to write; it appears when it is complete. An interrupted command goes on when it is given again."""
    model: Path | None = None
    """Config and tokenizer, for a Megatron checkpoint that has none."""
    block: tuple[pydantic.PositiveInt, pydantic.PositiveInt] = (128, 128)
    """Rows and columns that share a scale."""
    keep: tuple[str, ...] = ()
    """Globs of tensors to leave in high precision too."""
    shard_gib: float = pydantic.Field(2.0, gt=0, allow_inf_nan=False)
    """Size of a safetensors file."""
    overwrite: bool = False
    """Replace OUT if it exists, at the end and in one step."""
    no_verify: bool = False
    """Do not read everything back."""

    def run(self, overrides: Overrides) -> None:
        from megarl.convert.quantization import Options, quantize_and_show

        options = Options(
            block=self.block,
            keep=self.keep,
            shard_bytes=int(self.shard_gib * 2**30),
            verify=not self.no_verify,
            overwrite=self.overwrite,
        )
        quantize_and_show(self.source, self.out, self.model, options)


@command
class Patch:
    """Put the replay hook into a Megatron-Core before 0.16, or take it out again: docs/patches.md."""

    action: Positional[Literal["check", "apply", "revert", "status"]]
    """check: would it go in? Changes nothing."""
    target: Positional[Path | None] = None
    """A folder that contains megatron/core; default where this Python would import it from."""
    version: str | None = None
    """Take the patch of this release; default that of the target's own, or the nearest that fits."""
    dry_run: bool = False
    """Print what apply or revert would change, as a patch."""

    def run(self, overrides: Overrides) -> None:
        from megarl.patches import patch

        patch.run(self.action, self.target, self.version, self.dry_run)


@command
class Recipes:
    """List the configurations for public models; copy NAME [FOLDER]; or path NAME: docs/recipes.md."""

    action: Positional[Literal["list", "copy", "path"]] = "list"
    """copy: the recipe, its scripts and its model's config.json, nothing is overwritten. path: where the file is."""
    name: Positional[str | None] = None
    """A recipe, a script such as colocated.sbatch, or Containerfile with the requirements on GPUs."""
    folder: Positional[Path] = Path()
    """Where to copy to; default this folder."""
    json: bool = False
    """Print the results as JSON."""

    def run(self, overrides: Overrides) -> None:
        from megarl.recipes import shipped

        if self.action == "list":
            found = shipped.list_recipes()
            print(json.dumps(found) if self.json else text_table(found.items()))
        elif self.name is None:
            raise ConfigError(f"megarl recipes {self.action}: found no name; megarl recipes lists them")
        elif self.action == "path":
            print(shipped.find(self.name))
        else:
            print(*shipped.copy(self.name, self.folder), sep="\n")


@command
class Init:
    """Write a configuration, from the recipe that fits; asks in a terminal for what no flag says."""

    out: Positional[Path] = Path("megarl.toml")
    """The file to write; its name names the run."""
    model: str | None = None
    """Folder of the model, in Hugging Face format."""
    data: str | None = None
    """Prompts: a .jsonl or .parquet file, a dataset folder or a hub name; default data/train.jsonl."""
    heldout: str | None = None
    """The same for evaluation, every 20 steps; default none."""
    engine: Literal["local", "sglang"] | None = None
    """What samples; default sglang on GPUs."""
    gpus: int | None = pydantic.Field(None, ge=0, le=1024)
    """GPUs on each node, 0 for none; default 8."""
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
    """Replace OUT if it exists."""

    def run(self, overrides: Overrides) -> None:
        from megarl.starter import Answers, init

        names = Answers.__dataclass_fields__.keys() - {"name"}
        init(self.out, Answers(**{name: getattr(self, name) for name in names}), self.force)


@command
class Help:
    """Explain the keys of the configuration: a table, a key, or all."""

    topic: Positional[str | None] = None
    """A table such as rollout, a key such as rollout.temperature, or all; default: the list of tables."""

    def run(self, overrides: Overrides) -> None:
        from megarl.config import key_help

        print(key_help.describe_tables().strip() if self.topic is None else key_help.describe(self.topic))


@command
class Completion:
    """Print a script that completes commands, flags and keys in a shell: docs/install.md."""

    shell: Positional[Literal["bash", "zsh"]]
    """The shell."""

    def run(self, overrides: Overrides) -> None:
        from megarl.completion import script

        print(script(self.shell, COMMANDS))


@command
class Quickstart:
    """Make a tiny model and a task, train it with RL on the CPU, write a report to OUT/report."""

    out: Path = Path("runs/quickstart")
    """The folder for the model, the run and the report."""
    family: Literal["qwen3_moe", "qwen3", "qwen2", "llama"] = "qwen3_moe"
    """A MoE, or a dense model."""

    def run(self, overrides: Overrides) -> None:
        from megarl.quickstart import quickstart

        quickstart(self.out, self.family)


def _require_inputs(config: Config, stage: Literal["rl", "sft", "eval"] = "rl") -> None:
    from megarl.doctor.inputs import require_inputs

    require_inputs(config, stage)


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))  # set by torchrun
