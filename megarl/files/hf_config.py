"""config.json as the model class of a family reads the file: defaults, aliases, unread keys, and the MoE layers.

Without heavy imports, like ``megarl.models.shapes``.
"""

import fnmatch
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.errors import ConfigError, DataError, refusal, refuse_if
from megarl.files.texts import read_table

_TABLES = read_table(__file__, "families.toml")
COMMON: Mapping[str, Any] = _TABLES["common"]
FAMILIES: Mapping[str, Mapping[str, Any]] = _TABLES["families"]
ROPE: Mapping[str, Any] = _TABLES["rope"]
RENAMED: Mapping[str, Mapping[str, str]] = _TABLES["renamed"]
LACKING: Mapping[str, str] = _TABLES["lacking"]
"""Unsupported model types -> the feature that megarl lacks."""
_MAPS = read_table(__file__, "layer_maps.toml")
LAYER_MAPS: Mapping[str, Mapping[str, Any]] = _MAPS["types"]
"""Model types of which only the MoE layers are read, and their keys."""
_FEATURES = {name: re.compile(rf"(?:^|[_.])(?:{words})", re.IGNORECASE) for name, words in _TABLES["features"].items()}
_ALL = (COMMON, ROPE, *FAMILIES.values(), *LAYER_MAPS.values())
BOUNDS: Mapping[str, tuple[float, float]] = _TABLES["bounds"] | _MAPS["bounds"]
"""Least and largest value of each number; a bound with a decimal point allows a decimal point."""
_KINDS = {
    **{key: type(high) for key, (_, high) in BOUNDS.items()},
    **dict.fromkeys(("rope_parameters", "rope_scaling"), dict),
    **dict.fromkeys(("architectures", "indexer_types", "layer_types", "mlp_only_layers", "moe_layers"), list),
    "index_topk_pattern": str,
    **{key: type(value) for table in _ALL for key, value in table.get("defaults", {}).items()},
}
_NOUNS = {int: "an integer", float: "a number", bool: "true or false", str: "a string", dict: "a table"}
QUANTIZATION = ("quantization_config", "compression_config")
"""Keys of config.json for the quantisation of the weights."""
_DTYPES = ("bfloat16", "float16", "float32", "float64")


class HFConfig:
    """Values of a table of config.json by key, with the defaults of the model class; remembers the keys that were read.

    Reading a key raises ConfigError, naming the key, for a value of a wrong kind and for a missing value without a
    default.
    """

    def __init__(self, values: Mapping[str, Any], *tables: Mapping[str, Any], prefix: str = "") -> None:
        """tables: of families.toml; a later default overrides.

        ``defaults``, ``required``, ``optional`` and ``derived`` then hold the keys of these kinds.
        """
        aliases = {alias: key for table in tables for alias, key in table.get("aliases", {}).items() if alias in values}
        self.values = dict(values)
        for alias, key in aliases.items():
            self.values[key] = self.values.pop(alias)
            if key in values and (values[key] != values[alias] or type(values[key]) is not type(values[alias])):
                raise ConfigError(f"{alias} is {values[alias]!r} and {key} {values[key]!r}, expected one value")
        self._labels = {key: prefix + alias for alias, key in aliases.items()}
        sections = ("optional", "derived", "harmless", "sizes", "stated")
        keys = ({key for table in tables for key in table.get(section, ())} for section in sections)
        self.optional, self.derived, self._harmless, sizes, stated = keys
        self.required = sizes | stated
        defaults = (table.get(section, {}) for table in tables for section in ("defaults", "elsewhere"))
        self.defaults: dict[str, Any] = dict.fromkeys(self.optional | self.derived)
        self.defaults |= {key: section[key] for section in defaults for key in section.keys() - stated}
        self._fixed = {key for table in tables for key in table.get("fixed", ())}
        self.prefix, self._unread = prefix, set(self.values)

    @staticmethod
    def of(hf: Mapping[str, Any]) -> "HFConfig":
        """Return the config of a model whose type is in ``FAMILIES``."""
        hf = flatten(hf)
        return HFConfig(hf, {"harmless": _TABLES["harmless"]}, COMMON, *reversed(_entries(hf["model_type"])))

    def get(self, key: str) -> Any:
        """Return the value of a key; None, and not read, if the class lacks the key."""
        return self[key] if key in self.defaults or key in self.required else None

    def label(self, key: str) -> str:
        """Return the name of a key in this config.json, for messages."""
        return self._labels.get(key, self.prefix + key)

    def __getitem__(self, key: str) -> Any:
        self._unread.discard(key)
        label = self.label(key)
        refuse_if(key not in self.values and key not in self.defaults, ConfigError, "no_default", label=label)
        value, kind = self.values[key] if key in self.values else self.defaults[key], _KINDS.get(key)
        if key in self._fixed and value != self.defaults[key]:
            raise ConfigError(f"{label} is {reprlib.repr(value)}, expected {self.defaults[key]!r}, as the class has it")
        if kind is None or (value is None and (key in self.optional or key not in self.values)):
            return value
        is_kind = type(value) in ((int, float) if kind is float else (kind,))
        if isinstance(value, list):
            is_kind = is_kind and {type(item) for item in value} <= {int if key.endswith("_layers") else str}
        low, high = BOUNDS.get(key, (0, 0))
        if not is_kind or (isinstance(value, (int, float)) and high and not low <= value <= high):
            limits = f" from {low:g} to {high:g}" if high else ""
            raise ConfigError(f"{label} is {reprlib.repr(value)}, expected {_NOUNS.get(kind, 'a list')}{limits}")
        return value

    def check_unread(self) -> None:
        """Raise ConfigError for an unread key that can change the model's computation."""
        for key in sorted(self._unread):
            value, label = self.values[key], self.prefix + key
            feature = next((name for name, words in _FEATURES.items() if words.search(label)), None)
            is_known = key in self.defaults
            default = self.defaults.get(key)
            is_default = value == default and isinstance(value, bool) == isinstance(default, bool)
            if self.is_harmless(key) or (is_default if is_known else not (value and feature)):
                continue
            facts = {"value": reprlib.repr(value), "feature": feature or "anything else"}
            facts |= {"label": label, "expected": repr(default) if is_known else "no such key"}
            raise ConfigError(refusal("unread_key", model=self.values.get("model_type", "models"), **facts))

    def is_harmless(self, key: str) -> bool:
        """Whether a key says nothing of the model's computation."""
        return _matches(key, self._harmless)


