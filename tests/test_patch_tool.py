"""The patch tool on the real files of each release: what it writes, errors on the way, targets that are none."""

from __future__ import annotations

import errno
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from patch_trees import FILES, VERSIONS, commit_all, contents, edit, git, refuse, succeed
from release_checks import NEWER

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


@pytest.mark.parametrize("elsewhere", [False, True])
def test_an_environment_that_a_foreign_repository_ignores(
    elsewhere: bool, core_tree: Callable[..., Path], tmp_path: Path
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / ".gitignore").write_text(".venv\n")
    commit_all(project)
    root = core_tree("0.15.3", project / ".venv" / "lib" / "site-packages")
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
def test_windows_line_ends_stay(version: str, core_tree: Callable[..., Path], tmp_path: Path) -> None:
    root, plain = core_tree(version), core_tree(version, tmp_path / "plain")
    for name in FILES:
        (root / name).write_bytes((root / name).read_bytes().replace(b"\n", b"\r\n"))
    before = contents(root)
    succeed("apply", root)
    succeed("apply", plain)
    for name in FILES:
        assert (root / name).read_bytes() == (plain / name).read_bytes().replace(b"\n", b"\r\n")
    succeed("revert", root)
    assert contents(root) == before


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
    command: str, kind: type[BaseException], core_tree: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = core_tree("0.15.3")
    if command == "revert":
        succeed("apply", root)
    before, stamps = contents(root), [(root / name).stat().st_mtime_ns for name in FILES]
    error = OSError(errno.ENOSPC, "No space left on device", "new", None, "target") if kind is OSError else kind()
    with monkeypatch.context() as patched:
        Interruption(patched, 1, error)
        with pytest.raises(tool.PatchError if kind is OSError else kind) as caught:
            tool.run(command, root, None)
    if kind is OSError:
        assert str(caught.value) == "cannot write target: No space left on device; nothing was changed"
    assert contents(root) == before  # no file is left over either
    assert [(root / name).stat().st_mtime_ns for name in FILES] == stamps
    succeed(command, root)


def test_a_file_that_somebody_saves_meanwhile_is_not_overwritten(core_tree: Callable[..., Path]) -> None:
    root = core_tree("0.15.3")
    states = tool.examine(root, "0.15.3")
    edit(root / FILES[1], "class TopKRouter(Router):", "# ours\nclass TopKRouter(Router):")
    before = contents(root)
    with pytest.raises(tool.PatchError, match=r"router.py has changed meanwhile; nothing was changed"):
        tool.replace_files(root, states)
    assert contents(root) == before


def test_a_folder_without_megatron_core(tmp_path: Path, core_tree: Callable[..., Path]) -> None:
    assert "expected the folder that contains megatron/core" in refuse("status", tmp_path)
    assert "expected the folder that contains megatron/core" in refuse(
        "apply", core_tree("0.15.3") / "megatron" / "core"
    )


def rename(root: Path, version: str) -> None:
    """Make the tree say that it is another version, for instance 0.16.0rc0."""
    info = root / "megatron/core/package_info.py"
    major, minor, micro, pre = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)(\w*)", version).groups()  # type: ignore[union-attr]
    for name, value in {"MAJOR": major, "MINOR": minor, "PATCH": micro, "PRE_RELEASE": f"'{pre}'"}.items():
        info.write_text(re.sub(rf"^{name} = .*$", f"{name} = {value}", info.read_text(), flags=re.MULTILINE))


def remove_hook(root: Path) -> None:
    """As in mainline between 0.15 and 0.16: the guard of 0.16.1 fits, but routers pass nothing on."""
    edit(root / FILES[0], "return router_replay.get_replay_topk(", "return _compute_topk(")
    edit(root / FILES[1], "                router_replay=self.router_replay,\n", "")


@pytest.mark.parametrize(
    ("source", "version", "patch"),
    [
        ("0.12.3", "0.12.0", "0.12.3"),
        ("0.13.1", "0.14.0rc5", "0.13.1"),
        ("0.14.0", "0.15.0rc0", "0.15.3"),
        ("0.15.3", "0.15.1", "0.15.3"),
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
@pytest.mark.parametrize("words", [(), ("--version", "0.16.1")])
def test_a_guard_without_a_hook_is_refused(
    version: str, words: tuple[str, ...], core_tree: Callable[..., Path]
) -> None:
    root = core_tree("0.16.1")
    remove_hook(root)
    rename(root, version)
    before = contents(root)
    for command in ("check", "apply"):
        told = refuse(command, root, *words)
        if words or version == "0.16.1":
            assert (
                f"0.16.1.patch fits Megatron-Core {version} in {root}, but leaves routers that do not pass on" in told
            )
        else:
            assert f"no patch fits Megatron-Core 0.16.0rc0 in {root}, which has no hook (router_replay)" in told
            assert re.search(r"0\.15\.3\.patch: \S+moe_utils\.py:\d+: the lines that 0\.15\.3\.patch expects", told)
        assert "nothing was changed" in told
    assert contents(root) == before


def test_a_guard_that_was_put_in_without_a_hook_is_named_and_comes_out(core_tree: Callable[..., Path]) -> None:
    root = core_tree("0.15.3")
    rename(root, "0.16.0rc0")
    before = contents(root)
    git(root, "apply", str(tool.PATCHES / "0.16.1.patch"))
    assert "which has no hook (router_replay)" in refuse("apply", root)
    succeed("revert", root, "--version", "0.16.1")
    assert contents(root) == before
    assert "0.15.3.patch" in succeed("apply", root)


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


def test_a_release_that_has_no_patch_cannot_be_asked_for(core_tree: Callable[..., Path]) -> None:
    told = refuse("check", core_tree("0.15.3"), "--version", "0.15")
    assert "no patch for Megatron-Core 0.15, expected one of 0.12.3, 0.13.1, 0.14.0, 0.15.3, 0.16.1" in told


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
