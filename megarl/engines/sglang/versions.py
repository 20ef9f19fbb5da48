"""The SGLang releases that megarl takes, and arguments that make routes or log-probabilities wrong (releases.toml)."""

import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.config.trust import find_stranger, safe_environment
from megarl.core.fp8_names import BLOCK
from megarl.errors import ConfigError, RolloutError, reason_of, refusal, reworded
from megarl.files.hf_config import find_quantization
from megarl.files.texts import read_table
from megarl.models.hf_folder import read_json

Version = tuple[int, int, int]
OLDEST, NEWEST = (0, 5, 17), (0, 5, 23)
UPDATE_SESSIONS = (0, 5, 21)
"""The first release with /begin_weight_update and /end_weight_update."""
SAMPLING_MASKS = (0, 5, 20)
"""The first release whose answers have the ids that each token was drawn from, for top_p below 1."""
Arguments = Mapping[str, Any]
"""Name with underscores -> value, as in /server_info; an absent argument has its default."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Arguments that make a server's answers wrong; megarl refuses the server."""

    name: str
    when: Sequence[Sequence[tuple[str, str, Any]]]
    """Cases that cause the fault: (argument, name of a test below, what the argument's value is compared with)."""
    meaning: str
    """The wrong result, and the arguments that cause it."""
    remedy: str
    of_routes: bool = False
    """Whether the fault matters only for requests with routes."""
    last: str | None = None
    """The last release with the fault; None: all releases."""

    def applies(self, arguments: Arguments) -> bool:
        """Whether arguments cause the fault: all tests of a case hold."""
        return any(all(_TESTS[test](arguments.get(name), value) for name, test, value in case) for case in self.when)


def _number(value: Any, default: int) -> int:
    try:
        return int(value)
    except (OverflowError, TypeError, ValueError):  # None, or a value that the server refuses
        return default


def _has_key(info: Arguments) -> bool:
    return bool(info.get("api_key") or info.get("admin_api_key"))


_TESTS: Mapping[str, Callable[[Any, Any], bool]] = {
    "set": lambda value, expected: bool(value) is expected,
    "among": lambda value, choices: value in choices,
    "not_among": lambda value, choices: value is not None and value not in choices,
    "above": lambda value, limit: _number(value, limit) > limit,
    "below": lambda value, limit: _number(value, limit) < limit,
}
"""Of the value of an argument, None for an absent one."""


def parse_version(text: str) -> Version:
    """Return ``"0.5.21.post1"`` as (0, 5, 21); RolloutError for text without a release number."""
    match = re.match(r"v?(\d+)\.(\d+)\.(\d+)", text)
    if match is None:
        raise RolloutError(f"the server calls its version {text!r}, expected a release number such as 0.5.23")
    return int(match[1]), int(match[2]), int(match[3])


TABLE = read_table(__file__, "releases.toml")
FAULTS = [Fault(name, **fields) for name, fields in TABLE["faults"].items()]


def check_server(
    info: Arguments, tp: int, routes: bool = True, nucleus: bool = False, source: Path | None = None, fp8: bool = False,
) -> tuple[Version, list[str]]:  # fmt: skip
    """Return the version in a /server_info answer, and warnings; ConfigError if megarl cannot use the server, or if its
    tensor-parallel size is not ``tp``. routes: whether the server must return routes; nucleus: whether top_p is below
    1; source: folder with the model's config.json; fp8: whether weights are sent as FP8 blocks."""
    text = str(info.get("version"))
    version = parse_version(text)
    if version < OLDEST:
        raise ConfigError(refusal("sglang_is_old", text=text, oldest=dotted(OLDEST)))
    if source is not None and (config := source / "config.json").is_file():
        info = {**info, "model_type": read_json(config).get("model_type")}
    _refuse_faults(info, routes, f"SGLang {text}", version)
    _check_form(info, fp8)
    if nucleus and version < SAMPLING_MASKS:
        raise ConfigError(refusal("sglang_without_kept_ids", text=text, oldest=dotted(SAMPLING_MASKS)))
    if _number(info.get("tp_size"), tp) != tp:
        raise ConfigError(f"SGLang runs with --tp-size {info['tp_size']}, expected {tp}: set sglang.tp to the former")
    warnings = []
    if not _has_key(info):
        warnings.append("no API key: whoever reaches the server can replace its weights; start it with --api-key")
    if info.get("speculative_algorithm") is not None:
        warnings.append("speculative decoding: megarl was never tried with it; watch rollout/k3 (docs/sglang.md)")
    if version > NEWEST:
        warnings.append(f"SGLang {text} is newer than {dotted(NEWEST)}, the last release that megarl was tried with")
    return version, warnings


