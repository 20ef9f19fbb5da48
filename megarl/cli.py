"""The command line: ``megarl train | launch | plan | status | report`` and more, see ``megarl --help``.

Every key of the configuration is also a flag, ``--rollout.temperature 0.7``; defaults < file < flags. torch and
everything built on it is imported only inside the commands, after the configuration has been found valid. A mistake of
the user costs one line on stderr and exit code 2.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import tyro

from megarl.config import Config
from megarl.config import file as config_file
from megarl.config.flags import as_flag, split_overrides
from megarl.errors import ConfigError, MegarlError, StopError

USAGE_ERROR = 2
_TAKE_A_CONFIGURATION = ("train", "launch", "sft", "eval", "plan")
_FIRST_RANK_SPEAKS_S = 3.0
INTERRUPTED = 130
STOPPED = 75
"""The run was asked to stop and has saved itself (EX_TEMPFAIL): start it again to continue."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, 1 (something is missing or lost), 2 (an error), 75 (asked to stop)."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        arguments, overrides = split_overrides(words)
        return _parse_command(arguments, overrides)()
    except StopError as error:
        _complain(str(error), on_every_rank=False)
        return STOPPED
    except MegarlError as error:
        _leave_word(error)
        _complain(str(error), on_every_rank=not isinstance(error, ConfigError) or _ranks_have_met())
        return USAGE_ERROR
    except KeyboardInterrupt:
        _complain("interrupted", on_every_rank=False)
        return INTERRUPTED


Command = Callable[[], int]


def _parse_command(arguments: list[str], overrides: Mapping[str, Any]) -> Command:
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.extras.subcommand_cli_from_dict(
                _commands(overrides), prog="megarl", description=_DESCRIPTION, args=arguments
            )
    except SystemExit as stop:
        if stop.code:
            raise ConfigError(_one_line(complaint.getvalue())) from None
        if arguments[0] in _TAKE_A_CONFIGURATION:
            _print_keys()
        raise


_DESCRIPTION = "Stable reinforcement learning of Mixture-of-Experts language models on Megatron-Core."


def _one_line(box: str) -> str:
    """tyro's complaint, which is a titled box of several lines, as one line."""
    lines = [line.strip(" |\u2502\u256d\u256e\u2570\u256f\u2500-") for line in box.splitlines()]
    title, *body = [line for line in lines if line]
    return " ".join("; ".join(body or [title]).replace(":;", ":").replace(".;", ";").replace(",;", ",").split())


