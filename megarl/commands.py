"""The commands of ``megarl``, by name: here commands that need the whole package; other commands beside their
subject."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Literal

import pydantic

from megarl import enable_cpu
from megarl.config import Config, process_environment
from megarl.config import file as config_file
from megarl.config.command import Command, OnConfiguration, Overrides, Positional, command, show, world_size
from megarl.convert.command import Convert, Quantize
from megarl.data.prepare.command import Data
from megarl.errors import ConfigError, printable, refusal
from megarl.ops.evaluate.request import WITHOUT_TRAINING, EvalRequest, eval_request
from megarl.ops.report.samples import Samples
from megarl.text_table import text_table
from megarl.watch.limits import GAP


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
    """Train, or `launch eval | sft`, where the [launch] table says, with all ranks and servers, and keep the run going:
    docs/launch.md."""

    def run(self, overrides: Overrides) -> int:
        config = self.load(overrides)
        config.check_world_size(config.launch.ranks)
        return _launch(config, "train", self.words(overrides))


def _launch(config: Config, stage: Literal["train", "sft", "eval"], words: list[str]) -> int:
    from megarl.ops.launch.supervisor import launch

    process_environment.process_environment(config, os.environ)  # contradictions are found before a rank starts
    if config.launch.layout == "local":  # elsewhere, another node may have the files
        _require_inputs(config, "rl" if stage == "train" else stage)
    return launch(config, [stage, *words])


@command
class Sft(OnConfiguration):
    """Teach the model a format from demonstrations (the [sft] table), before RL."""

    def load(self, overrides: Overrides) -> Config:
        """The configuration; ConfigError without the table [sft]."""
        config = super().load(overrides)
        if config.sft is None:
            raise ConfigError(refusal("no_sft", config=self.config))
        return config

    def run(self, overrides: Overrides) -> int | None:
        config = self.load_for_ranks(overrides)
        _require_inputs(config, "sft")
        enable_cpu()
        from megarl.trainer.sft import sft

        sft(config)


@command
class LaunchSft(Sft):
    """Start `megarl sft` on all ranks that the [launch] table says: docs/launch.md."""

    def run(self, overrides: Overrides) -> int:
        config = self.load(overrides)
        config.check_world_size(config.launch.ranks, "megarl launch sft CONFIG")
        return _launch(config, "sft", self.words(overrides))


@command
class Eval(OnConfiguration):
    """Sample benchmarks and print avg@k and pass@k with intervals: alone, or on many ranks under torchrun."""

    takes_keys: ClassVar[bool] = True
    config: Positional[Path | None] = None  # pyright: ignore[reportIncompatibleVariableOverride]
    """The configuration, a TOML file; default that of the run of --checkpoint."""
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

    def run(self, overrides: Overrides) -> int | None:
        """ConfigError with neither a configuration nor a run that has one."""
        if self.config is None:
            if self.checkpoint is None:
                raise ConfigError("megarl eval: found neither CONFIG nor --checkpoint; give one of them")
            saved, places = config_file.find_saved(self.checkpoint, "give CONFIG, too")
            return replace(self, config=saved).run({**places, **overrides})
        options = {name: getattr(self, name) for name in ("data", "samples", "template", "checkpoint", "out")}
        return self._start(eval_request(self.load({**WITHOUT_TRAINING, **overrides}), ks=self.k, **options), overrides)

    def _start(self, request: EvalRequest, overrides: Overrides) -> int | None:
        request.layout(world_size(), self.launch_line(overrides))
        _require_inputs(request.config, "eval")
        process_environment.apply(request.config)
        enable_cpu()
        from megarl.ops.evaluate.evaluation import evaluate

        evaluate(request, world_size())


@command
class LaunchEval(Eval):
    """Start `megarl eval` on all ranks and servers that the [launch] table says: docs/launch.md."""

    def _start(self, request: EvalRequest, overrides: Overrides) -> int:
        request.layout(request.config.launch.ranks)
        return _launch(request.config, "eval", self.words({**WITHOUT_TRAINING, **overrides}))  # also for servers


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
class Patch:
    """Put the replay hook into a Megatron-Core before 0.16, or take it out again: docs/patches.md."""

    action: Positional[Literal["check", "apply", "revert", "status"]]
    """check: would the patch apply? Changes no file."""
    target: Positional[Path | None] = None
    """A folder that contains megatron/core; default the folder that this Python would import."""
    version: str | None = None
    """Release of the patch; default the target's release, or the nearest that fits."""
    json: bool = False
    """Print the state of each file as JSON: docs/commands.md."""

    def run(self, overrides: Overrides) -> None:
        from megarl.ops.patching import patch

        patch.run(self.action, self.target, self.version, self.json)


@command
class Recipes:
    """List the configurations for public models; copy NAME [FOLDER]; or path NAME: docs/recipes.md."""

    action: Positional[Literal["list", "copy", "path"]] = "list"
    """copy: the recipe, scripts and the model's config.json; existing files stay. path: place of the file."""
    name: Positional[str | None] = None
    """A recipe, a script such as colocated.sbatch, or Containerfile with the requirements on GPUs."""
    folder: Positional[Path] = Path()
    """Where to copy to; default this folder."""

    def run(self, overrides: Overrides) -> None:
        """ConfigError without a name, or for an unknown one."""
        from megarl.ops import shipped

        if self.action == "list":
            print(text_table(shipped.list_recipes().items()))
        elif self.name is None:
            raise ConfigError(f"megarl recipes {self.action}: found no name; megarl recipes lists them")
        elif self.action == "path":
            print(shipped.find(self.name))
        else:
            print(*shipped.copy(self.name, self.folder), sep="\n")


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


