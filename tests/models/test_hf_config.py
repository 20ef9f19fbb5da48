"""Every family and every key of its config.json: read as transformers reads it, or refused by name.

Compared is what transformers makes of a config.json with what Megatron makes of a ModelShape: parameters, rotary
embeddings, routers.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_families import FAMILIES as TINY
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from megarl.engines.weights import auto_class
from megarl.errors import ConfigError
from megarl.files import hf_config
from megarl.files.hf_config import FAMILIES, HFConfig, family_entry, flatten, is_beside_text, is_turned
from megarl.models.names import hf_shapes
from megarl.models.shapes import ModelShape, read_shape

Config = dict[str, Any]
Facts = dict[str, Any]
_BUILT: dict[str, Facts] = {}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """transformers says a line about most of the changed configs."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


def class_of(kind: str) -> Any:
    """The config class of a model type, of the text model of a larger one; Kimi-K2 has that of DeepSeek-V3."""
    text = FAMILIES[kind].get("text", kind)
    return CONFIG_MAPPING[text if text in CONFIG_MAPPING else FAMILIES[kind]["like"]]


def nested(config: Config) -> Config:
    """The config.json of a larger model whose text model has the keys of this table."""
    kind = config.get("model_type")
    if "text" not in FAMILIES.get(kind, {}) or "text_config" in config:
        return config
    outer = ("model_type", "architectures", "tie_word_embeddings", "dtype", "torch_dtype")
    text = {key: value for key, value in config.items() if key not in outer}
    return {**{key: config[key] for key in outer if key in config}, "text_config": text}


def facts_of_transformers(hf: Mapping[str, Any]) -> Facts:
    """Raises what transformers raises for a config that it cannot read, or build a model of."""
    kind = kind_of(hf)
    config = CONFIG_MAPPING[kind].from_dict({**copy.deepcopy(nested(dict(hf))), "model_type": kind})
    if hf.get("rotary_dim"):  # the class of MiniMax-M2 forgets it; its authors' code and SGLang do not
        config.rope_parameters["partial_rotary_factor"] = hf["rotary_dim"] / config.head_dim
    key = json.dumps(config.to_dict(), sort_keys=True, default=str)
    if key not in _BUILT:
        _BUILT[key] = _build(config)
    return _BUILT[key]


def _build(config: Any) -> Facts:
    with torch.device("meta"):
        model = auto_class(config).from_config(config, dtype=torch.float32)
    outer, config = config, config.get_text_config()
    inner = getattr(model.model, "language_model", model.model)
    rotary, window = type(inner.rotary_emb)(config), getattr(config, "sliding_window", None)
    attention = next((layer.self_attn for layer in reversed(inner.layers) if hasattr(layer, "self_attn")), None)
    moe = [index for index, one in enumerate(inner.layers) if hasattr(one.mlp, "experts")]
    facts: Facts = {
        "parameters": checkpoint_parameters(model, outer),
        "frequencies": rotary.inv_freq.double(),
        "rotary_scale": float(rotary.attention_scaling),
        "attention_scale": float(attention.scaling) if attention else None,
        "norm_epsilon": _epsilon(inner.layers[-1].input_layernorm),
        "moe_layers": tuple(moe),
        "tied": outer.tie_word_embeddings,
        "positions": config.max_position_embeddings,
        "activation": config.hidden_act,
        "windows": tuple(
            getattr(getattr(one, "self_attn", None), "sliding_window", window) or None for one in inner.layers
        ),
        "clip": getattr(config, "clip_qkv", None),
        "interleaved": getattr(config, "rope_interleave", True if hasattr(config, "kv_lora_rank") else None),
    }
    indexers = {
        i: one.self_attn.indexer
        for i, one in enumerate(inner.layers)
        if getattr(getattr(one, "self_attn", None), "indexer", None)
    }
    facts["indexers"] = {i: (one.n_heads, one.head_dim, one.index_topk) for i, one in indexers.items()}
    for name in ("q_norm", "q_a_layernorm", "kv_a_layernorm"):
        if module := getattr(attention, name, None):
            facts[f"epsilon of {name}"] = _epsilon(module)
    if moe:
        block = inner.layers[moe[-1]].mlp
        names = ("top_k", "norm_topk_prob", "topk_group", "routed_scaling_factor")
        # Releases of transformers have them in the block or in its router.
        gate = getattr(block, "gate", None) or block.router
        facts["router"] = {name: getattr(block, name, getattr(gate, name, None)) for name in names}
        facts["router"]["n_group"] = getattr(config, "n_group", None)
        facts["router"]["routed_scaling_factor"] = facts["router"]["routed_scaling_factor"] or getattr(
            gate, "router_scaling_factor", None
        )
    return facts


