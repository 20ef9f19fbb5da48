"""Files of routing traces: many sequences of one model in one safetensors file, encoded by ``core.routing``.

    metadata  format, format_version, model, fingerprint, layers, num_experts, top_k, weight_versions, names
    tensors   routes uint8 [bytes] and route_offsets int64 [N+1]: the encoded traces back to back
              cu_seqlens int64 [N+1]; if given also tokens int32 [T], row_versions int32 [T], row_sources uint8 [T]

Lists in the metadata are JSON. Each encoded trace has its own checksum, and is decoded when it is asked for.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from megarl.core.routing import RoutingTrace, decode, encode
from megarl.core.routing.provenance import row_sources, row_versions
from megarl.core.types import Rollout, RowSource
from megarl.errors import ConfigError, TraceError

FORMAT = "megarl-routing-traces"
FORMAT_VERSION = 1
MOST_EXPERTS = 65536
_COLUMNS = {"tokens": np.dtype(np.int32), "row_versions": np.dtype(np.int32), "row_sources": np.dtype(np.uint8)}
"""Tensors with one entry per token that a file may hold besides the traces."""


@dataclass(frozen=True, slots=True)
class TraceInfo:
    """What all sequences of a file have in common."""

    model: str
    """Name or folder of the model."""
    layers: tuple[int, ...]
    """0-based index in the model of each of the L MoE layers of a trace."""
    num_experts: int
    """E."""
    top_k: int
    """K."""
    fingerprint: str = ""
    """Tells models of one name apart, for instance a hash of the weights; "" if unknown."""


@dataclass(frozen=True, slots=True, eq=False)
class TracedSequence:
    """One sequence of T tokens and its routes. Raises TraceError if the columns do not fit the trace."""

    name: str
    """Unique in its file, for instance "group 3 sample 1"."""
    trace: RoutingTrace
    """[T, L, K]."""
    tokens: np.ndarray | None = None
    """int32 [T], token ids."""
    row_versions: np.ndarray | None = None
    """int32 [T], version of the weights that chose the experts of each token."""
    row_sources: np.ndarray | None = None
    """uint8 [T], a RowSource; MISSING exactly where the trace has no row, or NATIVE there."""

    def __post_init__(self) -> None:
        num_tokens = len(self.trace.experts)
        for column, dtype in _COLUMNS.items():
            values = getattr(self, column)
            if values is not None and (values.dtype != dtype or values.shape != (num_tokens,)):
                raise TraceError(
                    f"{self.name}: {column} is {values.dtype} {list(values.shape)}, expected {dtype} [{num_tokens}]"
                )
        if self.row_sources is not None and num_tokens:
            self._check_sources(self.row_sources)

    def _check_sources(self, sources: np.ndarray) -> None:
        present = np.ones(len(sources), dtype=bool) if self.trace.present is None else self.trace.present
        claims_row = sources == RowSource.CAPTURED
        wrong = (sources > max(RowSource)) | (present & (sources == RowSource.MISSING)) | (~present & claims_row)
        if wrong.any():
            token = int(wrong.argmax())
            has = "a row" if present[token] else "no row"
            raise TraceError(
                f"{self.name}: token {token} has {has} and row source {sources[token]}; expected a fitting one of "
                f"{', '.join(f'{s.value} {s.name.lower()}' for s in RowSource)}"
            )


def from_rollout(rollout: Rollout, num_experts: int, prefix: str = "") -> TracedSequence:
    """The routes that the engine recorded with a rollout, as "<prefix>group 3 sample 1". TraceError if it has none."""
    name = f"{prefix}group {rollout.group} sample {rollout.sample}"
    if rollout.routed_experts is None:
        raise TraceError(f"{name}: the rollout has no routes; sample with return_routed_experts = True")
    trace = RoutingTrace(rollout.routed_experts, num_experts, present=rollout.routed_mask, label=name)
    return TracedSequence(name, trace, rollout.tokens, row_versions(rollout), row_sources(rollout))


class TraceFile:
    """The sequences of a file, in order; a sequence is decoded when it is asked for, by position or by name."""

    def __init__(self, path: Path, metadata: dict[str, str], tensors: dict[str, np.ndarray]) -> None:
        self.path = path
        self.info = _read_info(path, metadata)
        self.names: tuple[str, ...] = tuple(_json_list(path, metadata, "names", str))
        self.weight_versions: tuple[int, ...] = tuple(_json_list(path, metadata, "weight_versions", int))
        """All versions that any row has, ascending; empty if the file does not say."""
        self._routes = _column(path, tensors, "routes", np.dtype(np.uint8))
        self._offsets = _bounds(path, tensors, "route_offsets", len(self.names), len(self._routes))
        bounds = _column(path, tensors, "cu_seqlens", np.dtype(np.int64))
        self._cu_seqlens = _bounds(path, tensors, "cu_seqlens", len(self.names), int(bounds[-1]) if len(bounds) else 0)
        self._columns = {name: _column(path, tensors, name, t) for name, t in _COLUMNS.items() if name in tensors}
        for name, column in self._columns.items():
            if len(column) != self.num_tokens:
                raise TraceError(f"{path}: {name} has {len(column)} entries, expected {self.num_tokens}, one per token")
        self._position = {name: i for i, name in enumerate(self.names)}
        if len(self._position) < len(self.names):
            raise TraceError(f"{path}: {len(self.names) - len(self._position)} sequences have the name of another one")

    @property
    def num_tokens(self) -> int:
        return int(self._cu_seqlens[-1])

    @property
    def lengths(self) -> np.ndarray:
        """int64 [N], tokens of each sequence."""
        return np.diff(self._cu_seqlens)

    @property
    def num_route_bytes(self) -> int:
        """Size of all encoded traces, headers included."""
        return len(self._routes)

    @property
    def columns(self) -> tuple[str, ...]:
        """Which of tokens, row_versions and row_sources the file holds."""
        return tuple(self._columns)

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[TracedSequence]:
        return (self[i] for i in range(len(self)))

    def __contains__(self, name: str) -> bool:
        return name in self._position

    def __getitem__(self, which: int | str) -> TracedSequence:
        """Decode one sequence. Raises TraceError if its routes are damaged or not of the file's model."""
        i = self._position[which] if isinstance(which, str) else range(len(self))[which]
        label = f"{self.path}: {self.names[i]}"
        data = self._routes[self._offsets[i] : self._offsets[i + 1]]
        trace = decode(data.tobytes(), label=label)
        start, stop = self._cu_seqlens[i], self._cu_seqlens[i + 1]
        expected = (int(stop - start), len(self.info.layers), self.info.top_k)
        if trace.experts.shape != expected or trace.num_experts != self.info.num_experts:
            raise TraceError(
                f"{label}: routes {list(trace.experts.shape)} of {trace.num_experts} experts, expected "
                f"{list(expected)} of {self.info.num_experts} as the file says"
            )
        columns = {name: column[start:stop] for name, column in self._columns.items()}
        return TracedSequence(self.names[i], trace, **columns)


