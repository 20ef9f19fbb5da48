"""Files of routing traces: many sequences of one model in one safetensors file, encoded by ``megarl.routes``.

    metadata  format, format_version, model, layers, num_experts, top_k, weight_versions, names
    tensors   routes uint8 [bytes] and route_offsets int64 [N+1]: the encoded traces back to back
              cu_seqlens int64 [N+1]
              optional: tokens int32 [T], row_versions int32 [T], gate_weights float32 [T, L, K]

Lists in the metadata are JSON. Each encoded trace has a checksum, and is decoded on access.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from pydantic import BaseModel, Field, Json, StrictInt, StrictStr, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from megarl.core.types import Rollout
from megarl.errors import ConfigError, DataError, TraceError, reason_of, refusal, reworded
from megarl.files.foreign_json import require_regular
from megarl.files.writing import write_atomically
from megarl.routes import RoutingTrace, decode, encode
from megarl.routes.turns import row_versions

FORMAT, FORMAT_VERSION = "megarl-routing-traces", 1
MOST_EXPERTS = 65536
Tensors = Mapping[str, np.ndarray]
Metadata = Mapping[str, str]
_COLUMNS = {"tokens": np.dtype(np.int32), "row_versions": np.dtype(np.int32), "gate_weights": np.dtype(np.float32)}
"""Optional tensors with one entry, or row, per token."""


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
    gate_weights: np.ndarray | None = None
    """float32 [T, L, K], the weights of the experts."""

    def __post_init__(self) -> None:
        shape = self.trace.experts.shape
        for name, dtype in _COLUMNS.items():
            column, expected = getattr(self, name), shape if name == "gate_weights" else shape[:1]
            if column is not None and (getattr(column, "dtype", None) != dtype or column.shape != expected):
                form = f"{np.asarray(column).dtype} {list(np.shape(column))}"
                raise TraceError(f"{self.name}: {name} is {form}, expected {dtype} {list(expected)}")


def from_rollout(rollout: Rollout, num_experts: int, prefix: str = "") -> TracedSequence:
    """Return the routes that the engine recorded with a rollout, named "<prefix>group 3 sample 1".

    Raises TraceError if the rollout has no routes.
    """
    name = f"{prefix}group {rollout.group} sample {rollout.sample}"
    if rollout.routed_experts is None:
        raise TraceError(f"{name}: the rollout has no routes; sample with return_routed_experts = True")
    trace = RoutingTrace(rollout.routed_experts, num_experts, present=rollout.routed_mask, label=name)
    return TracedSequence(name, trace, rollout.tokens, row_versions(rollout), rollout.gate_weights)


def write_traces(path: str | Path, info: TraceInfo, sequences: Sequence[TracedSequence]) -> None:
    """Write a file; it appears complete or not at all.

    Raises TraceError if a sequence is not of the model that ``info`` describes, if two have one name, or if only some
    of them have an optional column; ConfigError if the folder does not exist.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: there is no folder {path.parent}; create it first")
    names, lengths = [sequence.name for sequence in sequences], [len(sequence.trace.experts) for sequence in sequences]
    _number(names, path)
    for sequence, length in zip(sequences, lengths, strict=True):
        _check_model(sequence.trace, info, length, sequence.name)
    encoded = [encode(sequence.trace) for sequence in sequences]
    tensors = {
        "routes": np.frombuffer(b"".join(encoded), dtype=np.uint8),
        "route_offsets": np.cumsum([0, *map(len, encoded)], dtype=np.int64),
        "cu_seqlens": np.cumsum([0, *lengths], dtype=np.int64),
    }
    for name in _COLUMNS:
        column = [values for sequence in sequences if (values := getattr(sequence, name)) is not None]
        if len(column) not in (0, len(names)):
            raise TraceError(f"{path}: {len(column)} of {len(names)} sequences have {name}; expected all or none")
        tensors |= {name: np.concatenate(column)} if column else {}
    versions = np.unique(tensors.get("row_versions", ())).tolist()
    fields = {"format": FORMAT, "format_version": FORMAT_VERSION, **asdict(info)}
    fields |= {"weight_versions": versions, "names": names}
    metadata = {key: value if isinstance(value, str) else json.dumps(value) for key, value in fields.items()}
    write_atomically(path, dump_tensors(tensors, metadata))


