"""What can be set in the ``[megatron]`` table, read from Megatron-Core's source without importing it.

Importing ``megatron.core`` imports torch, which takes seconds; a wrong key should be reported before that. So the three
dataclasses are parsed with ``ast``: field names and annotations, for the version that is really installed.

Two more facts about these fields are kept here as data: which of them megarl sets itself (``DERIVED``), and which of
them would let Megatron route without asking the replay hook (``REPLAY_BLOCKERS``).
"""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from megarl.errors import ConfigError

DATACLASSES: Mapping[str, tuple[tuple[str, str], ...]] = {
    "TransformerConfig": (
        ("model_parallel_config.py", "ModelParallelConfig"),
        ("transformer/transformer_config.py", "TransformerConfig"),
    ),
    "DistributedDataParallelConfig": (
        ("distributed/distributed_data_parallel_config.py", "DistributedDataParallelConfig"),
    ),
    "OptimizerConfig": (("optimizer/optimizer_config.py", "OptimizerConfig"),),
}
"""Dataclass -> (file below megatron/core, class), base class first."""

_FROM_MODEL = (
    "activation_func add_bias_linear add_qkv_bias ffn_hidden_size gated_linear_unit hidden_size kv_channels"
    " layernorm_epsilon layernorm_zero_centered_gamma moe_ffn_hidden_size moe_layer_freq moe_router_enable_expert_bias"
    " moe_router_group_topk moe_router_num_groups moe_router_pre_softmax moe_router_score_function moe_router_topk"
    " moe_router_topk_limited_devices moe_router_topk_scaling_factor moe_shared_expert_gate"
    " moe_shared_expert_intermediate_size mtp_num_layers multi_latent_attention normalization num_attention_heads"
    " num_layers num_moe_experts num_query_groups qk_layernorm rotary_interleaved softmax_scale window_size"
)

DERIVED: Mapping[str, str] = {
    **dict.fromkeys(_FROM_MODEL.split(), "model.path"),
    **dict.fromkeys(("bf16", "fp16", "params_dtype", "pipeline_dtype"), "model.dtype"),
    "tensor_model_parallel_size": "parallel.tp",
    "pipeline_model_parallel_size": "parallel.pp",
    "virtual_pipeline_model_parallel_size": "parallel.vpp",
    "expert_model_parallel_size": "parallel.ep",
    "expert_tensor_parallel_size": "parallel.etp",
    "context_parallel_size": "parallel.cp",
    "hierarchical_context_parallel_sizes": "parallel.cp",
    "hybrid_context_parallel": "parallel.cp",
    "sequence_parallel": "parallel.sequence_parallel",
    "moe_token_dispatcher_type": "parallel.dispatcher",
    "use_distributed_optimizer": "parallel.distributed_optimizer",
    "recompute_granularity": "recompute.granularity",
    "recompute_method": "recompute.method",
    "recompute_num_layers": "recompute.num_layers",
    "recompute_modules": "recompute.modules",
    "moe_layer_recompute": "recompute.modules",
    "lr": "optim.lr",
    "min_lr": "optim.min_lr",
    "weight_decay": "optim.weight_decay",
    "adam_beta1": "optim.adam_beta1",
    "adam_beta2": "optim.adam_beta2",
    "adam_eps": "optim.adam_eps",
    "clip_grad": "optim.clip_grad",
    "deterministic_mode": "run.deterministic",
    "moe_enable_routing_replay": "train.replay",
    "calculate_per_token_loss": "train.objective",
    "variable_seq_lengths": "train.micro_batch_tokens",
}
"""Megatron field that megarl sets itself -> the megarl key that decides it."""


@dataclass(frozen=True, slots=True)
class ReplayBlocker:
    """A Megatron setting under which the experts in use are not those that the replay hook returned."""

    setting: str
    """Field of TransformerConfig."""
    hit: Callable[[Mapping[str, Any]], bool]
    """True if these settings (field -> value, absent means Megatron's default) bypass the hook."""
    reason: str
    """What Megatron does then; completes "replay cannot hold, because"."""


