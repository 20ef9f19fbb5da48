"""``megarl doctor``: whether this machine, or one configuration here, can train; needs only numpy and pydantic.

report   checks, tables, the verdict; as text and as JSON
trial    the trainer's first imports and reads, in a separate process
machine  packages, Megatron-Core, devices, SGLang
inputs   model, data, keys, disk and [launch] of a configuration
details  the tables below the verdict
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.config import file as config_file
from megarl.errors import ConfigError
from megarl.models.fit import check_fit
from megarl.ops.doctor import details, inputs, machine
from megarl.ops.doctor.report import Diagnosis, Finding


def doctor(
    path: Path | None = None, overrides: Mapping[str, Any] | None = None, *, trust: bool = False, json: bool = False
) -> int:
    """Print the verdict, reasons and details; return 0 if ready, otherwise 1. ConfigError for a wrong configuration."""
    report = examine(path, overrides, trust=trust)
    print(report.to_json() if json else report.to_text())
    return 0 if report.ready else 1


def examine(path: Path | None = None, overrides: Mapping[str, Any] | None = None, *, trust: bool = False) -> Diagnosis:
    """Check the machine, and with a path what the configuration names."""
    releases, config, checks = machine.versions(), None, []
    try:
        config = None if path is None else config_file.load(path, overrides, trust=trust)
    except ConfigError as error:
        if "found no megatron-core" not in str(error):
            raise
        checks = [Finding("[megatron]", "failed", "not checked: Megatron-Core, which has its keys, is not installed")]
    if config is None:
        checks += machine.check_machine(None, releases)[0]
        return Diagnosis(
            None if path is None else str(path), checks, [details.blockers(), details.releases()], releases
        )
    layout = details.layout_of(config)
    of_model, shape = inputs.read_model(config)
    if shape is not None:
        check_fit(config, shape)
    of_inputs = [*of_model, *inputs.check_inputs(config, shape)]
    failed = {check.name for check in of_inputs if check.status == "failed"}
    of_machine, has_te = machine.check_machine(config, releases, failed)
    checks += of_machine + of_inputs
    checks += [Finding("configuration", "warning", warning) for warning in config.warnings]
    tables = [details.resolved(config, layout, shape)]
    if releases["megatron-core"] is not None:
        tables.append(details.switches(config, has_te and not (shape is not None and shape.norm_over_heads)))
    if config.rollout.engine_kind.server and releases["httpx"] and releases["aiohttp"]:
        of_servers, table = details.servers(config)
        checks += of_servers
        tables.append(table)
    return Diagnosis(str(path), checks, tables, releases)