def write_traces(
    path: str | Path,
    info: TraceInfo,
    sequences: Iterable[TracedSequence],
    *,
    ordered: bool = False,
    compress: bool = False,
) -> None:
    """Write a file as a whole or not at all; ``ordered`` and ``compress`` as for ``encode``.

    Raises TraceError if a sequence is not of the model that ``info`` describes, if two have one name, or if only some
    of them have tokens, row_versions or row_sources; ConfigError if the folder does not exist.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: there is no folder {path.parent}; create it first")
    names: list[str] = []
    encoded: list[bytes] = []
    lengths: list[int] = []
    columns: dict[str, list[np.ndarray]] = {name: [] for name in _COLUMNS}
    for sequence in sequences:
        _check_belongs(sequence, info)
        names.append(sequence.name)
        lengths.append(len(sequence.trace.experts))
        encoded.append(encode(sequence.trace, ordered=ordered, compress=compress))
        for name, column in columns.items():
            if (values := getattr(sequence, name)) is not None:
                column.append(values)
    if len(set(names)) < len(names):
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise TraceError(f"{path}: two sequences are called {twice!r}; give each its own name")
    tensors = {
        "routes": np.frombuffer(b"".join(encoded), dtype=np.uint8),
        "route_offsets": _cumulative([len(data) for data in encoded]),
        "cu_seqlens": _cumulative(lengths),
    }
    tensors |= _present_columns(path, columns, len(names))
    _save(path, tensors, _metadata(info, names, tensors.get("row_versions")))


def read_traces(path: str | Path) -> TraceFile:
    """Open a file. Raises TraceError if it is missing, damaged, of another format or a later version."""
    path = Path(path)
    if not path.is_file():
        what = "it is a folder" if path.is_dir() else "there is no such file"
        raise TraceError(f"{path}: {what}; expected a trace file")
    try:
        with safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise TraceError(
                    f"{path}: a safetensors file of format {metadata.get('format', 'unknown')!r}, expected {FORMAT!r}"
                )
            if metadata.get("format_version") != str(FORMAT_VERSION):
                raise TraceError(
                    f"{path}: format version {metadata.get('format_version')!r}, expected '{FORMAT_VERSION}': another "
                    f"megarl wrote it"
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError) as error:
        raise TraceError(f"{path}: not a readable safetensors file ({error}); expected a trace file") from error
    return TraceFile(path, metadata, tensors)


def _check_belongs(sequence: TracedSequence, info: TraceInfo) -> None:
    trace = sequence.trace
    expected = [len(info.layers), info.top_k]
    if list(trace.experts.shape[1:]) != expected or trace.num_experts != info.num_experts:
        raise TraceError(
            f"{sequence.name}: routes [T, {trace.experts.shape[1]}, {trace.experts.shape[2]}] of {trace.num_experts} "
            f"experts, expected [T, {expected[0]}, {expected[1]}] of {info.num_experts} for {info.model}"
        )


def _present_columns(path: Path, columns: dict[str, list[np.ndarray]], num_sequences: int) -> dict[str, np.ndarray]:
    for name, column in columns.items():
        if len(column) not in (0, num_sequences):
            raise TraceError(
                f"{path}: {len(column)} of {num_sequences} sequences have {name}; expected it in all of them or in none"
            )
    return {name: np.concatenate(column) for name, column in columns.items() if column}


def _metadata(info: TraceInfo, names: list[str], row_versions: np.ndarray | None) -> dict[str, str]:
    return {
        "format": FORMAT,
        "format_version": str(FORMAT_VERSION),
        "model": info.model,
        "fingerprint": info.fingerprint,
        "layers": json.dumps(info.layers),
        "num_experts": str(info.num_experts),
        "top_k": str(info.top_k),
        "weight_versions": json.dumps([] if row_versions is None else np.unique(row_versions).tolist()),
        "names": json.dumps(names),
    }


def _save(path: Path, tensors: dict[str, np.ndarray], metadata: dict[str, str]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode  # what the user's umask grants; safetensors would leave it to the owner alone
        save_file(tensors, temporary, metadata)
        temporary.chmod(mode)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _read_info(path: Path, metadata: dict[str, str]) -> TraceInfo:
    numbers: dict[str, int] = {}
    for key in ("num_experts", "top_k"):
        if not metadata.get(key, "").isdecimal():
            raise TraceError(f"{path}: its metadata has {key} = {metadata.get(key)!r}, expected a whole number")
        numbers[key] = int(metadata[key][:9])
    if not 1 <= numbers["top_k"] <= numbers["num_experts"] <= MOST_EXPERTS:
        raise TraceError(
            f"{path}: top-{metadata['top_k'][:9]} of {metadata['num_experts'][:9]} experts, expected 1 <= top_k <= "
            f"num_experts <= {MOST_EXPERTS}"
        )
    layers = tuple(_json_list(path, metadata, "layers", int))
    return TraceInfo(
        metadata.get("model", ""), layers, numbers["num_experts"], numbers["top_k"], metadata.get("fingerprint", "")
    )


def _json_list(path: Path, metadata: dict[str, str], key: str, kind: type) -> list[Any]:
    try:
        values = json.loads(metadata.get(key, ""))
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, list) or not all(type(value) is kind for value in values):
        raise TraceError(f"{path}: its metadata has {key} = {metadata.get(key, '')[:40]!r}, expected a list")
    return values


def _column(path: Path, tensors: dict[str, np.ndarray], name: str, dtype: np.dtype) -> np.ndarray:
    found = tensors.get(name)
    if found is None or found.dtype != dtype or found.ndim != 1:
        what = "none" if found is None else f"{found.dtype} {list(found.shape)}"
        raise TraceError(f"{path}: of tensor {name} found {what}, expected {dtype} with one dimension")
    return found


def _bounds(path: Path, tensors: dict[str, np.ndarray], name: str, num_sequences: int, end: int) -> np.ndarray:
    bounds = _column(path, tensors, name, np.dtype(np.int64))
    rising = len(bounds) > 0 and bounds[0] == 0 and bounds[-1] == end and bool((np.diff(bounds) >= 0).all())
    if len(bounds) != num_sequences + 1 or not rising:
        raise TraceError(
            f"{path}: {name} has {len(bounds)} entries, expected {num_sequences + 1} that rise from 0 to {end}"
        )
    return bounds


def _cumulative(lengths: list[int]) -> np.ndarray:
    return np.cumsum([0, *lengths], dtype=np.int64)
