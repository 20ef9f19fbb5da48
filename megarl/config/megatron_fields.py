"""Keys of the ``[megatron]`` table, read from Megatron-Core's source without an import.

Importing ``megatron.core`` imports torch, which takes seconds; a wrong key must be reported earlier. So ``ast`` reads
names and annotations of the fields from the three dataclasses of the installed version.

derived.toml (``DERIVED``) lists the fields that megarl sets itself. ``core/replay_blockers.py`` lists the fields that
bypass replay.
"""

import ast
import importlib.util
import json
import re
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, List, Literal, Optional, Tuple, Union, get_args  # noqa: UP035

from pydantic import TypeAdapter

from megarl.errors import ConfigError, did_you_mean

RELEASES = "0.12.3 to 0.19"
"""Of Megatron-Core, that megarl runs on."""
DATACLASSES: Mapping[str, tuple[str, ...]] = {
    "TransformerConfig": (
        "model_parallel_config.ModelParallelConfig",
        "transformer.transformer_config.TransformerConfig",
    ),
    "DistributedDataParallelConfig": ("distributed.distributed_data_parallel_config.DistributedDataParallelConfig",),
    "OptimizerConfig": ("optimizer.optimizer_config.OptimizerConfig",),
}
"""Dataclass -> paths below megatron.core: the base class, then the class."""

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


@cache
def fields() -> dict[str, dict[str, str]]:
    """Dataclass -> field -> annotation as written in Megatron's source, e.g. ``"Optional[int]"``."""
    result: dict[str, dict[str, str]] = {name: {} for name in DATACLASSES}
    for name, paths in DATACLASSES.items():
        for node in (statement for path in paths for statement in _class_body(path)):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                result[name][node.target.id] = ast.unparse(node.annotation)
    return result


def _class_body(dotted: str) -> list[ast.stmt]:
    """The statements of a class below megatron.core, of which only the file is read."""
    module, _, class_name = dotted.rpartition(".")
    path = source_root() / f"{module.replace('.', '/')}.py"
    statements = ast.parse(path.read_text()).body if path.is_file() else []
    for node in statements:
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            return node.body
    raise ConfigError(f"found no class {class_name} in {path}, expected megatron-core {RELEASES}")


def check(table: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Sort a flat ``[megatron]`` table by dataclass (a key may be in several), checking names and types.

    Values of torch.dtype and enum fields stay names ("bfloat16", "flash"). Raises ConfigError for an unknown key (with
    the closest names), a wrong type, or a field that no file can hold (a callable).
    """
    result: dict[str, dict[str, Any]] = {name: {} for name in DATACLASSES}
    for key, value in table.items():
        owners = [name for name, names in fields().items() if key in names and not key.startswith("_")]
        if not owners:
            known = {field for names in fields().values() for field in names}
            hint = did_you_mean(key, known, "see `megarl doctor` for the installed version", most=3)
            raise ConfigError(f"megatron.{key}: no field of Megatron's {', '.join(DATACLASSES)} has this name; {hint}")
        for owner in owners:
            _check_type(key, value, fields()[owner][key])
            result[owner][key] = value
    return result


class _Unwritable:
    """A type that no configuration file can hold."""


class _Types(dict[str, Any]):
    """Types named in annotations, in the form of a file."""

    def __missing__(self, name: str) -> Any:
        if name not in _ENUMS:
            return _Unwritable
        members = [node.targets[0] for node in _class_body(_ENUMS[name]) if isinstance(node, ast.Assign)]
        return Literal[tuple(sorted(target.id for target in members if isinstance(target, ast.Name)))]


_GRAPH_ENUMS = ("CudaGraphScope", "CudaGraphModule", "InferenceCudaGraphScope")  # the latter two from 0.18 on
_ENUMS = {name: f"transformer.enums.{name}" for name in ("AttnBackend", *_GRAPH_ENUMS)}
_TYPES = _Types(
    {type_.__name__: type_ for type_ in (bool, int, float, str, list, tuple)},
    dtype=Literal["bfloat16", "float16", "float32", "uint8"],
    List=List,  # noqa: UP006
    Literal=Literal,
    Optional=Optional,
    Tuple=Tuple,  # noqa: UP006
    Union=Union,
)


def _check_type(key: str, value: Any, annotation: str) -> None:
    without_modules = re.sub(r"\b\w+\.(?=\w)", "", annotation)
    expected = eval(without_modules, {"__builtins__": {}}, _TYPES)
    if all(option in (_Unwritable, type(None)) for option in get_args(expected) or [expected]):
        raise ConfigError(
            f"megatron.{key}: Megatron's type is {annotation}, which no configuration file can hold; remove the key"
        )
    adapter = TypeAdapter(expected, config={"arbitrary_types_allowed": True, "strict": True})
    try:
        adapter.validate_json(json.dumps(value))  # as JSON, since Python's strict tuple refuses a list
    except (TypeError, ValueError):
        enum = next((name for name in ("dtype", *_ENUMS) if name in annotation), None)
        choices = f", one of {', '.join(get_args(_TYPES[enum]))}" if enum else ""
        raise ConfigError(f"megatron.{key}: found {value!r}, expected {annotation}{choices}") from None
