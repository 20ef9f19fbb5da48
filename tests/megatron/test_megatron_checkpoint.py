"""Checkpoints: an interrupted run goes on as if nothing had happened."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cases_checkpoint
import numpy as np
import pytest
import torch
from ranks import Case, case, slow
from saves import save
from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception

from megarl.errors import CheckpointError, SaveError
from megarl.megatron.checkpoints import checkpoint
from megarl.megatron.checkpoints.folders import complete_checkpoints

INTERRUPTED = "cases_checkpoint:interrupted"


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
        slow(case(2, INTERRUPTED, "tp2")),
        slow(case(2, INTERRUPTED, "pp2 vpp2")),
        case(2, INTERRUPTED, "ep2", then="tp2 ep2 etp1"),
        slow(case(4, INTERRUPTED, "ep2", then="pp2 ep2")),
    ],
    ids=str,
)
def test_a_run_resumes_in_its_own_and_in_other_layouts(case: Case, outcome: dict[str, Any]) -> None:
    goes_on(outcome)


@pytest.mark.multirank
@pytest.mark.parametrize(
    "case",
    [
        case(2, INTERRUPTED, "", then="tp2 ep2 etp1"),
        slow(case(2, INTERRUPTED, "pp2", then="ep2")),
        slow(case(2, INTERRUPTED, "ep2", then="tp1")),
    ],
    ids=str,
)
def test_a_run_moves_between_one_and_several_expert_ranks(case: Case, outcome: dict[str, Any]) -> None:
    """Since Megatron-Core 0.15; it has one optimizer with ep = 1, and two with more."""
    goes_on(outcome)


def goes_on(outcome: dict[str, Any]) -> None:
    assert largest_difference(outcome["loaded_weights"], outcome["saved_weights"]) == 0
    for resumed, straight in zip(outcome["resumed"], outcome["straight"][2:], strict=True):
        assert resumed == pytest.approx(straight, rel=1e-5)
    # a step moves a weight by about 1e-3
    assert largest_difference(outcome["resumed_weights"], outcome["straight_weights"]) <= 1e-6
    assert outcome["folder"] == ["step_0000002"]


@pytest.fixture
def policy(models: dict[str, Path], one_rank: None) -> Any:
    from tiny_world import config, policy_of

    return policy_of(config(models["base"]))


def test_old_checkpoints_go_and_an_unfinished_one_is_never_taken(policy: Any, tmp_path: Path) -> None:
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


def test_what_no_save_wrote_is_never_removed(policy: Any, tmp_path: Path) -> None:
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


def test_saving_a_step_again_replaces_it(policy: Any, tmp_path: Path) -> None:
    save(tmp_path, 1, policy, {"round": 1}, keep=2)
    path = save(tmp_path, 1, policy, {"round": 2}, keep=2)
    assert checkpoint.load(path, policy)["round"] == 2


def _halve(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize(
    ("names", "spoil"),
    [
        ("*", Path.unlink),
        ("common.pt", Path.unlink),
        ("common.pt", _halve),
        ("*.distcp", _halve),
        ("*.distcp", Path.unlink),
        (".metadata", Path.unlink),
    ],
)
def test_a_damaged_checkpoint_is_refused_by_name(
    names: str, spoil: Callable[[Path], None], policy: Any, tmp_path: Path
) -> None:
    path = save(tmp_path, 1, policy, {}, keep=2)
    files = list(path.glob(names)) or list(path.glob("*.distcp"))[:1]  # common.pt is among the tensors from 0.19 on
    assert files
    for file in files:
        spoil(file)
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
    error: BaseException, policy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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


def test_a_checkpoint_of_another_model_is_refused(policy: Any, models: dict[str, Path], tmp_path: Path) -> None:
    from tiny_world import config, policy_of

    path = save(tmp_path, 1, policy, {}, keep=2)
    other = policy_of(config(models["vocab31"]))
    with pytest.raises(CheckpointError, match="another model: vocab_size is 32, expected 31"):
        checkpoint.load(path, other)


def test_random_numbers_continue(policy: Any, tmp_path: Path) -> None:
    path = save(tmp_path, 1, policy, {}, keep=2)
    drawn = [torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()]
    torch.manual_seed(1)
    checkpoint.load(path, policy)
    assert [torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()] == drawn
