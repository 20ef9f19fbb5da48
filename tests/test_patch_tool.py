"""The patches of Megatron-Core and the tool that applies them, on the real files of each release."""

from __future__ import annotations

import ast
import errno
import importlib.metadata
import importlib.util
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron_releases import installed

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))

import hunks
import patch as tool

TOOL = Path(tool.__file__)
VERSIONS = tool.versions()
MOE = Path("megatron/core/transformer/moe")
FILES = (MOE / "moe_utils.py", MOE / "router.py")


@pytest.fixture
def tree(tmp_path: Path) -> Callable[..., Path]:
    """Makes a source tree: the files of a release that a patch can touch, and the one that names the version."""

    def make(version: str, folder: Path = tmp_path / "tree") -> Path:
        for name in (*FILES, Path("megatron/core/package_info.py")):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(installed(version) / name, folder / name)
        return folder

    return make


def run(command: str, *words: str | Path, **settings: object) -> subprocess.CompletedProcess[str]:
    """The tool in a Python that has the standard library alone."""
    line = [sys.executable, "-I", "-S", str(TOOL), command, *map(str, words)]
    return subprocess.run(line, capture_output=True, text=True, timeout=60, check=False, **settings)  # type: ignore[call-overload]


def succeed(command: str, *words: str | Path, **settings: object) -> str:
    done = run(command, *words, **settings)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return done.stdout


def refuse(command: str, *words: str | Path, **settings: object) -> str:
    """What the tool says on refusing: one line, and exit code 2."""
    done = run(command, *words, **settings)
    assert done.returncode == 2, done.stdout + done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("patch: ")
    return done.stderr


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, git's own left out."""
    files = (path for path in folder.rglob("*") if path.is_file() and ".git" not in path.relative_to(folder).parts)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_bytes().decode()
    assert text.count(old) == 1, old
    file.write_bytes(text.replace(old, new).encode())


def git(folder: Path, *words: str, **settings: object) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "core.autocrlf=false"]
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    line = ["git", *identity, *words]
    done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, check=True, **settings)  # type: ignore[call-overload]
    return done.stdout


def commit_all(folder: Path) -> None:
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "the release")


# The patches themselves


def test_every_release_that_the_tool_supports_has_a_patch() -> None:
    assert VERSIONS == ["0.12.3", "0.13.1", "0.14.0", "0.15.3", "0.16.1"]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_patch_says_what_it_is_for(version: str) -> None:
    header, found, _ = (tool.PATCHES / f"{version}.patch").read_text().partition("\ndiff --git ")
    assert found
    assert header.startswith(f"Megatron-Core {version}: ")
    for field in ("Reason", "Upstream", "Drop when"):
        assert re.search(rf"^{field}: \S", header, re.MULTILINE), field
    assert max(map(len, header.splitlines())) <= 120


@pytest.mark.parametrize("version", VERSIONS)
def test_each_hunk_has_one_place_and_the_result_is_python(version: str) -> None:
    patches = hunks.read_patch(tool.PATCHES / f"{version}.patch")
    written = (tool.PATCHES / f"{version}.patch").read_text()
    assert len(patches) == written.count("\ndiff --git ")
    assert sum(len(patch.hunks) for patch in patches) == len(re.findall(r"^@@ ", written, re.MULTILINE))
    for patch in patches:
        file = installed(version) / patch.path
        assert git(installed(version), "hash-object", "--no-filters", str(file)).strip() == patch.blob
        text = file.read_text()
        patched, notes = hunks.fit(text, patch)
        assert notes == []
        ast.parse(patched)
        for hunk in patch.hunks:
            assert len(hunks.places(text.split("\n"), hunk.old)) == 1
            assert len(hunks.places(patched.split("\n"), hunk.new)) == 1
        assert hunks.fit(patched, patch.reverse()) == (text, [])


@pytest.mark.parametrize("version", VERSIONS)
def test_the_tool_writes_what_git_apply_writes(version: str, tree: Callable[..., Path], tmp_path: Path) -> None:
    ours, gits = tree(version), tree(version, tmp_path / "git")
    succeed("apply", ours)
    git(gits, "apply", str(tool.PATCHES / f"{version}.patch"))
    assert contents(ours) == contents(gits) != contents(tree(version, tmp_path / "plain"))


