"""Finds the parameters of a whole model in a ``torch_dist`` checkpoint, whatever wrote it."""

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal

import torch

from megarl.convert.torch_dist import Place, TorchDistReader
from megarl.errors import CheckpointError, ConfigError
from megarl.files.foreign_files import read_regular
from megarl.megatron.checkpoints.folders import complete_checkpoints
from megarl.models.hf_files import describe_faults
from megarl.models.names import LAYOUTS, Rule, dimensions, rules_of
from megarl.models.shapes import ModelShape

Layers = Literal["local", "te"]
"""Which layers will load the checkpoint: Megatron's local ones, or Transformer Engine's."""

_FUSED_IN_LOCAL = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
"""What local layers with grouped attention call these parameters in checkpoints."""
_LAYER = "layers.{layer}."
_LAYERS: tuple[Layers, ...] = ("local", "te")
HF_FOLDER = "huggingface"
"""Subfolder of a converted Megatron checkpoint with config and tokenizer of its model."""
_ARGUMENTS = ("num_layers", "hidden_size", "num_attention_heads", "kv_channels")
"""Megatron-LM's arguments that are fields of a shape."""
_NO_WEIGHTS = ("optimizer", "chained_", "rng", "rerun_state", "opt_param_scheduler", "num_floating_point")
"""Prefixes of the keys of training state, which is not converted."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One parameter of the whole model."""

    rule: Rule
    layer: int
    expert: int

    @property
    def hf(self) -> list[str]:
        return self.rule.hf_names(self.layer, self.expert)


@dataclass(frozen=True, slots=True)
class Keys:
    """One way in which Megatron names parameters in checkpoints; ``Keys.all_of`` lists all that it has used."""

    layers: Layers
    stacked: bool  # one tensor [L, ...] for all layers, Megatron's default where they are of one kind; else one each
    single_experts: bool = False
    """One key per expert, and gate and up apart (``singleton_local_shards``); else one axis for the experts."""

    @staticmethod
    def all_of(shape: ModelShape) -> "list[Keys]":
        one_kind = len(shape.moe_layers) in (0, shape.num_layers)
        plain = [Keys(layers, stacked) for stacked in ([False, True] if one_kind else [False]) for layers in _LAYERS]
        return [*plain, *(Keys(layers, False, single_experts=True) for layers in _LAYERS)]

    @staticmethod
    def of_megatron(shape: ModelShape, layers: Layers, stacked: bool = False) -> "Keys":
        """The keys that Megatron asks for: it stacks layers unless ``moe_layer_freq`` is a list, as in a MoE model."""
        return Keys("local" if shape.norm_over_heads else layers, stacked or not shape.moe_layers)

    def places(self, piece: Piece, shape: ModelShape) -> list[Place]:
        """One, or with ``single_experts`` the two halves of a gated matrix."""
        rule, layer, expert = piece.rule, piece.layer, piece.expert
        name, index, sizes = self._name(rule, shape), [], []
        if rule.scope != "model":
            if self.stacked:
                name = name.replace(_LAYER, "layers.")
                index, sizes = [layer], [shape.num_layers]
            else:
                name = name.replace(_LAYER, f"layers.{layer}.")
        if rule.scope == "expert" and self.single_experts:
            name = name.replace("{expert}", str(expert))
        elif rule.scope == "expert":
            name = name.replace("{expert}.", "")
            index, sizes = [*index, expert], [*sizes, shape.num_experts]
        halves = ("_w", "_v") if self.single_experts and rule.layout == "gate_up" else ("",)
        return [Place(name + half, tuple(index), tuple(sizes)) for half in halves]

    def _name(self, rule: Rule, shape: ModelShape) -> str:
        if rule.scope == "expert":  # the same for both kinds of layers
            return rule.megatron[0].replace("local_experts.{expert}", "experts.{expert}")
        name = rule.megatron[0 if self.layers == "local" else -1]
        if self.layers == "local" and not shape.fields.get("multi_latent_attention"):
            for local, fused in _FUSED_IN_LOCAL.items():
                name = name.replace(local, fused)
        return name

    def extra_states(self, piece: Piece, shape: ModelShape) -> list[str]:
        """Names of the ``_extra_state`` objects that the parameter's module loads: None without FP8 training."""
        place = self.places(piece, shape)[0]
        module = place.key.rpartition(".")[0]
        leaf = module.rpartition(".")[2]
        is_whole = piece.rule.scope == "model" and leaf != "final_layernorm"
        if is_whole or not (leaf.startswith("linear_") or self.layers == "te"):
            return []
        index, sizes = (".".join(map(str, numbers)) for numbers in (place.index or (0,), place.sizes or (1,)))
        modules = [module]
        if self.layers == "te" and leaf == "linear_proj":
            modules.append(module.replace("linear_proj", "core_attention"))
        return [f"{name}._extra_state/shard_{index}_{sizes}" for name in modules if leaf != "router"]


def units_of(shape: ModelShape) -> list[list[Piece]]:
    """The parameters, in the order of computation: the embedding, one unit per layer, final norm and output layer."""
    units: list[list[Piece]] = [[] for _ in range(shape.num_layers + 2)]
    for rule in rules_of(shape):
        for layer, expert in rule.places(shape):
            at = layer + 1 if rule.scope != "model" else 0 if rule.megatron[0].startswith("embedding") else -1
            units[at].append(Piece(rule, layer, expert))
    return units