def _epsilon(norm: Any) -> float:
    return norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps


def checkpoint_parameters(model: Any, config: Any) -> dict[str, tuple[int, ...]]:
    """Names and shapes as published checkpoints have them, without a tied output layer."""
    kind, hidden, found = config.model_type, config.get_text_config().hidden_size, {}
    live = model.state_dict(keep_vars=True)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    tensors = {name: tensor.detach() for name, tensor in live.items() if name not in tied}
    reverted = tensors if family_entry(kind, "as_built") else revert_weight_conversion(model, tensors)
    for name, tensor in reverted.items():
        shape = tuple(tensor.shape)
        if not is_beside_text(kind, name):
            found[name] = (shape[0], shape[2], shape[1]) if is_turned(kind, name, shape, hidden) else shape
    return found


def kind_of(hf: Mapping[str, Any]) -> str:
    """The type that transformers knows."""
    kind = hf["model_type"]
    return kind if kind in CONFIG_MAPPING else FAMILIES[kind]["like"]


def facts_of_megatron(shape: ModelShape) -> Facts:
    from megatron.core.models.common.embeddings import yarn_rotary_pos_embedding as yarn
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    fields, is_latent = shape.fields, "multi_latent_attention" in shape.fields
    width = fields["qk_pos_emb_head_dim"] if is_latent else fields["kv_channels"]
    scaling = (shape.rope_factor is not None, shape.rope_factor or 1.0)
    plain = RotaryEmbedding(width, shape.rotary_percent, False, None, shape.rotary_base, *scaling, True)  # type: ignore[arg-type]
    frequencies, rotary_scale = plain.inv_freq.double(), 1.0
    depth = fields["qk_head_dim"] + width if is_latent else width
    has_softmax = len(shape.linear_layers) < shape.num_layers
    attention_scale = depth**-0.5 if has_softmax else None
    if fields.get("rope_type") == "yarn" or "yarn_beta_fast" in fields:
        own = {name.removeprefix("yarn_"): value for name, value in fields.items()}
        factor, all_dim = own["rotary_scaling_factor"], own["mscale_all_dim"]
        bounds = yarn._yarn_find_correction_range(
            own["beta_fast"], own["beta_slow"], width, shape.rotary_base,
            own["original_max_position_embeddings"], own.get("correction_range_round_to_int", True),
        )  # fmt: skip
        ramp = yarn._yarn_linear_ramp_mask(*bounds, width // 2, torch.device("cpu"))
        frequencies = frequencies / factor * ramp + frequencies * (1 - ramp)
        rotary_scale = yarn._yarn_get_concentration_factor(factor, own["mscale"], all_dim)
        attention_scale *= yarn._yarn_get_mscale(factor, all_dim) ** 2 if is_latent else 1
    window, has_window = fields.get("window_size"), fields.get("window_attn_skip_freq", [0] * shape.num_layers)
    facts: Facts = {
        "parameters": hf_shapes(shape),
        "frequencies": frequencies,
        "rotary_scale": rotary_scale,
        "attention_scale": attention_scale,
        "norm_epsilon": fields["layernorm_epsilon"],
        "moe_layers": shape.moe_layers,
        "tied": shape.tied_embeddings,
        "positions": shape.max_sequence_length,
        "activation": "silu",
        "windows": tuple(window[0] + 1 if window and has else None for has in has_window),
        "clip": None,
        "interleaved": True if is_latent else None,
    }
    names = ("n_heads", "head_dim", "topk")
    indexer = tuple(fields.get(f"dsa_indexer_{name}") for name in names)
    facts["indexers"] = dict.fromkeys(shape.indexer_layers, indexer)
    if is_latent:
        names = ("q_a_layernorm", "kv_a_layernorm") if fields["q_lora_rank"] else ("kv_a_layernorm",)
        facts |= {f"epsilon of {name}": shape.latent_norm_epsilon for name in names}
    elif fields["qk_layernorm"] and has_softmax:
        facts["epsilon of q_norm"] = fields["layernorm_epsilon"]
    if shape.moe_layers:
        is_sigmoid = "moe_router_score_function" in fields
        always = family_entry(shape.family, "shape").get("normalised")
        has_keys = shape.family not in ("minimax_m2", "hy_v3")
        facts["router"] = {
            "top_k": shape.topk,
            "norm_topk_prob": None if always else is_sigmoid or not fields["moe_router_pre_softmax"],
            "n_group": (fields["moe_router_num_groups"] or 1) if is_sigmoid and has_keys else None,
            "topk_group": (fields["moe_router_group_topk"] or 1) if is_sigmoid and has_keys else None,
            "routed_scaling_factor": None
            if not is_sigmoid or shape.family == "minimax_m2"
            else fields["moe_router_topk_scaling_factor"],
        }
    return facts


def differences(left: Facts, right: Facts) -> list[str]:
    """What differs, in words."""
    found = []
    for name in left.keys() | right.keys():
        one, other = left.get(name), right.get(name)
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            is_same = one.shape == other.shape and torch.allclose(one, other, rtol=1e-5, atol=0)
        elif isinstance(one, float) and isinstance(other, float):
            is_same = math.isclose(one, other, rel_tol=1e-6)
        else:
            is_same = one == other
        if not is_same:
            found.append(f"{name}: {_short(one)} and {_short(other)}")
    return sorted(found)


def _short(value: Any) -> str:
    return repr(value)[:160]


ROPE_PLACES = ("rope_parameters", "rope_scaling")


def full_config(name: str) -> Config:
    """A config with every key of the class, each at a value of its own, as transformers 5 saves it."""
    kind, tiny = TINY[name]
    text = tiny.get("text_config", tiny)
    text = {key: value[:3] if isinstance(value, list) else value for key, value in text.items()}
    config = class_of(kind)(**{**text, "rms_norm_eps": 3e-5, "num_hidden_layers": 3, "vocab_size": 30})
    config.rope_parameters |= {"rope_theta": 54321.0}
    return {**json.loads(config.to_json_string(use_diff=False)), "model_type": "kimi_k2" if name == "kimi_k2" else kind}


def as_transformers_4(config: Config) -> Config:
    """The same as releases before 5 save it."""
    rope = dict(config["rope_parameters"])
    outside = {key: rope.pop(key) for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    scaling = None if rope["rope_type"] == "default" else {"type": rope.pop("rope_type"), **rope}
    kept = {key: value for key, value in config.items() if key not in ("rope_parameters", "dtype")}
    return {**kept, **outside, "rope_scaling": scaling, "torch_dtype": "bfloat16"}


BASES = {
    f"{name} {style}": change(full_config(name))
    for name in TINY
    for style, change in (("5", dict), ("4", as_transformers_4))
}


def read(config: Config, folder: Path) -> ModelShape:
    (folder / "config.json").write_text(json.dumps(nested(config)))
    return read_shape(folder)


@pytest.fixture
def keys_read(monkeypatch: pytest.MonkeyPatch) -> dict[str, None]:
    """Fills with the keys that are read, "rope." in front of those of the rotary table."""
    keys: dict[str, None] = {}
    real = HFConfig.__getitem__

    def record(self: HFConfig, key: str) -> Any:
        keys["rope." * bool(self.prefix) + key] = None
        return real(self, key)

    monkeypatch.setattr(HFConfig, "__getitem__", record)
    return keys


_REMOVED = object()


def others(value: Any) -> Iterator[Any]:
    """Values that could stand in place of another."""
    yield from (_REMOVED, None, "7", [], {}, 0, -1, 1.5, True, False, float("nan"))
    if isinstance(value, bool):
        return
    if isinstance(value, (int, float)):
        yield from (value + 1, value * 2, value / 2, float(value), int(value))
    if isinstance(value, str):
        yield from (value.upper(), "torch." + value, "auto", "float32", "gelu", "llama3", "yarn", "default", "linear")
    if isinstance(value, list):
        yield from ([1], [0, 2], [*value, *value], ["sliding_attention"] * 3, ["full_attention"] * 3)


def with_value(table: Config, key: str, value: Any) -> Config:
    return {k: v for k, v in table.items() if k != key} if value is _REMOVED else {**table, key: value}


def mutations(base: Config, key: str) -> Iterator[tuple[str, Config]]:
    """(what was done to the key, config); a key of the rotary table is moved through its places too."""
    rope, key = key.startswith("rope."), key.removeprefix("rope.")
    place = next((place for place in ROPE_PLACES if base.get(place)), "rope_parameters")
    table = base.get(place) or {}
    known = table.get(key, base.get(key, HFConfig.of(nested(base)).defaults.get(key)))
    for value in others(known):
        label = "removed" if value is _REMOVED else repr(value)
        if not rope or key in base:
            yield label, with_value(base, key, value)
        if rope:
            yield f"{label} in {place}", {**base, place: with_value(table, key, value)}
    if rope:
        inside, outside = with_value(table, key, _REMOVED), with_value(base, key, _REMOVED)
        for other in ROPE_PLACES:
            for spelling in {key, "type" if key == "rope_type" else key}:
                moved = {**outside, **dict.fromkeys(ROPE_PLACES), other: {**inside, spelling: known}}
                yield f"moved to {other} as {spelling}", moved
                yield f"only in {other}", {**outside, **dict.fromkeys(ROPE_PLACES), other: {spelling: known}}
                yield f"at both places, {other}", {**outside, place: table, other: {spelling: known}}
        yield "moved to the top", {**outside, place: inside, key: known}
        for value in others(known):
            yield f"{value!r} at the top too", {**with_value(base, key, value), place: table}


def as_class_types(config: Config) -> Config:
    """The classes take no integer where they expect a float; megarl does, as JSON has one kind of number."""
    floats = {field.name for field in dataclasses.fields(class_of(config["model_type"])) if field.type is float}
    return {key: float(value) if key in floats and type(value) is int else value for key, value in config.items()}


def names_of(key: str, kind: str) -> list[str]:
    """What a refusal may name: the key or its other name; the rotary table for one of its keys."""
    aliases = family_entry(kind, "aliases") or {}
    return [key.removeprefix("rope."), aliases.get(key, key), *(("rope_",) if key.startswith("rope.") else ())]


def fault_of(config: Config, names: Sequence[str], folder: Path) -> str | None:
    """What is wrong with how megarl reads a config; None if it is read as transformers reads it. ConfigError if it is
    refused by one of these names."""
    try:
        shape = read(config, folder)
    except ConfigError as error:
        if any(name in str(error) for name in names):
            raise
        return f"the refusal does not name it: {error}"
    try:
        with quiet():
            theirs = facts_of_transformers(as_class_types(config))
    except Exception as error:
        return f"transformers refuses: {type(error).__name__} {error}"[:200]
    found = differences(theirs, facts_of_megatron(shape))
    return f"transformers and megarl: {found}" if found else None


@pytest.mark.parametrize("name", BASES)
def test_every_key_is_read_as_transformers_reads_it_or_refused_by_name(
    name: str, tmp_path: Path, keys_read: dict[str, None]
) -> None:
    base, wrong, num_equal, num_refused = BASES[name], [], 0, 0
    read(base, tmp_path)
    config = HFConfig.of(nested(base))
    known = {*config.defaults, *config.required, *FAMILIES[base["model_type"]].get("aliases", {})}
    keys = {**keys_read, **dict.fromkeys(sorted({*known, *base.keys()} - {"model_type"}))}
    harmless = {key for key in keys if config.is_harmless(key)} - {"dtype", "torch_dtype"}
    for key in keys.keys() - harmless:
        for what, changed in mutations(base, key):
            if key == "layer_types" and what == "None" and "text" in FAMILIES[base["model_type"]]:
                continue  # transformers fails in the forward pass of the larger model, where the key may be absent
            try:
                fault = fault_of(changed, names_of(key, base["model_type"]), tmp_path)
            except ConfigError:
                num_refused += 1
                continue
            num_equal += fault is None
            wrong += [] if fault is None else [f"{key} {what}: {fault}"]
    assert not wrong, f"{len(wrong)} of {num_equal + num_refused + len(wrong)}:\n" + "\n".join(wrong)
    assert num_equal > 90
    assert num_refused > 200


@pytest.mark.parametrize("name", ["kimi_k2 5", "kimi_k2 4", "gpt_oss 5"])
def test_yarn_scales_as_in_transformers_or_is_refused(name: str, tmp_path: Path) -> None:
    """transformers scales cosines and scores by both mscales, by the factor alone where one is absent."""
    place = next(place for place in ROPE_PLACES if BASES[name].get(place))
    values, num_equal = (_REMOVED, None, 0, 0.7, 1.0, 1), 0
    for mscale, all_dim, factor in itertools.product(values, values, (_REMOVED, None, 1.0, 1.2)):
        table = BASES[name][place]
        for key, value in (("mscale", mscale), ("mscale_all_dim", all_dim), ("attention_factor", factor)):
            table = with_value(table, key, value)
        try:
            assert fault_of({**BASES[name], place: table}, ["mscale", "attention_factor"], tmp_path) is None, table
            num_equal += 1
        except ConfigError:
            continue
    # Equal mscales, as 1 and 1.0 are, in latent attention; each, or both, null or left out in grouped attention. All of
    # that without an attention factor, or with null.
    assert num_equal == 2 * (1 + 4 if name.startswith("kimi") else 9 + 12 + 4)


@pytest.mark.parametrize("name", BASES)
def test_a_key_that_is_left_out_has_the_value_of_the_class(
    name: str, tmp_path: Path, keys_read: dict[str, None]
) -> None:
    """Not refused, but for sizes and what Kimi-K2's own class and DeepSeek-V3's would take otherwise."""
    base = BASES[name]
    read(base, tmp_path)
    required = HFConfig.of(nested(base)).required | {"rope.factor", "rope.low_freq_factor", "rope.high_freq_factor"}
    refused = set()
    for key in keys_read.keys() - {"rope.rope_type", "rope.mscale", "rope.mscale_all_dim"}:
        try:
            for what, config in mutations(base, key):
                if what.startswith("removed"):
                    read(config, tmp_path)
        except ConfigError:
            refused.add(key)
    if base["model_type"] == "llama":  # Llama 3.1's bounds are Megatron's alone
        refused -= {"rope.original_max_position_embeddings"}
    # The tiny models have fewer layers, heads and experts in a group than the class takes.
    few = {"first_k_dense_replace", "linear_num_key_heads", "num_key_value_heads"}
    few |= {"n_group", "topk_group", "num_experts"}
    if base["model_type"] == "dots1":  # whose class takes a router that does not normalise
        few |= {"norm_topk_prob"}
    assert refused - required <= few, refused


@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if "like" not in FAMILIES[kind]])
def test_the_tables_are_those_of_transformers_classes(kind: str) -> None:
    config_class, ours = class_of(kind), HFConfig.of(nested({"model_type": kind}))
    fields = {field.name: field for field in dataclasses.fields(config_class)}
    missing = {key for key in fields if key not in {*ours.defaults, *ours.required} and not ours.is_harmless(key)}
    assert not missing, "neither read, nor at a default, nor known as harmless"
    with quiet():
        made = config_class()
    theirs = {key: field.default for key, field in fields.items()} | made.rope_parameters
    theirs |= {"index_skip_topk_offset": 2}  # not a field
    stated = {**hf_config.COMMON["defaults"], **FAMILIES[kind]["defaults"]}
    assert {key: theirs.get(key, 1.0) for key in stated} == stated
    of_class = set(fields) & set(ours.defaults) - stated.keys()
    assert {key: fields[key].default for key in of_class} == dict.fromkeys(of_class)
    assert not {key for key in ours.optional & set(fields) if "None" not in str(fields[key].type)}
    assert not ours.derived & set(fields)
    names = {frozenset(pair) for pair in FAMILIES[kind].get("aliases", {}).items()}
    assert names == {frozenset(pair) for pair in config_class.attribute_map.items()}
    assert FAMILIES[kind]["class"] == MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]


