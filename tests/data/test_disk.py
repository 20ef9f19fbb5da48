"""What could not be written is said in the system's words, with the room on the disk, and leaves nothing behind."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megarl.errors import ConfigError
from megarl.files.writing import describe_write_error, write_atomically
from megarl.models.hf_files import save_tensors
from megarl.run import status

LARGE = torch.zeros(1 << 20)


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
