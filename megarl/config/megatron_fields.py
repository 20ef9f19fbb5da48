"""The ``[megatron]`` table: the fields that megarl sets itself, and where Megatron-Core is installed.

derived.toml (``DERIVED``) lists the fields that megarl sets itself. ``core/replay_blockers.py`` lists the fields that
bypass replay. ``megatron/policy.py`` checks all other keys against the installed version.
"""

import importlib.util
import tomllib
from collections.abc import Mapping
from pathlib import Path

from megarl.errors import ConfigError

RELEASES = "0.12.3 to 0.19"
"""Of Megatron-Core, that megarl runs on."""
DERIVED: Mapping[str, str] = {
    field: key
    for key, fields in tomllib.loads(Path(__file__).with_name("derived.toml").read_text("utf-8")).items()
    for field in fields
}
"""Megatron field set by megarl -> megarl key that decides the value."""


def source_root() -> Path:
    """Folder of the installed megatron.core, without an import; ConfigError if Megatron is not installed."""
    # `megatron` is a namespace package: a search below the package runs no code.
    spec = importlib.util.find_spec("megatron")
    for location in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(location) / "core" / "__init__.py").is_file():
            return Path(location) / "core"
    raise ConfigError(
        f"found no megatron-core in this environment, expected {RELEASES}: run `pip install 'megarl-moe[megatron]'`"
    )
