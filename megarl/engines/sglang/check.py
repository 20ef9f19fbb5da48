"""Examines the servers of a configuration before a run: release, and problems for megarl."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.config import Config
from megarl.engines.sglang.http import key_named, server_info
from megarl.engines.sglang.spec import SERVER_DTYPES, ServerSpec, command
from megarl.engines.sglang.versions import CHECKSUMS_ON_CPU, check_server, installed_release, parse_arguments
from megarl.errors import MegarlError
from megarl.models.fit import servers_record

ASK_S = 20.0


@dataclass(frozen=True, slots=True)
class Examined:
    """An environment for servers, or a running server."""

    where: str
    """Path of the interpreter, or URL."""
    release: str | None = None
    """None: unknown."""
    warnings: tuple[str, ...] = ()
    problem: str | None = None
    """Why a run would refuse the server, and the remedy; None: no problem."""


def examine(config: Config) -> list[Examined]:
    """Ask the servers in sglang.urls, or the interpreter sglang.python; starts no server."""
    return [_check(config, place) for place in config.sglang.urls or [str(config.sglang.python)]]


def _predict_info(config: Config, python: str) -> Mapping[str, Any]:
    """Return the expected /server_info of a server with these settings, as far as the command line shows."""
    settings = config.sglang
    gpus, arguments = tuple(settings.gpus[: settings.tp]) or None, tuple(settings.arguments)
    programs = config.model.path, python, SERVER_DTYPES[config.rollout.dtype], os.devnull
    spec = ServerSpec(*programs, tp=settings.tp, gpus=gpus, routes=servers_record(config), extra_args=arguments)
    # Servers started by megarl have a key, which is not on the command line.
    return {**parse_arguments(command(spec)), "api_key": True, "version": installed_release(Path(python))}


def _check(config: Config, place: str) -> Examined:
    release = None
    try:
        if config.sglang.urls:
            info = server_info(place, key_named(config.sglang.api_key_env), ASK_S)
        else:
            info = _predict_info(config, place)
        release = str(info.get("version"))
        version, warnings = check_server(info, config.sglang.tp, servers_record(config))
    except MegarlError as error:
        return Examined(place, release, problem=str(error))
    problem = None
    if config.sglang.checksums and info.get("device") == "cpu" and version < CHECKSUMS_ON_CPU:
        problem = f"SGLang {release} gives no checksums on a CPU: take a later one, or sglang.checksums = false"
    return Examined(place, release, tuple(warnings), problem)
