"""A checkpoint is what one save of one run has written, or it counts as damaged; and it is on disk before it counts."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import cases_checkpoint
import pytest
from ranks import Case, case
from saves import save
from tiny_world import config, policy_of

from megarl.errors import CheckpointError, DamageError, SaveError
from megarl.megatron.checkpoints import checkpoint
from megarl.megatron.checkpoints import folders as manifest
from megarl.megatron.checkpoints.folders import MANIFEST, complete_checkpoints, read_manifest
from megarl.megatron.policy import Policy

RUN = "this run"
pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(scope="module")
def policy(models: dict[str, Path]) -> Policy:
    return policy_of(config(models["base"]))


@pytest.fixture(scope="module")
def saved(policy: Policy, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of checkpoints 1 and 2, with other weights."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    save(folder, 1, policy, {"position": 1}, keep=2, run=RUN)
    cases_checkpoint.train(policy, config(models["base"]), range(1))
    save(folder, 2, policy, {"position": 2}, keep=2, run=RUN)
    return folder


def copy(path: Path, to: Path, name: str = "", data: bytes | None = None) -> Path:
    """Links to the files of ``path``; file ``name`` is left out, or has this content."""
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(path, to, copy_function=os.link, ignore=lambda folder, names: {name} & set(names))
    if data is not None:
        (to / name).write_bytes(data)
    return to


def damage(path: Path, run: str = RUN) -> str:
    return checkpoint.find_damage(path, run) or "nothing"


def test_a_file_that_cannot_be_read_is_no_damage(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(file: Path) -> str:
        raise OSError(errno.EIO, "Input/output error", str(file))

    monkeypatch.setattr(manifest, "sha256_of", fail)
    with pytest.raises(CheckpointError, match=r"step_0000002 cannot be read: .*Input/output error.*remove it to go on"):
        damage(saved / "step_0000002")


def test_a_checkpoint_of_an_earlier_step_than_those_of_before_stays(policy: Policy, tmp_path: Path) -> None:
    for step in (1000, 1010, 5):
        path = save(tmp_path, step, policy, {}, keep=2)
    assert path.name == "step_0000005"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step_0000005", "step_0001000", "step_0001010"]


def test_one_changed_byte_in_any_file_is_found_and_named(saved: Path, policy: Policy, tmp_path: Path) -> None:
    path, to = saved / "step_0000002", tmp_path / "step_0000002"
    assert damage(path) == damage(copy(path, to)) == "nothing"
    assert checkpoint.load(to, policy)["position"] == 2
    draw = random.Random(3)
    files = sorted(path.iterdir())
    assert {"__0_0.distcp", ".metadata", "metadata.json", MANIFEST} <= {file.name for file in files}
    for file in files:
        whole = file.read_bytes()
        for offset in {0, len(whole) - 1, *draw.choices(range(len(whole)), k=4)}:
            changed = bytearray(whole)
            changed[offset] ^= 1 << draw.randrange(8)
            assert f"{to / file.name} is not the file that was written" in damage(copy(path, to, file.name, changed))
        shorter = "is not the file" if file.name == MANIFEST else f"bytes, expected {len(whole)}"
        assert shorter in damage(copy(path, to, file.name, whole[:-1]))
        assert shorter in damage(copy(path, to, file.name, whole + b"\0"))
        missing = damage(copy(path, to, file.name))
        assert f"{to} {'has no' if file.name == MANIFEST else 'lacks'} {file.name}" in missing
    assert f"{to} holds more.pt" in damage(copy(path, to, "more.pt", b"more"))


def test_files_and_folders_of_another_step_or_run_are_found(saved: Path, tmp_path: Path) -> None:
    one, two, to = saved / "step_0000001", saved / "step_0000002", tmp_path / "step_0000002"
    for file in sorted(one.iterdir()):
        if file.read_bytes() == (two / file.name).read_bytes():
            assert file.name == "metadata.json"
            continue
        found = damage(copy(two, to, file.name, file.read_bytes()))
        assert str(to / file.name) in found or "step 1 under another name" in found
    assert "is the checkpoint of step 1 under another name" in damage(copy(one, to))
    assert "is of run this run, expected that run" in damage(two, "that run")
    assert damage(two, "") == "nothing"
    assert damage(copy(two, tmp_path / "best")) == "nothing"  # a copy to keep, under a name of its own
    assert "lacks" in damage(copy(two, to, ".metadata"))
    with pytest.raises(DamageError, match=r"lacks \.metadata; the checkpoint is damaged, choose another one"):
        checkpoint.require_intact(to)


@pytest.mark.multirank
@pytest.mark.parametrize("case", [case(2, "cases_checkpoint:verdicts", "ep2")], ids=str)
def test_all_ranks_come_to_one_verdict(case: Case, outcome: dict[str, set[str]]) -> None:
    assert outcome.pop("") == {""}
    assert {"__0_0.distcp", "__1_0.distcp", ".metadata", MANIFEST} < set(outcome)
    for name, said in outcome.items():
        (verdict,) = said
        assert f"{name} is not the file that was written" in verdict


def test_everything_is_flushed_before_it_gets_its_name_and_before_the_older_one_goes(
    policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "checkpoints"
    save(folder, 1, policy, {}, keep=1)
    log = os.open(tmp_path / "log", os.O_RDWR | os.O_CREAT | os.O_APPEND)  # the forked writers share it

    def spy(module: object, name: str, tell: Callable[..., str]) -> None:
        original = getattr(module, name)

        def told(*arguments: object, **rest: object) -> object:
            os.write(log, f"{name} {tell(*arguments)}\n".encode())
            return original(*arguments, **rest)

        monkeypatch.setattr(module, name, told)

    spy(os, "fsync", lambda file: f"{os.readlink(f'/proc/self/fd/{file}')} {os.fstat(file).st_size}")
    spy(os, "rename", lambda old, new: f"{old} {new}")
    spy(os, "unlink", lambda path: str(path))
    path = save(folder, 2, policy, {}, keep=1)
    calls = (tmp_path / "log").read_text().splitlines()
    partial, old = f"{path}.partial", folder / "step_0000001"
    named = calls.index(f"rename {partial} {path}")
    for file in path.iterdir():
        name = f".{MANIFEST}.{os.getpid()}.tmp" if file.name == MANIFEST else file.name
        name = ".metadata.tmp" if name == ".metadata" and not _at(calls, f"fsync {partial}/.metadata ") else name
        # with all its bytes: Megatron alone would call fsync before the last ones are written
        assert calls.index(f"fsync {partial}/{name} {file.stat().st_size}") < named, name
    assert _at(calls, f"fsync {partial}/.{MANIFEST}")[-1] < _at(calls, f"fsync {partial} ")[-1] < named
    assert named < _at(calls, f"fsync {folder} ")[-1] < calls.index(f"rename {old} {old}.partial")
    assert calls.index(f"rename {old} {old}.partial") < _at(calls, f"unlink {old}.partial/")[0]
    assert damage(path, "") == "nothing"


def _at(calls: list[str], start: str) -> list[int]:
    return [index for index, call in enumerate(calls) if call.startswith(start)]


def test_a_full_disk_at_any_file_leaves_the_older_checkpoint_and_says_so(
    policy: Policy, disk: Callable[[int | None], Path]
) -> None:
    folder = disk(None)
    path = save(folder, 1, policy, {}, keep=1)
    size = sum(-(-file.stat().st_size // 4096) * 4096 for file in path.iterdir())
    manifest = -(-(path / MANIFEST).stat().st_size // 4096) * 4096
    tail = range(4096, manifest + 3 * 4096, 4096)  # full while the small last files are written
    for free in (4096, 3 * 4096, size // 3, 2 * size // 3, *(size - left for left in tail)):
        with pytest.raises(SaveError, match=r"(No space left|full disk).*; step_0000001 is as it was") as raised:
            save(disk(free), 2, policy, {}, keep=1)
        assert "step_0000002 could not be written" in str(raised.value)
        assert "Traceback" not in str(raised.value)
        assert [entry.name for entry in folder.iterdir()] == ["step_0000001"]
        assert damage(path, "") == "nothing"
    save(disk(None), 2, policy, {}, keep=1)
    assert [step for step, _ in complete_checkpoints(folder)] == [2]
    assert read_manifest(folder / "step_0000002")
