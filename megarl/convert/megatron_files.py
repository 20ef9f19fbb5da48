"""Find the parameters of a whole model in a ``torch_dist`` checkpoint of any writer."""

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Literal

import torch

from megarl.convert.torch_dist import Place, TorchDistReader
from megarl.errors import CheckpointError, refuse_if
from megarl.files.foreign_json import read_regular
from megarl.megatron.checkpoints.folders import complete_checkpoints
from megarl.models.hf_files import describe_faults
from megarl.models.layouts import LAYOUTS
from megarl.models.names import Rule, dimensions, rules_of
from megarl.models.shapes import ModelShape

_FUSED_IN_LOCAL = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
"""Names of parameters in checkpoints of local layers with grouped attention."""
_STATELESS = ("router", "self_attention", "conv1d", "out_norm")
_LAYER = "layers.{layer}."
_LAYERS: tuple[Literal["local", "te"], ...] = ("local", "te")
HF_FOLDER = "huggingface"
"""Subfolder of a converted Megatron checkpoint with config and tokenizer of the model."""
_ARGUMENTS = ("num_layers", "hidden_size", "num_attention_heads", "kv_channels")
"""Megatron-LM's arguments that are fields of a shape."""
_NO_WEIGHTS = ("optimizer", "chained_", "rng", "rerun_state", "opt_param_scheduler", "num_floating_point")
"""Prefixes of the keys of training state, which is not converted."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A parameter of the whole model."""

    rule: Rule
    layer: int
    expert: int

    @property
    def hf(self) -> list[str]:
        """Names of the Hugging Face tensors in the parameter."""
        return self.rule.hf_names(self.layer, self.expert)


@dataclass(frozen=True, slots=True)
class Keys:
    """A scheme by which Megatron names parameters in checkpoints; ``Keys.all_of`` lists all schemes in use."""

    layers: Literal["local", "te"]
    """Layers that load the checkpoint: Megatron's local layers, or Transformer Engine's."""
    stacked: bool
    """A tensor [L, ...] for all layers, Megatron's default for layers of a single kind; else a tensor per layer."""

    @staticmethod
    def all_of(shape: ModelShape) -> "list[Keys]":
        can_stack = len(shape.moe_layers) in (0, shape.num_layers) and not shape.linear_layers
        return [Keys(layers, stacked) for stacked in ([False, True] if can_stack else [False]) for layers in _LAYERS]

    @staticmethod
    def of_megatron(shape: ModelShape, layers: Literal["local", "te"]) -> "Keys":
        """Return Megatron's scheme: layers are stacked unless ``moe_layer_freq`` is a list, as in a MoE model."""
        is_stacked = not (shape.moe_layers or shape.linear_layers)
        return Keys("local" if shape.needs_local_layers else layers, stacked=is_stacked)

    def place(self, piece: Piece, shape: ModelShape) -> Place:
        """Return the place of a parameter."""
        rule, layer, expert = piece.rule, piece.layer, piece.expert
        name, index, sizes = self._name(rule, shape), [], []
        if rule.scope != "model" and self.stacked:
            name, index, sizes = name.replace(_LAYER, "layers."), [layer], [shape.num_layers]
        elif rule.scope != "model":
            name = name.replace(_LAYER, f"layers.{layer}.")
        name = name.replace("{expert}.", "")
        if rule.scope == "expert":
            index, sizes = [*index, expert], [*sizes, shape.num_experts]
        return Place(name, tuple(index), tuple(sizes))

    def parts(self, piece: Piece, shape: ModelShape) -> list[tuple[Place, tuple[int, ...]]]:
        """Return place and shape of the tensors that hold a parameter: blocks of its rows, or the whole."""
        place, whole = self.place(piece, shape), parameter_shape(piece, shape)
        blocks, sizes = LAYOUTS[piece.rule.layout].blocks.items(), dimensions(shape)
        parts = [(replace(place, key=f"{place.key}.{name}"), (sizes[rows], *whole[1:])) for name, rows in blocks]
        return parts or [(place, whole)]

    def _name(self, rule: Rule, shape: ModelShape) -> str:
        if rule.is_of_experts:  # equal for both kinds of layers
            return rule.megatron[0].replace("local_experts.{expert}", "experts.{expert}")
        name = rule.megatron[0 if self.layers == "local" else -1]
        if self.layers == "local" and not shape.fields.get("multi_latent_attention"):
            for local, fused in _FUSED_IN_LOCAL.items():
                name = name.replace(local, fused)
        return name

    def extra_states(self, piece: Piece, shape: ModelShape) -> list[str]:
        """Return the names of the ``_extra_state`` objects of the parameter's module; without FP8 training: None."""
        if piece.rule.scope == "experts":
            of_each = replace(piece.rule, scope="expert")
            pieces = (Piece(of_each, piece.layer, expert) for expert in range(shape.num_experts))
            return [name for single in pieces for name in self.extra_states(single, shape)]
        place = self.place(piece, shape)
        module = place.key.rpartition(".")[0]
        leaf = module.rpartition(".")[2]
        is_whole = piece.rule.scope == "model" and leaf != "final_layernorm"
        is_linear = leaf.startswith("linear_") or leaf in ("in_proj", "out_proj")
        if is_whole or leaf in _STATELESS or not (is_linear or self.layers == "te"):
            return []
        of_shard = (place.index or (0,), place.sizes or (1,))
        shard = f"shard_{'_'.join('.'.join(map(str, part)) for part in of_shard)}"
        modules = [module]
        if self.layers == "te" and leaf == "linear_proj":
            modules.append(module.replace("linear_proj", "core_attention"))
        return [f"{name}._extra_state/{shard}" for name in modules]


