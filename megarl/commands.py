"""The commands of ``megarl``, by name: here commands that need the whole package; other commands beside their
subject."""

import json
import os
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveInt

from megarl import enable_cpu
from megarl.config import Config, process_environment
from megarl.config import file as config_file
from megarl.config.command import POSITIONAL, Command, OnConfiguration, Overrides, Positional, command, world_size
from megarl.convert.command import Convert, Quantize
from megarl.errors import ConfigError
from megarl.ops.evaluate.command import Gap
from megarl.ops.plan.command import Plan
from megarl.ops.report.command import Report, Trace
from megarl.ops.report.samples import Samples
from megarl.ops.starter import Init
from megarl.text_table import text_table

_ZSH = "autoload -Uz compinit bashcompinit && compinit && bashcompinit\n"
"""Lets zsh read the script for bash."""


@command
class Train(OnConfiguration):
    """Train with RL: alone, or on many ranks under torchrun."""

    def run(self, overrides: Overrides) -> None:
        config = self.load_for_ranks(overrides)
        _require_inputs(config)
        enable_cpu()
        from megarl.trainer.loop import train

        train(config)


@command
class Launch(OnConfiguration):
    """Train where the [launch] table says, with all ranks and servers, and keep the run going: docs/launch.md."""

    def run(self, overrides: Overrides) -> int:
        from megarl.ops.launch.supervisor import launch

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
        enable_cpu()
        from megarl.trainer.sft import sft

        sft(config)


@command
class Eval(OnConfiguration):
    """Sample benchmarks and print avg@k and pass@k with intervals: alone, or on many ranks under torchrun."""

    checkpoint: Path | None = None
    """Step folder of a run, or a run's folder for the newest step; default the weights in model.path."""
    data: tuple[str, ...] = ()
    """aime24, aime25, hmmt25, a .jsonl, .json or .parquet file, a hub name, or NAME=SOURCE; default data.heldout."""
    samples: int | None = None
    """Responses to each prompt; default eval.samples."""
    k: tuple[int, ...] = ()
    """The k of pass@k; default the powers of 4 up to samples, and samples."""
    template: str | None = None
    """Text with {prompt} around every plain-text prompt; default the benchmark's text."""
    out: Path | None = None
    """Folder for figures and responses; default <run.dir>/eval/<checkpoint>."""
    json: bool = False
    """Print the results as JSON."""

    def run(self, overrides: Overrides) -> None:
        from megarl.ops.evaluate.request import WITHOUT_TRAINING, eval_request

        options = {name: getattr(self, name) for name in ("data", "samples", "template", "checkpoint", "out", "json")}
        request = eval_request(self.load({**WITHOUT_TRAINING, **overrides}), ks=self.k, **options)
        request.layout(world_size())
        _require_inputs(request.config, "eval")
        process_environment.apply(request.config)
        enable_cpu()
        from megarl.ops.evaluate.evaluation import evaluate

        evaluate(request, world_size())


@command
class Doctor:
    """Say whether this machine, or one configuration here, can train, and list missing parts."""

    config: Positional[Path | None] = None
    """The configuration to check."""
    trust: bool = False
    """As for ``megarl train``."""
    json: bool = False
    """Print everything as JSON."""

    def run(self, overrides: Overrides) -> int:
        from megarl.ops.doctor import doctor

        os.environ.update(process_environment.compile_caches(os.environ))
        return doctor(self.config, overrides, trust=self.trust, json=self.json)


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
class Simulate:
    """Compare the sampling rules on prompts with given pass rates: exact cost, contrast and efficiency."""

    rates: tuple[str, ...] = ()
    """Pass rates of the prompts, each P or P:PROMPTS, such as 0:20 0.3:50 0.9:30."""
    samples: int = Field(8, ge=2, le=256)
    """Samples per prompt, for uniform sampling and rules that divide a budget."""
    train_size: int = Field(4, ge=2)
    """Samples of a prompt that train under Ada-Seq."""
    round_size: PositiveInt = 8
    """Samples of a round of Ada-Seq."""
    max_samples: int = Field(32, le=256)
    """Most samples of a prompt under Ada-Seq."""
    out: Path = Path("runs/simulate.html")
    """The figure, an HTML page."""
    json: bool = False
    """Print the results as JSON."""

    def run(self, overrides: Overrides) -> None:
        from megarl.ops.simulate import Budget, simulate

        budget = Budget(self.samples, self.train_size, self.round_size, self.max_samples)
        simulate(self.rates, budget, self.out, self.json)