UNREFUSED = """\
adapter_reduction_factor afn apply_spec_augment architecture asm begin_suppress_tokens bi_data chroma_length
classifier_proj_size concat_input conf_reduction_factor context_length crop_size decoder decoder_vocab_size
default_language do_pooling downsample_rate enable_pronunciation enable_shape end_n_top init_device init_std
initializer_cutoff_factor initializer_factor input_feat_size input_jitter_noise input_size is_decoder lang_id
languages mask_feature_length mask_feature_min_masks mask_feature_prob mask_time_length mask_time_min_masks
mask_time_prob max_num_tiles max_seq_len median_filter_width mem_len mode n_ctx n_langs num_buckets num_centroids
num_chroma num_mel_bins pixel_shuffle_ratio prompt_length prompt_types pronunciation_vocab_size reuse_len same_length
segment_types shape_vocab_size slow_but_exact standardize start_n_top summary_proj_to_labels summary_type
summary_use_proj supported_aspect_ratios suppress_tokens task_type_vocab_size time_reduction type_vocab_size
use_associative_scan use_long_context use_mem_eff_path use_mems_eval use_mems_train use_prompt use_task_id
vocab_offset vocabulary_map weight_mode
"""
"""Keys about other inputs, training and outputs, reviewed one by one."""


def test_a_key_of_any_other_class_of_transformers_is_refused(tmp_path: Path) -> None:
    """Every key of every causal language model, on in a config of each family: read, harmless or refused."""
    keys: dict[str, None] = {}
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        with contextlib.suppress(KeyError):
            parts = (CONFIG_MAPPING[kind], *CONFIG_MAPPING[kind].sub_configs.values())
            keys |= {
                field.name: None
                for part in parts
                if dataclasses.is_dataclass(part)
                for field in dataclasses.fields(part)
            }
    accepted = set()
    for kind in FAMILIES:
        for key in keys:
            with contextlib.suppress(ConfigError):
                config = HFConfig.of(nested({"model_type": kind, key: 7}))
                if key in {*config.defaults, *config.required} or config.is_harmless(key):
                    continue
                config.check_unread()
                accepted.add(key)
    assert accepted <= set(UNREFUSED.split()), accepted - set(UNREFUSED.split())


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("value", [False, None])
def test_a_model_that_sees_later_tokens_is_refused(kind: str, value: bool | None) -> None:
    """transformers' masks read is_causal of every config, though no class has it."""
    with pytest.raises(ConfigError, match=r"is_causal is .*, expected True"):
        HFConfig.of(nested({"model_type": kind, "is_causal": value})).check_unread()


