"""The patch tool on the real files of each release, on forks with edited code; what patches say and do."""

from __future__ import annotations

import errno
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import preloaded
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_releases import installed
from patch_trees import FILES, VERSIONS, contents, edit, git, refuse, run, succeed
from release_checks import NEWER, ReleasePopen

from megarl.ops.patching import patch as tool


@pytest.mark.parametrize("version", VERSIONS)
def test_apply_twice_and_revert_leaves_no_trace(version: str, core_tree: Callable[..., Path], tmp_path: Path) -> None:
    root = core_tree(version)
    (root / FILES[0]).chmod(0o640)
    os.utime(root / FILES[0], (1e9, 1e9))
    os.link(root / FILES[0], tmp_path / "cached")
    if os.geteuid() == 0:
        os.chown(root / FILES[0], 65534, 65534)
    user = (root / FILES[0]).stat().st_uid
    before = contents(root)
    touched = [str(name) for name in FILES if f"a/{name} " in (tool.PATCHES / f"{version}.patch").read_text()]

    def tell(command: str, word: str) -> None:
        lines = [f"megatron-core {version} in {root}: {version}.patch", *(f"  {name}: {word}" for name in touched)]
        assert succeed(command, root).splitlines() == lines

    for command, word in (("status", "not in"), ("check", "applies"), ("revert", "not in")):
        tell(command, word)
    assert contents(root) == before
    tell("apply", "patched")
    patched = contents(root)
    assert (root / FILES[0]).stat().st_uid == user
    assert (tmp_path / "cached").read_bytes() == before[str(FILES[0])]  # as in a package cache that links its files
    assert (root / FILES[0]).stat().st_mtime > 1e9  # or Python would go on with what it has compiled
    assert {name for name in before if patched[name] != before[name]} == set(touched)
    for command, word in (("apply", "already in"), ("check", "already in"), ("status", "in")):
        tell(command, word)
    assert contents(root) == patched
    tell("revert", "restored")
    assert contents(root) == before
    assert (root / FILES[0]).stat().st_mode & 0o777 == 0o640


def test_an_environment_that_a_foreign_repository_ignores(core_tree: Callable[..., Path], tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / ".gitignore").write_text(".venv\n")
    for words in (("init", "-q"), ("add", "-A"), ("commit", "-qm", "ours")):
        git(project, *words)
    root = core_tree("0.15.3", project / ".venv" / "lib" / "site-packages")
    before = contents(root)
    variables = {**os.environ, "GIT_DIR": str(project / ".git"), "GIT_WORK_TREE": str(project)}
    for place in ({"cwd": project}, {"cwd": tmp_path, "env": variables}):
        assert "patched" in succeed("apply", root, **place)
        assert b"router_replay" in (root / FILES[1]).read_bytes()
        succeed("revert", root, **place)
        assert contents(root) == before
    assert git(project, "status", "--porcelain") == ""


def test_windows_line_ends_stay(core_tree: Callable[..., Path], tmp_path: Path) -> None:
    root, plain = core_tree("0.15.3"), core_tree("0.15.3", tmp_path / "plain")
    for name in FILES:
        (root / name).write_bytes((root / name).read_bytes().replace(b"\n", b"\r\n"))
    before = contents(root)
    succeed("apply", root)
    succeed("apply", plain)
    for name in FILES:
        assert (root / name).read_bytes() == (plain / name).read_bytes().replace(b"\n", b"\r\n")
    succeed("revert", root)
    assert contents(root) == before


