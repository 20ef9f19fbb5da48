"""What each SGLang release can do, as far as megarl needs it, and which of its faults touch routing traces.

Sources: the releases' own code and answers. Releases 0.5.18 to 0.5.23 were run; what is said of earlier ones was read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from megarl.errors import ConfigError, RolloutError

OLDEST, NEWEST = (0, 5, 7), (0, 5, 23)
Version = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Capability:
    """Something that a release can do from some version on."""

    name: str
    since: Version
    meaning: str


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that releases up to a version get wrong."""

    name: str
    first: Version
    last: Version
    meaning: str
    """What goes wrong, and when."""
    refused: bool
    """Whether megarl refuses the release for it, or only warns."""


CAPABILITIES: tuple[Capability, ...] = (
    Capability("routed_experts", (0, 5, 7), "answers carry the experts of every prompt and response token"),
    Capability("routed_experts_start_len", (0, 5, 12), "answers can leave out the experts of a known prefix"),
    Capability("weight_versions", (0, 5, 19), "answers say which weights made which tokens"),
    Capability("update_session", (0, 5, 21), "updates stand between /begin_weight_update and /end_weight_update"),
)

FAULTS: tuple[Fault, ...] = (
    Fault(
        "physical_experts",
        (0, 5, 7),
        (0, 5, 9),
        "under expert-parallel load balancing (EPLB) answers name physical instead of logical experts",
        refused=False,
    ),
    Fault(
        "wrong_rows_on_cpu",
        (0, 5, 7),
        (0, 5, 17),
        "on a CPU with overlap scheduling some rows of routes are those of other tokens",
        refused=False,
    ),
)


def parse_version(text: str) -> Version:
    """``"0.5.21.post1"`` -> (0, 5, 21). Raises RolloutError for what is no release number."""
    found = re.match(r"v?(\d+)\.(\d+)\.(\d+)", text)
    if found is None:
        raise RolloutError(f"the server calls its version {text!r}, expected a release number such as 0.5.23")
    major, minor, patch = (int(part) for part in found.groups())
    return major, minor, patch


def can(version: Version, capability: str) -> bool:
    """Whether a release has a capability of the table; KeyError for another name."""
    return version >= {entry.name: entry.since for entry in CAPABILITIES}[capability]


def check_version(text: str) -> tuple[Version, list[str]]:
    """The parsed version, and warnings about it. ConfigError if megarl cannot use the release."""
    version = parse_version(text)
    if version < OLDEST:
        raise ConfigError(
            f"SGLang {text} returns no routes, expected at least {_dotted(OLDEST)}: upgrade it, or set "
            'rollout.engine = "local"'
        )
    faults = [fault for fault in FAULTS if fault.first <= version <= fault.last]
    refused = [fault for fault in faults if fault.refused]
    if refused:
        raise ConfigError(f"SGLang {text}: {refused[0].meaning}; expected {_dotted(_next(refused[0].last))} or later")
    warnings = [f"SGLang {text}: {fault.meaning}; {_dotted(_next(fault.last))} is free of that" for fault in faults]
    if version > NEWEST:
        warnings.append(f"SGLang {text} is newer than {_dotted(NEWEST)}, the last release that megarl was tried with")
    return version, warnings


def _next(version: Version) -> Version:
    return version[0], version[1], version[2] + 1


def _dotted(version: Version) -> str:
    return ".".join(map(str, version))
