"""``megarl trace inspect | diff``: show the content of a file of routing traces, and the difference of two files."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megarl.errors import TraceError, printable
from megarl.routes import Disagreement, common_rows, shared_experts
from megarl.routes.trace_file import TracedSequence, TraceFile, common_names, read_traces, require_same_tokens
from megarl.run.status import name_ranges
from megarl.text_table import text_table


@dataclass(frozen=True, slots=True)
class FileDifference:
    """The difference between two files, over common sequences."""

    total: Disagreement
    overlap: np.ndarray
    """float64 [L], share of experts used in both files."""
    num_sequences: int
    only_in: tuple[int, int]
    """Number of sequences that are only in the first file, and only in the second."""


def inspect(path: Path) -> None:
    """Print what the file holds. Decodes every sequence; TraceError for a damaged sequence."""
    file = read_traces(path)
    info = file.info
    missing = sum(sequence.trace.num_missing for sequence in file)
    rows = {
        "model": info.model or "not said",
        "fingerprint": info.fingerprint or "not said",
        "MoE layers": f"{len(info.layers)}: {name_ranges(info.layers)}",
        "experts": f"top-{info.top_k} of {info.num_experts}",
        "weight versions": name_ranges(file.weight_versions) if file.weight_versions else "not said",
        "per token besides routes": ", ".join(file.columns) or "nothing",
        "sequences": f"{len(file):,}",
        "tokens": f"{file.num_tokens:,}" + (f", longest sequence {file.lengths.max():,}" if len(file) else ""),
        "missing rows": f"{missing:,}" + (f" ({missing / file.num_tokens:.2%})" if file.num_tokens else ""),
    }
    _print(str(path), [*rows.items()], ("", "value"))


def diff(first: Path, second: Path) -> None:
    """Print how far two files agree, by layer."""
    a, b = read_traces(first), read_traces(second)
    difference = compare_files(a, b)
    rows = [
        [str(layer), f"{flip:.3%}", f"{overlap:.3%}"]
        for layer, flip, overlap in zip(a.info.layers, difference.total.per_layer_flip, difference.overlap, strict=True)
    ]
    rows.append(["all", f"{difference.total.flip:.3%}", f"{difference.total.overlap:.3%}"])
    notes = [
        f"{difference.total.num_tokens:,} tokens of {difference.num_sequences:,} sequences compared; "
        f"only in the first file {difference.only_in[0]:,}, only in the second {difference.only_in[1]:,}.",
        f"{difference.total.token_any:.3%} of the tokens differ in at least one layer, "
        f"{difference.total.layers_per_token:.3f} layers per token on average.",
        "flip: share of tokens with another set of experts. overlap: share of the experts that both have.",
    ]
    one, other = (f"{info.model} ({info.fingerprint})" if info.fingerprint else info.model for info in (a.info, b.info))
    if one != other:
        notes.insert(0, f"The models differ: {one} against {other}.")
    _print(f"{first} against {second}", rows, ("layer", "flip", "overlap"), *notes)


def compare_files(a: TraceFile, b: TraceFile) -> FileDifference:
    """Compare the sequences of one name. Raises TraceError if the models' shapes, or tokens of one name, differ."""
    names = common_names(a, b)
    compared = [_compare_sequences(a[name], b[name]) for name in names]
    num_shared = np.concatenate(compared)
    if not num_shared.size:
        raise TraceError(f"{a.path} and {b.path}: no token has routes in both files")
    only_in = (len(a) - len(names), len(b) - len(names))
    total, overlap = Disagreement.of(num_shared, a.info.top_k), num_shared.mean(axis=0) / a.info.top_k
    return FileDifference(total, overlap, len(names), only_in)


def _compare_sequences(a: TracedSequence, b: TracedSequence) -> np.ndarray:
    """Return the numbers of shared experts, uint16 [P, L], at the P positions with routes in both files."""
    rows = common_rows(a.trace, b.trace)
    require_same_tokens(a, b)
    # All tokens of two files are in memory at once: keep the numbers small.
    return shared_experts(a.trace.experts[rows], b.trace.experts[rows]).astype(np.uint16)


def _print(title: str, rows: Sequence[Sequence[str]], headings: Sequence[str], *notes: str) -> None:
    """Print a table with title and notes; without a first heading it has names and values."""
    table = text_table(rows, headings, words=0) if headings[0] else text_table(rows)
    print(printable(title), "", table, "", *map(printable, notes), sep="\n")
