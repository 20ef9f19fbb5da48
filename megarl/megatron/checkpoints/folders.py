"""The folders of checkpoints: found, written under another name, put in place, removed, set aside.

A checkpoint is a folder ``step_<n>``. A save writes ``step_<n>.partial``, and renames the folder when all files and the
manifest are on disk: a folder with the final name was once complete.
"""

import os
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron.core import dist_checkpointing
from torch.distributed.checkpoint.api import CheckpointException

from megarl.errors import SaveError
from megarl.files.outputs import IsOwn, find_foreign, free_name, matches, partial_of, remove_own, replace_folder
from megarl.files.writing import describe_write_error, sha256_of, sync
from megarl.megatron.checkpoints.manifest import MANIFEST, Files, saved_files, step_name, write_manifest
from megarl.megatron.distributed import from_main_rank, gather_on_main_rank, is_collective_error, is_main_rank

FindLasting = Callable[[Sequence[int]], Collection[int]]
_NAME = re.compile(r"step_(\d+)")
_WRITTEN = ("__*_*.distcp*", ".metadata*", "metadata.json*", "common.pt*", MANIFEST, ".*.tmp")
"""Names of what Megatron and megarl write into the folder of a checkpoint."""
# CheckpointException is torch's: a BaseException, no Exception.
WRITE_ERRORS = (dist_checkpointing.core.CheckpointingException, CheckpointException, OSError, RuntimeError)


def complete_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """(step, path) of every complete checkpoint in ``folder``, oldest first; not folders of other content."""
    entries = folder.iterdir() if folder.is_dir() else ()
    numbered = ((int(match[1]), path) for path in entries if (match := _NAME.fullmatch(path.name)) and path.is_dir())
    return sorted((step, path) for step, path in numbered if _is_checkpoint([*os.listdir(path)]))


def _is_checkpoint(names: Sequence[str]) -> bool:
    return not names or any(matches(name, (MANIFEST, ".metadata", "__*_*.distcp")) for name in names)


def _is_written(name: str, _: os.stat_result) -> bool:
    return matches(name, _WRITTEN)


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn an error of writing ``path`` into a SaveError, and remove the partial folder, which may fill a disk."""
    try:
        yield
    except WRITE_ERRORS as error:
        if is_collective_error(error):
            raise
        failed = [cause for cause, _ in error.failures.values()] if isinstance(error, CheckpointException) else [error]
        reason = describe_write_error(failed[0], partial_of(path)) if failed else "another rank says why"
        if is_main_rank():
            _remove_partial(partial_of(path))
        earlier = [folder.name for _, folder in complete_checkpoints(path.parent)]
        consequence = f"{earlier[-1]} is as it was" if earlier else "there is no earlier checkpoint"
        raise SaveError(f"{path} could not be written: {reason}; {consequence}") from error


def clear_partial(folder: Path, step: int, run: str) -> Path:
    """Make an empty partial folder for checkpoint ``step`` and return the final path; a collective call.

    SaveError if the folder holds anything that no save of ``run`` wrote.
    """
    path = folder / step_name(step)

    def make() -> None:
        for stale in folder.glob("step_*.partial"):
            _remove_partial(stale)
        for place, is_own in ((partial_of(path), _is_written), (path, saved_files(path, run))):
            if foreign := _find_foreign(place, is_own):
                raise SaveError(
                    f"{place} is or holds {foreign[0]}, which no save of this run wrote; move it away and start again"
                )
        with explained(path):
            partial_of(path).mkdir(parents=True, exist_ok=True)

    from_main_rank(make)
    return path


def _find_foreign(place: Path, is_own: IsOwn) -> list[str]:
    is_other = os.path.lexists(place) and (place.is_symlink() or not place.is_dir())
    return ["a link or a file"] if is_other else find_foreign(place, is_own)


def _remove_partial(folder: Path) -> None:
    with suppress(OSError):
        remove_own(folder, _is_written)


def set_aside(damaged: Iterable[Path]) -> None:
    """Rename damaged checkpoints to *.damaged, so that no command loads them."""
    for path in damaged:
        path.rename(free_name(path.with_name(f"{path.name}.damaged")))


def publish(path: Path, run: str, files: Files, keep: int, find_lasting: FindLasting) -> None:
    """Put a written checkpoint in place with a manifest, and keep the newest ``keep``; a collective call.

    ``find_lasting`` returns, on the main rank, which complete steps stay besides.

    ``files``: written and flushed by the rank's processes. The whole checkpoint and its name are on disk before an
    older checkpoint is removed.
    """
    partial = partial_of(path)
    sync(partial)  # each rank: the names of its files
    by_rank = gather_on_main_rank(files)

    def put_in_place() -> None:
        with explained(path):
            written = {name: record for records in by_rank or [] for name, record in records.items()}
            write_manifest(partial, run, int(path.name.removeprefix("step_")), _complete(partial, written))
            sync(partial)
            replace_folder(partial, path, lambda folder: saved_files(folder, run))
        complete = complete_checkpoints(path.parent)
        lasting = {*find_lasting([step for step, _ in complete]), int(path.name.removeprefix("step_"))}
        for old in (old for step, old in complete[:-keep] if step not in lasting):
            if foreign := _find_foreign(old, saved_files(old, run)):
                reason = f"it is or holds {foreign[0]}, which this run did not save"
                warnings.warn(f"{old} stays although checkpoint.keep is {keep}: {reason}", stacklevel=2)
                continue
            # remains after a kill are no checkpoint
            _remove_partial(old.rename(partial_of(old)))

    from_main_rank(put_in_place)


def _complete(folder: Path, written: Files) -> Files:
    """``written`` and the small files of the main rank, which are flushed and read here."""
    files = dict(written)
    for file in folder.iterdir():
        if file.name not in files:
            sync(file)
            files[file.name] = (file.stat().st_size, sha256_of(file))
    for name, (size, _) in files.items():
        if (actual := (folder / name).stat().st_size) != size:
            raise SaveError(f"{folder / name} has {actual} bytes, and {size} were written")
    return files
