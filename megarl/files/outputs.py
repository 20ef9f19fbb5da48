"""What megarl wrote, and may therefore replace or remove. Nothing else is removed, replaced or renamed.

- A **folder** that is written as a whole holds the file ``MARK``: during the writing the patterns of the file names,
  afterwards bytes and modification time of each file. Such a folder is replaced only if it holds nothing else.
- A **file** is listed in ``FILES`` beside the file, with the SHA-256 of the written content.

Everything else is foreign: a file of another name, size or time, a link, an empty folder.
"""

import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from glob import escape
from itertools import chain, count
from pathlib import Path, PurePosixPath
from typing import Any

from megarl.errors import ConfigError, refusal, refuse_if, reworded, some
from megarl.files.writing import exchange, model_files, read_record, sha256_of, sync, sync_all, write_atomically

MARK, FILES = ".megarl.json", ".megarl-files.json"
IsOwn = Callable[[str, os.stat_result], bool]
"""Whether megarl wrote the regular file of this path, relative to the folder."""
HF_FILES = ("model-*.safetensors", "model.safetensors.index.json", "config.json")
"""Names of the files that megarl writes of a model, besides ``model_files`` of the source."""
_RESERVED = (".megarl*",)
_WHILE_WRITTEN = (*_RESERVED, ".*.tmp", "*/.*.tmp")


def partial_of(out: Path) -> Path:
    """Return the name of a folder until the folder is complete. ConfigError for a path without a name."""
    refuse_if(not out.name, ConfigError, "unnamed_folder", out=out)
    return out.with_name(out.name + ".partial")


def require_apart(out: Path, *sources: Path | None) -> None:
    """Raise ConfigError if ``out`` or its ``.partial`` folder is or contains a source."""
    written = {out.resolve(), partial_of(out.resolve())}
    for source in sources:
        if source is not None and {source.resolve(), *source.resolve().parents} & written:
            raise ConfigError(f"{out} would replace its own source {source}; choose another folder")


def require_own(*folders: Path) -> None:
    """Raise ConfigError unless each folder is new, empty, or holds only what megarl wrote as a whole."""
    for folder in folders:
        if os.path.lexists(folder) and (folder.is_symlink() or not folder.is_dir()):
            raise ConfigError(f"{folder} is no folder; remove it, or choose another place")
        if foreign := find_foreign(folder, marked(folder)):
            raise ConfigError(refusal("foreign_in_folder", folder=folder, foreign=some(foreign)))


