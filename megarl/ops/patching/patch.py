"""``megarl patch``: put a patch into a Megatron-Core, or take it out again: all files or none (docs/patches.md).

Where somebody has edited the lines that a hunk expects, the file is merged 3-way, if the target's git repository has
the file that the patch was made from. What fits in neither way is refused, naming the line.
"""

import difflib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megarl.errors import MegarlError
from megarl.files.shipped import shipped_folder
from megarl.ops.patching.hunks import FilePatch, MisfitError, explain_misfits, find_places, fit, read_patch

PATCHES = shipped_folder("patches")
WORDS = {
    "check": {"out": "applies", "in": "already in", "unfit": "does not apply"},
    "apply": {"out": "patched", "in": "already in", "unfit": "does not apply"},
    "revert": {"out": "not in", "in": "restored", "unfit": "cannot be restored"},
    "status": {"out": "not in", "in": "in", "unfit": "neither in nor out"},
}
"""What a file's state means to each command."""
_MOE = "megatron/core/transformer/moe/"
_ROUTER = f"{_MOE}router.py"
_REFUSED = re.compile(r"^    def quantile_balancing\(.*?(?=^    def )", re.MULTILINE | re.DOTALL)
"""A choice of experts without the hook, in 0.19, that replay refuses."""


class PatchError(MegarlError):
    """The message says what was found, what was expected, and whether anything was changed."""


@dataclass(frozen=True, slots=True)
class FileState:
    """One file of the target, and what it would become."""

    patch: FilePatch
    file: Path
    state: str
    """The patch is "in", "out", or neither: "unfit"."""
    before: bytes
    after: bytes
    """With the patch where it is out, without it where it is in."""
    notes: tuple[str, ...]
    """Hunks that sit on another line than in the release; of an unfit file the places, as ``path:line: reason``."""


def list_versions() -> list[str]:
    return sorted((path.stem for path in PATCHES.glob("*.patch")), key=_position)


def _position(version: str) -> int:
    major, minor, micro = [*map(int, re.findall(r"\d+", version)), 0, 0, 0][:3]
    return (major * 1000 + minor) * 1000 + micro


def find_installed() -> Path:
    """The folder from which this Python would import megatron.core."""
    spec = importlib.util.find_spec("megatron")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (Path(folder) / "core" / "package_info.py").is_file():
            return Path(folder).parent
    raise PatchError("this Python has no megatron-core; expected one, or a TARGET that contains megatron/core")


def read_version(root: Path) -> str:
    info = root / "megatron" / "core" / "package_info.py"
    if not info.is_file():
        raise PatchError(f"{info} is missing: expected the folder that contains megatron/core")
    pattern = r"^(MAJOR|MINOR|PATCH|PRE_RELEASE) *= *['\"]?(\w*)"
    said = dict(re.findall(pattern, info.read_text(encoding="utf-8"), re.MULTILINE))
    return ".".join(said.get(name, "?") for name in ("MAJOR", "MINOR", "PATCH")) + said.get("PRE_RELEASE", "")


def git(folder: Path, *words: str) -> bytes | None:
    """What git prints, None where it fails or is not installed. No variable of the caller points it elsewhere."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment |= {"GIT_NO_LAZY_FETCH": "1", "GIT_TERMINAL_PROMPT": "0"}
    try:
        done = subprocess.run(["git", "-C", str(folder), *words], env=environment, capture_output=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None


def merge(current: str, base: str, theirs: str) -> str | None:
    """The current text with what leads from base to theirs, None if that touches lines that are edited in current."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in (("current", current), ("base", base), ("theirs", theirs)):
            (Path(folder) / name).write_bytes(_encode(text))
        merged = git(Path(folder), "merge-file", "-p", "-q", "current", "base", "theirs")
    return None if merged is None else _decode(merged)


def _decode(content: bytes) -> str:
    return content.decode("utf-8", "surrogateescape")


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _content(file: Path) -> bytes:
    if file.is_symlink() or not file.is_file():
        kind = "a symbolic link" if file.is_symlink() else "missing"
        raise PatchError(f"{file} is {kind}, expected a file of the target itself; nothing was changed")
    return file.read_bytes()


def examine(root: Path, patch: FilePatch, reverting: bool) -> FileState:
    """Whether the patch is in one file of the target, and what the file would become."""
    file = root / patch.path
    before = _content(file)
    carriage_returns = before.count(b"\r\n") == before.count(b"\n") > 0
    text = _decode(before.replace(b"\r\n", b"\n") if carriage_returns else before)
    state, other, notes = _state(file, text, patch, reverting)
    after = _encode(other).replace(b"\n", b"\r\n") if carriage_returns else _encode(other)
    return FileState(patch, file, state, before, after, tuple(notes))