def _on(name: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda settings: bool(settings.get(name))


def _names(value: Any) -> list[str]:
    """A setting that may be a string, an enum member, or a list of either, as a list of strings."""
    items = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
    return [part for item in items for part in str(getattr(item, "name", item)).split(",")]


def _own_top_k(settings: Mapping[str, Any]) -> bool:
    known = {"none", "aux_loss", "seq_aux_loss", "global_aux_loss"}
    return not known.issuperset(_names(settings.get("moe_router_load_balancing_type", "aux_loss")))


def _capacity(settings: Mapping[str, Any]) -> bool:
    factor = settings.get("moe_expert_capacity_factor")
    return factor is not None and factor >= 0  # a negative factor means no limit


def _graph_over_router(settings: Mapping[str, Any]) -> bool:
    if settings.get("cuda_graph_impl", "none") == "none":
        return False
    scope = _names(settings.get("cuda_graph_scope", "full"))  # an empty scope captures the whole layer
    return not scope or not {"attn", "mlp", "mamba"}.issuperset(scope)


REPLAY_BLOCKERS: tuple[ReplayBlocker, ...] = (
    ReplayBlocker(
        "moe_router_fusion",
        _on("moe_router_fusion"),
        "the fused top-k kernel returns before the replay hook is asked",
    ),
    ReplayBlocker(
        "moe_router_load_balancing_type",
        _own_top_k,
        "sinkhorn, and every balancing that is not an auxiliary loss, chooses experts without the replay hook",
    ),
    ReplayBlocker(
        "moe_expert_capacity_factor",
        _capacity,
        "tokens over an expert's capacity are dropped after the replay hook, so replayed experts vanish",
    ),
    ReplayBlocker(
        "moe_router_force_load_balancing",
        _on("moe_router_force_load_balancing"),
        "router logits are replaced by random ones, so replayed experts get random gate weights",
    ),
    ReplayBlocker(
        "moe_router_force_biased",
        lambda settings: settings.get("moe_router_force_biased") is not None,
        "router logits are biased at random (0.17 and later), so replayed experts get random gate weights",
    ),
    ReplayBlocker(
        "overlap_moe_expert_parallel_comm",
        _on("overlap_moe_expert_parallel_comm"),
        "the combined 1F1B schedule interleaves two micro-batches, so a pass no longer meets its rows in order",
    ),
    ReplayBlocker(
        "cuda_graph_impl",
        _graph_over_router,
        "a CUDA graph over the router repeats the captured routes and never calls the replay hook again",
    ),
    ReplayBlocker(
        "enable_cuda_graph",
        _on("enable_cuda_graph"),
        "a CUDA graph over the layer repeats the captured routes and never calls the replay hook again",
    ),
    ReplayBlocker(
        "external_cuda_graph",
        _on("external_cuda_graph"),
        "a CUDA graph over the layer repeats the captured routes and never calls the replay hook again",
    ),
)
"""Every such setting of megatron-core 0.16.1 (read in transformer/moe/router.py, moe_utils.py, moe_layer.py,
transformer_layer.py and the schedules)."""


def replay_blockers(settings: Mapping[str, Any]) -> list[ReplayBlocker]:
    """The entries of REPLAY_BLOCKERS that these settings hit; ``vars(transformer_config)`` serves as settings too."""
    return [blocker for blocker in REPLAY_BLOCKERS if blocker.hit(settings)]


def source_root() -> Path:
    """Folder of the installed megatron.core, found without importing it; ConfigError if there is none."""
    # `megatron` is a namespace package: looking below it runs no code of it.
    spec = importlib.util.find_spec("megatron")
    for location in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(location) / "core" / "__init__.py").is_file():
            return Path(location) / "core"
    raise ConfigError(
        "found no megatron-core in this environment, expected 0.16.1: run `pip install megatron-core==0.16.1`"
    )


@cache
def fields() -> dict[str, dict[str, str]]:
    """Dataclass -> field -> annotation as written in Megatron's source, e.g. ``"Optional[int]"``."""
    return {name: _parse(sources) for name, sources in DATACLASSES.items()}


def _parse(sources: tuple[tuple[str, str], ...]) -> dict[str, str]:
    found: dict[str, str] = {}
    for file, class_name in sources:
        path = source_root() / file
        if not path.is_file():
            raise ConfigError(f"found no {path}, expected megatron-core 0.16.1 with class {class_name} there")
        classes = [n for n in ast.parse(path.read_text()).body if isinstance(n, ast.ClassDef) and n.name == class_name]
        if not classes:
            raise ConfigError(f"found no class {class_name} in {path}, expected megatron-core 0.16.1")
        for node in classes[0].body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found[node.target.id] = ast.unparse(node.annotation)
    return found