def units_of(shape: ModelShape) -> list[list[Piece]]:
    """Return the parameters in the order of computation: embedding, a unit per layer, final norm and output layer."""
    units: list[list[Piece]] = [[] for _ in range(shape.num_layers + 2)]
    for rule in rules_of(shape):
        for layer, expert in rule.places(shape):
            unit = layer + 1 if rule.scope != "model" else 0 if rule.megatron[0].startswith("embedding") else -1
            units[unit].append(Piece(rule, layer, expert))
    return units


def parameter_shape(piece: Piece, shape: ModelShape) -> tuple[int, ...]:
    """Return the shape of the whole parameter in Megatron."""
    sizes = dimensions(shape)
    tensors = [torch.empty([sizes[dim] for dim in dims.split()], device="meta") for dims in piece.rule.dims]
    return tuple(LAYOUTS[piece.rule.layout].cut(tensors, 0, 1, shape).shape)


def torch_dist_folder(path: Path) -> Path:
    """Return the newest checkpoint in a folder of Megatron-LM or of a megarl run; any other path unchanged.

    CheckpointError for a tracker file that names no checkpoint.
    """
    tracker = path / "latest_checkpointed_iteration.txt"
    if tracker.is_file():
        word = read_regular(tracker, 64).decode(errors="replace").strip()
        refuse_if(word != "release" and not word.isdecimal(), CheckpointError, "tracker", tracker=tracker, word=word)
        folder = path / (word if word == "release" else f"iter_{int(word):07d}")
        if not folder.is_dir():
            raise CheckpointError(f"{tracker} says {word!r}, but there is no {folder}")
        return folder
    steps = complete_checkpoints(path) or complete_checkpoints(path / "checkpoints")
    return steps[-1][1] if steps else path


class MegatronCheckpoint:
    """Read access to the parameters of a model in a ``torch_dist`` checkpoint.

    Recognises the names of local and Transformer Engine layers, with layers stacked or single.
    CheckpointError for tensors that are missing, unknown (unless a glob in ``drop`` matches) or mis-shaped.
    """

    def __init__(self, path: Path, shape: ModelShape, drop: Sequence[str] = ()) -> None:
        self.shape = shape
        self._reader = TorchDistReader(path)
        self._stored = self._reader.tensors
        self._check_model()
        pieces = list(chain(*units_of(shape)))
        names = {k: {place.key for piece in pieces for place, _ in k.parts(piece, shape)} for k in Keys.all_of(shape)}
        self.keys, expected = min(names.items(), key=lambda scheme: len(scheme[1] - self._stored.keys()))
        unexpected = [key for key in self._stored if key not in expected and not key.startswith(_NO_WEIGHTS)]
        self.dropped = sorted({key for pattern in drop for key in fnmatch.filter(unexpected, pattern)})
        faults = {"missing": list(expected - {*self._stored}), "unknown": list({*unexpected} - {*self.dropped})}
        refuse_if(text := describe_faults(faults), CheckpointError, "other_family", path=path, shape=shape, text=text)
        parts = ((piece, *part) for piece in pieces for part in self.keys.parts(piece, shape))
        for piece, place, inner in parts:
            size, wanted = tuple(self._stored[place.key].size), (*place.sizes, *inner)
            is_padded = piece.rule.layout == "vocab" and size[1:] == wanted[1:] and size[0] > wanted[0]
            if size != wanted and not is_padded:
                raise CheckpointError(f"{path}: {place.key} has shape {size}, expected {wanted}")

    def _check_model(self) -> None:
        """Compare with the checkpoint's description of the model: 4 heads of 16 and 8 heads of 8 have equal shapes."""
        common = self._reader.common()
        loop, arguments = common.get("loop"), common.get("args")
        stated = loop.get("model", {}) if isinstance(loop, dict) else {}
        expected = self.shape.describe()
        if not stated and arguments is not None:
            names = [*_ARGUMENTS, *(["num_query_groups"] if getattr(arguments, "group_query_attention", False) else [])]
            stated = {name: value for name in names if (value := getattr(arguments, name, None)) is not None}
        for name, value in stated.items():
            if expected.get(name, value) != value:
                values = f"{value!r}, and {expected[name]!r} in the config"
                raise CheckpointError(f"{self._reader.path} is of another model: {name} is {values}")

    def dtype(self, piece: Piece) -> torch.dtype:
        """Return the stored dtype of a parameter."""
        return self._stored[self.keys.parts(piece, self.shape)[0][0].key].properties.dtype

    def read(self, piece: Piece) -> torch.Tensor:
        """Return the whole parameter [...]; a vocabulary may be padded."""
        parts = [self._reader.read(place) for place, _ in self.keys.parts(piece, self.shape)]
        return torch.cat(parts) if len(parts) > 1 else parts[0]
