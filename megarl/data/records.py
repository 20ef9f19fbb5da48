"""Read records (a dict per example) from a JSONL, JSON, Parquet, CSV or TSV file, a dataset folder or a hub name.

Every record comes with its place ("train.jsonl:17", "train.parquet row 17"), for error messages. Lines count from 1, as
in editors. Rows count from 0, as in tables. A .json file holds a list of objects, or an object per line.
"""

import csv
import io
import json
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

from megarl.config.tables.data import FILES
from megarl.errors import ConfigError, DataError, describe, refusal, reworded
from megarl.files.foreign_json import MOST_JSON_BYTES, open_regular, parse_json, read_regular, require_regular
from megarl.files.outputs import write_output

_TYPES = {str: "text", int: "a whole number", float: "a number", bool: "true/false", list: "a list", dict: "a table"}
_BLANK = b"\xef\xbb\xbf \t\r\n"
"""A byte order mark, and white space."""

Record = dict[str, Any]
Records = Iterator[tuple[str, Record]]
"""Each with its place."""


def read_records(source: str | Path, *, split: str | None = None, limit: int | None = None) -> Records:
    """Yield (place, record) for every example of a source, in order, at most ``limit`` examples.

    source: a file with an ending of ``FILES``, a local dataset folder, or a hub name for ``datasets.load_dataset``
    ("owner/name", or "owner/name:config"). split: of a folder or hub data set; None if the data set has a single split.

    DataError for a missing or empty file and a broken line, ConfigError for a split of a file.
    """
    path = Path(source)
    if path.suffix in FILES:
        if split is not None:
            raise ConfigError(f"split = {split!r}, but {source} is a file: only folders and hub names have splits")
        require_file(source)
        records = _READERS.get(path.suffix, _read_table)(path)
    elif path.is_file():
        raise DataError(refusal("format", source=source, ending=path.suffix, files=", ".join(FILES)))
    else:
        records = _read_dataset(str(source), split)
    first = next(records, None)
    if first is None:
        raise DataError(f"{source}: the file is empty: expected at least one example")
    yield from islice(chain([first], records), limit)


def require_file(source: str | Path) -> None:
    """Raise DataError if a source has the name of a file and the file is missing; folders and hub names pass."""
    if Path(source).suffix in FILES:
        require_regular(Path(source))
        if not Path(source).is_file():
            place = "" if Path(source).is_absolute() else f" in the working folder {Path.cwd()}"
            raise DataError(f"{source}: there is no such file{place}")


def write_jsonl(path: Path, rows: Iterable[Record]) -> None:
    """Write a JSON object per line; the file appears complete or not at all.

    ConfigError if the file exists and is not as megarl wrote the file.
    """
    write_output(path, "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows).encode())


def get_field(record: Record, field: str, place: str) -> Any:
    """Return the value of a field. A dotted name ("reward_model.ground_truth") reaches into nested tables.

    DataError, with a list of the record's fields, if the field is missing.
    """
    if field in record:
        return record[field]
    value: Any = record
    for key in field.split("."):
        if not isinstance(value, dict) or key not in value:
            raise DataError(refusal("no_field", place=place, field=field, names=", ".join(map(str, record)) or "none"))
        value = value[key]
    return value


def type_name(value: object) -> str:
    """Return the type of a value in words, for an error message."""
    return "null" if value is None else _TYPES.get(type(value), type(value).__name__)


def _read_jsonl(path: Path) -> Records:
    with open_regular(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(MOST_JSON_BYTES + 1), b""), start=1):
            place = f"{path}:{number}"
            if not line.strip():
                continue
            try:
                # utf-8-sig removes a byte order mark at the start of the file.
                record = parse_json(line.decode("utf-8-sig" if number == 1 else "utf-8"), "it", MOST_JSON_BYTES)
            except UnicodeDecodeError as error:
                raise DataError(f"{place}: not UTF-8 text (byte {error.start} of the line)") from error
            except DataError as error:
                hint = ": half a character" if "hex escape" in str(error) else ""
                form = "one JSON object per line" + (", or a list of them" if path.suffix == ".json" else "")
                raise DataError(f"{place}: broken JSON ({error}{hint}): expected {form}") from error
            yield place, _as_record(record, place)


def _as_record(value: Any, place: str) -> Record:
    if not isinstance(value, dict):
        raise DataError(f"{place}: {type_name(value)} instead of a JSON object with named fields")
    return value


def _read_json(path: Path) -> Records:
    """Return the members of a list, which is parsed as a whole; of a file without a list, its lines."""
    with open_regular(path) as file:
        if not file.read(1024).lstrip(_BLANK).startswith(b"["):
            return _read_jsonl(path)
    advice = f"; or write an object per line: jq -c '.[]' {path} > {path.with_suffix('.jsonl')}"
    with reworded(DataError, DataError, "", advice):
        rows = parse_json(read_regular(path, MOST_JSON_BYTES).lstrip(_BLANK), str(path), MOST_JSON_BYTES)
    return ((f"{path} row {row}", _as_record(value, f"{path} row {row}")) for row, value in enumerate(rows))


def _read_table(path: Path) -> Records:
    """Yield the rows of a CSV or TSV file as texts, by the names in its first line; missing fields are None."""
    with open_regular(path) as file:
        text = io.TextIOWrapper(file, "utf-8-sig", newline="")
        lines = iter(lambda: text.readline(MOST_JSON_BYTES), "")  # an endless line is a row of too many fields
        rows = csv.DictReader(lines, delimiter="\t" if path.suffix == ".tsv" else ",", strict=True)
        try:
            if len({*(names := rows.fieldnames or [])}) < len(names):
                raise DataError(f"{path}:1: found the names {[*names]}, expected another name for each column")
            for row, record in enumerate(rows):
                if None in record:
                    raise DataError(f"{path} row {row}: {len(record[None])} fields more than the {len(names)} names")
                yield f"{path} row {row}", record
        except (UnicodeDecodeError, csv.Error) as error:
            raise DataError(refusal("no_table", path=path, line=rows.line_num, error=error)) from error


def _read_parquet(path: Path) -> Records:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    row = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for record in batch.to_pylist():
                    yield f"{path} row {row}", record
                    row += 1
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a readable Parquet file after row {row} ({describe(error)})") from error


def _read_dataset(source: str, split: str | None) -> Records:
    """Yield the records of a folder or a hub name. The import of ``datasets`` takes a second."""
    from datasets import DatasetDict, load_dataset

    name, _, config_name = (source, "", "") if Path(source).is_dir() else source.partition(":")
    try:
        data = load_dataset(name, config_name or None, split=split)
    except Exception as error:  # load_dataset documents no errors
        raise DataError(refusal("dataset", source=source, error=describe(error))) from error
    if isinstance(data, DatasetDict):
        if len(data) != 1:
            raise DataError(refusal("splits", source=source, splits=", ".join(map(str, data))))
        (data,) = data.values()
    for row, record in enumerate(data):
        yield f"{source} row {row}", dict(record)


_READERS = {".jsonl": _read_jsonl, ".json": _read_json, ".parquet": _read_parquet}
