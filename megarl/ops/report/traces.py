"""``megarl trace inspect | stats | diff``: show what a file of routing traces holds, and how two files differ."""

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megarl.errors import ConfigError, TraceError, printable
from megarl.files.outputs import write_output
from megarl.routes import Disagreement, common_rows, shared_experts
from megarl.routes.trace_file import TracedSequence, TraceFile, read_traces
from megarl.run.status import name_ranges
from megarl.text_table import text_table

MAX_BINS = 64
"""Most columns of the heat map."""


@dataclass(frozen=True, slots=True)
class FileDifference:
    """The difference between two files, over the sequences that both hold."""

    total: Disagreement
    overlap: np.ndarray
    """float64 [L], share of the experts that both files use."""
    flips: np.ndarray
    """int64 [L, bins], tokens with different expert sets, by layer and position in the sequence."""
    counts: np.ndarray
    """int64 [bins], number of compared tokens at these positions."""
    bin_tokens: int
    """Positions per bin: bin b holds b * bin_tokens <= position < (b + 1) * bin_tokens."""
    num_sequences: int
    only_in: tuple[int, int]
    """Number of sequences that are only in the first file, and only in the second."""


def inspect(path: Path, as_json: bool = False) -> None:
    """Print what the file holds. Decodes every sequence, so a damaged one raises TraceError."""
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
    rows |= _describe_sizes(file)
    _print(str(path), [*rows.items()], ("", "value"), as_json=as_json)


def stats(path: Path, as_json: bool = False) -> None:
    """Print how evenly each layer uses its experts."""
    file = read_traces(path)
    counts = np.zeros((len(file.info.layers), file.info.num_experts), dtype=np.int64)
    for trace in (sequence.trace for sequence in file):
        experts = trace.experts if trace.present is None else trace.experts[trace.present]
        for layer, layer_counts in enumerate(counts):
            layer_counts += np.bincount(experts[:, layer].reshape(-1), minlength=file.info.num_experts)
    tokens = counts.sum(axis=1)
    if not tokens.any():  # also if there are no layers
        raise TraceError(f"{path}: no token has routes, so no load can be counted")
    share = counts / tokens[:, None]
    entropy = -np.where(counts > 0, share * np.log2(np.where(counts > 0, share, 1.0)), 0.0).sum(axis=1)
    most, least = share.max(axis=1) * file.info.num_experts, share.min(axis=1) * file.info.num_experts
    unused = np.count_nonzero(counts == 0, axis=1)
    columns = zip(most, least, unused, entropy, strict=True)
    rows = [
        [str(layer), f"{high:.2f}", f"{low:.2f}", str(idle), f"{bits:.3f}", f"{2**bits:.1f}"]
        for layer, (high, low, idle, bits) in zip(file.info.layers, columns, strict=True)
    ]
    bits = float(entropy.mean())
    rows.append(["all", f"{most.max():.2f}", f"{least.min():.2f}", str(unused.sum()), f"{bits:.3f}", f"{2**bits:.1f}"])
    headings = ("layer", "max / mean", "min / mean", "unused", "entropy (bits)", "effective experts")
    num_experts, top_k = file.info.num_experts, file.info.top_k
    _print(
        f"{path}: expert load by layer",
        rows,
        headings,
        f"{tokens[0] // top_k:,} tokens, top-{top_k} of {num_experts} experts; even load has max / mean 1 and entropy "
        f"{math.log2(num_experts):.3f} bits.",
        "Last row: highest, lowest, sum, means.",
        as_json=as_json,
    )


def diff(first: Path, second: Path, out: Path | None = None, as_json: bool = False) -> None:
    """Print how far two files agree, by layer; plot layers against token positions into the page ``out``."""
    if out is not None and (out.suffix != ".html" or not out.parent.is_dir()):
        raise ConfigError(f"--out: found {out}, expected a .html file in a folder that exists")
    a, b = read_traces(first), read_traces(second)
    found = compare_files(a, b)
    rows = [
        [str(layer), f"{flip:.3%}", f"{overlap:.3%}"]
        for layer, flip, overlap in zip(a.info.layers, found.total.per_layer_flip, found.overlap, strict=True)
    ]
    rows.append(["all", f"{found.total.flip:.3%}", f"{found.total.overlap:.3%}"])
    notes = [
        f"{found.total.num_tokens:,} tokens of {found.num_sequences:,} sequences compared; "
        f"only in the first file {found.only_in[0]:,}, only in the second {found.only_in[1]:,}.",
        f"{found.total.token_any:.3%} of the tokens differ in at least one layer, "
        f"{found.total.layers_per_token:.3f} layers per token on average.",
        "flip: share of tokens with another set of experts. overlap: share of the experts that both have.",
    ]
    one, other = (f"{info.model} ({info.fingerprint})" if info.fingerprint else info.model for info in (a.info, b.info))
    if one != other:
        notes.insert(0, f"The models differ: {one} against {other}.")
    _print(f"{first} against {second}", rows, ("layer", "flip", "overlap"), *notes, as_json=as_json)
    if out is not None:
        from megarl.ops.report.figures import plot_trace_difference
        from megarl.ops.report.page import PLOT, make_page

        share = np.where(found.counts > 0, found.flips / np.maximum(found.counts, 1), np.nan)
        figure = plot_trace_difference(share, found.total.per_layer_flip, a.info.layers, found.bin_tokens)
        title = f"{found.total.flip:.2%} of (token, layer) pairs differ"
        page = make_page(title, printable(f"{first} against {second}"), PLOT, [figure])
        write_output(out, page)
        print(printable(f"heat map: {out}"), file=sys.stderr if as_json else None)