def check(table: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Sort a flat ``[megatron]`` table by dataclass, checking names and simple types.

    Returns a dict for each name in DATACLASSES; a key that several of them have (such as bf16) is set in all. Values of
    torch.dtype and enum fields stay names ("bfloat16", "flash"); ``realize`` turns them into objects later.
    Raises ConfigError, one line, for an unknown key (with the closest names), a wrong type, or a field that no file can
    hold (a callable).
    """
    known = fields() if table else {name: {} for name in DATACLASSES}
    result: dict[str, dict[str, Any]] = {name: {} for name in DATACLASSES}
    for key, value in table.items():
        owners = [name for name in DATACLASSES if key in known[name] and not key.startswith("_")]
        if not owners:
            close = difflib.get_close_matches(key, {field for owner in known.values() for field in owner}, n=3)
            hint = f"did you mean {' or '.join(close)}?" if close else "see `megarl doctor` for the installed version"
            raise ConfigError(f"megatron.{key}: no field of Megatron's {', '.join(DATACLASSES)} has this name; {hint}")
        for owner in owners:
            _check_type(key, value, known[owner][key])
            result[owner][key] = value
    return result


def _check_type(key: str, value: Any, annotation: str) -> None:
    verdict = _fits(value, ast.parse(annotation, mode="eval").body)
    if verdict is None:
        raise ConfigError(
            f"megatron.{key}: Megatron's type is {annotation}, which no configuration file can hold; remove the key"
        )
    if not verdict:
        named = next((name for name in _SYMBOLS if name in annotation), None)
        choices = f", one of {', '.join(sorted(_symbol_names(named)))}" if named else ""
        raise ConfigError(f"megatron.{key}: found {value!r}, expected {annotation}{choices}")


def _fits(value: Any, node: ast.expr) -> bool | None:
    """Whether the value has the annotated type; None if the type cannot be written in TOML at all."""
    if isinstance(node, ast.Constant):
        return value is None if node.value is None else _fits(value, ast.parse(str(node.value), mode="eval").body)
    if isinstance(node, ast.BinOp):
        return _any((_fits(value, node.left), _fits(value, node.right)))
    if isinstance(node, ast.Subscript):
        return _fits_generic(value, node)
    name = ast.unparse(node).rpartition(".")[2]
    if name in _SYMBOLS:
        return isinstance(value, str) and value in _symbol_names(name)
    if name not in _PLAIN:
        return None
    if isinstance(value, bool):  # a bool is an int to Python, but never meant as one
        return name == "bool"
    return isinstance(value, _PLAIN[name])


_PLAIN: Mapping[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "str": (str,),
    "list": (list, tuple),
    "List": (list, tuple),
}
_SYMBOLS: Mapping[str, str] = {
    "dtype": "torch",
    "AttnBackend": "megatron.core.transformer.enums",
    "CudaGraphScope": "megatron.core.transformer.enums",
}
"""Types whose values are named in the table -> the module that defines them."""


def _any(verdicts: tuple[bool | None, ...]) -> bool | None:
    possible = [verdict for verdict in verdicts if verdict is not None]
    return any(possible) if possible else None


def _fits_generic(value: Any, node: ast.Subscript) -> bool | None:
    outer = ast.unparse(node.value).rpartition(".")[2]
    parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    if outer == "Literal":
        return value in [ast.literal_eval(part) for part in parts]
    if outer in ("Optional", "Union"):
        return value is None or _any(tuple(_fits(value, part) for part in parts))
    if outer in ("list", "List"):
        return isinstance(value, (list, tuple)) and all(_fits(item, parts[0]) for item in value)
    if outer in ("tuple", "Tuple"):
        same = isinstance(value, (list, tuple)) and len(value) == len(parts)
        return same and all(_fits(item, part) for item, part in zip(value, parts, strict=True))
    return None


@cache
def _symbol_names(type_name: str) -> frozenset[str]:
    if type_name == "dtype":
        return frozenset(("float32", "bfloat16", "float16", "uint8"))
    tree = ast.parse((source_root() / "transformer/enums.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == type_name:
            return frozenset(
                target.id
                for line in node.body
                if isinstance(line, ast.Assign)
                for target in line.targets
                if isinstance(target, ast.Name)
            )
    return frozenset()


def realize(dataclass_name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The checked values of one dataclass, with names of dtypes and enum members replaced by the objects themselves.

    For the layer that builds Megatron's configs, where torch is loaded anyway: the modules are looked up at the call.
    A name of CudaGraphScope stays a string, because Megatron parses those itself.
    """
    known = fields()[dataclass_name] if values else {}
    result: dict[str, Any] = {}
    for key, value in values.items():
        type_name = next((s for s in ("dtype", "AttnBackend") if known[key].rpartition(".")[2].startswith(s)), None)
        if type_name is None or not isinstance(value, str):
            result[key] = tuple(value) if isinstance(value, list) and "Tuple" in known[key] else value
            continue
        module = importlib.import_module(_SYMBOLS[type_name])
        result[key] = getattr(module, value) if type_name == "dtype" else getattr(module, type_name)[value]
    return result
