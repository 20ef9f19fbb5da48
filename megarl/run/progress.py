"""What the user sees while a run goes: lines of the first rank. ``megarl status`` shows the phase."""

import os
import shlex
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from megarl.config import Config
from megarl.errors import printable
from megarl.models.shapes import ModelShape
from megarl.run.signals import drop_lost_outputs

Advance = Callable[[int], None]
"""Reports a number of finished items; fits an engine's ``on_finish``."""


class StepProgress:
    def __init__(self, enabled: bool = True) -> None:
        """enabled: whether this rank shows anything."""
        self._enabled = enabled

    def line(self, text: str) -> None:
        """Print a line, without control characters. A lost output is a hang-up, also without a terminal."""
        if not self._enabled:
            return
        try:
            print(printable(text), flush=True)
        except OSError:
            if not drop_lost_outputs():
                raise
            signal.raise_signal(signal.SIGHUP)


def program(name: str = "megarl") -> str:
    """Return how a shell calls this installation's megarl or torchrun from the current folder."""
    sibling, on_path = Path(sys.executable).with_name(name), shutil.which(name)
    if not sibling.exists() or (on_path and Path(on_path).resolve() == sibling.resolve()):
        return name
    relative = os.path.relpath(sibling)
    return shlex.quote(str(sibling) if relative.startswith("..") else relative)


def header(config: Config, shape: ModelShape, ranks: int, device: str) -> list[str]:
    """Return the lines that a training run begins with; ``device`` is the name of this rank's device."""
    layout, train = config.check_world_size(ranks), config.train
    sizes = ", ".join(f"{name} {getattr(layout, name)}" for name in ("tp", "pp", "cp", "dp", "ep", "etp"))
    experts = f", {shape.num_experts} experts" if shape.num_experts else ""
    updates = f"{train.mini_batches} updates of {config.responses_per_step // train.mini_batches} responses per step"
    rows = {
        "where": f"{ranks} rank{'s' * (ranks > 1)} on {device}: {sizes}",
        "model": f"{config.model.path} ({shape.family}, {shape.num_layers} layers{experts}, {config.model.dtype})",
        "data": config.data.train,
        "objective": f"{train.objective}, replay {train.replay}, {updates}",
        "engine": f"{config.rollout.engine} ({config.rollout.dtype})",
    }
    title = f"run '{config.run.name}' in {config.run_dir}, {config.run.steps} steps"
    return [title, *(f"  {name:<12} {text}" for name, text in rows.items())]


def ending(config: Config, checkpoint: Path | None, first: int) -> list[str]:
    """Return the lines that a run ends with; the run began after ``first`` steps."""
    steps = config.run.steps
    title = f"done: {steps} of {steps} steps"
    if first >= steps:
        title = f"nothing to do: {first} steps are done, and run.steps is {steps}; go on with --run.steps {2 * first}"
    weights = str(checkpoint) if checkpoint else "none saved (checkpoint.every and at_end are off)"
    report = f"{program()} report {shlex.quote(str(config.run_dir))}"
    return [title, f"  {'weights':<12} {weights}", f"  {'report':<12} {report}"]