def _matches(name: str, globs: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, glob) for glob in globs)


def family_entry(kind: str, key: str) -> Any:
    """Return what families.toml says of a model type under ``key``, or of the family that it is like; None without."""
    return next((entry[key] for entry in _entries(kind) if key in entry), None)


def _entries(kind: str) -> list[Mapping[str, Any]]:
    """Return the table of a model type, then of the family that it is like."""
    entry = FAMILIES.get(kind, {})
    return [entry, *(_entries(entry["like"]) if "like" in entry else ())]


def hf_name(kind: str, name: str) -> str:
    """Return the name that a tensor of a text model has in the checkpoints of a model type, a larger model perhaps."""
    prefixes = family_entry(kind, "prefixes") or {}
    return next((new + name.removeprefix(old) for old, new in prefixes.items() if name.startswith(old)), name)


def is_beside_text(kind: str, name: str) -> bool:
    """Whether a tensor of a larger model does not belong to its text model, such as a vision tower's."""
    return _matches(name, family_entry(kind, "beside") or ())


def is_turned(kind: str, name: str, shape: Sequence[int], hidden: int) -> bool:
    """Whether a tensor [E, rows, columns] lies the other way round than in published checkpoints.

    transformers 5 turns the experts of such a family when it reads or saves them. DataError for a square matrix.
    """
    axes = (axis for glob, axis in (family_entry(kind, "turned") or {}).items() if fnmatch.fnmatchcase(name, glob))
    if (axis := next(axes, None)) is None or len(shape) != 3:
        return False
    refuse_if(shape[1] == shape[2], DataError, "square_matrix", name=name, shape=tuple(shape))
    return shape[axis] != hidden == shape[3 - axis]


