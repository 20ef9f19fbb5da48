"""Prints a plan: as aligned text, by the rows of table.toml, or as JSON."""

import json
import string
import tomllib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megarl.config import Config
from megarl.ops.plan.plan import Plan


def to_json(found: Plan) -> str:
    """All numbers of a plan; bytes, counts and fractions under the names of the records."""
    totals = {"training": found.memory.training, "peak": found.memory.peak}
    return json.dumps({**asdict(found), "worst_rank": {"stage": found.memory.stage, **totals}}, indent=2)


def to_text(found: Plan, config: Config) -> str:
    """Sections of aligned lines."""
    sections = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    names = {name: getattr(found, name) for name in Plan.__slots__} | {"config": config, "say": _derive(found, config)}
    lines = [f"plan of {config.run.name}: {found.family}, shape from {found.model_path}"]
    for title, rows in sections.items():
        lines += ["", _FORMAT.vformat(title, (), names), *(line for row in rows for line in _lines(found, names, *row))]
    return "\n".join(lines)


def _lines(found: Plan, names: dict[str, Any], what: str, amount: str, note: str, needs: str = "") -> Iterator[str]:
    if needs and not _FORMAT.get_field(needs, (), names)[0]:
        return
    rows = [(what, amount, note, names)]
    if what == "stages":
        others = found.stages if len(found.stages) > 1 else ()
        rows = [("  stage {s.stage}", "{s.peak:size}", "weights {s.weights:size}", {"s": other}) for other in others]
    for *texts, known in rows:
        filled = (_FORMAT.vformat(text, (), known) for text in texts)
        yield "  {:<34} {:>14}  {}".format(*filled).rstrip()


def _derive(found: Plan, config: Config) -> SimpleNamespace:
    """What rows say that is no field of a plan."""
    is_server, limit = config.rollout.engine_kind.server, config.launch.gpu_memory_gib
    beside = "on the trainer's" if config.servers_share_gpus else "beside the trainer's"
    where = "apart" if config.launch.apart else beside if config.sglang.gpus else "elsewhere"
    return SimpleNamespace(
        in_layers=found.model.active - found.model.embeddings,
        vpp=f", vpp {found.layout.vpp}" if found.layout.vpp else "",
        servers=f'{where}, sync = "{config.weight_sync}"' if is_server else "no servers",
        update=found.memory.states + found.memory.sync,
        engine_dtype="FP8 blocks" if is_server and config.sglang.fp8 else config.rollout.dtype,
        place="of a server" if is_server else "of a rank",
        shared="shared in turns, " if config.sglang.release_memory else "",
        of_gpu="no launch.gpu_memory_gib, nothing refused" if limit is None else f"of {limit:g} GiB",
        pipelined=found.layout.pp > 1,
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