def _state(file: Path, text: str, patch: FilePatch, reverting: bool) -> tuple[str, str, list[str]]:
    """The state, the text that the file would become, and the notes."""
    fits: list[tuple[str, str, list[str]]] = []
    for state, way in (("out", patch), ("in", patch.reverse())):
        try:
            fits.append((state, *fit(text, way)))
        except MisfitError:
            continue
    if len(fits) == 1:
        return fits[0]
    merged, reason = three_way(file, text, patch)
    if merged is not None:
        return (*merged, ["merged 3-way: lines that a hunk expects have been edited"])
    lines = text.split("\n")
    is_in = sum(bool(find_places(lines, hunk.new)) for hunk in patch.hunks)
    is_out = sum(bool(find_places(lines, hunk.old)) for hunk in patch.hunks)
    wrong = explain_misfits(text, patch.reverse() if is_in > is_out or (is_in == is_out and reverting) else patch)
    part = f"; {is_in} of its {len(patch.hunks)} hunks are in already" if is_in and is_out else ""
    return "unfit", text, [f"{place} ({reason}{part})" for place in wrong]


def three_way(file: Path, text: str, patch: FilePatch) -> tuple[tuple[str, str] | None, str]:
    """(state, what the text would become) by git's merge; or None, and why not."""
    content = git(file.parent, "cat-file", "blob", patch.blob)
    if content is None:
        return None, f"no 3-way merge, for git has no object {patch.blob[:12]} here"
    without = _decode(content.replace(b"\r\n", b"\n"))
    patched, _ = fit(without, patch)
    applied, reverted = merge(text, without, patched), merge(text, patched, without)
    # Only what the opposite command would undo byte for byte: where a part is in already, that part would go too.
    if applied not in (None, text) and merge(applied, patched, without) == text:
        return ("out", applied), ""
    if reverted not in (None, text) and merge(reverted, without, patched) == text:
        return ("in", reverted), ""
    if applied is None or reverted is None:
        return None, "a 3-way merge conflicts"
    return None, "git can merge, but revert could not undo it"


def has_hook(root: Path, changes: Sequence[FileState] = ()) -> bool:
    """Whether the hook is asked, and routers pass it on wherever replay lets them choose; with these changes made."""
    after = {change.patch.path: change.after for change in changes if change.state == "out"}
    asks, router = (_decode(after.get(name) or _content(root / name)) for name in (f"{_MOE}moe_utils.py", _ROUTER))
    router = _REFUSED.sub("", router)
    calls = len(re.findall(r"\b(?:topk_softmax_with_capacity|topk_routing_with_score_function)\(", router))
    return "router_replay.get_replay_topk(" in asks and 0 < calls == router.count("router_replay=self.router_replay")


def choose(root: Path, version: str, asked: str | None, reverting: bool) -> tuple[str, list[FileState]] | None:
    """The release whose patch is for this tree, and what the patch would do to it; PatchError if there is none.

    That of the release that is asked for, or that the tree says it is. Otherwise the nearest that fits, in or out, and
    leaves a tree with the hook. Those that bring the hook come first: they contain the guard's hunks. None if none
    fits and the tree has the hook.
    """
    release = asked or version
    if asked or release in list_versions():
        if release not in list_versions():
            raise PatchError(f"no patch for Megatron-Core {release}, expected one of {', '.join(list_versions())}")
        return release, _examine_all(root, release, reverting)
    nearest = sorted(list_versions(), key=lambda known: abs(_position(known) - _position(version)))
    nearest.sort(key=_only_guards)
    tried = {release: _examine_all(root, release, reverting) for release in nearest}
    for release, states in tried.items():
        if not _unfit(states) and has_hook(root, states):
            return release, states
    if has_hook(root):
        return None
    raise PatchError(_no_fit(root, version, tried))


def _examine_all(root: Path, release: str, reverting: bool) -> list[FileState]:
    return [examine(root, patch, reverting) for patch in read_patch(PATCHES / f"{release}.patch")]


def _unfit(states: Sequence[FileState]) -> list[FileState]:
    return [state for state in states if state.state == "unfit"]


def _only_guards(release: str) -> bool:
    """Whether the patch is for trees that have the hook already: it does not touch the router."""
    return all(patch.path != _ROUTER for patch in read_patch(PATCHES / f"{release}.patch"))


def _no_fit(root: Path, version: str, tried: dict[str, list[FileState]]) -> str:
    found = f"no patch fits Megatron-Core {version} in {root}"
    for release, states in tried.items():
        if _only_guards(release) and all(state.state == "in" for state in states):
            return (
                f"{found}: it has no hook (router_replay), and {release}.patch is in, which only guards one; take that "
                f"out first: megarl patch revert --version {release}; nothing was changed"
            )
    release, states = next(iter(tried.items()))
    return (
        f"{found}: it has no hook (router_replay), and none of {', '.join(tried)} brings it in. Put the change of the "
        f"nearest in by hand, or use a release that has a patch or the hook. {release}.patch: "
        f"{_unfit(states)[0].notes[0]}; nothing was changed"
    )


