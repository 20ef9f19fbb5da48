"""What could not be written is said in the system's words, with the room on the disk, and leaves nothing behind."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from megarl.errors import ConfigError
from megarl.files.writing import describe_write_error, write_atomically
from megarl.models.hf_files import save_tensors
from megarl.run import status


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """A longer file fails with EFBIG, as one on a bad disk does with EIO."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


LARGE = torch.zeros(1 << 20)


def test_the_room_is_told(tmp_path: Path) -> None:
    with files_of_at_most(1 << 16):
        with pytest.raises(RuntimeError, match="inline_container") as caught:
            torch.save(LARGE, tmp_path / "a.pt")
        told = describe_write_error(caught.value, tmp_path / "not" / "there")
    assert told.endswith(f" GiB are free in {tmp_path}")
    assert [file.name for file in tmp_path.iterdir()] == ["a.pt"]  # torch's own; no probe


def test_every_writer_takes_its_temporary_file_away(
    disk: Callable[[int | None], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = disk(4096)
    monkeypatch.setenv(status.FAILURE_VARIABLE, str(folder / "failure.json"))
    for write in (
        lambda: write_atomically(folder / "a.json", bytes(100_000)),
        lambda: save_tensors({"a": LARGE}, folder / "a.safetensors"),
    ):
        with pytest.raises(OSError, match="No space left on device") as caught:
            write()
        assert " GiB are free in " in describe_write_error(caught.value, folder)
        assert [*folder.iterdir()] == []
    status.write_failure(ConfigError("x" * 100_000))
    assert [*folder.iterdir()] == []
    disk(None)
    status.write_failure(ConfigError("x"))
    assert os.listdir(folder) == ["failure.json"]
