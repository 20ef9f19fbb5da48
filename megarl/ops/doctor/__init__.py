"""``megarl doctor``: whether this machine, or one configuration here, can train; needs only numpy and pydantic.

report   checks, the verdict; as text and as JSON; the texts are in findings.toml
machine  packages, Megatron-Core, devices, SGLang; a trial of the trainer's first imports and reads
inputs   model, data, keys, disk and [launch] of a configuration
"""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.config import file as config_file
from megarl.models.fit import check_fit
from megarl.ops.doctor import inputs, machine
from megarl.ops.doctor.report import Diagnosis, Finding


def doctor(
    path: Path | None = None, overrides: Mapping[str, Any] | None = None, *, trust: bool = False, json: bool = False
) -> int:
    """Print the verdict, reasons and checks; return 0 if ready, otherwise 1. ConfigError for a wrong configuration."""
    report = examine(path, overrides, trust=trust)
    print(report.to_json() if json else report.to_text())
    return 0 if report.ready else 1


def examine(path: Path | None = None, overrides: Mapping[str, Any] | None = None, *, trust: bool = False) -> Diagnosis:
    """Check the machine, and with a path what the configuration names."""
    releases = machine.versions()
    if path is None:
        return Diagnosis(None, machine.check_machine(None, releases), releases)
    config = config_file.load(path, overrides, trust=trust)
    p = config.parallel
    smallest = math.lcm(p.tp * p.pp * p.cp, p.ep * p.expert_tp * p.pp)
    ranks = config.launch.ranks if "launch" in config.model_fields_set else smallest
    config.check_world_size(int(os.environ.get("WORLD_SIZE", ranks)))  # ConfigError if sizes do not divide
    of_model, shape = inputs.read_model(config)
    if shape is not None:
        check_fit(config, shape)
    of_inputs = [*of_model, *inputs.check_inputs(config, shape)]
    failed = {check.name for check in of_inputs if check.status == "failed"}
    checks = [*machine.check_machine(config, releases, failed), *of_inputs]
    checks += [Finding("configuration", "warning", warning) for warning in config.warnings]
    failed = {check.name for check in checks if check.status == "failed"}
    if config.rollout.engine_kind.server and not failed & {"httpx", "aiohttp", "sglang", "sglang.api_key_env"}:
        from megarl.engines.sglang.server import examine as examine_servers  # needs httpx and aiohttp

        checks = [check for check in checks if check.name != "sglang"]  # which the servers' checks say again
        checks += [Finding(f"server {place}", status, text) for place, status, text in examine_servers(config)]
    return Diagnosis(str(path), checks, releases)