@pytest.mark.parametrize(
    ("model", "changes", "problem"),
    [
        ("hy_v3", {"mlp_layer_types": ["dense", "hash_moe", "dense", "sparse"]}, "one of 'dense', 'sparse'"),
        ("qwen3_5_moe_text", {"norm_topk_prob": False}, "norm_topk_prob is False, expected True"),
    ],
)
def test_what_a_class_would_not_read_is_refused(model: str, changes: Config, problem: str, tmp_path: Path) -> None:
    kind, config = TINY[model]
    with pytest.raises(ConfigError, match=problem):
        read({"model_type": kind, **config, **changes}, tmp_path)


PUBLIC = json.loads((Path(__file__).parent / "public_configs.json").read_text())


@pytest.mark.parametrize("model", PUBLIC)
def test_public_configs_are_read_as_transformers_reads_them_or_refused_with_the_reason(
    model: str, tmp_path: Path
) -> None:
    config, reason = PUBLIC[model]["config"], PUBLIC[model]["refused"]
    if reason is not None:
        with pytest.raises(ConfigError, match=reason):
            read(config, tmp_path)
        return
    is_known = config["model_type"] in CONFIG_MAPPING  # Kimi-K2.5 is not: its text model is
    config = dict(flatten(config)) if is_known else config.get("text_config", config)
    shape = read(config, tmp_path)
    small: Config = {"num_hidden_layers": min(config["num_hidden_layers"], 5)}  # building all layers takes seconds
    by_layer = ("layer_types", "mlp_layer_types", "indexer_types")
    small |= {key: config[key][:5] for key in by_layer if key in config}
    few = read({**config, **small}, tmp_path)
    with quiet():
        theirs = facts_of_transformers(as_class_types({**config, **small, "quantization_config": None}))
    assert differences(theirs, facts_of_megatron(few)) == []
    assert shape.num_layers == config["num_hidden_layers"]
    by_layer: dict[str, Any] = {"fields": {}, "indexer_layers": ()}
    assert dataclasses.replace(shape, **by_layer) == dataclasses.replace(few, **by_layer)