def _commands(overrides: Mapping[str, Any]) -> dict[str, Callable[..., Command]]:
    """Name -> function that tyro fills from the command line; each returns what is to be done."""

    def train(config: tyro.conf.Positional[Path]) -> Command:
        """Train with RL: alone, or on many ranks under torchrun."""
        return lambda: _train(_load_for_this_world(config, overrides))

    def launch(config: tyro.conf.Positional[Path]) -> Command:
        """Train where the [launch] table says, with all ranks and servers, and keep the run going: docs/launch.md."""
        return lambda: _launch(config, overrides)

    def sft(config: tyro.conf.Positional[Path]) -> Command:
        """Teach the model a format from demonstrations (the [sft] table), before RL."""
        return lambda: _sft(_load_for_this_world(config, overrides))

    def eval(
        config: tyro.conf.Positional[Path],
        checkpoint: Path | None = None,
        data: tuple[str, ...] = (),
        samples: int | None = None,
        k: tuple[int, ...] = (),
        template: str | None = None,
        out: Path | None = None,
    ) -> Command:
        """Sample benchmarks and print avg@k and pass@k with intervals: alone, or on many ranks under torchrun.

        Args:
            checkpoint: step folder of a run, or a run's folder for its newest; without it the weights in model.path.
            data: aime24, aime25, hmmt25, a .jsonl or .parquet file, a hub name, or NAME=SOURCE; default data.heldout.
            samples: responses to each prompt; default eval.samples.
            k: the k of pass@k; default the powers of 4 up to samples, and samples.
            template: text with {prompt} in it, around every plain-text prompt; default that of the benchmark.
            out: folder for figures and responses; default <run.dir>/eval/<checkpoint>.
        """
        asked = {"data": data, "samples": samples, "ks": k, "template": template, "checkpoint": checkpoint, "out": out}
        return lambda: _eval(config, overrides, asked)

    def plan(config: tyro.conf.Positional[Path], model: Path | None = None, json: bool = False) -> Command:
        """Reckon memory, bytes moved and batches from the configuration alone; refuse what cannot fit or divide.

        Args:
            model: folder with the model's config.json; default model.path, then the shipped one of that name.
            json: print the numbers as JSON.
        """
        return lambda: _plan(config, model, json, overrides)

    def doctor(config: tyro.conf.Positional[Path | None] = None) -> Command:
        """Show what is installed, what that enables, and what would silently disable routing replay."""
        return lambda: _doctor(config, overrides)

    def report(run_dir: tyro.conf.Positional[Path]) -> Command:
        """Draw the curves of a run into PNGs and one HTML page."""
        return lambda: _report(run_dir, overrides)

    def status(run_dir: tyro.conf.Positional[Path], json: bool = False) -> Command:
        """Say how far a run is: step, phase, speed, time to go, last error, and where its ranks are.

        Args:
            json: print status.json with what is known of the ranks, for programs.
        """
        return lambda: _status(run_dir, json, overrides)

    def trace(
        action: tyro.conf.Positional[Literal["inspect", "stats", "diff"]],
        files: tyro.conf.Positional[tuple[Path, ...]],
        out: Path | None = None,
    ) -> Command:
        """Look into files of routing traces: inspect FILE, stats FILE, or diff A B [--out heatmap.png]."""
        return lambda: _trace(action, files, out, overrides)

    def simulate(
        rates: tuple[str, ...] = (),
        samples: int = 8,
        train_size: int = 4,
        round_size: int = 8,
        max_samples: int = 32,
        out: Path = Path("runs/simulate.png"),
    ) -> Command:
        """Compare the sampling rules on prompts with given pass rates: exact cost, contrast and efficiency.

        Args:
            rates: pass rates of the prompts, P or P:PROMPTS each, such as 0:20 0.3:50 0.9:30.
            samples: per prompt, for uniform sampling and rules that divide a budget.
            train_size: samples of a prompt that train under Ada-Seq.
            round_size: samples of a round of Ada-Seq.
            max_samples: cap of Ada-Seq.
            out: the picture, a PNG file.
        """
        budget = {"samples": samples, "train_size": train_size, "round_size": round_size, "max_samples": max_samples}
        return lambda: _simulate(rates, budget, out, overrides)

    def convert(
        source: tyro.conf.Positional[Path],
        out: tyro.conf.Positional[Path],
        model: Path | None = None,
        dtype: Literal["keep", "fp32", "bf16", "fp16"] = "keep",
        layers: Literal["installed", "local", "te"] = "installed",
        stack_layers: bool = False,
        drop: tuple[str, ...] = (),
        verify: Literal["none", "checksums", "logits"] = "checksums",
        shard_gib: float = 2.0,
        overwrite: bool = False,
    ) -> Command:
        """Convert a Hugging Face checkpoint into Megatron's torch_dist format, or back; also under torchrun.

        Args:
            source: a Hugging Face folder, a torch_dist checkpoint, or a folder of Megatron-LM or megarl with some.
            out: the folder to write; it appears when it is complete.
            model: for a Megatron source, a folder with config and tokenizer; a converted checkpoint has its own.
            dtype: of the output.
            layers: whose names Megatron will look for, those of its local layers or of Transformer Engine's.
            stack_layers: one tensor for all layers, as Megatron-LM asks for by default under --moe-layer-freq 1.
            drop: globs of tensors that the model does not have and that may be left out (prediction layers).
            verify: read everything back and compare bits; logits also builds both models and compares their logits.
            shard_gib: size of a safetensors file.
            overwrite: replace OUT if it exists, at the end and in one step.
        """
        asked = {"stack_layers": stack_layers, "drop": drop, "overwrite": overwrite}
        return lambda: _convert(source, out, model, (dtype, layers, verify), shard_gib, asked, overrides)

    def quickstart(out: Path = Path("runs/quickstart")) -> Command:
        """Make a tiny MoE and a task, train it with RL on the CPU, write a report to OUT/report."""
        return lambda: _quickstart(out, overrides)

    commands = (train, launch, sft, eval, plan, doctor, report, status, trace, simulate, convert, quickstart)
    return {command.__name__: command for command in commands}


def _load_for_this_world(path: Path, overrides: Mapping[str, Any]) -> Config:
    config = config_file.load(path, overrides)
    config.check_world_size(int(os.environ.get("WORLD_SIZE", "1")))  # set by torchrun
    return config


def _refuse_overrides(command: str, overrides: Mapping[str, Any]) -> None:
    if overrides:
        raise ConfigError(f"megarl {command} reads no configuration: remove --{next(iter(overrides))}")


def _train(config: Config) -> int:
    from megarl.train.loop import train

    train(config)
    return 0


def _launch(path: Path, overrides: Mapping[str, Any]) -> int:
    from megarl.launch.supervisor import launch

    words = [word for key, value in overrides.items() for word in (f"--{key}", as_flag(value))]
    return launch(config_file.load(path, overrides), ["train", *words, str(path)])


def _sft(config: Config) -> int:
    if config.sft is None:
        raise ConfigError("found no [sft] table, expected one with data, steps, batch_size and lr; add it to the file")
    from megarl.train.sft import sft

    sft(config)
    return 0


def _eval(path: Path, overrides: Mapping[str, Any], asked: Mapping[str, Any]) -> int:
    from megarl.evaluate.request import WITHOUT_TRAINING, eval_request

    request = eval_request(config_file.load(path, {**WITHOUT_TRAINING, **overrides}), **asked)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    request.layout(world_size)
    from megarl.evaluate.evaluation import evaluate

    evaluate(request, world_size)
    return 0


