"""Write docs/config.md: every key of the configuration, its type, default and meaning, from the tables' docstrings.

.venv/bin/python tools/config_doc.py [--out FILE]
"""

import argparse
import inspect
import json
import types
import typing
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from megarl.config import Config
from megarl.config import file as config_file
from megarl.config.tables.base import Table

PAGE = Path(__file__).parents[1] / "docs" / "config.md"
HEAD = """# Every key of the configuration

A configuration is one TOML file. Each key is also a flag of `megarl train`, `sft`, `eval`, `plan`, `doctor` and
`launch`: `--rollout.temperature 0.7`. Defaults < file < flags. A key with the default `-` may be absent; as a flag,
`none` means no value. A wrong key, value or combination is one line and exit code 2, before torch is imported; keys of
`[megatron]` are checked when the model is built, and by `megarl doctor`.

Paths are relative to the working folder, in the file and in flags: start in the folder of the configuration, or write
whole paths. An input that only the configuration's folder has is an error that names both. Modules of your own
(`package.module:name`) are looked for in the configuration's folder first. A run's `config.toml` repeats paths as they
were written; resume and evaluate in the same working folder.

`tools/config_doc.py` writes this page from the code.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=PAGE)
    parser.parse_args().out.write_text(page())


def page() -> str:
    parts, table = [HEAD], ""
    for dotted, info in config_file.keys().items():
        name, _, key = dotted.partition(".")
        if name != table:
            table = name
            parts.append(f"\n## [{name}]\n\n{_about(name)}\n\n| key | type | default | meaning |\n|---|---|---|---|\n")
        parts.append(f"| `{key}` | {_type(info.annotation)} | {_default(info)} | {_cell(info.description or '')} |\n")
    return "".join(parts)


def _about(name: str) -> str:
    info = Config.model_fields[name]
    for option in (info.annotation, *typing.get_args(info.annotation)):
        if isinstance(option, type) and issubclass(option, Table):
            text = " ".join((inspect.getdoc(option) or "").split()).partition(": ")[2] or ""
            return text[:1].upper() + text[1:]
    return "A free table."


def _type(annotation: Any) -> str:
    origin, options = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type(options[0])
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_type(option) for option in options if option is not type(None))
    if origin is typing.Literal:
        return ", ".join(f"`{json.dumps(option)}`" for option in options)
    if origin is list:
        return f"list of {_type(options[0])}"
    if origin is dict:
        return "table"
    names = {str: "text", int: "whole number", float: "number", bool: "true, false", Any: "any"}
    return names[annotation]


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "**needed**"
    value = info.get_default(call_default_factory=True)
    return "-" if value is None else f"`{config_file.as_toml(value)}`"


def _cell(text: str) -> str:
    """Text within a table: what looks like a placeholder stays visible, and a bar does not end the cell."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")


if __name__ == "__main__":
    main()