def _check_model(trace: RoutingTrace, info: TraceInfo, num_tokens: int, label: str) -> None:
    shape, expected = list(trace.experts.shape), [num_tokens, len(info.layers), info.top_k]
    if shape != expected or trace.num_experts != info.num_experts:
        raise TraceError(refusal("routes_in_file", label=label, shape=shape, trace=trace, expected=expected, info=info))


class _Metadata(BaseModel):
    model: str = ""
    layers: Json[tuple[StrictInt, ...]]
    num_experts: int = Field(ge=1, le=MOST_EXPERTS)
    top_k: int = Field(ge=1)
    weight_versions: Json[tuple[StrictInt, ...]]
    names: Json[tuple[StrictStr, ...]]


def read_traces(path: str | Path) -> "TraceFile":
    """Open a file. Raises TraceError if it is missing, damaged, of another format or a later version."""
    path = Path(path)

    def check_format(metadata: Mapping[str, str]) -> None:
        file_format, version = metadata.get("format", "unknown"), metadata.get("format_version")
        if file_format != FORMAT:
            raise TraceError(f"{path}: a safetensors file (format {file_format!r}{refusal('no_trace_file')}")
        if version != str(FORMAT_VERSION):
            raise TraceError(f"{path}: format version {version!r}, expected '{FORMAT_VERSION}': of another megarl")

    tensors, metadata = load_tensors(path, check_format)
    try:
        return TraceFile(path, _Metadata.model_validate(metadata), tensors)
    except ValidationError as error:
        first = error.errors()[0]
        entry = f"{first['loc'][0]} = {str(first['input'])[:40]!r}"
        raise TraceError(f"{path}: its metadata has {entry}: {first['msg']}") from error


class TraceFile:
    """The sequences of a file, in order. Access by position or name decodes a sequence."""

    def __init__(self, path: Path, metadata: _Metadata, tensors: Tensors) -> None:
        self.path, self.names, self.weight_versions = path, metadata.names, metadata.weight_versions
        self.info = TraceInfo(**metadata.model_dump(exclude={"names", "weight_versions"}))
        if self.info.top_k > self.info.num_experts:
            raise TraceError(f"{path}: top-{self.info.top_k} of {self.info.num_experts} experts")
        self._routes = _read_column(path, tensors, "routes", np.dtype(np.uint8))
        self.num_route_bytes = len(self._routes)
        """Size of all encoded traces, headers included."""
        self._columns = {name: _read_column(path, tensors, name, t) for name, t in _COLUMNS.items() if name in tensors}
        self.columns = tuple(self._columns)
        """Which optional columns the file holds."""
        self._offsets = _read_bounds(path, tensors, "route_offsets", len(self.names), self.num_route_bytes)
        self._cu_seqlens = _read_bounds(path, tensors, "cu_seqlens", len(self.names))
        self.num_tokens, self.lengths = int(self._cu_seqlens[-1]), np.diff(self._cu_seqlens)
        """lengths: int64 [N], tokens of each sequence."""
        for name, column in self._columns.items():
            if len(column) != self.num_tokens:
                raise TraceError(f"{path}: {name} has {len(column)} entries, expected {self.num_tokens}, one per token")
        self._position = _number(self.names, path)

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
        trace = decode(self._routes[self._offsets[i] : self._offsets[i + 1]].tobytes(), label=label)
        start, stop = self._cu_seqlens[i], self._cu_seqlens[i + 1]
        _check_model(trace, self.info, int(stop - start), label)
        columns = {name: column[start:stop] for name, column in self._columns.items()}
        return TracedSequence(self.names[i], trace, **columns)