def _plan(path: Path, model: Path | None, as_json: bool, overrides: Mapping[str, Any]) -> int:
    config = config_file.load(path, overrides)
    from megarl.plan import table
    from megarl.plan.plan import plan

    found = plan(config, model, path)
    print(table.to_json(found) if as_json else table.to_text(found, config))
    return 0


def _doctor(path: Path | None, overrides: Mapping[str, Any]) -> int:
    if path is None:
        _refuse_overrides("doctor without a file", overrides)
    from megarl.doctor import doctor

    return doctor(path, overrides)


def _report(run_dir: Path, overrides: Mapping[str, Any]) -> int:
    _refuse_overrides("report", overrides)
    from megarl.report.report import write_report

    print(f"report: {write_report(run_dir)}")
    return 0


def _status(run_dir: Path, as_json: bool, overrides: Mapping[str, Any]) -> int:
    _refuse_overrides("status", overrides)
    from megarl.run.status import show

    return show(run_dir, as_json)


def _trace(action: str, files: Sequence[Path], out: Path | None, overrides: Mapping[str, Any]) -> int:
    _refuse_overrides("trace", overrides)
    expected = 2 if action == "diff" else 1
    if len(files) != expected:
        raise ConfigError(f"megarl trace {action}: found {len(files)} files, expected {expected}")
    if out is not None and action != "diff":
        raise ConfigError(f"megarl trace {action} draws nothing: remove --out, which belongs to megarl trace diff")
    from megarl.report import traces as trace_report

    if action == "inspect":
        trace_report.inspect(files[0])
    elif action == "stats":
        trace_report.stats(files[0])
    else:
        trace_report.diff(files[0], files[1], out)
    return 0


def _simulate(rates: tuple[str, ...], budget: Mapping[str, int], out: Path, overrides: Mapping[str, Any]) -> int:
    _refuse_overrides("simulate", overrides)
    from megarl.simulate import Budget, simulate

    simulate(rates, Budget(**budget), out)
    return 0


def _convert(
    source: Path,
    out: Path,
    model: Path | None,
    choices: tuple[str, str, Any],
    shard_gib: float,
    asked: Mapping[str, Any],
    overrides: Mapping[str, Any],
) -> int:
    _refuse_overrides("convert", overrides)
    if not 0 < shard_gib < float("inf"):
        raise ConfigError(f"--shard-gib: found {shard_gib}, expected more than 0")
    from megarl.convert.command import DTYPES, convert, installed_layers
    from megarl.convert.conversion import Options

    dtype, layers, verify = choices
    named = installed_layers() if layers == "installed" else layers
    options = Options(dtype=DTYPES[dtype], layers=named, shard_bytes=int(shard_gib * 2**30), **asked)
    convert(source, out, model, options, verify)
    return 0


def _quickstart(out: Path, overrides: Mapping[str, Any]) -> int:
    _refuse_overrides("quickstart", overrides)
    from megarl.quickstart import quickstart

    quickstart(out)
    return 0


def _print_keys() -> None:
    """Every key with its default and meaning, below tyro's help."""
    print("\nany key of the configuration file, on top of it (none for no value):\n")
    for key, info in config_file.keys().items():
        default = "needed" if info.is_required() else f"default {info.default}" if info.default is not None else ""
        note = f" [{default}]" if default and not key.endswith("*") else ""
        print(f"  --{key}{note}\n      {info.description or ''}")


def _leave_word(error: MegarlError) -> None:
    """For ``megarl launch``, which hears of its ranks only that they failed. The first that knows why has the word."""
    if "MEGARL_FAILURE" not in os.environ:
        return
    path = Path(os.environ["MEGARL_FAILURE"])
    word = {"kind": type(error).__name__, "message": " ".join(str(error).split()), "second_hand": error.second_hand}
    own = path.with_name(f".{path.name}.{os.environ.get('RANK', '0')}")
    with contextlib.suppress(OSError):
        own.write_text(json.dumps(word))
        try:
            os.link(own, path)  # whole at once, and not over another's
        except FileExistsError:
            if not error.second_hand and json.loads(path.read_text())["second_hand"]:
                own.replace(path)
        except OSError:  # a file system without links
            own.replace(path)
        own.unlink(missing_ok=True)


def _ranks_have_met() -> bool:
    """Before the ranks join, all of them find the same mistake; afterwards one may find what no other does."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def _complain(message: str, *, on_every_rank: bool) -> None:
    """One line on stderr. What all ranks find alike is said by the first one only."""
    rank = os.environ.get("RANK", "0")  # set by torchrun
    if rank != "0" and not on_every_rank:
        time.sleep(_FIRST_RANK_SPEAKS_S)  # torchrun ends all ranks when one does: the first one must come to its word
        return
    where = f" (rank {rank})" if "RANK" in os.environ and on_every_rank else ""
    print(f"megarl: error{where}: {' '.join(message.split())}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
