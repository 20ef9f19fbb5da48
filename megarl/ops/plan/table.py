"""Prints a plan: as aligned text, by the rows of table.toml, or as JSON."""

import json
import string
from collections.abc import Iterator
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

from megarl.config import Config
from megarl.files.texts import read_table
from megarl.ops.plan.plan import Estimate


def to_json(plan: Estimate) -> str:
    """All numbers of a plan; bytes, counts and fractions under the names of the records."""
    totals = {"training": plan.memory.training, "peak": plan.memory.peak}
    return json.dumps({**asdict(plan), "worst_rank": {"stage": plan.memory.stage, **totals}}, indent=2)


def to_text(plan: Estimate, config: Config) -> str:
    """Sections of aligned lines."""
    names = {name: getattr(plan, name) for name in Estimate.__slots__}
    names |= {"config": config, "say": _derive(plan, config)}
    lines = [f"plan of {config.run.name}: {plan.family}, shape from {plan.model_path}"]
    for title, rows in read_table(__file__).items():
        lines += ["", _FORMAT.vformat(title, (), names), *(line for row in rows for line in _lines(names, *row))]
    return "\n".join(lines)


def _lines(names: dict[str, Any], label: str, amount: str, note: str, needs: str = "") -> Iterator[str]:
    if needs and not _FORMAT.get_field(needs, (), names)[0]:
        return
    yield "  {:<34} {:>14}  {}".format(*(_FORMAT.vformat(text, (), names) for text in (label, amount, note))).rstrip()


def _derive(plan: Estimate, config: Config) -> SimpleNamespace:
    """Values in rows that are no fields of a plan."""
    is_server, limit = config.rollout.engine_kind.server, config.launch.gpu_memory_gib
    with_gpus = "on the trainer's" if config.servers_share_gpus else "beside the trainer's"
    place = "apart" if config.launch.apart else with_gpus if config.sglang.gpus else "elsewhere"
    return SimpleNamespace(
        in_layers=plan.model.active - plan.model.embeddings,
        mini_batch=config.responses_per_step // config.train.mini_batches,
        vpp=f", vpp {plan.layout.vpp}" if plan.layout.vpp else "",
        servers=f'{place}, sync = "{config.weight_sync}"' if is_server else "no servers",
        update=plan.memory.states + plan.memory.sync,
        engine_dtype="FP8 blocks" if is_server and config.sglang.fp8 else config.rollout.dtype,
        of_gpu="no launch.gpu_memory_gib, nothing refused" if limit is None else f"of {limit:g} GiB",
    )


class _Format(string.Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec == "size":  # the largest unit that leaves at least 1, four figures
            return _scale(value, 1024, ("B", "KiB", "MiB", "GiB", "TiB"), ".4g")
        if format_spec == "count":
            return _scale(value, 1000, ("", "k", "M", "B"), ".2f") if value >= 1000 else str(value)
        return super().format_field(value, format_spec)


_FORMAT = _Format()


def _scale(value: float, step: int, units: tuple[str, ...], figures: str) -> str:
    for unit in units[:-1]:
        if abs(value) < step:
            return f"{value:{figures}} {unit}"
        value /= step
    return f"{value:{figures}} {units[-1]}"