def marked(folder: Path) -> IsOwn:
    """Return the test for the files that the ``MARK`` of a folder lists; false for all files without a mark."""
    record = read_record(folder / MARK)
    files: Any = record.get("files")
    patterns: Any = record.get("patterns")
    if not isinstance(files, dict) or not isinstance(patterns, list):
        files, patterns = {}, _RESERVED
    return lambda name, status: (
        files[name] == [status.st_size, status.st_mtime_ns] if name in files else matches(name, patterns)
    )


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a path matches a glob."""
    return any(fnmatchcase(name, str(pattern)) for pattern in patterns)


def _entries(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    for place, folders, files in os.walk(folder):
        for path in (Path(place, name) for name in (*folders, *files)):
            yield path.relative_to(folder).as_posix(), path.lstat()


def _split(folder: Path, is_own: IsOwn) -> tuple[list[str], list[str]]:
    """Return (megarl's files, foreign entries); folders of megarl's files count as neither."""
    entries = dict(_entries(folder))
    written = [name for name, status in entries.items() if stat.S_ISREG(status.st_mode) and is_own(name, status)]
    folders = {str(parent) for name in written for parent in PurePosixPath(name).parents}
    return written, sorted({*entries} - {*written} - folders)


def find_foreign(folder: Path, is_own: IsOwn) -> list[str]:
    """Return the entries of a folder that megarl did not write."""
    return _split(folder, is_own)[1]


def remove_own(folder: Path, is_own: IsOwn) -> list[str]:
    """Remove megarl's files, and the folder if nothing else is inside; return the foreign entries. Links stay."""
    if folder.is_symlink() or not folder.is_dir():
        return []
    written, foreign = _split(folder, is_own)
    for name in sorted(written, key=lambda name: name == MARK):  # the mark last: a kill leaves a folder that is known
        (folder / name).unlink()
    parents = {folder / parent for name in written for parent in PurePosixPath(name).parents} | {folder}
    for parent in sorted(parents, reverse=True):
        if not any(parent.iterdir()):
            parent.rmdir()
    return foreign


def free_name(path: Path) -> Path:
    """Return the path, or the first of path-2, path-3 and so on that does not exist."""
    names = chain([path], (path.with_name(f"{path.stem}-{number}{path.suffix}") for number in count(2)))
    return next(name for name in names if not os.path.lexists(name))


def begin(
    folder: Path, patterns: Sequence[str], model: Path | None = None, keep: Iterable[str] = (), **fields: Any
) -> None:
    """Make a folder for files of these names; of megarl's earlier files only ``keep`` (patterns) stays.

    model: a folder whose ``model_files`` will be copied, to the folder or to a subfolder. fields: for the mark.

    ConfigError if the folder holds a foreign entry.
    """
    require_own(folder)
    is_own = marked(folder)
    remove_own(folder, lambda name, status: is_own(name, status) and not matches(name, keep))
    folder.mkdir(parents=True, exist_ok=True)
    names = [] if model is None else [escape(file.name) for file in model_files(model)]
    copied = [pattern for name in names for pattern in (name, f"*/{name}")]
    _write_mark(folder, {}, [*patterns, *copied, *_WHILE_WRITTEN], fields)


def seal(folder: Path, **fields: Any) -> None:
    """List the written files, and flush all to the disk. Files that are added or changed later are foreign."""
    sync_all(folder)  # first: a network file system may set the time of a file at the flush
    is_own = marked(folder)
    entries = ((n, s) for n, s in sorted(_entries(folder)) if stat.S_ISREG(s.st_mode) and is_own(n, s))
    files = {n: [s.st_size, s.st_mtime_ns] for n, s in entries if not matches(n, _WHILE_WRITTEN)}
    _write_mark(folder, files, _WHILE_WRITTEN, fields)
    sync(folder)


def _write_mark(folder: Path, files: dict[str, list[int]], patterns: Sequence[str], fields: dict[str, Any]) -> None:
    write_atomically(folder / MARK, json.dumps({**fields, "patterns": patterns, "files": files}, indent=1).encode())


def replace_folder(new: Path, target: Path, owner: Callable[[Path], IsOwn] = marked) -> None:
    """Rename folder ``new`` to ``target`` in a single step, and remove the previous folder if it is megarl's.

    At every moment ``target`` is the old folder or the new folder. On network file systems that cannot exchange two
    names, there is a moment without ``target``: the old folder is then called ``target.old``.

    OSError, and ConfigError if ``target`` holds an entry that ``owner(target)`` does not list.
    """
    is_own = owner(target)
    if foreign := find_foreign(target, is_own):
        raise ConfigError(f"{target} holds {some(foreign)}, which megarl did not write; {new} is whole: rename it")
    if not target.exists():
        new.rename(target)
    elif exchange(new, target):
        sync(target.parent)
        remove_own(new, is_own)
    else:
        old = target.with_name(target.name + ".old")
        refuse_if(os.path.lexists(old), ConfigError, "old_in_the_way", old=old, new=new, target=target)
        target.rename(old)
        new.rename(target)
        sync(target.parent)
        remove_own(old, is_own)
    sync(target.parent)


def require_own_files(*paths: Path) -> None:
    """Raise ConfigError if a path exists and is not as megarl wrote it."""
    for path in paths:
        refuse_if(os.path.lexists(path) and not _is_own_file(path), ConfigError, "foreign_file", path=path)


def _is_own_file(path: Path) -> bool:
    digests: Any = read_record(path.with_name(FILES)).get(path.name)
    return isinstance(digests, list) and path.is_file() and not path.is_symlink() and sha256_of(path) in digests


def make_folder(folder: Path) -> None:
    """Make a folder and those above it. ConfigError if a file is in the way."""
    kinds, problem = (FileExistsError, NotADirectoryError), ": found a file, expected a folder or nothing"
    with reworded(kinds, ConfigError, suffix=problem, tell=lambda error: error.filename):
        folder.mkdir(parents=True, exist_ok=True)


def write_output(path: Path, data: bytes) -> None:
    """Write a file atomically, list the file, and make its folder. ConfigError if a foreign file has the name.

    The new digest is listed beside the present digest: a kill between the two writes leaves a listed file.
    """
    require_own_files(path)
    make_folder(path.parent)
    listing = path.with_name(FILES)
    digests = [hashlib.sha256(data).hexdigest(), *([sha256_of(path)] if path.exists() else [])]
    write_atomically(listing, json.dumps({**read_record(listing), path.name: digests}, indent=1).encode())
    write_atomically(path, data)
