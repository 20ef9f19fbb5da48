"""Checkpoints: an interrupted run goes on as if nothing had happened. What no save of the run has written is damage."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cases_checkpoint
import numpy as np
import pytest
import torch
from ranks import Case, case, slow
from saves import save
from tiny_world import config, policy_of
from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception

from megarl.errors import CheckpointError, DamageError, SaveError
from megarl.megatron.checkpoints import checkpoint
from megarl.megatron.checkpoints.folders import MANIFEST, complete_checkpoints, read_manifest
from megarl.megatron.policy import Policy

INTERRUPTED = "cases_checkpoint:interrupted"
RUN = "this run"
pytestmark = pytest.mark.usefixtures("one_rank")


def largest_difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert sorted(found) == sorted(expected)
    return max(float((found[name].double() - expected[name].double()).abs().max()) for name in expected)


@pytest.mark.parametrize(
    "overrides",
    [{}, {"parallel__distributed_optimizer": False}, {"model__dtype": "bf16"}],
    ids=["distributed-optimizer", "plain-optimizer", "bf16"],
)
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(
    overrides: dict[str, Any], in_model_folder: None, tmp_path: Any
) -> None:
    found = cases_checkpoint.interrupted({}, name=f"{tmp_path}/run", **overrides)
    assert found["resumed"] == found["straight"][2:]
    assert largest_difference(found["resumed_weights"], found["straight_weights"]) == 0
    assert largest_difference(found["saved_weights"], found["straight_weights"]) > 0
    rates = [rate for _, _, rate in found["straight"]]
    assert len(set(rates[1:])) == 3  # the schedule moves, so continuing it is not trivial
    assert found["loop"]["position"] == 7
    assert found["loop"]["step"] == 2


@pytest.mark.multirank
@pytest.mark.parametrize(
    "case",
    [
        case(2, INTERRUPTED, "ep2"),
        case(2, INTERRUPTED, "ep2", then="tp2 ep2 etp1"),
        case(2, INTERRUPTED, "", then="tp2 ep2 etp1"),
        *(slow(case(2, INTERRUPTED, layout)) for layout in ("tp2", "pp2 vpp2")),
        slow(case(4, INTERRUPTED, "ep2", then="pp2 ep2")),
        # Since Megatron-Core 0.15; it has one optimizer with ep = 1, and two with more.
        *(slow(case(2, INTERRUPTED, a, then=b)) for a, b in (("pp2", "ep2"), ("ep2", "tp1"))),
    ],
    ids=str,
)
def test_a_run_resumes_in_its_own_and_in_other_layouts(case: Case, outcome: dict[str, Any]) -> None:
    assert largest_difference(outcome["loaded_weights"], outcome["saved_weights"]) == 0
    for resumed, straight in zip(outcome["resumed"], outcome["straight"][2:], strict=True):
        assert resumed == pytest.approx(straight, rel=1e-5)
    # a step moves a weight by about 1e-3
    assert largest_difference(outcome["resumed_weights"], outcome["straight_weights"]) <= 1e-6
    assert outcome["folder"] == ["step_0000002"]


@pytest.fixture(scope="module")
def policy(models: dict[str, Path]) -> Policy:
    return policy_of(config(models["base"]))


def test_old_checkpoints_go_and_an_unfinished_one_is_never_taken(policy: Policy, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    assert complete_checkpoints(folder) == []
    for step in (1, 2, 12):
        save(folder, step, policy, {}, keep=2)
    (folder / "step_0000013.partial").mkdir()
    (folder / "notes").mkdir()
    assert [step for step, _ in complete_checkpoints(folder)] == [2, 12]
    # what a killed writer left of step 13 is replaced, not mixed with the new files
    (folder / "step_0000013.partial" / "__7_7.distcp").write_text("")
    path = save(folder, 13, policy, {}, keep=1)
    assert complete_checkpoints(folder) == [(13, path)]
    assert not (path / "__7_7.distcp").exists()
    assert not (folder / "step_0000013.partial").exists()
    save(folder, 13, policy, {"round": 2}, keep=2)  # a step that is saved again is replaced
    assert checkpoint.load(path, policy)["round"] == 2
    save(folder, 5, policy, {}, keep=1)  # an earlier step than those of before
    assert [step for step, _ in complete_checkpoints(folder)] == [5, 13]


def test_what_no_save_wrote_is_never_removed(policy: Policy, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, policy, {}, keep=9)
    (tmp_path / "step_0000001" / "notes.txt").write_text("mine")  # beside the files of a save
    elsewhere = (tmp_path / "step_0000002").rename(tmp_path / "elsewhere")
    (tmp_path / "step_0000002").symlink_to(elsewhere)
    changed = tmp_path / "step_0000003" / "common.pt"
    changed.write_bytes(changed.read_bytes()[::-1])
    os.utime(changed, ns=(2**62, 2**62))
    for name in ("step_0000000", "step_0000007"):  # called like a checkpoint
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.tex").write_text("mine")
    held = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.warns(UserWarning, match=r"step_000000\d stays although checkpoint.keep is 1"):
        save(tmp_path, 5, policy, {}, keep=1)
    assert {path: path.read_bytes() for path in held} == held
    with pytest.raises(SaveError, match=r"step_0000007 is or holds thesis.tex, which no save of this run wrote"):
        save(tmp_path, 7, policy, {}, keep=1)
    assert {path: path.read_bytes() for path in held} == held
    assert [step for step, _ in complete_checkpoints(tmp_path)] == [1, 2, 3, 5]


@pytest.mark.parametrize(
    ("names", "length"), [("*", None), ("common.pt", None), ("common.pt", 100), ("*.distcp", 1000), (".metadata", None)]
)
def test_a_damaged_checkpoint_is_refused_by_name(
    names: str, length: int | None, policy: Policy, tmp_path: Path
) -> None:
    path = save(tmp_path, 1, policy, {}, keep=2)
    files = list(path.glob(names)) or list(path.glob("*.distcp"))[:1]  # common.pt is among the tensors from 0.19 on
    assert files
    for file in files:
        file.unlink() if length is None else os.truncate(file, length)
    with pytest.raises(CheckpointError, match="step_0000001"):
        checkpoint.load(path, policy)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1"),
        OSError(errno.ESTALE, "Stale file handle"),
        CheckpointException("read", {1: _wrap_exception(OSError(errno.EIO, "Input/output error"))}),
    ],
    ids=["a rank died", "the file system is away", "for another rank"],
)
def test_what_another_start_may_mend_is_not_called_damage(
    error: BaseException, policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path, 1, policy, {}, keep=2)

    def fails(*rest: Any) -> None:
        raise error

    for place in ("load", "load_common_state_dict"):
        with monkeypatch.context() as patched:
            patched.setattr(checkpoint.dist_checkpointing, place, fails)
            with pytest.raises((OSError, RuntimeError)) as raised:  # no CheckpointException, which is no Exception
                checkpoint.load(path, policy)
            assert not isinstance(raised.value, CheckpointError)
            assert str(raised.value) in str(error)


def test_a_checkpoint_of_another_model_is_refused(policy: Policy, models: dict[str, Path], tmp_path: Path) -> None:
    path = save(tmp_path, 1, policy, {}, keep=2)
    with pytest.raises(CheckpointError, match="another model: vocab_size is 32, expected 31"):
        checkpoint.load(path, policy_of(config(models["vocab31"])))


def test_random_numbers_continue(policy: Policy, tmp_path: Path) -> None:
    path = save(tmp_path, 1, policy, {}, keep=2)
    drawn = [torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()]
    torch.manual_seed(1)
    checkpoint.load(path, policy)
    assert [torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()] == drawn


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

    monkeypatch.setattr(checkpoint, "sha256_of", fail)
    with pytest.raises(CheckpointError, match=r"step_0000002 cannot be read: .*Input/output error.*remove it to go on"):
        damage(saved / "step_0000002")


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
        full = r"(No space left|; (0|\S+e-\d+) of \S+ GiB are free)"  # torch may name a position instead of the disk
        with pytest.raises(SaveError, match=full + ".*; step_0000001 is as it was") as raised:
            save(disk(free), 2, policy, {}, keep=1)
        assert "step_0000002 could not be written" in str(raised.value)
        assert "Traceback" not in str(raised.value)
        assert [entry.name for entry in folder.iterdir()] == ["step_0000001"]
        assert damage(path, "") == "nothing"
    save(disk(None), 2, policy, {}, keep=1)
    assert [step for step, _ in complete_checkpoints(folder)] == [2]
    assert read_manifest(folder / "step_0000002")
