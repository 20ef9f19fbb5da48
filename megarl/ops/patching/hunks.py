"""Hunks of a patch: where they go into a text, and what stands there instead where they do not.

A hunk goes in where all the lines stand that it expects, and only there, on whichever line; there is no fuzz, because a
guess is how a patch ends up in the wrong function.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

_FILE = re.compile(
    r"^diff --git a/(?P<path>\S+) b/(?P=path)\nindex (?P<blob>[0-9a-f]{40})\.\.[0-9a-f]{40} 100644\n"
    r"--- a/(?P=path)\n\+\+\+ b/(?P=path)\n(?P<hunks>(?:[-+ @].*\n|\n)+)",
    re.MULTILINE,
)
_HUNK = re.compile(r"^@@ -(\d+)(?:,\d+)? \+(\d+)(?:,\d+)? @@.*\n((?:[-+ ].*\n|\n)+)", re.MULTILINE)


class MisfitError(Exception):
    """The lines that a hunk expects are not there, or there twice."""


@dataclass(frozen=True, slots=True)
class Hunk:
    """One place of one file: ``old`` becomes ``new``."""

    number: int
    line: int
    """Where it begins in the file of the release when the hunks before it are in; 1-based."""
    line_alone: int
    """Where it begins when they are not: the ``line`` of its reverse."""
    old: tuple[str, ...]
    new: tuple[str, ...]

    def reverse(self) -> "Hunk":
        return Hunk(self.number, self.line_alone, self.line, self.new, self.old)


@dataclass(frozen=True, slots=True)
class FilePatch:
    path: str
    blob: str
    """Git's id of the file that the patch was made from."""
    hunks: tuple[Hunk, ...]

    def reverse(self) -> "FilePatch":
        return replace(self, hunks=tuple(hunk.reverse() for hunk in self.hunks))


def read_patch(path: Path) -> list[FilePatch]:
    """The files of a patch as ``git diff --full-index`` writes it; what precedes the first is its header."""
    files = []
    for found in _FILE.finditer(path.read_text(encoding="utf-8")):
        hunks = []
        for number, (line, new_line, body) in enumerate(_HUNK.findall(found["hunks"]), 1):
            rows = [row or " " for row in body.split("\n")[:-1]]  # editors strip the space of an empty line
            old, new = (tuple(row[1:] for row in rows if row[0] in signs) for signs in (" -", " +"))
            hunks.append(Hunk(number, int(new_line), int(line), old, new))
        files.append(FilePatch(found["path"], found["blob"], tuple(hunks)))
    return files


def find_places(lines: Sequence[str], block: Sequence[str]) -> list[int]:
    """Every index at which the block stands."""
    size = len(block)
    return [at for at, line in enumerate(lines) if line == block[0] and tuple(lines[at : at + size]) == block]


def fit(text: str, patch: FilePatch) -> tuple[str, list[str]]:
    """The text with all hunks in, and a note for each that sits on another line than in the release."""
    lines, notes = text.split("\n"), []
    for hunk in patch.hunks:
        found = find_places(lines, hunk.old)
        if len(found) != 1:
            raise MisfitError
        at = found[0]
        if moved := at + 1 - hunk.line:
            plural, where = "s" if abs(moved) > 1 else "", "later" if moved > 0 else "earlier"
            notes.append(f"hunk {hunk.number} at line {at + 1}, {abs(moved)} line{plural} {where} than in the release")
        lines[at : at + len(hunk.old)] = hunk.new
    return "\n".join(lines), notes


def explain_misfits(text: str, patch: FilePatch) -> list[str]:
    """For each hunk that cannot go in, ``path:line: what is expected, and what stands there``; at least one entry."""
    lines, found = text.split("\n"), []
    shift = 0  # of the hunk before: what a fork has inserted moves all that follows
    for hunk in patch.hunks:
        at = find_places(lines, hunk.old)
        if len(at) == 1:
            shift = at[0] + 1 - hunk.line_alone
        elif at:
            numbers = " and ".join(str(index + 1) for index in at)
            found.append(f"{patch.path}:{at[0] + 1}: hunk {hunk.number} fits at lines {numbers}, expected one place")
        else:
            index, expected = _first_difference(lines, hunk.old, hunk.line_alone - 1 + shift)
            stands = repr(lines[index]) if 0 <= index < len(lines) else "the end of the file"
            found.append(f"{patch.path}:{index + 1}: hunk {hunk.number} expects {expected!r}, found {stands}")
    return found or [f"{patch.path}:1: each hunk fits, but not all of them together; is the code there twice?"]


def _first_difference(lines: Sequence[str], block: Sequence[str], near: int) -> tuple[int, str]:
    """The index beside the longest part of the block that is still there, and the line expected at it."""
    longest = (0, 0)  # its length, and minus its distance from where it should be
    start, first, size = near, 0, 0
    runs: dict[int, int] = {}
    for index, line in enumerate(lines):
        runs = {j: runs.get(j - 1, 0) + 1 for j, expected in enumerate(block) if line == expected}
        for j, length in runs.items():
            if length > size or (length, -abs(index - j - near)) > longest:
                longest = (length, -abs(index - j - near))
                start, first, size = index - length + 1, j - length + 1, length
    return (start - 1, block[first - 1]) if first else (start + size, block[size])