def _check_form(info: Arguments, fp8: bool) -> None:
    """ConfigError if the server's model, where its folder is on this machine, is not in the form of the updates."""
    config = Path(str(info.get("model_path"))) / "config.json"
    table = find_quantization(read_json(config)) or {} if config.is_file() else None
    expected = ("fp8", [*BLOCK]) if fp8 else (None, None)
    if table is not None and (found := (table.get("quant_method"), table.get("weight_block_size"))) != expected:
        facts = {"config": config, "found": found, "expected": expected, "value": str(fp8).lower()}
        raise ConfigError(refusal("sglang_quantization", **facts))


def check_arguments(words: Sequence[str], routes: bool = True) -> None:
    """ConfigError for arguments that make answers wrong. routes: whether the server must return routes."""
    _refuse_faults(parse_arguments(words), routes, "SGLang")


def _refuse_faults(arguments: Arguments, routes: bool, name: str, version: Version | None = None) -> None:
    """version: None for faults of every release alone."""
    for fault in FAULTS:
        concerns = fault.last is None or (version is not None and version <= parse_version(fault.last))
        if concerns and (routes or not fault.of_routes) and fault.applies(arguments):
            raise ConfigError(f"{name}: {fault.meaning}: {fault.remedy}")


def parse_arguments(words: Sequence[str]) -> dict[str, Any]:
    """Return ``["--a-b", "1", "--c=x", "--d"]`` as ``{"a_b": "1", "c": "x", "d": True}``; the last value wins."""
    arguments: dict[str, Any] = {}
    name = None
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.removeprefix("--").partition("=")
            name = name.replace("-", "_")
            arguments[name] = value if equals else True
        elif name is not None and arguments[name] is True:
            arguments[name] = word
    return arguments


def require_own(python: Path) -> None:
    """ConfigError for an interpreter below the current folder, perhaps put there by a different user."""
    if python.is_absolute() or not python.exists():
        return
    # The folder may be a link; the environment's own files lie beside the link.
    if problem := find_stranger(python) or find_stranger(python.parent):
        raise ConfigError(f"{python} is not trusted: {problem}; to run it, set sglang.python to the whole path")


def installed_release(python: Path) -> str:
    """Returns the release of SGLang in an interpreter's environment; ConfigError without interpreter or SGLang."""
    require_own(python)
    words = [str(python), "-c", "from importlib.metadata import version; print(version('sglang'))"]
    prefix, hint = f"found no Python for SGLang at {python} (", "): set sglang.python (docs/sglang.md)"
    with reworded((OSError, subprocess.TimeoutExpired), ConfigError, prefix, hint, reason_of):
        answer = subprocess.run(words, capture_output=True, text=True, timeout=60.0, env=safe_environment())
    if answer.returncode != 0:
        message = (answer.stderr.strip().splitlines() or ["no message"])[-1]
        raise ConfigError(f"{python} has no SGLang ({message}), expected {dotted(NEWEST)}")
    return answer.stdout.strip()


def dotted(version: Version) -> str:
    """(0, 5, 23) -> "0.5.23"."""
    return ".".join(map(str, version))
