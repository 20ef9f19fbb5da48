"""``megarl patch``: apply a patch to a Megatron-Core, or revert the patch: all files or no file (docs/patches.md).

``git apply`` does the work on a copy of each file.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megarl.config.command import show
from megarl.errors import MegarlError, refusal, refuse_if, reworded
from megarl.files.shipped import shipped_folder
from megarl.files.texts import read_table

PATCHES = shipped_folder("patches")
WORDS: dict[str, dict[str, str]] = read_table(__file__)
"""Command -> state of a file -> word to print."""
_MOE = "megatron/core/transformer/moe/"
_ROUTER = f"{_MOE}router.py"
_FILE = re.compile(r"^diff --git a/(\S+) b/\S+$", re.MULTILINE)
_REFUSED = re.compile(r"^    def quantile_balancing\(.*?(?=^    def )", re.MULTILINE | re.DOTALL)
"""Router of 0.19 without the hook; replay refuses quantile balancing."""


class PatchError(MegarlError):
    """The patch was refused, or a file could not be written; the message says whether anything was changed."""


@dataclass(frozen=True, slots=True)
class FileState:
    """State of the patch in one file of the target."""

    name: str
    """Path relative to the target."""
    file: Path
    state: str
    """"in", "out" or "unfit" (neither)."""
    current: bytes
    result: bytes
    """Content after ``apply`` if the state is "out", after ``revert`` if the state is "in"."""
    notes: tuple[str, ...] = ()
    """Hunks with an offset; for an unfit file, the reason."""


def list_versions() -> list[str]:
    """Return the releases that have a patch, oldest first."""
    return sorted((path.stem for path in PATCHES.glob("*.patch")), key=_position)


def _position(version: str) -> int:
    major, minor, micro = [*map(int, re.findall(r"\d+", version)), 0, 0, 0][:3]
    return (major * 1000 + minor) * 1000 + micro


def find_installed() -> Path:
    """Return the import folder of megatron.core. PatchError if the running Python has no megatron.core."""
    spec = importlib.util.find_spec("megatron")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (Path(folder) / "core" / "package_info.py").is_file():
            return Path(folder).parent
    raise PatchError("this Python has no megatron-core; expected one, or a TARGET that contains megatron/core")


def read_version(root: Path) -> str:
    """Return the version that a source tree states. PatchError if the tree contains no megatron/core."""
    info = root / "megatron" / "core" / "package_info.py"
    refuse_if(not info.is_file(), PatchError, "no_megatron_core", info=info)
    pattern = r"^(MAJOR|MINOR|PATCH|PRE_RELEASE) *= *['\"]?(\w*)"
    fields = dict(re.findall(pattern, info.read_text(encoding="utf-8"), re.MULTILINE))
    return ".".join(fields.get(name, "?") for name in ("MAJOR", "MINOR", "PATCH")) + fields.get("PRE_RELEASE", "")


def _git(folder: Path, *words: str | Path) -> subprocess.CompletedProcess[bytes]:
    """Run git in a folder. Neither a variable of the caller nor a repository around the temporary folder is used."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment |= {"GIT_NO_LAZY_FETCH": "1", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    environment["GIT_CEILING_DIRECTORIES"] = os.path.realpath(tempfile.gettempdir())
    settings = ["-c", "core.autocrlf=false", "-c", "apply.whitespace=nowarn", "-c", "apply.ignoreWhitespace=no"]
    problem = "git is not installed, and megarl patch needs it; nothing was changed"
    with reworded(FileNotFoundError, PatchError, problem, tell=lambda _: ""):
        return subprocess.run(["git", *settings, *words], cwd=folder, env=environment, capture_output=True, check=False)


