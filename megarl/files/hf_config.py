"""config.json as the model class of its family reads it: defaults, other names, and keys that nobody reads.

Light on purpose, like ``megarl.models.shapes``.
"""

import fnmatch
import re
import reprlib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.errors import ConfigError

_TABLES = tomllib.loads(Path(__file__).with_name("hf_config.toml").read_text(encoding="utf-8"))
COMMON: Mapping[str, Any] = _TABLES["common"]
FAMILIES: Mapping[str, Mapping[str, Any]] = _TABLES["families"]
ROPE: Mapping[str, Any] = _TABLES["rope"]
LACKING: Mapping[str, str] = _TABLES["lacking"]
"""Model types that no family reads -> what they have beyond the families."""
_FEATURES = {what: re.compile(rf"(?:^|[_.])(?:{words})", re.IGNORECASE) for what, words in _TABLES["features"].items()}
_ALL = (COMMON, ROPE, *FAMILIES.values())
BOUNDS: Mapping[str, tuple[float, float]] = _TABLES["bounds"]
"""The least and the largest value of each number; one that has a decimal point in the table may have one in a file."""
_KINDS = {
    **{key: type(high) for key, (_, high) in BOUNDS.items()},
    **dict.fromkeys(("rope_parameters", "rope_scaling"), dict),
    **dict.fromkeys(("architectures", "layer_types", "mlp_only_layers"), list),
    **{key: type(value) for table in _ALL for key, value in table.get("defaults", {}).items()},
}
_NOUNS = {int: "an integer", float: "a number", bool: "true or false", str: "a string", dict: "a table"}
QUANTIZATION = ("quantization_config", "compression_config")
"""Keys of config.json for how the weights are quantised."""
_DTYPES = ("bfloat16", "float16", "float32", "float64")


class HFConfig:
    """Values of a table of config.json by key; those left out are as in its class. It remembers which keys were read.

    A read raises ConfigError, naming the key, for a value of another kind and for a missing one that has no default.
    """

    def __init__(self, values: Mapping[str, Any], *tables: Mapping[str, Any], prefix: str = "") -> None:
        """tables: of hf_config.toml, the first defaults first."""
        aliases = {alias: key for table in tables for alias, key in table.get("aliases", {}).items() if alias in values}
        self.values = dict(values)
        for alias, key in aliases.items():
            self.values[key] = self.values.pop(alias)
            if key in values and (values[key] != values[alias] or type(values[key]) is not type(values[alias])):
                raise ConfigError(f"{alias} is {values[alias]!r} and {key} {values[key]!r}, expected one value")
        self._labels = {key: prefix + alias for alias, key in aliases.items()}
        self._optional, self._derived, self._harmless, sizes, stated = (
            {key for table in tables for key in table.get(part, ())}
            for part in ("optional", "derived", "harmless", "sizes", "stated")
        )
        self._required = sizes | stated
        parts = (table.get(part, {}) for table in tables for part in ("defaults", "elsewhere"))
        self._defaults: dict[str, Any] = dict.fromkeys(self._optional | self._derived)
        self._defaults |= {key: part[key] for part in parts for key in part.keys() - stated}
        self._prefix, self._unread = prefix, set(self.values)

    @staticmethod
    def of(hf: Mapping[str, Any]) -> "HFConfig":
        """The config of a model whose type is one of ``FAMILIES``."""
        table = FAMILIES[hf["model_type"]]
        base = FAMILIES[table["like"]] if "like" in table else {}
        return HFConfig(hf, {"harmless": _TABLES["harmless"]}, COMMON, base, table)

    def get(self, key: str) -> Any:
        """The value of a key; None, and not read, if the class has no such key."""
        return self[key] if key in self._defaults or key in self._required else None

    def __getitem__(self, key: str) -> Any:
        self._unread.discard(key)
        label = self._labels.get(key, self._prefix + key)
        if key not in self.values and key not in self._defaults:
            raise ConfigError(f"{label} is left out, and has no default; expected a number")
        value, kind = self.values[key] if key in self.values else self._defaults[key], _KINDS.get(key)
        if kind is None or (value is None and (key in self._optional or key not in self.values)):
            return value
        is_kind = type(value) in ((int, float) if kind is float else (kind,))
        if isinstance(value, list):
            is_kind = is_kind and {type(item) for item in value} <= {int if key == "mlp_only_layers" else str}
        low, high = BOUNDS.get(key, (0, 0))
        if not is_kind or (isinstance(value, (int, float)) and high and not low <= value <= high):
            limits = f" from {low:g} to {high:g}" if high else ""
            raise ConfigError(f"{label} is {reprlib.repr(value)}, expected {_NOUNS.get(kind, 'a list')}{limits}")
        return value

    def check_unread(self) -> None:
        """Raise ConfigError for a key that was not read and can change what the model computes."""
        for key in sorted(self._unread):
            value, label = self.values[key], self._prefix + key
            feature = next((what for what, words in _FEATURES.items() if words.search(label)), None)
            is_known = key in self._defaults
            default = self._defaults.get(key)
            is_default = value == default and isinstance(value, bool) == isinstance(default, bool)
            if self._is_harmless(key) or (is_default if is_known else not (value and feature)):
                continue
            expected = repr(default) if is_known else "no such key"
            raise ConfigError(
                f"{label} is {reprlib.repr(value)}, expected {expected}: megarl does not have "
                f"{feature or 'anything else'} for {self.values.get('model_type', 'models')}; take another model, or "
                "remove the key if it says nothing of what the model computes"
            )

    def _is_harmless(self, key: str) -> bool:
        return any(fnmatch.fnmatchcase(key, glob) for glob in self._harmless)