def _require_inputs(config: Config, stage: Literal["rl", "sft", "eval"] = "rl") -> None:
    from megarl.ops.doctor.inputs import require_inputs

    require_inputs(config, stage)


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
    responses: int = pydantic.Field(32, ge=1)
    """Responses of each precision."""
    tokens: int = pydantic.Field(256, ge=1)
    """Longest response; the configuration's limit if that is lower."""
    max_k3: float = pydantic.Field(GAP.k3, ge=0)
    """A larger gap per token, as configured, is bad."""
    trust: bool = False
    """As for ``megarl train``."""
    json: bool = False
    """Print everything as JSON."""

    def run(self, overrides: Overrides) -> int:
        enable_cpu()
        # Transformer Engine multiplies fp32 matrices in TF32, and the control in fp32 would differ. Before CUDA starts.
        os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")
        from megarl.ops.evaluate.gap import find_weights, measure_and_show

        config, checkpoint = find_weights(self.checkpoint, self.config, self.prompts, dict(overrides), self.trust)
        process_environment.apply(config)
        return measure_and_show(config, checkpoint, self.responses, self.tokens, self.max_k3, self.json)


@command
class Plan(OnConfiguration):
    """Estimate memory and batches from the configuration alone; refuse what cannot fit or divide."""

    model: Path | None = None
    """Folder with the model's config.json; default model.path, or the shipped folder of that name."""
    json: bool = False
    """Print the numbers as JSON."""

    def run(self, overrides: Overrides) -> None:
        config = self.load(overrides)
        from megarl.ops.plan import table
        from megarl.ops.plan.plan import plan

        result = plan(config, self.model)
        print(table.to_json(result) if self.json else printable(table.to_text(result, config)))


@command
class Report:
    """Write one HTML page about a run, or one that overlays the curves of several: docs/report.md."""

    run_dirs: Positional[tuple[Path, ...]]
    """The folder of the run, or of each run."""
    out: Path | None = None
    """The page; default RUN_DIR/report/index.html, of several runs report/compare.html of the first."""

    def run(self, overrides: Overrides) -> None:
        from megarl.ops.report.report import write_report

        print(printable(f"report: {write_report(*self.run_dirs, out=self.out)}"))


@command
class Trace:
    """Look into files of routing traces: inspect FILE, or diff A B."""

    action: Positional[Literal["inspect", "diff"]]
    """What to do."""
    files: Positional[tuple[Path, ...]]
    """One file, or two for diff."""
    json: bool = False
    """Print the numbers as JSON: docs/commands.md."""

    def run(self, overrides: Overrides) -> None:
        """ConfigError for another number of files."""
        expected = 2 if self.action == "diff" else 1
        if len(self.files) != expected:
            raise ConfigError(f"megarl trace {self.action}: found {len(self.files)} files, expected {expected}")
        from megarl.ops.report import traces

        getattr(traces, self.action)(*self.files, as_json=self.json)


@command
class Verify:
    """Are the routes of two trace files equal, and if not, why? With --engine: is this server fit to train from?"""

    files: Positional[tuple[Path, ...]] = ()
    """EXPECTED USED: two files of routing traces."""
    engine: str | None = None
    """URL of a running SGLang or vLLM server, which is asked in place of files: docs/verify_engine.md."""
    model: Path | None = None
    """Folder of the server's model; default the folder that the server names."""
    api_key_env: str | None = None
    """Name of the variable with the server's API key."""
    top_p: float = pydantic.Field(0.0, ge=0, lt=1)
    """Check the kept sets at this top_p; 0 does not."""
    pressure: bool = False
    """Fill the server's memory until it retracts requests."""
    json: bool = False
    """Print the comparison of two files as JSON: docs/commands.md."""
    update: bool = False
    """Load the model's weights into the server under a new version, and name them as before afterwards."""

    def run(self, overrides: Overrides) -> int:
        """ConfigError unless there are two files or a server."""
        if len(self.files) != (2 if self.engine is None else 0):
            raise ConfigError(refusal("files_to_verify", num=len(self.files), also=" and --engine" * bool(self.engine)))
        if self.engine is not None:
            from megarl.engines.sglang.http import key_named
            from megarl.verify.engine import show_engine

            key = key_named(self.api_key_env)
            options = {"top_p": self.top_p, "pressure": self.pressure, "update": self.update}
            return show_engine(self.engine, api_key=key, model_path=self.model, **options)
        from megarl.verify.trace_files import compare_trace_files

        report = compare_trace_files(*self.files)
        show(str(report), report.facts(), self.json)
        return 0 if report.is_right else 1


_LISTED = (
    Train, Launch, LaunchSft, LaunchEval, Sft, Eval, Gap, Data, Plan, Doctor, Report, Samples, Status, Trace, Verify,
    Convert, Quantize, Patch, Recipes, Quickstart,
)  # fmt: skip
COMMANDS: dict[str, type[Command]] = {re.sub("(?<=h)(?=[A-Z])", " ", kind.__name__).lower(): kind for kind in _LISTED}
"""By the name on the command line ("launch eval"), in the order of the help text."""
