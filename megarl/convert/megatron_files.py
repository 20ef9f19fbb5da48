"""Finds the parameters of a whole model in a ``torch_dist`` checkpoint, whatever wrote it."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megarl.convert.keys import Keys, Place
from megarl.convert.torch_dist import TorchDistReader
from megarl.errors import CheckpointError, ConfigError
from megarl.megatron.checkpoints.checkpoint import complete_checkpoints
from megarl.models.hf_reader import some
from megarl.models.names import LAYOUTS, Rule, dimensions, rules_of
from megarl.models.shapes import ModelShape

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

    def places(self, keys: Keys, shape: ModelShape) -> list[Place]:
        return keys.places(self.rule, shape, self.layer, self.expert)

    def extra_states(self, keys: Keys, shape: ModelShape) -> list[str]:
        return keys.extra_states(self.rule, shape, self.layer, self.expert)


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
        word = tracker.read_text().strip()
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
        pieces = [piece for unit in units_of(shape) for piece in unit]
        self.keys, wanted = self._recognise(pieces)
        rest = [key for key in self._stored if key not in wanted and not key.startswith(_NO_WEIGHTS)]
        self.dropped = sorted({key for pattern in drop for key in fnmatch.filter(rest, pattern)})
        """Unknown tensors that ``drop`` matches."""
        self.num_padded_rows = 0
        """Padding rows of the vocabulary, left out."""
        missing, unknown = sorted(wanted - set(self._stored)), sorted(set(rest) - set(self.dropped))
        if missing or unknown:
            lists = ((missing, "missing"), (unknown, "unknown"))
            told = "; ".join(f"{len(names)} tensors {what}: {some(names)}" for names, what in lists if names)
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
            said = {name: getattr(arguments, name, None) for name in names}
            said = {name: value for name, value in said.items() if value is not None}
        for name, value in said.items():
            if name in wanted and wanted[name] != value:
                raise CheckpointError(
                    f"{self._reader.path} is of another model: {name} is {value!r}, and {wanted[name]!r} in the config"
                )

    def _recognise(self, pieces: Sequence[Piece]) -> tuple[Keys, set[str]]:
        """The names under which the fewest parameters are missing."""
        candidates = [
            (keys, {place.key for piece in pieces for place in piece.places(keys, self.shape)})
            for keys in Keys.all_of(self.shape)
        ]
        return min(candidates, key=lambda candidate: len(candidate[1] - set(self._stored)))

    def _check_shape(self, piece: Piece) -> None:
        places = piece.places(self.keys, self.shape)
        first, *others = parameter_shape(piece, self.shape)
        for place in places:
            expected = (*place.sizes, first // len(places), *others)
            found = tuple(self._stored[place.key].size)
            is_padded = piece.rule.layout == "vocab" and found[1:] == expected[1:] and found[0] > expected[0]
            if is_padded:
                self.num_padded_rows = found[0] - expected[0]
            elif found != expected:
                raise CheckpointError(f"{self._reader.path}: {place.key} has shape {found}, expected {expected}")

    def dtype(self, piece: Piece) -> torch.dtype:
        return self._stored[piece.places(self.keys, self.shape)[0].key].properties.dtype

    def read(self, piece: Piece) -> torch.Tensor:
        """The whole parameter; a vocabulary may be padded."""
        parts = [self._reader.read(place) for place in piece.places(self.keys, self.shape)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)
