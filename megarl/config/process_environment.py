"""Environment variables that libraries of a training process read at import or at the first use of a GPU.

``apply`` sets the variables before torch is imported. The user's values win; a value that contradicts the configuration
is a ConfigError. On a CPU, the variables have no effect.
"""

import os
import re
import tempfile
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from megarl.config.tables import Tables
from megarl.config.trust import make_private
from megarl.errors import ConfigError, refusal, reworded
from megarl.files.texts import read_table

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables with the settings of torch's GPU allocator; torch 2.9 and later read the first, which wins over the
second."""
LAUNCHER = re.compile(r"((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|ROLE_NAME|TORCHELASTIC_.*)")
"""Variables of torchrun, because of which a library in another process would take it for a rank."""
_TABLES = read_table(__file__)
_DETERMINISTIC: Mapping[str, list[str]] = _TABLES["deterministic"]
"""Values that are deterministic; megarl's own is the first."""
_CACHES: Mapping[str, str] = _TABLES["caches"]
"""Variables of torch, Triton, CUDA and the kernels of SGLang -> folder of each below megarl's."""


def process_environment(config: Tables, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to set in addition to ``environment``, the variables of the process.

    ConfigError for a value that contradicts the configuration.
    """
    variables: dict[str, str] = {}
    if config.run.deterministic:
        for name, values in _DETERMINISTIC.items():
            if (value := environment.get(name, values[0])) not in values:
                raise ConfigError(refusal("not_deterministic", name=name, value=value, values=" or ".join(values)))
            variables[name] = values[0]
    parallel = config.parallel
    if max(parallel.tp, parallel.cp) > 1:
        # One hardware queue: an overlapped collective call starts before the kernels that follow the call.
        variables["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    missing = {name: value for name, value in variables.items() if name not in environment}
    return missing | _expandable_segments(environment)


def _expandable_segments(environment: Mapping[str, str]) -> dict[str, str]:
    """Segments that grow: batches differ in length, and fixed segments of many sizes fragment the memory."""
    try:
        release = tuple(int(number) for number in version("torch").split(".")[:2])
    except PackageNotFoundError:  # a launcher whose ranks have another Python
        return {}
    names = ALLOCATOR_VARIABLES if release >= (2, 9) else ALLOCATOR_VARIABLES[1:]
    name = next((name for name in names if name in environment), names[0])
    setting = environment.get(name, "")
    if {"expandable_segments", "backend"} & {key for key, _ in _settings(setting)}:
        return {}
    return {name: ",".join(filter(None, (setting, "expandable_segments:True")))}


def without_expandable_segments(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables without this allocator setting; further settings stay."""
    result = dict(environment)
    for name in ALLOCATOR_VARIABLES:
        settings = [text for key, text in _settings(result.pop(name, "")) if key != "expandable_segments"]
        if settings:
            result[name] = ",".join(settings)
    return result


def _settings(value: str) -> list[tuple[str, str]]:
    """(key, text) of each setting ``key:value``; torch allows blanks."""
    settings = [setting.strip() for setting in value.split(",")]
    return [(setting.partition(":")[0].strip(), setting) for setting in settings if setting]


def apply(config: Tables) -> None:
    """Set the variables of this process; call before torch is imported."""
    os.environ.update(process_environment(config, os.environ))
    os.environ.update(compile_caches(os.environ))


def compile_caches(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the cache folders of compilers, below folders that only this user can write.

    Two variables default to a name in /tmp, where another user of the node can create the folder first, and the
    remaining variables to the home folder. ConfigError if no such folder exists, or if other users can write a folder
    named in ``environment``.
    """
    checked = dict[str, str]()
    for name in _CACHES.keys() & environment.keys():
        problem = f"environment variable {name}={environment[name]}: programs load code from there, and "
        with reworded(OSError, ConfigError, problem, "; name a folder that only you can write, or unset it"):
            checked[name] = str(make_private(Path(environment[name])))
    home, fallback = os.path.expanduser("~"), Path(tempfile.gettempdir()) / f"megarl-{os.geteuid()}"
    failures = list[str]()
    if not (missing := _CACHES.keys() - environment.keys()):
        return checked
    for base in (environment.get("XDG_CACHE_HOME"), f"{home}/.cache", fallback):
        if base and Path(base).is_absolute():
            try:
                folder = make_private(make_private(Path(base)) / "megarl" / "compiled")
                return checked | {name: str(folder / _CACHES[name]) for name in missing}
            except OSError as error:
                failures.append(str(error))
    raise ConfigError(refusal("no_cache_folder", failures="; ".join(failures)))