def common_names(a: TraceFile, b: TraceFile) -> list[str]:
    """Names that both files have, in the order of the first. TraceError if none, or for models of other shapes."""
    for name in ("layers", "num_experts", "top_k"):
        if getattr(a.info, name) != getattr(b.info, name):
            facts = {"a": a, "name": name, "value_a": getattr(a.info, name), "b": b, "value_b": getattr(b.info, name)}
            raise TraceError(refusal("model_of_files", **facts))
    names = [name for name in a.names if name in b]
    if not names:
        raise TraceError(refusal("no_common_name", a=a, b=b, names=a.names[:2], others=b.names[:2]))
    return names


def require_same_tokens(a: TracedSequence, b: TracedSequence) -> None:
    """TraceError if both know their tokens, and the tokens differ."""
    if a.tokens is None or b.tokens is None or np.array_equal(a.tokens, b.tokens):
        return
    if len(a.tokens) != len(b.tokens):
        raise TraceError(refusal("tokens_in_files", a=a, num_a=len(a.tokens), num_b=len(b.tokens)))
    index = int((a.tokens != b.tokens).argmax())
    raise TraceError(refusal("token_in_files", a=a, index=index, token_a=a.tokens[index], token_b=b.tokens[index]))


def _number(names: Sequence[str], path: Path) -> dict[str, int]:
    """Name -> position; TraceError if two sequences have one name."""
    positions: dict[str, int] = {}
    for position, name in enumerate(names):
        if positions.setdefault(name, position) != position:
            raise TraceError(f"{path}: two sequences are called {name!r}; give each its own name")
    return positions


def _read_column(path: Path, tensors: Tensors, name: str, dtype: np.dtype) -> np.ndarray:
    column, dims = tensors.get(name), 3 if name == "gate_weights" else 1
    if column is None or column.dtype != dtype or column.ndim != dims:
        description = "none" if column is None else f"{column.dtype} {list(column.shape)}"
        raise TraceError(f"{path}: of tensor {name} found {description}, expected {dtype} with {dims} dimension(s)")
    return column


def _read_bounds(path: Path, tensors: Tensors, name: str, count: int, end: int | None = None) -> np.ndarray:
    """Return [N+1] offsets that rise from 0 to ``end``; default the last offset."""
    bounds = _read_column(path, tensors, name, np.dtype(np.int64))
    end = int(bounds[-1]) if end is None and len(bounds) else end or 0
    rising = len(bounds) > 0 and bounds[0] == 0 and bounds[-1] == end and bool((np.diff(bounds) >= 0).all())
    if len(bounds) != count + 1 or not rising:
        raise TraceError(f"{path}: {name} has {len(bounds)} entries, expected {count + 1} that rise from 0 to {end}")
    return bounds


def dump_tensors(tensors: Tensors, metadata: Metadata) -> bytes:
    """Return the content of a file with tensors of any shape."""
    return save({name: np.ascontiguousarray(values) for name, values in tensors.items()}, dict(metadata))


def _describe_fault(path: Path, error: Exception) -> str:
    if not isinstance(error, SafetensorError):
        return reason_of(error)
    with path.open("rb") as file:
        begin = file.read(512)
    is_text = begin and b"\0" not in begin
    return f"text, begins with {begin[:20]!r}" if is_text else str(error) if begin else "it is empty"


def load_tensors(path: Path, check: Callable[[Metadata], None] = lambda _: None) -> tuple[Tensors, Metadata]:
    """Return arrays of the stored shapes, and metadata; ``check`` gets the metadata before a tensor is read.

    TraceError if the file is damaged.
    """
    kinds = (OSError, DataError, SafetensorError, TypeError)  # TypeError: a dtype without a match in numpy
    prefix, expected = f"{path}: not a readable safetensors file (", refusal("no_trace_file")
    with reworded(kinds, TraceError, prefix, expected, lambda error: _describe_fault(path, error)):
        require_regular(path)
        with safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
            check(metadata)
            return {name: file.get_tensor(name) for name in file.keys()}, metadata  # noqa: SIM118 (not a mapping)
