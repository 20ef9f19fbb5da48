"""Checkpoints of a run in Megatron's torch_dist format: compared with their manifests, and loaded.

Weights and the state of the distributed optimizer load in any layout. ``FrozenModel`` holds weights for evaluation.
"""

import errno
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from torch.distributed.checkpoint.api import CheckpointException

from megarl.config import Config
from megarl.errors import CheckpointError, DamageError, refusal, refuse_if
from megarl.files.pickles import require_plain
from megarl.files.writing import sha256_of
from megarl.megatron.checkpoints import state
from megarl.megatron.checkpoints.folders import MANIFEST, WRITE_ERRORS, read_manifest
from megarl.megatron.distributed import from_main_rank, gather_objects, is_collective_error
from megarl.megatron.hf_weights import export_hf, load_hf
from megarl.megatron.policy import Policy, build_chunks
from megarl.models.shapes import ModelShape, read_shape
from megarl.replay import RoutingReplay
from megarl.replay.megatron_state import unwrap

# AttributeError comes from a bug in Megatron, where common.pt is missing.
_READ_ERRORS = (*WRITE_ERRORS, AssertionError, AttributeError, EOFError, KeyError, UnpicklingError, ValueError)
"""What Megatron and torch raise for a damaged or foreign checkpoint."""
_OTHER_PARAMETERS = ". It is damaged, or was written with settings that change the parameters"
_UNREACHABLE = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EREMOTEIO)
"""Errors of a network file system that is away."""


def find_damage(path: Path, run: str = "") -> str | None:
    """Return what is wrong with a checkpoint or None; a collective call.

    The ranks share the reading. run: as in ``read_manifest``. CheckpointError on all ranks if one cannot read a file.
    """

    def plan() -> tuple[list[tuple[str, str]], str | None]:
        try:
            return [(name, digest) for name, (_, digest) in sorted(read_manifest(path, run).items())], None
        except DamageError as error:
            return [], str(error)

    def compare() -> tuple[str | None, str | None]:
        try:
            for name, digest in files[dist.get_rank() :: dist.get_world_size()]:
                if sha256_of(path / name) != digest:
                    return f"{path / name} is not the file that was written: {MANIFEST} has another SHA-256", None
        except OSError as error:
            return None, str(error)
        return None, None

    files, fault = from_main_rank(plan)
    results = gather_objects(compare())
    unreadable = next((problem for _, problem in results if problem), None)
    # No damage: the file system may be away.
    refuse_if(unreadable, CheckpointError, "unreadable_checkpoint", path=path, problem=unreadable)
    return next((problem for problem in (fault, *(change for change, _ in results)) if problem), None)


def require_intact(path: Path) -> None:
    """DamageError if a checkpoint is damaged; a collective call."""
    refuse_if(fault := find_damage(path), DamageError, "damaged_checkpoint", fault=fault)


def load(path: Path, policy: Policy) -> dict[str, Any]:
    """Restore a checkpoint into ``policy`` and the random generators; returns the loop state. A collective
    call.

    Random states and untrained samples are restored only in the layout of the save; another layout begins with the
    seeds, and draws the samples again.
    """
    written = _read_loop(path, policy.shape)
    is_same = written["layout"] == (layout := state.describe_layout(policy))
    advice = refusal("other_layout", written=written["layout"], layout=layout)
    with _explain_errors(path, "does not load into this run", advice):
        targets = state.sharded_state(policy, is_loading=True)
        if not is_same:
            del targets["rng"]
        elif written.get("has_untrained"):
            targets["untrained"] = state.of_rank("untrained", None)
        read = _read(targets, path)
        _load_chunks(policy.chunks, read)
        policy.optimizer.load_state_dict(state.regrouped(read["optimizer"], policy.optimizer))
        state.separate_adam_steps(policy.optimizer)
        policy.scheduler.load_state_dict(read["scheduler"])
    if is_same:
        state.restore_rng(read["rng"])
    if "untrained" in read:
        read["loop"]["untrained"] = read["untrained"]
    return read["loop"]


def load_weights(path: Path, chunks: Sequence[torch.nn.Module], shape: ModelShape) -> int:
    """Restore the weights alone, in any layout; returns the checkpoint's step. A collective call, without optimizer."""
    require_intact(path)
    step = int(_read_loop(path, shape)["step"])
    with _explain_errors(path, "does not load", _OTHER_PARAMETERS):  # reading the loop state has examined the pickles
        _load_chunks(chunks, _read(state.sharded_weights(chunks), path))
    return step


def _load_chunks(chunks: Sequence[torch.nn.Module], weights: Mapping[str, Any]) -> None:
    for index, chunk in enumerate(chunks):
        unwrap(chunk).load_state_dict(weights[f"model{index}"])


def _read_loop(path: Path, shape: ModelShape) -> dict[str, Any]:
    """The loop state of a checkpoint; CheckpointError if incomplete or of another model."""
    with _explain_errors(path, "is not a complete checkpoint"):
        require_plain(path)
        loop = dist_checkpointing.load_common_state_dict(str(path))["loop"]
        written_by, _ = loop["model"], loop["layout"]
    expected = shape.describe()
    for key in sorted({*written_by, *expected}):
        facts = {"key": key, "value": written_by.get(key), "expected": expected.get(key)}
        refuse_if(facts["value"] != facts["expected"], CheckpointError, "other_model", path=path, **facts)
    return loop


@contextmanager
def _explain_errors(path: Path, problem: str, advice: str = "") -> Iterator[None]:
    """Turn an error of reading into a CheckpointError, unless it is no fault of the checkpoint."""
    try:
        yield
    except _READ_ERRORS as error:
        wrapped = [cause for cause, _ in error.failures.values()] if isinstance(error, CheckpointException) else [error]
        for cause in wrapped:
            if (isinstance(cause, OSError) and cause.errno in _UNREACHABLE) or is_collective_error(cause):
                raise cause  # noqa: B904 (no fault of the checkpoint: a dead rank, an absent file system)
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{path} {problem}: {type(error).__name__}: {reason[-300:]}{advice}") from error


def _read(targets: dict[str, Any], path: Path) -> Any:
    with warnings.catch_warnings():
        # Megatron calls a torch function under its old name; a user cannot change that.
        warnings.filterwarnings("ignore", message="`load_state_dict` is deprecated", category=FutureWarning)
        return dist_checkpointing.load(targets, str(path))


class FrozenModel:
    """A model in this run's layout, without optimizer or gradients.

    ``model.path`` gives the architecture. weights: a step folder, whatever layout wrote it, or a Hugging Face folder of
    the same architecture; default ``model.path``. replays: with routing replay. Construction is a collective call.
    CheckpointError for a damaged checkpoint, or a checkpoint of another model.
    """

    def __init__(self, config: Config, weights: Path | None, replays: bool = False) -> None:
        self.config, self.shape = config, read_shape(config.model.path)
        _, self.chunks = build_chunks(config, self.shape)
        for chunk in self.chunks:
            chunk.requires_grad_(False)
        self.step = 0
        """Global steps that the weights of a step folder have seen."""
        folder = Path(config.model.path) if weights is None else weights
        if (folder / "config.json").is_file():
            load_hf(self.chunks, self.shape, folder)
        else:
            self.step = load_weights(folder, self.chunks, self.shape)
        self.replay = RoutingReplay(self.chunks, min_score=config.train.replay_min_score) if replays else None

    def export(self, receive: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield all weights, whole [...], under Hugging Face names, on ranks that ``receive``; a collective call."""
        return export_hf(self.chunks, self.shape, receive)