def compare_files(a: TraceFile, b: TraceFile) -> FileDifference:
    """Compare the sequences of one name. Raises TraceError if the models' shapes, or tokens of one name, differ."""
    for what in ("layers", "num_experts", "top_k"):
        if getattr(a.info, what) != getattr(b.info, what):
            raise TraceError(
                f"{a.path} has {what} {getattr(a.info, what)}, {b.path} has {getattr(b.info, what)}: only traces of "
                f"models of the same shape can be compared"
            )
    names = [name for name in a.names if name in b]
    if not names:
        raise TraceError(
            f"{a.path} and {b.path} have no sequence of the same name; they begin with {a.names[:2]} and {b.names[:2]}"
        )
    compared = [_compare_sequences(a[name], b[name]) for name in names]
    positions, shared = (np.concatenate(part) for part in zip(*compared, strict=True))
    if not shared.size:
        raise TraceError(f"{a.path} and {b.path}: no token has routes in both files")
    longest = max(1, int(a.lengths.max()))
    bin_tokens = -(-longest // MAX_BINS)
    counts = np.bincount(positions // bin_tokens, minlength=-(-longest // bin_tokens))
    flips = np.zeros((shared.shape[1], len(counts)), dtype=np.int64)
    np.add.at(flips.T, positions // bin_tokens, shared < a.info.top_k)
    only_in = (len(a) - len(names), len(b) - len(names))
    total, overlap = Disagreement.of(shared, a.info.top_k), shared.mean(axis=0) / a.info.top_k
    return FileDifference(total, overlap, flips, counts, bin_tokens, len(names), only_in)


def _compare_sequences(a: TracedSequence, b: TracedSequence) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions [P] where both have routes, and the number of shared experts there, uint16 [P, L]."""
    both = common_rows(a.trace, b.trace)
    if a.tokens is not None and b.tokens is not None and (a.tokens != b.tokens).any():
        at = int((a.tokens != b.tokens).argmax())
        raise TraceError(
            f"{a.name}: token {at} is {a.tokens[at]} in one file and {b.tokens[at]} in the other; only routes of "
            f"the same text can be compared"
        )
    # All tokens of both files are held at once, so the numbers are kept small.
    return np.flatnonzero(both), shared_experts(a.trace.experts[both], b.trace.experts[both]).astype(np.uint16)


def _describe_sizes(file: TraceFile) -> dict[str, str]:
    size = {"bytes of routes": f"{file.num_route_bytes:,}"}
    if file.num_tokens:
        info, per_token = file.info, file.num_route_bytes / file.num_tokens
        bound = len(info.layers) * math.log2(math.comb(info.num_experts, info.top_k)) / 8
        size["bytes per token"] = f"{per_token:.1f}; log2 C(E, K) is {bound:.1f}"
        width = 1 if info.num_experts <= 256 else 2
        if plain := len(info.layers) * info.top_k * width:
            size[f"against uint{8 * width}"] = f"{per_token / plain:.3f} of {plain} bytes per token"
    return size


def _print(
    title: str, rows: Sequence[Sequence[str]], headings: Sequence[str], *notes: str, as_json: bool = False
) -> None:
    """Print a table under its title, with notes below it; without a first heading it has names and values."""
    if as_json:
        cells = [dict(zip(headings, row, strict=True)) for row in rows] if headings[0] else dict(rows)  # type: ignore[arg-type]
        print(json.dumps({"title": title, "rows": cells, "notes": notes}, indent=1))
        return
    table = text_table(rows, headings, words=0) if headings[0] else text_table(rows)
    print(printable(title), "", table, "", *map(printable, notes), sep="\n")
