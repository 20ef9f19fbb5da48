"""No loader of checkpoints runs what a pickle names; the records of torch and Megatron still load."""

from __future__ import annotations

import os
import pickle
import signal
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.optimizer import OptimizerConfig
from megatron.core.rerun_state_machine import RerunMode
from megatron.core.transformer.enums import AttnBackend
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from megarl.convert.torch_dist import Chunk, Place, TorchDistReader, write_file, write_metadata
from megarl.errors import CheckpointError
from megarl.files.pickles import load_metadata, require_plain
from megarl.megatron.checkpoints import checkpoint

PLACE = Place("weight", (), ())
CHUNK = Chunk(PLACE, (3, 2), torch.bfloat16, lambda: torch.ones(3, 2, dtype=torch.bfloat16))


def write(folder: Path, *objects: str) -> None:
    write_metadata(folder, [CHUNK], [*objects], [write_file(folder, 0, [CHUNK], [*objects])])


class Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "step_0000001"
    made.mkdir()
    write(made, "layer._extra_state")
    generator = np.random.default_rng(0).bit_generator.state
    torch.save({"args": Namespace(tp=1), "step": 1, "rng": [torch.zeros(2), generator]}, made / "common.pt")
    return made


def spoil_metadata(folder: Path, evil: Evil) -> None:
    metadata = load_metadata(folder)
    metadata.planner_data = evil
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def spoil_object(folder: Path, evil: Any) -> None:
    metadata: Metadata = load_metadata(folder)
    torch.save([evil], folder / "__1_0.distcp")
    for index, stored in metadata.storage_data.items():
        if isinstance(metadata.state_dict_metadata[index.fqn], BytesStorageMetadata):
            stored.relative_path, stored.offset = "__1_0.distcp", 0
            stored.length = (folder / "__1_0.distcp").stat().st_size
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def spoil_common(folder: Path, evil: Evil) -> None:
    torch.save({"loop": evil}, folder / "common.pt")


def spoil_common_protocol(folder: Path, evil: Evil) -> None:
    """In a form that a restricted reader may give up on before it finds the name, and an unlimited one reads."""
    torch.save({"loop": evil}, folder / "common.pt", pickle_protocol=4)


def spoil_old_object(folder: Path, evil: Evil) -> None:
    (folder / "rng_state").mkdir()
    torch.save(evil, folder / "rng_state" / "shard_0_1.pt")


SPOILS = (spoil_metadata, spoil_object, spoil_common, spoil_common_protocol, spoil_old_object)


def test_what_was_written_is_plain(folder: Path):
    """And what Megatron-LM keeps beside it."""
    require_plain(folder)
    reader = TorchDistReader(folder)
    assert torch.equal(reader.read(PLACE), torch.ones(3, 2, dtype=torch.bfloat16))
    assert reader.common()["args"].tp == 1
    common = {"args": Namespace(backend=AttnBackend.flash), "rng": np.random.get_state(), "rerun": RerunMode.DISABLED}
    torch.save(common | {"optimizer": OptimizerConfig(lr=0.5), "exit": signal.SIGTERM}, folder / "common.pt")
    require_plain(folder)
    assert sorted(TorchDistReader(folder).common()) == ["args", "exit", "optimizer", "rerun", "rng"]


def test_the_common_state_may_be_an_object_among_the_tensors(folder: Path):
    """As Megatron-Core writes it from 0.19 on."""
    write(folder, "common_state/shard_0_1")
    (folder / "common.pt").unlink()
    assert TorchDistReader(folder).common() == {}  # the object is None
    spoil_object(folder, {"args": Namespace(tp=2)})
    require_plain(folder)
    assert TorchDistReader(folder).common()["args"].tp == 2
    marker = folder / "marker"
    spoil_object(folder, {"args": Evil(marker)})
    with pytest.raises(CheckpointError, match=r"its common state cannot be read .*names posix\.system"):
        TorchDistReader(folder).common()
    assert not marker.exists()