@pytest.mark.parametrize("command", ["apply", "revert"])
@pytest.mark.parametrize("kind", [OSError, KeyboardInterrupt])
def test_an_error_between_the_files_puts_back_the_first(
    command: str, kind: type[BaseException], core_tree: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = core_tree("0.15.3")
    if command == "revert":
        succeed("apply", root)
    before, stamps = contents(root), [(root / name).stat().st_mtime_ns for name in FILES]
    error = OSError(errno.ENOSPC, "No space left on device", "new", None, "target") if kind is OSError else kind()
    renamed, real = [], os.replace

    def fail_at_second(source: Path, target: Path) -> None:
        renamed.append(target)
        if len(renamed) == 2:
            raise error
        real(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(tool.os, "replace", fail_at_second)
        with pytest.raises(tool.PatchError if kind is OSError else kind) as caught:
            tool.run(command, root, None)
    if kind is OSError:
        assert str(caught.value) == "cannot write target: No space left on device; nothing was changed"
    assert contents(root) == before  # no file is left over either
    assert [(root / name).stat().st_mtime_ns for name in FILES] == stamps
    succeed(command, root)


def test_without_a_target_it_is_the_megatron_core_of_this_python_and_that_is_not_imported() -> None:
    code = (
        "import sys; from megarl import cli; cli.main(['patch', 'status'])\n"
        "print([name for name in ('torch', 'megatron', 'megatron.core') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    spec, here = importlib.util.find_spec("megatron.core"), importlib.metadata.version("megatron-core")
    assert spec is not None
    assert spec.origin is not None
    lines = done.stdout.splitlines()
    patch = f"{here}.patch" if here in VERSIONS else "has the hook and needs no patch"
    assert lines[0] == f"megatron-core {here} in {Path(spec.origin).resolve().parents[2]}: {patch}"
    assert lines[-1] == "[]"


def test_a_file_that_somebody_saves_meanwhile_is_not_overwritten(core_tree: Callable[..., Path]) -> None:
    root = core_tree("0.15.3")
    states = tool.examine(root, "0.15.3")
    edit(root / FILES[1], "class TopKRouter(Router):", "# ours\nclass TopKRouter(Router):")
    before = contents(root)
    with pytest.raises(tool.PatchError, match=r"router.py has changed meanwhile; nothing was changed"):
        tool.replace_files(root, states)
    assert contents(root) == before


def rename(root: Path, version: str) -> None:
    """Make the tree say that it is another version, for instance 0.16.0rc0."""
    info = root / "megatron/core/package_info.py"
    major, minor, micro, pre = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)(\w*)", version).groups()  # type: ignore[union-attr]
    for name, value in {"MAJOR": major, "MINOR": minor, "PATCH": micro, "PRE_RELEASE": f"'{pre}'"}.items():
        info.write_text(re.sub(rf"^{name} = .*$", f"{name} = {value}", info.read_text(), flags=re.MULTILINE))


@pytest.mark.parametrize(
    ("source", "version", "patch"),
    [
        ("0.12.3", "0.12.0", "0.12.3"),
        ("0.14.0", "0.15.0rc0", "0.15.3"),
        ("0.15.3", "0.16.0rc0", "0.15.3"),  # mainline before the hook: 0.16.1.patch is nearer, fits, and adds none
        ("0.16.1", "0.16.0rc0", "0.16.1"),  # mainline after it
        ("0.16.1", "0.17.0", "0.16.1"),
    ],
)
def test_another_version_gets_the_nearest_patch_that_fits_and_leaves_the_hook(
    source: str, version: str, patch: str, core_tree: Callable[..., Path]
) -> None:
    root = core_tree(source)
    rename(root, version)
    before = contents(root)
    said = f"megatron-core {version} in {root}: {patch}.patch"
    for command, word in (("status", "not in"), ("check", "applies"), ("revert", "not in")):
        told = succeed(command, root)
        assert said in told
        assert f"moe_utils.py: {word}\n" in told
    assert contents(root) == before
    assert "moe_utils.py: patched" in succeed("apply", root)
    assert tool.has_hook(root)
    for command, word in (("apply", "already in"), ("status", "in"), ("revert", "restored")):
        told = succeed(command, root)
        assert said in told
        assert f"moe_utils.py: {word}\n" in told
    assert contents(root) == before


@pytest.mark.parametrize("version", ["0.16.0rc0", "0.16.1"])
def test_a_guard_without_a_hook_is_refused(version: str, core_tree: Callable[..., Path]) -> None:
    """As in mainline between 0.15 and 0.16: the guard of 0.16.1 fits, but routers pass nothing on."""
    root = core_tree("0.16.1")
    edit(root / FILES[0], "return router_replay.get_replay_topk(", "return _compute_topk(")
    edit(root / FILES[1], "                router_replay=self.router_replay,\n", "")
    rename(root, version)
    before = contents(root)
    fits = f"0.16.1.patch fits Megatron-Core {version} in {root}, but leaves routers that do not pass on"
    assert fits in refuse("apply", root, "--version", "0.16.1")
    for command in ("check", "apply"):
        told = refuse(command, root)
        if version == "0.16.1":
            assert fits in told
        else:
            assert f"no patch fits Megatron-Core 0.16.0rc0 in {root}, which has no hook (router_replay)" in told
            assert re.search(r"0\.15\.3\.patch: \S+moe_utils\.py:\d+: the lines that 0\.15\.3\.patch expects", told)
        assert "nothing was changed" in told
    assert contents(root) == before


@pytest.mark.parametrize("version", ["0.16.0", *NEWER])
def test_a_tree_that_has_the_hook_and_that_nothing_fits_needs_nothing(
    version: str, core_tree: Callable[..., Path]
) -> None:
    root = core_tree(version)
    if version == "0.16.0":
        rename(root, "0.18.0")
        edit(root / FILES[0], "    HAVE_TE = False\n", "    HAVE_TE = None\n")
    before = contents(root)
    for command in ("status", "check", "apply", "revert"):
        assert succeed(command, root).endswith(f" in {root}: has the hook and needs no patch\n")
    assert contents(root) == before
    edit(root / FILES[0], "return router_replay.get_replay_topk(", "return _compute_topk(")
    assert "has no hook (router_replay)" in refuse("apply", root)


def test_a_choice_of_experts_that_does_not_ask_the_hook_is_seen(core_tree: Callable[..., Path]) -> None:
    root = core_tree("0.15.3")
    with (root / FILES[1]).open("a") as file:
        file.write("\n\ndef ours(logits):\n    return topk_routing_with_score_function(logits, 2)\n")
    before = contents(root)
    assert "leaves routers that do not pass on a hook (router_replay)" in refuse("apply", root)
    assert contents(root) == before


def test_a_symbolic_link_is_not_written_through(core_tree: Callable[..., Path], tmp_path: Path) -> None:
    root = core_tree("0.15.3")
    shutil.move(root / FILES[1], tmp_path / "shared.py")
    (root / FILES[1]).symlink_to(tmp_path / "shared.py")
    before = contents(tmp_path)
    assert "router.py is a symbolic link" in refuse("apply", root)
    (root / FILES[1]).unlink()
    assert "router.py is missing" in refuse("apply", root)
    before.pop(f"tree/{FILES[1]}")
    assert contents(tmp_path) == before


def test_lines_above_move_the_hunks(core_tree: Callable[..., Path]) -> None:
    root = core_tree("0.15.3")
    file = root / FILES[1]
    edit(file, "class TopKRouter(Router):", "# ours\n" * 12 + "class TopKRouter(Router):")
    edit(
        file,
        "        # Calculate probs and routing_map for",
        "        # ours\n        # Calculate probs and routing_map for",
    )
    before = contents(root)
    told = succeed("apply", root).splitlines()
    assert "hunk 1 at line 166 (offset 12 lines)" in told[3]
    assert "hunk 2 at line 511 (offset 13 lines)" in told[4]
    lines = file.read_text().splitlines()
    assert lines.index("                router_replay=self.router_replay,") + 1 == 511 + 3
    succeed("revert", root)
    assert contents(root) == before


def test_an_edit_beside_the_change_is_refused(core_tree: Callable[..., Path], tmp_path: Path) -> None:
    root = core_tree("0.15.3")
    old = "        self.routing_type = self.config.moe_router_load_balancing_type\n"
    edit(root / FILES[1], old, old.replace("self.config", "config"))
    before = contents(root)
    for command in ("check", "apply"):
        assert f"{FILES[1]}:154: the lines that 0.15.3.patch expects differ" in refuse(command, root)
        assert contents(root) == before
    assert "moe_utils.py: not changed" in run("apply", root).stdout
    assert "neither in nor out" in succeed("status", root)
    assert "expected the folder that contains megatron/core" in refuse("status", tmp_path / "nothing")
    assert "no patch for Megatron-Core 0.15, expected one of" in refuse("check", root, "--version", "0.15")


def test_a_half_applied_patch_is_seen_completed_and_reverted(core_tree: Callable[..., Path]) -> None:
    root = core_tree("0.15.3")
    before = contents(root)
    succeed("apply", root)
    patched = contents(root)
    for command, whole in (("apply", patched), ("revert", before)):
        (root / FILES[0]).write_bytes(patched[str(FILES[0])])
        (root / FILES[1]).write_bytes(before[str(FILES[1])])
        told = succeed("status", root)
        assert "moe_utils.py: in\n" in told
        assert "router.py: not in\n" in told
        succeed(command, root)
        assert contents(root) == whole


@given(
    st.lists(
        st.tuples(st.sampled_from(["insert", "delete", "change", "copy"]), st.integers(0, 900), st.integers(1, 9)),
        max_size=6,
    ),
    st.sampled_from(VERSIONS),
    st.integers(0, 1),
)
@settings(max_examples=30)
def test_whatever_was_edited_the_patch_is_whole_or_refused(
    edits: list[tuple[str, int, int]], version: str, which: int
) -> None:
    name = FILES[which if version != "0.16.1" else 0]
    lines = (installed(version) / name).read_text().split("\n")
    for kind, place, size in edits:
        at = place % (len(lines) + 1)
        if kind == "delete":
            del lines[at : at + size]
        else:
            end = at if kind == "insert" else at + size
            lines[at:end] = lines[:size] if kind == "copy" else ["# ours"] * size
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for file in FILES:
            (root / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(installed(version) / file, root / file)
        (root / name).write_text("\n".join(lines))
        state = next(state for state in tool.examine(root, version) if state.name == str(name))
        if state.state == "unfit":
            assert state.result == state.current
            return
        assert state.state == "out"
        rows = changes(version, name).partition("\n@@")[2].splitlines()
        added, removed = ([row[1:] for row in rows if row.startswith(sign)] for sign in "+-")
        after, before = state.result.decode().split("\n"), state.current.decode().split("\n")
        assert Counter(after) == Counter(before) + Counter(added) - Counter(removed)
        (root / name).write_bytes(state.result)
        reverted = next(state for state in tool.examine(root, version) if state.name == str(name))
        assert (reverted.state, reverted.result) == ("in", state.current)


def changes(version: str, name: Path) -> str:
    """The hunks of a file in the patch of a release."""
    text = (tool.PATCHES / f"{version}.patch").read_text()
    return next(part for part in text.split("\ndiff --git ")[1:] if part.startswith(f"a/{name} "))


@pytest.mark.parametrize("version", VERSIONS)
def test_each_hunk_has_one_place_and_the_result_is_python(version: str) -> None:
    assert tool.list_versions() == VERSIONS
    text = (tool.PATCHES / f"{version}.patch").read_text()
    for section in text.split("\ndiff --git ")[1:]:
        path, blob = re.findall(r"^a/(\S+) b/.*\nindex (\w{40})", section)[0]
        file = installed(version) / path
        assert git(installed(version), "hash-object", "--no-filters", str(file)).strip() == blob
        for body in re.split(r"^@@ .*\n", section, flags=re.MULTILINE)[1:]:
            expected = "".join(row[1:] or "\n" for row in body.splitlines(keepends=True) if row[0] != "+")
            assert file.read_text().count(expected) == 1


ASKS = """
import sys, types, torch
from megatron.core.transformer.moe import moe_utils

old = hasattr(moe_utils, "topk_softmax_with_capacity")
route = moe_utils.topk_softmax_with_capacity if old else moe_utils.topk_routing_with_score_function
torch.manual_seed(0)
logits = torch.randn(5, 8)
wanted = torch.tensor([[7, 0], [1, 2], [3, 4], [6, 5], [0, 1]])
seen = []

class Hook:
    def get_replay_topk(self, scores, topk, num_groups, group_topk, default_compute_topk):
        own, indices = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        assert torch.equal(own, scores.gather(1, indices)) and not torch.equal(indices, wanted)
        seen.append((num_groups, group_topk))
        return scores.gather(1, wanted), wanted

bias = torch.linspace(0, 3, 8)
cases = [dict(), dict(use_pre_softmax=True), dict(score_function="sigmoid"),
         dict(score_function="sigmoid", expert_bias=bias), dict(scaling_factor=2.5)]
for groups in (dict(), dict(num_groups=4, group_topk=2)):
    for case in cases:
        plain = route(logits, 2, **case, **groups)
        assert all(map(torch.equal, plain, route(logits, 2, router_replay=None, **case, **groups)))
        probs, chosen = route(logits, 2, router_replay=Hook(), **case, **groups)[:2]
        assert torch.equal(chosen.nonzero()[:, 1].view(5, 2), wanted.sort(1).values)
        assert seen.pop() == (groups.get("num_groups"), groups.get("group_topk")) and not seen
        scores = logits.softmax(-1) if "use_pre_softmax" in case else logits.gather(1, wanted).softmax(-1)
        if "use_pre_softmax" in case:
            scores = scores.gather(1, wanted)
        if "score_function" in case:
            scores = logits.sigmoid().gather(1, wanted)
            scores = scores / scores.sum(1, keepdim=True)
        torch.testing.assert_close(probs.gather(1, wanted), scores * case.get("scaling_factor", 1))
assert moe_utils.HAVE_TE or old and sys.argv[1] == "0.12.3" or moe_utils.te_general_gemm is None
if not old:
    moe_utils.HAVE_TE, moe_utils.fused_topk_with_score_function = True, lambda **named: "fused"
    assert route(logits, 2, fused=True) == "fused"
    try:
        route(logits, 2, fused=True, router_replay=Hook())
    except ValueError as error:
        assert "moe_router_fusion" in str(error) and not seen
    else:
        raise AssertionError("the fused router ignores the hook")
print("asked")
"""


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_a_patched_release_asks_the_hook_in_every_way_of_scoring(version: str, tmp_path: Path) -> None:
    shutil.copytree(
        installed(version) / "megatron", tmp_path / "megatron", ignore=shutil.ignore_patterns("__pycache__")
    )
    line = [sys.executable, "-W", "ignore", "-c", ASKS, version]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    succeed("apply", tmp_path)
    done = preloaded.run(line, start=ReleasePopen, env=environment, timeout=600)
    assert done.stdout == "asked\n", done.stderr[-2000:]