def _apply(content: bytes, release: str, name: str, *options: str) -> tuple[bytes | None, str]:
    """Return (content after ``git apply``, git's messages); (None, messages) if the patch does not fit."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, name)
        file.parent.mkdir(parents=True)
        file.write_bytes(content)
        done = _git(Path(folder), "apply", "-v", f"--include={name}", *options, PATCHES / f"{release}.patch")
        return (None if done.returncode else file.read_bytes()), done.stderr.decode()


def _content(file: Path) -> bytes:
    if file.is_symlink() or not file.is_file():
        kind = "a symbolic link" if file.is_symlink() else "missing"
        raise PatchError(f"{file} is {kind}, expected a file of the target itself; nothing was changed")
    return file.read_bytes()


def examine(root: Path, release: str) -> list[FileState]:
    """Return the state of each file in the patch of a release. git gets LF line ends; CRLF is restored afterwards."""
    states = []
    for name in _FILE.findall((PATCHES / f"{release}.patch").read_text(encoding="utf-8")):
        current = _content(root / name)
        is_crlf = current.count(b"\r\n") == current.count(b"\n") > 0
        state, result, notes = _examine_file(current.replace(b"\r\n", b"\n") if is_crlf else current, release, name)
        result = result.replace(b"\n", b"\r\n") if is_crlf else result
        states.append(FileState(name, root / name, state, current, result, tuple(notes)))
    return states


def _examine_file(text: bytes, release: str, name: str) -> tuple[str, bytes, list[str]]:
    """Return (state, result, notes). A state counts only if the opposite command restores the file byte for byte."""
    ways = {"out": ((), ("-R",)), "in": (("-R",), ())}
    fits, failed_lines = [], [1]
    for state, (options, opposite) in ways.items():
        result, output = _apply(text, release, name, *options)
        if result is not None and _apply(result, release, name, *opposite)[0] == text:
            moved = re.findall(r"Hunk #(\d+) succeeded at (\d+) \((offset -?\d+ lines?)\)", output)
            fits.append((state, result, ["hunk {} at line {} ({})".format(*groups) for groups in moved]))
        failed_lines += map(int, re.findall(r"patch failed: \S+:(\d+)", output))
    if len(fits) == 1:
        return fits[0]
    # Forward and reverse fail at different hunks: the later hunk is the likely place of the edit.
    return "unfit", text, [f"{name}:{max(failed_lines)}: the lines that {release}.patch expects differ"]


def has_hook(root: Path, changes: Sequence[FileState] = ()) -> bool:
    """Whether a tree, with ``changes`` applied, calls the hook, and each choice of experts passes the hook on."""
    results = {change.name: change.result for change in changes if change.state == "out"}
    contents = (results.get(name) or _content(root / name) for name in (f"{_MOE}moe_utils.py", _ROUTER))
    utils, router = (content.decode(errors="replace") for content in contents)
    router = _REFUSED.sub("", router)
    calls = len(re.findall(r"\b(?:topk_softmax_with_capacity|topk_routing_with_score_function)\(", router))
    return "router_replay.get_replay_topk(" in utils and 0 < calls == router.count("router_replay=self.router_replay")


def choose(root: Path, version: str, requested: str | None) -> tuple[str, list[FileState]] | None:
    """Return (release, file states) of the patch for a tree; None if the tree has the hook and no patch fits.

    The order is: the requested release, the tree's own release, the nearest release whose patch fits and leaves a tree
    with the hook. Patches that add the hook are tried before 0.16.1.patch.

    PatchError if the requested release has no patch, or no patch brings the hook.
    """
    releases = list_versions()
    release = requested or version
    if requested or release in releases:
        refuse_if(release not in releases, PatchError, "no_patch", release=release, releases=", ".join(releases))
        return release, examine(root, release)
    releases.sort(key=lambda release: (_adds_no_hook(release), abs(_position(release) - _position(version))))
    tried = {release: examine(root, release) for release in releases}
    for release, states in tried.items():
        if not _unfit(states) and has_hook(root, states):
            return release, states
    if has_hook(root):
        return None
    nearest, states = next(iter(tried.items()))
    reason = _unfit(states)[0].notes[0] if _unfit(states) else "leaves no hook"
    raise PatchError(refusal("no_patch_fits", version=version, root=root, nearest=nearest, reason=reason))


def _unfit(states: Sequence[FileState]) -> list[FileState]:
    return [state for state in states if state.state == "unfit"]


def _adds_no_hook(release: str) -> bool:
    return f"a/{_ROUTER} " not in (PATCHES / f"{release}.patch").read_text(encoding="utf-8")


def replace_files(root: Path, changes: Sequence[FileState]) -> None:
    """Replace all files or none: stage old and new contents on the same disk, rename, rename back on an error.

    PatchError if a file cannot be written or has changed since ``examine``.
    """
    num_renamed = 0
    inside = root / "megatron" / "core"
    try:
        with tempfile.TemporaryDirectory(dir=inside, prefix=".patch-", ignore_cleanup_errors=True) as folder:
            pairs = [(Path(folder, f"{number}.old"), Path(folder, f"{number}.new")) for number in range(len(changes))]
            for change, (old, new) in zip(changes, pairs, strict=True):
                _stage(change, old, new)
            try:
                for change, (_, new) in zip(changes, pairs, strict=True):
                    os.replace(new, change.file)
                    num_renamed += 1
            except BaseException:
                while num_renamed:
                    os.replace(pairs[num_renamed - 1][0], changes[num_renamed - 1].file)
                    num_renamed -= 1
                raise
    except OSError as error:
        place = error.filename2 or error.filename or inside
        outcome = "some files are changed: run the opposite command" if num_renamed else "nothing was changed"
        raise PatchError(f"cannot write {place}: {error.strerror}; {outcome}") from error


def _stage(change: FileState, old: Path, new: Path) -> None:
    shutil.copy2(change.file, old)
    refuse_if(old.read_bytes() != change.current, PatchError, "changed_meanwhile", change=change)
    new.write_bytes(change.result)
    shutil.copymode(old, new)  # with a new time stamp: Python compiles the file again
    if os.geteuid() == 0:
        owner = change.file.stat()
        os.chown(new, owner.st_uid, owner.st_gid)


def run(command: str, target: Path | None, version: str | None, as_json: bool = False) -> None:
    """Run one command, a key of ``WORDS``, and print the state of each file. PatchError if the command is refused.

    version: take the patch of this release. as_json: print JSON.
    """
    names = "{0.filename}: {0.strerror}".format
    with reworded(OSError, PatchError, "cannot read ", "; nothing was changed", names):
        root = (target or find_installed()).resolve()
        core = read_version(root)
        release, states = choose(root, core, version) or (None, [])
        unfit = _unfit(states)
        if command in ("check", "apply") and not unfit and not has_hook(root, states):
            raise PatchError(refusal("patch_without_hook", release=release, core=core, root=root))
        changes = [state for state in states if state.state == {"apply": "out", "revert": "in"}.get(command)]
        if changes and not unfit:
            # moe_utils.py first: a patched router would pass the hook to a function without the argument.
            replace_files(root, changes if command == "apply" else changes[::-1])
        words = ["not changed" if unfit and s in changes else WORDS[command][s.state] for s in states]
        pairs = zip(states, words, strict=True)
        files = [{"name": s.name, "state": s.state, "result": word, "notes": s.notes} for s, word in pairs]
        lines = ["\n    ".join([f"  {file['name']}: {file['result']}", *file["notes"]]) for file in files]
        patch = f"{release}.patch" if release else "has the hook and needs no patch"
        facts = {"version": core, "target": root, "patch": release, "files": files}
        show("\n".join([f"megatron-core {core} in {root}: {patch}", *lines]), facts, as_json)
        refuse_if(unfit and command != "status", PatchError, "unfit_file", unfit=unfit)