@pytest.mark.parametrize("version", VERSIONS)
def test_every_router_has_the_attribute_and_passes_it_on(version: str, tree: Callable[..., Path]) -> None:
    root = tree(version)
    succeed("apply", root)
    parsed = ast.parse((root / FILES[1]).read_text())
    routers = [node for node in ast.walk(parsed) if isinstance(node, ast.ClassDef) and node.name == "TopKRouter"]
    (start,) = [node for node in routers[0].body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    assert "self.router_replay = None" in map(ast.unparse, start.body)
    names = ("topk_softmax_with_capacity", "topk_routing_with_score_function")
    calls = [node for node in ast.walk(parsed) if isinstance(node, ast.Call) and ast.unparse(node.func) in names]
    assert len(calls) == (3 if version < "0.14" else 1)
    for call in calls:
        assert "router_replay=self.router_replay" in map(ast.unparse, call.keywords)


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
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "asked\n", done.stderr[-2000:]


# The tool, where all is as it should be


@pytest.mark.parametrize("version", VERSIONS)
def test_apply_twice_and_revert_leaves_no_trace(version: str, tree: Callable[..., Path], tmp_path: Path) -> None:
    root = tree(version)
    (root / FILES[0]).chmod(0o640)
    os.utime(root / FILES[0], (1e9, 1e9))
    os.link(root / FILES[0], tmp_path / "cached")
    if os.geteuid() == 0:
        os.chown(root / FILES[0], 65534, 65534)
    user = (root / FILES[0]).stat().st_uid
    before = contents(root)
    touched = [str(name) for name in FILES if f"a/{name} " in (tool.PATCHES / f"{version}.patch").read_text()]

    def said(word: str) -> str:
        lines = [f"megatron-core {version} in {root}: {version}.patch", *(f"  {name}: {word}" for name in touched)]
        return "\n".join(lines) + "\n"

    assert succeed("status", root) == said("not in")
    assert succeed("check", root) == said("applies")
    assert succeed("revert", root) == said("not in")
    assert contents(root) == before
    assert succeed("apply", root) == said("patched")
    patched = contents(root)
    assert (root / FILES[0]).stat().st_uid == user
    assert (tmp_path / "cached").read_bytes() == before[str(FILES[0])]  # as in a package cache that links its files
    assert (root / FILES[0]).stat().st_mtime > 1e9  # or Python would go on with what it has compiled
    assert {name for name in before if patched[name] != before[name]} == set(touched)
    assert succeed("apply", root) == said("already in")
    assert succeed("check", root) == said("already in")
    assert succeed("status", root) == said("in")
    assert contents(root) == patched
    assert succeed("revert", root) == said("restored")
    assert contents(root) == before
    assert (root / FILES[0]).stat().st_mode & 0o777 == 0o640


def test_a_dry_run_prints_the_change_and_makes_none(tree: Callable[..., Path], tmp_path: Path) -> None:
    root, other = tree("0.14.0"), tree("0.14.0", tmp_path / "other")
    for folder in (root, other):
        (folder / FILES[1]).write_text("# ours\n" * 3 + (folder / FILES[1]).read_text())
    before, stamps = contents(root), [(root / name).stat().st_mtime_ns for name in FILES]
    printed = succeed("apply", root, "--dry-run")
    assert contents(root) == before
    assert [(root / name).stat().st_mtime_ns for name in FILES] == stamps
    git(other, "apply", "-", input=printed)
    succeed("apply", root)
    assert contents(root) == contents(other)
    git(other, "apply", "-", input=succeed("revert", root, "--dry-run"))
    assert contents(other) == before
    assert succeed("apply", root, "--dry-run") == ""
    assert "--dry-run goes with apply or revert" in run("check", root, "--dry-run").stderr


def test_without_a_target_it_is_the_megatron_core_of_this_python_and_that_is_not_imported() -> None:
    code = (
        f"import runpy, sys; sys.argv = ['patch.py', 'status']; sys.path.insert(0, {str(TOOL.parent)!r})\n"
        f"try: runpy.run_path({str(TOOL)!r}, run_name='__main__')\n"
        "finally: print([name for name in ('torch', 'megatron', 'megatron.core') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    spec, here = importlib.util.find_spec("megatron.core"), importlib.metadata.version("megatron-core")
    assert spec is not None
    assert spec.origin is not None
    lines = done.stdout.splitlines()
    assert lines[0] == f"megatron-core {here} in {Path(spec.origin).resolve().parents[2]}: {here}.patch"
    assert lines[-1] == "[]"


@pytest.mark.parametrize("elsewhere", [False, True])
def test_an_environment_that_a_foreign_repository_ignores(
    elsewhere: bool, tree: Callable[..., Path], tmp_path: Path
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / ".gitignore").write_text(".venv\n")
    commit_all(project)
    root = tree("0.15.3", project / ".venv" / "lib" / "site-packages")
    before = contents(root)
    settings = {"cwd": tmp_path if elsewhere else project}
    if elsewhere:
        settings["env"] = {**os.environ, "GIT_DIR": str(project / ".git"), "GIT_WORK_TREE": str(project)}
    assert "patched" in succeed("apply", root, **settings)
    assert b"router_replay" in (root / FILES[1]).read_bytes()
    assert "patched" not in succeed("apply", root, **settings)
    succeed("revert", root, **settings)
    assert contents(root) == before
    assert git(project, "status", "--porcelain") == ""


@pytest.mark.parametrize("version", ["0.12.3", "0.15.3"])
def test_windows_line_ends_stay(version: str, tree: Callable[..., Path], tmp_path: Path) -> None:
    root, plain = tree(version), tree(version, tmp_path / "plain")
    for name in FILES:
        (root / name).write_bytes((root / name).read_bytes().replace(b"\n", b"\r\n"))
    before = contents(root)
    succeed("apply", root)
    succeed("apply", plain)
    for name in FILES:
        assert (root / name).read_bytes() == (plain / name).read_bytes().replace(b"\n", b"\r\n")
    succeed("revert", root)
    assert contents(root) == before


# Forks that have drifted


def test_lines_above_move_the_hunks(tree: Callable[..., Path]) -> None:
    root = tree("0.15.3")
    file = root / FILES[1]
    edit(file, "class TopKRouter(Router):", "# ours\n" * 12 + "class TopKRouter(Router):")
    edit(
        file,
        "        # Calculate probs and routing_map for",
        "        # ours\n        # Calculate probs and routing_map for",
    )
    before = contents(root)
    told = succeed("apply", root).splitlines()
    assert "hunk 1 at line 166, 12 lines later than in the release" in told[3]
    assert "hunk 2 at line 511, 13 lines later than in the release" in told[4]
    lines = file.read_text().splitlines()
    assert lines.index("                router_replay=self.router_replay,") + 1 == 511 + 3
    succeed("revert", root)
    assert contents(root) == before


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
def test_an_edit_beside_the_change_is_refused_without_git_and_merged_with_it(
    line_end: bytes, tree: Callable[..., Path]
) -> None:
    root = tree("0.15.3")
    commit_all(root)
    shutil.move(root / ".git", root.parent / "aside")
    old = "        self.routing_type = self.config.moe_router_load_balancing_type\n"
    edit(root / FILES[1], old, old.replace("self.config", "config"))
    line = 1 + (root / FILES[1]).read_text().splitlines().index(old.replace("self.config", "config").rstrip())
    (root / FILES[1]).write_bytes((root / FILES[1]).read_bytes().replace(b"\n", line_end))
    before = contents(root)
    for command in ("check", "apply"):
        told = refuse(command, root)
        assert f"{FILES[1]}:{line}: hunk 1 expects {old.rstrip()!r}, found " in told
        assert "no 3-way merge, for git has no object 068d680c798f here" in told
        assert contents(root) == before
    shutil.move(root.parent / "aside", root / ".git")
    git(root, "commit", "-qam", "the fork")
    environment = {**os.environ, "GIT_DIR": str(root.parent / "none")}  # as in a hook of another repository
    assert "merged 3-way" in succeed("check", root, env=environment)
    assert contents(root) == before
    assert "merged 3-way" in succeed("apply", root)
    patched = contents(root)
    assert patched[str(FILES[1])].count(b"router_replay=self.router_replay") == 1
    assert patched[str(FILES[0])].count(b"router_replay.get_replay_topk(") == 1
    assert "already in" in succeed("apply", root)
    assert "router.py: in\n" in succeed("status", root)
    assert contents(root) == patched
    succeed("revert", root)
    assert contents(root) == before
    assert git(root, "status", "--porcelain") == ""


@pytest.mark.parametrize("with_git", [False, True])
def test_an_edit_of_the_very_lines_is_refused_and_nothing_is_changed(with_git: bool, tree: Callable[..., Path]) -> None:
    root = tree("0.15.3")
    if with_git:
        commit_all(root)
    edit(root / FILES[0], "    def compute_topk(scores, topk,", "    def own_topk(scores, topk,")
    before = contents(root)
    line = 1 + before[str(FILES[0])].decode().split("\n").index(
        "    def own_topk(scores, topk, num_groups=None, group_topk=None):"
    )
    told = refuse("apply", root)
    assert f"{FILES[0]}:{line}: hunk 4 expects '    def compute_topk(" in told
    assert "found '    def own_topk(" in told
    assert ("a 3-way merge conflicts" if with_git else "no 3-way merge") in told
    assert contents(root) == before
    assert "router.py: not changed" in run("apply", root).stdout
    assert "neither in nor out" in succeed("status", root)


def test_a_fork_that_has_one_of_the_changes_already_is_refused(tree: Callable[..., Path]) -> None:
    root = tree("0.15.3")
    commit_all(root)
    edit(root / FILES[0], "    HAVE_TE = False\n", "    HAVE_TE = False\n    te_general_gemm = None\n")
    before = contents(root)
    told = refuse("apply", root)
    assert "hunk 1 expects '', found '    te_general_gemm = None'" in told
    assert "git can merge, but revert could not undo it; 1 of its 5 hunks are in already" in told
    assert contents(root) == before


def test_the_place_is_found_among_similar_ones_in_a_fork_that_has_moved(tree: Callable[..., Path]) -> None:
    root = tree("0.13.1")
    file = root / FILES[1]
    edit(file, "class TopKRouter(Router):", "# ours\n" * 60 + "class TopKRouter(Router):")
    lines = file.read_text().split("\n")
    calls = [index for index, line in enumerate(lines) if "            scaling_factor=self.config." in line]
    assert len(calls) == 3
    lines[calls[1]] += "  # ours"
    file.write_text("\n".join(lines))
    assert f"{FILES[1]}:{calls[1] + 1}: hunk 3 expects " in refuse("apply", root)


def test_code_that_is_there_twice_is_refused(tree: Callable[..., Path]) -> None:
    root = tree("0.15.3")
    file = root / FILES[1]
    text = file.read_text()
    file.write_text(text + text[text.index("class TopKRouter(Router):") :].replace("TopKRouter", "OwnRouter"))
    before = contents(root)
    assert re.search(r"hunk 1 fits at lines \d+ and \d+, expected one place", refuse("apply", root))
    assert contents(root) == before


def test_revert_refuses_what_was_edited_since(tree: Callable[..., Path]) -> None:
    root = tree("0.13.1")
    succeed("apply", root)
    edit(root / FILES[0], "        if router_replay is None:\n", "        if not router_replay:\n")
    before = contents(root)
    line = 1 + before[str(FILES[0])].decode().split("\n").index("        if not router_replay:")
    expected = f"{FILES[0]}:{line}: hunk 4 expects '        if router_replay is None:', found"
    assert expected in refuse("revert", root)
    assert expected in refuse("apply", root)
    assert contents(root) == before


def test_a_half_applied_patch_is_seen_completed_and_reverted(tree: Callable[..., Path]) -> None:
    root = tree("0.15.3")
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
def test_whatever_was_edited_the_patch_is_whole_or_refused(
    edits: list[tuple[str, int, int]], version: str, which: int
) -> None:
    patches = hunks.read_patch(tool.PATCHES / f"{version}.patch")
    patch = patches[which % len(patches)]
    lines = (installed(version) / patch.path).read_text().split("\n")
    for kind, place, size in edits:
        at = place % (len(lines) + 1)
        if kind == "delete":
            del lines[at : at + size]
        else:
            end = at if kind == "insert" else at + size
            lines[at:end] = lines[:size] if kind == "copy" else ["# ours"] * size
    text = "\n".join(lines)
    try:
        patched, _ = hunks.fit(text, patch)
    except hunks.MisfitError:
        for place in hunks.misfits(text, patch):
            path, line, _ = place.split(":", 2)
            assert path == patch.path
            assert 1 <= int(line) <= len(lines) + 1
        return
    assert hunks.fit(patched, patch.reverse())[0] == text
    changed = [side for hunk in patch.hunks for side in (len(hunk.new) - len(hunk.old),)]
    assert patched.count("\n") - text.count("\n") == sum(changed)
    assert patched.count("router_replay") > text.count("router_replay") or version == "0.16.1"


# Errors on the way


class Interruption:
    """Lets so many renames pass and raises at the next."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, passing: int, error: BaseException) -> None:
        self.real, self.left, self.error = os.replace, passing, error
        monkeypatch.setattr(tool.os, "replace", self)

    def __call__(self, source: Path, target: Path) -> None:
        self.left -= 1
        if self.left == -1:
            raise self.error
        self.real(source, target)


@pytest.mark.parametrize("command", ["apply", "revert"])
@pytest.mark.parametrize("kind", [OSError, KeyboardInterrupt])
def test_an_error_between_the_files_puts_back_the_first(
    command: str, kind: type[BaseException], tree: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tree("0.15.3")
    if command == "revert":
        succeed("apply", root)
    before, stamps = contents(root), [(root / name).stat().st_mtime_ns for name in FILES]
    error = OSError(errno.ENOSPC, "No space left on device", "new", None, "target") if kind is OSError else kind()
    with monkeypatch.context() as patched:
        Interruption(patched, 1, error)
        with pytest.raises(tool.PatchError if kind is OSError else kind) as caught:
            tool.run(command, root, None, False)
    if kind is OSError:
        assert str(caught.value) == "cannot write target: No space left on device; nothing was changed"
    assert contents(root) == before  # no file is left over either
    assert [(root / name).stat().st_mtime_ns for name in FILES] == stamps
    succeed(command, root)


@pytest.mark.parametrize("command", ["apply", "revert"])
def test_when_even_that_fails_the_message_says_how_to_go_on(
    command: str, tree: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tree("0.15.3")
    if command == "revert":
        succeed("apply", root)
    before = contents(root)
    real, calls = os.replace, []

    def failing(source: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) > 1:
            raise OSError(errno.EROFS, "Read-only file system", str(source), None, str(target))
        real(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(tool.os, "replace", failing)
        with pytest.raises(tool.PatchError, match="some files are changed: run the opposite command"):
            tool.run(command, root, None, False)
    assert b"router_replay=self." not in (root / FILES[1]).read_bytes()  # the half that still routes
    assert b"get_replay_topk" in (root / FILES[0]).read_bytes()
    assert contents(root) != before
    succeed({"apply": "revert", "revert": "apply"}[command], root)
    assert contents(root) == before


def test_a_file_that_somebody_saves_meanwhile_is_not_overwritten(tree: Callable[..., Path]) -> None:
    root = tree("0.15.3")
    states = [tool.examine(root, patch, False) for patch in hunks.read_patch(tool.PATCHES / "0.15.3.patch")]
    edit(root / FILES[1], "class TopKRouter(Router):", "# ours\nclass TopKRouter(Router):")
    before = contents(root)
    with pytest.raises(tool.PatchError, match=r"router.py has changed meanwhile; nothing was changed"):
        tool.replace_files(root, states)
    assert contents(root) == before


def test_a_full_disk_changes_nothing(tree: Callable[..., Path]) -> None:
    root = tree("0.15.3")
    succeed("apply", root)
    before = contents(root)
    limit = len(before[str(FILES[1])]) + 1  # of the two, moe_utils.py is larger, and is the second to be reverted
    assert len(before[str(FILES[0])]) > limit
    told = refuse("revert", root, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    assert "File too large; nothing was changed" in told
    assert contents(root) == before


def test_a_folder_that_cannot_be_written(tree: Callable[..., Path]) -> None:
    root = tree("0.15.3")
    before = contents(root)
    folders = [path for path in root.rglob("*") if path.is_dir()]
    # Root may write everywhere, unless it gives that up.
    powerless = ["setpriv", "--bounding-set=-dac_override", "--inh-caps=-all"] if os.geteuid() == 0 else []
    if powerless and subprocess.run([*powerless, "true"], capture_output=True, check=False).returncode:
        pytest.skip("root cannot give up its rights here")
    for folder in folders:
        folder.chmod(0o555)
    line = [*powerless, sys.executable, "-I", "-S", str(TOOL), "apply", str(root)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    for folder in folders:
        folder.chmod(0o755)
    assert done.returncode == 2
    assert re.fullmatch(r"patch: cannot write \S+: Permission denied; nothing was changed\n", done.stderr)
    assert contents(root) == before


# Targets that are none


def test_a_folder_without_megatron_core(tmp_path: Path, tree: Callable[..., Path]) -> None:
    assert "expected the folder that contains megatron/core" in refuse("status", tmp_path)
    assert "expected the folder that contains megatron/core" in refuse("apply", tree("0.15.3") / "megatron" / "core")
    done = run("status")  # an isolated Python has none
    assert done.returncode == 2
    assert "this Python has no megatron-core" in done.stderr


def test_a_version_without_a_patch_names_the_nearest_and_can_be_forced(tree: Callable[..., Path]) -> None:
    root = tree("0.15.3")
    edit(root / "megatron/core/package_info.py", "PATCH = 3", "PATCH = 1")
    before = contents(root)
    for command in ("check", "apply", "revert", "status"):
        told = refuse(command, root)
        assert "no patch for Megatron-Core 0.15.1, expected one of 0.12.3, 0.13.1, 0.14.0, 0.15.3, 0.16.1" in told
        assert "--version 0.15.3 tries the nearest" in told
    assert contents(root) == before
    assert "expected one of" in refuse("check", root, "--version", "0.15")
    assert f"megatron-core 0.15.1 in {root}: 0.15.3.patch" in succeed("apply", root, "--version", "0.15.3")
    succeed("revert", root, "--version", "0.15.3")
    assert contents(root) == before


@pytest.mark.parametrize(("version", "nearest"), [("0.11.0", "0.12.3"), ("0.16.0rc0", "0.16.1"), ("1.0.0", "0.16.1")])
def test_the_nearest_patch(version: str, nearest: str) -> None:
    with pytest.raises(tool.PatchError, match=rf"--version {re.escape(nearest)} tries the nearest"):
        tool.choose(version)


def test_the_patch_of_another_release_is_refused(tree: Callable[..., Path]) -> None:
    root = tree("0.13.1")
    before = contents(root)
    assert "hunk " in refuse("apply", root, "--version", "0.15.3")
    assert contents(root) == before


def test_a_symbolic_link_is_not_written_through(tree: Callable[..., Path], tmp_path: Path) -> None:
    root = tree("0.15.3")
    shutil.move(root / FILES[1], tmp_path / "shared.py")
    (root / FILES[1]).symlink_to(tmp_path / "shared.py")
    before = contents(tmp_path)
    assert "router.py is a symbolic link" in refuse("apply", root)
    (root / FILES[1]).unlink()
    assert "router.py is missing" in refuse("apply", root)
    before.pop(f"tree/{FILES[1]}")
    assert contents(tmp_path) == before
