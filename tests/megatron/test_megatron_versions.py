"""The same tests of replay, and the example, on every release of Megatron-Core that megarl runs on.

A release is installed beside the environment, without its dependencies; a copy of it is patched and comes first on the
path of a pytest of its own. What is run covers replay's order, group-limited top-k, sigmoid with bias, recomputation,
balancing losses, refusals and two ranks. ``tools/version_matrix.py`` runs more, and writes docs/version_matrix.md.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from megatron_releases import installed
from release_checks import OLDER, RELEASES, TOOL, prepared, restored, run, run_example, run_tests

pytestmark = [pytest.mark.multirank, pytest.mark.slow]

DOCTOR = "import sys; from megarl.doctor import doctor; sys.exit(doctor())"
UNPATCHED = """
import importlib.util, itertools, sys, torch
from megatron.core.transformer.moe import moe_utils

spec = importlib.util.spec_from_file_location("unpatched", sys.argv[1])
unpatched = importlib.util.module_from_spec(spec)
spec.loader.exec_module(unpatched)
name = next(n for n in ("topk_softmax_with_capacity", "topk_routing_with_score_function") if hasattr(moe_utils, n))
scorings = [dict(), dict(use_pre_softmax=True), dict(score_function="sigmoid"), dict(scaling_factor=2.5),
            dict(score_function="sigmoid", expert_bias=torch.linspace(0, 1, 8))]
groupings = [dict(), dict(num_groups=4, group_topk=2)]
same = 0
for scoring, grouping, dtype in itertools.product(scorings, groupings, (torch.float32, torch.bfloat16)):
    found = []
    for module in (unpatched, moe_utils):
        logits = torch.randn(64, 8, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
        outputs = getattr(module, name)(logits, 2, **scoring, **grouping)
        (outputs[0] * torch.arange(8)).sum().backward()
        found.append([*outputs, logits.grad])
    same += all(map(torch.equal, *found))
print("same:", same)
"""


@pytest.fixture(scope="module", params=RELEASES)
def release(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The name of a release, and the folder with its patched copy."""
    return request.param, prepared(request.param, tmp_path_factory.mktemp("release") / "packages")


def test_replay_works_unchanged_with_another_release(release: tuple[str, Path]) -> None:
    version, folder = release
    told = run(["-W", "ignore", "-c", "import megatron.core as m; print(m.__version__, m.__file__)"], folder)
    assert told.output.split()[-2] == version
    assert Path(told.output.split()[-1]).is_relative_to(folder)
    done = run_tests(folder)
    assert done.status == 0, done.output[-3000:]
    assert done.passed > 70
    assert " skipped" not in done.output


def test_without_an_object_in_the_hook_routing_is_that_of_the_unpatched_release(release: tuple[str, Path]) -> None:
    version, folder = release
    plain = installed(version) / "megatron/core/transformer/moe/moe_utils.py"
    assert (plain.read_bytes() == (folder / plain.relative_to(installed(version))).read_bytes()) == (
        version == "0.16.0"
    )
    done = run(["-W", "ignore", "-c", UNPATCHED, str(plain)], folder)
    assert done.output.splitlines()[-1] == "same: 20", done.output[-2000:]


def test_the_example_replays_on_two_ranks_with_recomputation(release: tuple[str, Path]) -> None:
    done = run_example(release[1], "--replay", "r3", "--tp", "2", "--recompute")
    assert done.status == 0, done.output[-3000:]
    assert "r3 held" in done.output


def test_doctor_accepts_the_patched_release_and_names_the_tool_where_it_is_not(
    release: tuple[str, Path],
) -> None:
    version, folder = release
    patched = run(["-W", "ignore", "-c", DOCTOR], folder)
    assert patched.status == 0, patched.output
    assert version in patched.output
    if version not in OLDER:
        return
    run([str(TOOL), "revert", str(folder)], check=True)
    try:
        missing = run(["-W", "ignore", "-c", DOCTOR], folder)
        assert missing.status == 1
        assert "Missing: replay hook." in missing.output
        assert "tools/patch.py" in missing.output
    finally:
        run([str(TOOL), "apply", str(folder)], check=True)


def test_taken_out_again_the_patch_leaves_no_trace(release: tuple[str, Path]) -> None:
    assert restored(*release) == []