@pytest.mark.parametrize("spoil", SPOILS)
def test_a_checkpoint_that_runs_something_is_not_read(folder: Path, spoil: Callable[[Path, Evil], None]):
    marker = folder / "marker"
    spoil(folder, Evil(marker))
    told = "it names posix.system|no plain data"
    with pytest.raises(pickle.UnpicklingError, match=told):
        require_plain(folder)
    with pytest.raises(CheckpointError, match=told):
        checkpoint._read_loop(folder, None)  # type: ignore[arg-type]
    if spoil in (spoil_metadata, spoil_common, spoil_common_protocol):
        with pytest.raises(CheckpointError, match=told):
            TorchDistReader(folder).common()
    assert not marker.exists()


def test_odd_metadata_hides_nothing(folder: Path):
    """What the examination does not understand is refused, for other readers may understand it."""
    spoil_object(folder, Evil(folder / "marker"))
    metadata = load_metadata(folder)
    for change in ({"storage_data": None}, {"state_dict_metadata": {}}, {"storage_data": {"a": "b"}}):
        odd = Metadata(**{**metadata.__dict__, **change})
        (folder / ".metadata").write_bytes(pickle.dumps(odd))
        with pytest.raises(pickle.UnpicklingError, match="is damaged"):
            require_plain(folder)
    assert not (folder / "marker").exists()


def test_a_pickle_may_not_rename_what_is_examined(folder: Path):
    """By its new name, torch's class of objects would not be known as such here, and torch would still load them."""
    spoil_object(folder, Evil(folder / "marker"))
    plain = pickle.dumps(load_metadata(folder), protocol=2)
    rename = b"N}X\x08\x00\x00\x00__name__X\x01\x00\x00\x00xs\x86b0"
    rename = b"ctorch.distributed.checkpoint.metadata\nBytesStorageMetadata\n" + rename
    (folder / ".metadata").write_bytes(plain[:2] + rename + plain[2:])
    with pytest.raises(pickle.UnpicklingError, match="it changes BytesStorageMetadata"):
        require_plain(folder)
    assert BytesStorageMetadata.__name__ == "BytesStorageMetadata"


def test_no_module_unpickles_without_limits():
    """One exception: a queue through a file without a name, which only this process and its fork can open."""
    sources = Path(checkpoint.__file__).parents[2]
    found = {
        str(path.relative_to(sources))
        for path in sources.rglob("*.py")
        for words in ("pickle.load", "weights_only=False", "allow_pickle=True", "read_metadata(")
        if words in path.read_text()
    }
    assert found == {"megatron/checkpoints/state.py"}


@pytest.mark.parametrize(
    ("module", "name"),
    [("os", "float32"), ("torch", "load"), ("torch", "hub"), ("torch", "no_such_name"), ("builtins", "eval")],
)
def test_the_name_of_a_type_of_tensors_is_torchs_alone(folder: Path, module: str, name: str):
    (folder / ".metadata").write_bytes(f"c{module}\n{name}\n.".encode())
    with pytest.raises(pickle.UnpicklingError, match=rf"^it names {module}\.{name}, which is no part"):
        load_metadata(folder)
    (folder / ".metadata").write_bytes(b"ctorch\nfloat32\n.")
    assert load_metadata(folder) is torch.float32


def test_every_object_of_a_checkpoint_is_examined_and_no_tensor(folder: Path):
    write(folder, "a", "b", "c")
    require_plain(folder)
    metadata: Metadata = load_metadata(folder)
    torch.save([Evil(folder / "marker")], folder / "evil.distcp")
    length = (folder / "evil.distcp").stat().st_size
    for chosen in [index for index in metadata.storage_data if index.fqn in ("a", "b", "c")]:
        changed: Metadata = load_metadata(folder)
        stored = changed.storage_data[chosen]
        stored.relative_path, stored.offset, stored.length = "evil.distcp", 0, length
        kept = (folder / ".metadata").read_bytes()
        (folder / ".metadata").write_bytes(pickle.dumps(changed))
        with pytest.raises(pickle.UnpicklingError, match=r"it names posix\.system"):
            require_plain(folder)
        (folder / ".metadata").write_bytes(kept)
    assert not (folder / "marker").exists()