def read_dtype(hf: Mapping[str, Any]) -> str:
    """The dtype that a config.json names, in torch's words; "bfloat16" if it names none.

    As transformers reads it: ``dtype``, else ``torch_dtype``. ConfigError, naming the key, for a value that
    transformers and SGLang cannot open.
    """
    key = "dtype" if hf.get("dtype") is not None else "torch_dtype"
    value = hf.get(key)
    if value is not None and value not in _DTYPES:
        raise ConfigError(
            f"{key} is {value!r}, which transformers cannot open, expected one of {', '.join(_DTYPES)}; "
            f'write "{key}": "bfloat16", or what the weights are in'
        )
    return value or "bfloat16"


def count_prediction_layers(hf: Mapping[str, Any]) -> int:
    """The layers that a config.json counts beyond the model's own; ConfigError, naming the key, for no such number."""
    return HFConfig(hf, {"optional": ("num_nextn_predict_layers",)})["num_nextn_predict_layers"] or 0


def find_quantization(hf: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What a config.json says of how the weights are quantised; None if they are not."""
    quantised = next((hf[key] for key in QUANTIZATION if hf.get(key) not in (None, {})), None)
    return quantised if isinstance(quantised, dict) or quantised is None else {"quant_method": quantised}


def read_fp8_block(hf: Mapping[str, Any]) -> tuple[int, int] | None:
    """(rows, columns) of the blocks of a model in FP8; None if it is not quantised, ConfigError if it is otherwise."""
    if (table := find_quantization(hf)) is None:
        return None
    block = table.get("weight_block_size")
    is_fp8 = table.get("quant_method") == "fp8" and table.get("fmt", "e4m3") == "e4m3"
    if not is_fp8 or not isinstance(block, list) or [type(size) for size in block] != [int, int] or min(block) < 1:
        raise ConfigError(
            f"the model is quantised by {table.get('quant_method')!r} with blocks {block!r}; expected no "
            "quantization_config, or 'fp8' (e4m3) with blocks of two dimensions: take the model in high precision"
        )
    return block[0], block[1]