def parameter_shape(piece: Piece, shape: ModelShape) -> tuple[int, ...]:
    """The shape of the whole parameter in Megatron."""
    sizes = dimensions(shape)
    tensors = [torch.empty([sizes[dim] for dim in dims.split()], device="meta") for dims in piece.rule.dims]
    return tuple(LAYOUTS[piece.rule.layout].cut(tensors, 0, 1, shape).shape)


def torch_dist_folder(path: Path) -> Path:
    """The newest checkpoint in a folder of Megatron-LM or of a megarl run; any other path as it is."""
    tracker = path / "latest_checkpointed_iteration.txt"
    if tracker.is_file():
        word = read_regular(tracker, 64).decode(errors="replace").strip()
        if word != "release" and not word.isdecimal():
            raise CheckpointError(f"{tracker} says {word!r}, expected a number or 'release'")
        found = path / (word if word == "release" else f"iter_{int(word):07d}")
        if not found.is_dir():
            raise CheckpointError(f"{tracker} says {word!r}, but there is no {found}")
        return found
    steps = complete_checkpoints(path) or complete_checkpoints(path / "checkpoints")
    return steps[-1][1] if steps else path


def model_folder(source: Path, model: Path | None) -> Path:
    """The folder with config and tokenizer of a Megatron checkpoint: ``model``, or the one that a conversion wrote."""
    model = model or source / HF_FOLDER
    if not (model / "config.json").is_file():
        raise ConfigError(
            f"{model} holds no config.json, and a Megatron checkpoint does not say which model it holds: give --model, "
            "a folder with the Hugging Face config and tokenizer"
        )
    return model


class MegatronCheckpoint:
    """Read access to the parameters of a model in a ``torch_dist`` checkpoint.

    It recognises the names of local and Transformer Engine layers, with layers and experts stacked or single. Raises
    CheckpointError for tensors that are missing, unknown (unless a glob in ``drop`` matches them) or mis-shaped.
    """

    def __init__(self, path: Path, shape: ModelShape, drop: Sequence[str] = ()) -> None:
        self.shape = shape
        self._reader = TorchDistReader(path)
        self._stored = self._reader.tensors
        self._check_model()
        pieces = list(chain(*units_of(shape)))
        self.keys, wanted = self._recognise(pieces)
        rest = [key for key in self._stored if key not in wanted and not key.startswith(_NO_WEIGHTS)]
        self.dropped = sorted({key for pattern in drop for key in fnmatch.filter(rest, pattern)})
        self.num_padded_rows = 0  # of the vocabulary, left out
        faults = {"missing": list(wanted - set(self._stored)), "unknown": list(set(rest) - set(self.dropped))}
        if told := describe_faults(faults):
            raise CheckpointError(f"{path} does not hold a {shape.family} model of this config: {told}")
        for piece in pieces:
            self._check_shape(piece)

    def _check_model(self) -> None:
        """Compare with the model that the checkpoint describes: 4 heads of 16 and 8 of 8 have the same shapes."""
        common = self._reader.common()
        loop, arguments = common.get("loop"), common.get("args")
        said = loop.get("model", {}) if isinstance(loop, dict) else {}
        wanted = self.shape.describe()
        if not said and arguments is not None:
            names = [*_ARGUMENTS, *(["num_query_groups"] if getattr(arguments, "group_query_attention", False) else [])]
            said = {name: found for name in names if (found := getattr(arguments, name, None)) is not None}
        for name, value in said.items():
            if wanted.get(name, value) != value:
                raise CheckpointError(
                    f"{self._reader.path} is of another model: {name} is {value!r}, and {wanted[name]!r} in the config"
                )

    def _recognise(self, pieces: Sequence[Piece]) -> tuple[Keys, set[str]]:
        """The names under which the fewest parameters are missing."""
        candidates = [
            (keys, {place.key for piece in pieces for place in keys.places(piece, self.shape)})
            for keys in Keys.all_of(self.shape)
        ]
        return min(candidates, key=lambda candidate: len(candidate[1] - set(self._stored)))

    def _check_shape(self, piece: Piece) -> None:
        places = self.keys.places(piece, self.shape)
        first, *others = parameter_shape(piece, self.shape)
        for place in places:
            expected = (*place.sizes, first // len(places), *others)
            found = tuple(self._stored[place.key].size)
            if piece.rule.layout == "vocab" and found[1:] == expected[1:] and found[0] > expected[0]:
                self.num_padded_rows = found[0] - expected[0]
            elif found != expected:
                raise CheckpointError(f"{self._reader.path}: {place.key} has shape {found}, expected {expected}")

    def dtype(self, piece: Piece) -> torch.dtype:
        return self._stored[self.keys.places(piece, self.shape)[0].key].properties.dtype

    def read(self, piece: Piece) -> torch.Tensor:
        """The whole parameter; a vocabulary may be padded."""
        parts = [self._reader.read(place) for place in self.keys.places(piece, self.shape)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)
