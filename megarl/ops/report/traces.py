"""``megarl trace inspect | diff``: show the content of a file of routing traces, and the difference of two files."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from megarl.config.command import show
from megarl.errors import TraceError
from megarl.routes import Disagreement, common_rows, shared_experts
from megarl.routes.trace_file import TracedSequence, common_names, read_traces, require_same_tokens
from megarl.run.status import name_ranges
from megarl.text_table import text_table


def inspect(path: Path, as_json: bool = False) -> None:
    """Print what the file holds, as text or JSON. Decodes every sequence; TraceError for a damaged sequence."""
    file = read_traces(path)
    info = file.info
    missing = sum(sequence.trace.num_missing for sequence in file)
    rows = {
        "model": info.model or "not said",
        "MoE layers": f"{len(info.layers)}: {name_ranges(info.layers)}",
        "experts": f"top-{info.top_k} of {info.num_experts}",
        "weight versions": name_ranges(file.weight_versions) if file.weight_versions else "not said",
        "per token besides routes": ", ".join(file.columns) or "nothing",
        "sequences": f"{len(file):,}",
        "tokens": f"{file.num_tokens:,}" + (f", longest sequence {file.lengths.max():,}" if len(file) else ""),
        "missing rows": f"{missing:,}" + (f" ({missing / file.num_tokens:.2%})" if file.num_tokens else ""),
    }
    facts = {**asdict(info), "weight_versions": file.weight_versions, "columns": file.columns, "missing_rows": missing}
    facts |= {"sequences": len(file), "tokens": file.num_tokens}
    show(_describe(str(path), [*rows.items()], ("", "value")), facts, as_json)


def diff(first: Path, second: Path, as_json: bool = False) -> None:
    """Print, as text or JSON, how far two files agree, by layer, over the sequences of one name.

    TraceError if the models' shapes, or the tokens of one name, differ.
    """
    a, b = read_traces(first), read_traces(second)
    names = common_names(a, b)
    num_shared = np.concatenate([_compare_sequences(a[name], b[name]) for name in names])
    if not num_shared.size:
        raise TraceError(f"{a.path} and {b.path}: no token has routes in both files")
    total, overlap = Disagreement.of(num_shared, a.info.top_k), num_shared.mean(axis=0) / a.info.top_k
    layers = zip(a.info.layers, total.per_layer_flip, overlap, strict=True)
    rows = [[str(layer), f"{flip:.3%}", f"{share:.3%}"] for layer, flip, share in layers]
    rows.append(["all", f"{total.flip:.3%}", f"{total.overlap:.3%}"])
    notes = [
        f"{total.num_tokens:,} tokens of {len(names):,} sequences compared; "
        f"only in the first file {len(a) - len(names):,}, only in the second {len(b) - len(names):,}.",
        f"{total.token_any:.3%} of the tokens differ in at least one layer, "
        f"{total.layers_per_token:.3f} layers per token on average.",
        "flip: share of tokens with another set of experts. overlap: share of the experts that both have.",
    ]
    model_a, model_b = (file.info.model for file in (a, b))
    if model_a != model_b:
        notes.insert(0, f"The models differ: {model_a} against {model_b}.")
    facts = {"layers": a.info.layers, "flip": total.flip, "overlap": total.overlap, "tokens": total.num_tokens}
    facts |= {"layer_flip": total.per_layer_flip.tolist(), "layer_overlap": overlap.tolist(), "sequences": len(names)}
    show(_describe(f"{first} against {second}", rows, ("layer", "flip", "overlap"), *notes), facts, as_json)


def _compare_sequences(a: TracedSequence, b: TracedSequence) -> np.ndarray:
    """Return the numbers of shared experts, uint16 [P, L], at the P positions with routes in both files."""
    rows = common_rows(a.trace, b.trace)
    require_same_tokens(a, b)
    # All tokens of two files are in memory at once: keep the numbers small.
    return shared_experts(a.trace.experts[rows], b.trace.experts[rows]).astype(np.uint16)


def _describe(title: str, rows: Sequence[Sequence[str]], headings: Sequence[str], *notes: str) -> str:
    """Return a table with title and notes; without a first heading it has names and values."""
    return "\n".join([title, "", text_table(rows, headings, words=0) if headings[0] else text_table(rows), "", *notes])