@command
class Patch:
    """Put the replay hook into a Megatron-Core before 0.16, or take it out again: docs/patches.md."""

    action: Positional[Literal["check", "apply", "revert", "status"]]
    """check: would the patch apply? Changes no file."""
    target: Positional[Path | None] = None
    """A folder that contains megatron/core; default the folder that this Python would import."""
    version: str | None = None
    """Release of the patch; default the target's release, or the nearest that fits."""
    dry_run: bool = False
    """Print what apply or revert would change, as a patch."""
    json: bool = False
    """Print the results as JSON."""

    def run(self, overrides: Overrides) -> None:
        from megarl.ops.patching import patch

        patch.run(self.action, self.target, self.version, self.dry_run, self.json)


@command
class Recipes:
    """List the configurations for public models; copy NAME [FOLDER]; or path NAME: docs/recipes.md."""

    action: Positional[Literal["list", "copy", "path"]] = "list"
    """copy: the recipe, scripts and the model's config.json; existing files stay. path: place of the file."""
    name: Positional[str | None] = None
    """A recipe, a script such as colocated.sbatch, or Containerfile with the requirements on GPUs."""
    folder: Positional[Path] = Path()
    """Where to copy to; default this folder."""
    json: bool = False
    """Print the results as JSON."""

    def run(self, overrides: Overrides) -> None:
        from megarl.ops import shipped

        if self.action == "list":
            recipes = shipped.list_recipes()
            print(json.dumps(recipes) if self.json else text_table(recipes.items()))
        elif self.name is None:
            raise ConfigError(f"megarl recipes {self.action}: found no name; megarl recipes lists them")
        elif self.action == "path":
            print(shipped.find(self.name))
        else:
            print(*shipped.copy(self.name, self.folder), sep="\n")


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
        infos, cases = config_file.keys(), []
        keys = [f"--{key}" for key in infos if not key.endswith("*")]
        for name, kind in dict[str, Any](COMMANDS).items():
            fields = kind.__pydantic_fields__
            flags = [field for field, info in fields.items() if POSITIONAL not in info.metadata]
            words = [f"--{flag.replace('_', '-')}" for flag in flags]
            words += ["--help", *(keys if "config" in fields else ())]
            if name == "help":
                words += ["all", *dict.fromkeys(key[2:].partition(".")[0] for key in keys)]
            cases.append(f'        {name}) words="{" ".join(words)}" ;;')
        text = Path(__file__).with_name("completion.bash").read_text("utf-8")
        text = text.replace("@COMMANDS@", " ".join(COMMANDS)).replace("@CASES@", "\n".join(cases))
        print((_ZSH if self.shell == "zsh" else "") + text.rstrip())


@command
class Quickstart:
    """Make a tiny model and a task, train it with RL on the CPU, write a report to OUT/report."""

    out: Path = Path("runs/quickstart")
    """The folder for the model, the run and the report."""
    family: Literal["qwen3_moe", "qwen3", "qwen2", "llama"] = "qwen3_moe"
    """A MoE, or a dense model."""

    def run(self, overrides: Overrides) -> None:
        from megarl.ops.quickstart import quickstart

        quickstart(self.out, self.family)


_LISTED = (
    Train, Launch, Sft, Eval, Gap, Plan, Doctor, Report, Samples, Status, Trace, Simulate, Convert, Quantize,
    Patch, Recipes, Init, Help, Completion, Quickstart,
)  # fmt: skip
COMMANDS: dict[str, type[Command]] = {kind.__name__.lower(): kind for kind in _LISTED}
"""By the name on the command line, in the order of the help text."""


def _require_inputs(config: Config, stage: Literal["rl", "sft", "eval"] = "rl") -> None:
    from megarl.ops.doctor.inputs import require_inputs

    require_inputs(config, stage)
