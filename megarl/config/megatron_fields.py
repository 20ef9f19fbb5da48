"""The ``[megatron]`` table: the fields that megarl sets itself.

derived.toml (``DERIVED``) lists the fields that megarl sets itself. ``core/replay_blockers.py`` lists the fields that
bypass replay. ``megatron/policy.py`` checks all other keys against the installed version.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path

RELEASES = "0.12.3 to 0.19"
"""Of Megatron-Core, that megarl runs on."""
DERIVED: Mapping[str, str] = {
    field: key
    for key, fields in tomllib.loads(Path(__file__).with_name("derived.toml").read_text("utf-8")).items()
    for field in fields
}
"""Megatron field set by megarl -> megarl key that decides the value."""