def replace_files(root: Path, changes: Sequence[FileState]) -> None:
    """All or none: old and new contents are staged on the same disk and renamed; an error renames the old ones back."""
    done: list[int] = []
    inside = root / "megatron" / "core"
    try:
        with tempfile.TemporaryDirectory(dir=inside, prefix=".patch-", ignore_cleanup_errors=True) as folder:
            for number, change in enumerate(changes):
                _stage(change, Path(folder) / f"{number}.old", Path(folder) / f"{number}.new")
            try:
                for number, change in enumerate(changes):
                    os.replace(Path(folder) / f"{number}.new", change.file)
                    done.append(number)
            except BaseException:
                while done:
                    os.replace(Path(folder) / f"{done[-1]}.old", changes[done[-1]].file)
                    done.pop()
                raise
    except OSError as error:
        what = error.filename2 or error.filename or inside
        left = "some files are changed: run the opposite command" if done else "nothing was changed"
        raise PatchError(f"cannot write {what}: {error.strerror}; {left}") from error


def _stage(change: FileState, old: Path, new: Path) -> None:
    shutil.copy2(change.file, old)
    if old.read_bytes() != change.before:
        raise PatchError(f"{change.file} has changed meanwhile; nothing was changed, try again")
    new.write_bytes(change.after)
    shutil.copymode(old, new)  # the time stamp is new, so that Python compiles it again
    if os.geteuid() == 0:
        owner = change.file.stat()
        os.chown(new, owner.st_uid, owner.st_gid)


def difference(changes: Sequence[FileState]) -> str:
    """The changes as a patch of the target's real files."""
    rows: list[str] = []
    for change in changes:
        before, after = (_decode(content).split("\n") for content in (change.before, change.after))
        named = f"a/{change.patch.path}", f"b/{change.patch.path}"
        rows += difflib.unified_diff(before, after, *named, lineterm="")
    return "".join(f"{row}\n" for row in rows)


def run(command: str, target: Path | None, version: str | None, dry_run: bool, as_json: bool = False) -> None:
    """Carry out one command, a key of ``WORDS``, and print what was done; PatchError if it is refused.

    ``version``: take the patch of this release. ``dry_run``: print the difference to the real files, change nothing.
    ``as_json``: print target, release of Megatron-Core, patch, and path, state and notes of each file.
    """
    if dry_run and command not in ("apply", "revert"):
        raise PatchError(f"--dry-run goes with apply or revert; {command} changes nothing anyway")
    try:
        _run(command, target, version, dry_run, as_json)
    except OSError as error:
        raise PatchError(f"cannot read {error.filename}: {error.strerror}; nothing was changed") from error


def _run(command: str, target: Path | None, version: str | None, dry_run: bool, as_json: bool) -> None:
    root = (target or find_installed()).resolve()
    says = read_version(root)
    chosen = choose(root, says, version, command == "revert")
    told = {"target": str(root), "megatron_core": says, "patch": None, "files": []}
    if chosen is None:
        if as_json:
            print(json.dumps(told, indent=1))
        elif not dry_run:
            print(f"megatron-core {says} in {root}: has the hook and needs no patch")
        return
    release, states = chosen
    unfit = _unfit(states)
    if command in ("check", "apply") and not unfit and not has_hook(root, states):
        raise PatchError(
            f"{release}.patch fits Megatron-Core {says} in {root}, but leaves routers that do not pass on a hook "
            "(router_replay), expected one at every choice of experts: put it in by hand, or take a patch that brings "
            "it (--version); nothing was changed"
        )
    changes = [state for state in states if state.state == {"apply": "out", "revert": "in"}.get(command)]
    if changes and not unfit and not dry_run:
        # A router that passes the hook on to a function that does not know it is the worse half.
        replace_files(root, changes if command == "apply" else changes[::-1])
    if dry_run and not unfit and not as_json:
        sys.stdout.buffer.write(_encode(difference(changes)))
        return
    words = ["not changed" if unfit and state in changes else WORDS[command][state.state] for state in states]
    if as_json:
        told |= {"patch": release, "difference": difference(changes)} if dry_run else {"patch": release}
        files = [{"path": s.patch.path, "state": word, "notes": s.notes} for s, word in zip(states, words, strict=True)]
        print(json.dumps(told | {"files": files}, indent=1))
    else:
        print(f"megatron-core {says} in {root}: {release}.patch")
        for state, word in zip(states, words, strict=True):
            print(f"  {state.patch.path}: {word}", *state.notes, sep="\n    ")
    if unfit and command != "status":
        more = sum(len(state.notes) for state in unfit) - 1
        raise PatchError(unfit[0].notes[0] + (f", and {more} more" if more else "") + "; nothing was changed")