def flatten(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config.json of a text model inside a larger model as one table; any other config as it is.

    The larger model's keys replace those of ``text_config`` that say nothing of the computation, and
    ``tie_word_embeddings``. ConfigError for another text model, and for two values of a key.
    """
    kind = family_entry(str(hf.get("model_type")), "text")
    text = hf.get("text_config")
    if kind is None:
        return hf
    if not isinstance(text, dict) or text.get("model_type", kind) != kind:
        raise ConfigError(f"text_config is {reprlib.repr(text)}, expected a table of model type {kind!r}")
    outer = {key: value for key, value in hf.items() if key != "text_config"}
    replaced = {"model_type", "architectures", "tie_word_embeddings"}
    for key in text.keys() & outer.keys() - replaced:
        if text[key] != outer[key] and not _matches(key, _TABLES["harmless"]):
            raise ConfigError(f"{key} is {outer[key]!r}, and in text_config {text[key]!r}; expected one value")
    return {**{key: value for key, value in text.items() if key not in replaced}, **outer}


def read_dtype(hf: Mapping[str, Any]) -> str:
    """Return the dtype in a config.json, in torch's words; "bfloat16" without a dtype.

    As in transformers, ``dtype`` precedes ``torch_dtype``. ConfigError, naming the key, for a value that transformers
    and SGLang cannot open.
    """
    key = "dtype" if hf.get("dtype") is not None else "torch_dtype"
    value = hf.get(key)
    if value is not None and value not in _DTYPES:
        raise ConfigError(refusal("dtype_of_config", key=key, value=value, dtypes=", ".join(_DTYPES)))
    return value or "bfloat16"


def count_prediction_layers(hf: Mapping[str, Any]) -> int:
    """Return the number of prediction layers behind the model's layers. ConfigError for a bad value."""
    return HFConfig(hf, {"optional": ("num_nextn_predict_layers",)})["num_nextn_predict_layers"] or 0


def find_quantization(hf: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the quantisation table of a config.json, or of its text model; None without quantisation."""
    tables = [table for table in (hf, hf.get("text_config")) if isinstance(table, Mapping)]
    quantised = next((table[key] for table in tables for key in QUANTIZATION if table.get(key) not in (None, {})), None)
    return quantised if isinstance(quantised, dict) or quantised is None else {"quant_method": quantised}


def read_weight_block(hf: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return (rows, columns) of the FP8 blocks; None if the scales tell, and without quantisation.

    ConfigError for a quantisation whose weights megarl cannot read.
    """
    if (table := find_quantization(hf)) is None:
        return None
    method, block, weights = table.get("quant_method"), table.get("weight_block_size"), _compressed_weights(table)
    readable = method in ("fp8", "mxfp8", "mxfp4") and table.get("fmt", "e4m3") in ("e4m3", "float8_e4m3fn")
    if method == "compressed-tensors" and weights:
        sizes = ((each.get("block_structure"), each.get("group_size") or 0) for each in weights)
        blocks = [block or ([1, size] if size > 0 else None) for block, size in sizes]
        readable, block = True, blocks[0] if blocks.count(blocks[0]) == len(blocks) else None
    is_block = isinstance(block, list) and [type(size) for size in block] == [int, int] and min(block) >= 1
    refuse_if(not readable or not (block is None or is_block), ConfigError, "quantization", method=method, block=block)
    return None if block is None else (block[0], block[1])


def _compressed_weights(table: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return what compressed-tensors' table says of each group of weights; [] if megarl cannot read a group."""
    formats = ("float-quantized", "naive-quantized", "pack-quantized", "mixed-precision")
    try:
        weights = [group["weights"] for group in table["config_groups"].values()]
        kinds = {(w["type"], w["num_bits"], w.get("symmetric", True), w.get("actorder")) for w in weights}
    except (AttributeError, KeyError, TypeError):
        return []
    orders = (None, "static", "weight")  # of the columns; other orders have a g_idx
    expected = {(*kind, True, order) for kind in (("float", 8), ("int", 4)) for order in orders}
    return weights if kinds <= expected and table.get("format") in formats and not table.get("transform_config") else []


DENSE = tuple(kind for kind in FAMILIES if "experts" not in str(family_entry(kind, "shape")["readers"]))
"""Model types without experts."""
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""E under the names of Qwen and OLMoE, of Mixtral, and of DeepSeek and GLM-4."""


@dataclass(frozen=True, slots=True)
class MoeShape:
    """Which layers of a model have experts, and how many: the shape of its routing traces. A dense model has none.

    Routers of ``exempt_layers`` do not choose: they take the experts of a token from a table (DeepSeek-V4's first
    layers). Traces leave these layers out, and replay leaves them alone, because every engine finds the same experts.
    """

    num_layers: int  # all decoder layers, dense ones included
    moe_layers: tuple[int, ...]  # 0-based indices of the L MoE layers whose routers choose: the columns of a trace
    num_experts: int  # E
    topk: int  # K
    exempt_layers: tuple[int, ...] = ()  # 0-based indices of the other MoE layers

    @property
    def dense_layers(self) -> tuple[int, ...]:
        return tuple(sorted(set(range(self.num_layers)) - {*self.moe_layers, *self.exempt_layers}))

    def __str__(self) -> str:
        table = f", layers {[*self.exempt_layers]} take experts from a table of token ids" if self.exempt_layers else ""
        return f"{len(self.moe_layers)} of {self.num_layers} layers have routes{table}"

    @staticmethod
    def of(hf: Mapping[str, Any]) -> "MoeShape":
        """Read a model's config.json, also of families that the trainer does not build (``LAYER_MAPS``).

        The text model within a larger one counts. ConfigError for a family that megarl does not know.
        """
        if (kind := str(hf.get("model_type"))) in FAMILIES:
            config = HFConfig.of(hf)
            return MoeShape(config["num_hidden_layers"], (), 0, 0) if kind in DENSE else read_moe(config)
        if kind in LAYER_MAPS:
            topk = hf.get("moe_topk")
            if isinstance(topk, list) and topk[:1] * len(topk) == topk:  # Hunyuan's, the same in each layer
                hf = {**hf, "moe_topk": next(iter(topk), None)}
            return read_moe(HFConfig(hf, {"sizes": ("num_hidden_layers", "num_experts_per_tok")}, LAYER_MAPS[kind]))
        if isinstance(text := hf.get("text_config"), Mapping):
            return MoeShape.of({"model_type": f"{kind}_text", **text, "text_config": None})
        raise ConfigError(refusal("unknown_moe", kind=kind, kinds=", ".join([*FAMILIES, *LAYER_MAPS])))

    @staticmethod
    def of_megatron(config: Any) -> "MoeShape":
        """Read Megatron's ``TransformerConfig``; without experts it has no MoE layers."""
        count, frequency = config.num_layers, config.moe_layer_freq
        is_moe = frequency if isinstance(frequency, list) else [index % frequency == 0 for index in range(count)]
        layers = [index for index, moe in enumerate(is_moe) if moe] if config.num_moe_experts else []
        # Fields of Megatron-LM's dev and main branches; no release up to 0.19 has layers with a table.
        hashed = max(getattr(config, name, 0) for name in ("moe_n_hash_layers", "moe_num_hash_layers"))
        chosen, exempt = (tuple(i for i in layers if (i < hashed) is side) for side in (False, True))
        return MoeShape(count, chosen, config.num_moe_experts or 0, config.moe_router_topk if layers else 0, exempt)


def read_moe(hf: HFConfig) -> MoeShape:
    """Return the shape in a config of one family. ConfigError if they contradict each other."""
    kinds: Any = hf.get("mlp_layer_types")
    num_layers = hf.get("num_layers") or hf["num_hidden_layers"] or len(kinds or ())
    is_trained = hf.values.get("model_type") in FAMILIES
    names = ["dense", "sparse"] if is_trained else [name for group in _MAPS["kinds"].values() for name in group]
    is_list = isinstance(kinds, list | str) and len(kinds) >= num_layers and all(map(names.count, kinds))
    if kinds is not None and not (is_list and (len(kinds) == num_layers or not is_trained)):
        expected = f"for each of num_hidden_layers, {num_layers}, one of {str(names)[1:-1]}"
        raise ConfigError(f"{hf.label('mlp_layer_types')} is {reprlib.repr(kinds)}, expected {expected}")
    if hf.get("enable_moe_block") is False:
        return MoeShape(num_layers, (), 0, 0)
    dense, stated = hf.get("mlp_only_layers") or (), hf.get("moe_layers")
    for key, layers in (("mlp_only_layers", dense), ("moe_layers", stated or ())):
        if len(layers) > num_layers or not all(0 <= layer < num_layers for layer in layers):
            raise ConfigError(f"{key} is {reprlib.repr(layers)}, expected some of layers 0 to {num_layers - 1}")
    first, step = hf.get("first_k_dense_replace") or 0, hf.get("decoder_sparse_step") or 1
    last, num_hashed = hf.get("moe_layer_end_index"), hf.get("num_hash_layers") or 0
    end = num_layers if last in (None, -1) else min(last + 1, num_layers)
    moe = [i for i in range(first, end) if i not in dense and (i + 1) % step == 0]
    moe = moe if stated is None else sorted({*stated})
    if kinds:
        by_step, moe = moe, [i for i in range(num_layers) if kinds[i] not in _MAPS["kinds"]["none"]]
        if "first_k_dense_replace" in hf.values and by_step != moe:
            raise ConfigError(refusal("other_dense_layers", kinds=reprlib.repr(kinds)))
    exempt = [i for i in moe if (kinds[i] in _MAPS["kinds"]["table"] if kinds else i < num_hashed)]
    counts = {key: count for key in _EXPERT_COUNTS if (count := hf.get(key))}
    num_experts, topk = min(counts.values(), default=0), hf["num_experts_per_tok"]
    refuse_if(max(counts.values(), default=0) != num_experts, ConfigError, "expert_counts", counts=counts)
    num_experts += hf.get("zero_expert_num") or 0
    refuse_if(topk > num_experts, ConfigError, "topk_of_experts", topk=topk, num_experts=num_experts)
    if num_layers * num_experts > (most := BOUNDS["experts_of_all_layers"][1]):
        raise ConfigError(refusal("num_experts", layers=num_layers, experts=num_experts, most=most))
    return MoeShape(num_layers, tuple(i for i in moe if i not in exempt), num_experts, topk, tuple(exempt))
