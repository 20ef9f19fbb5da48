"""Report of the doctor: checks and the verdict."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from megarl.errors import printable
from megarl.files.texts import read_table
from megarl.text_table import text_table

Status = Literal["ok", "optional", "warning", "failed"]
_TEXTS = read_table(__file__, "findings.toml")


@dataclass(frozen=True, slots=True)
class Finding:
    """A need or option of a run. "failed": a run would not work; "warning": a run may not work; "optional": absent, and
    not needed here."""

    name: str
    """A key of the configuration, or the name of a package or program."""
    status: Status
    found: str
    expected: str = ""
    advice: str = ""

    def says(self) -> str:
        """Found, expected and advice, on one line, without the name."""
        found = self.found.removeprefix(f"{self.name}: ") + (f", expected {self.expected}" if self.expected else "")
        return " ".join(f"{found}{f'; {self.advice}' if self.advice else ''}".split())


def find(key: str, /, **facts: Any) -> Finding:
    """Return the finding of this key in findings.toml, with ``facts`` in its texts."""
    return Finding(**{field: text.format(**facts) for field, text in _TEXTS[key].items()})


@dataclass(frozen=True, slots=True)
class Diagnosis:
    config: str | None
    """Path of the configuration; None: the machine alone was examined."""
    checks: Sequence[Finding]
    versions: Mapping[str, str | None]
    """Distribution -> release; None if not installed."""

    @property
    def ready(self) -> bool:
        return not any(check.status == "failed" for check in self.checks)

    def to_text(self) -> str:
        names = ", ".join(dict.fromkeys(check.name for check in self.checks if check.status == "failed"))
        subject = f"for {self.config}" if self.config else "to train on this machine"
        lines = [f"ready {subject}" if self.ready else f"not ready {subject}: {names}"]
        for status, begin in (("failed", "- "), ("warning", "- warning: ")):
            said = [(check.says(), check.name) for check in self.checks if check.status == status]
            for says in dict.fromkeys(text for text, _ in said):  # one line for all packages of one command
                lines.append(f"{begin}{', '.join(name for text, name in said if text == says)}: {says}")
        checks = [(each.status, each.name, each.says()) for each in self.checks if each.status in ("ok", "optional")]
        return printable("\n".join([*lines, "", text_table(checks, ("", "what", "found"))]))

    def to_json(self) -> str:
        """verdict, config, checks (name, status, found, expected, advice), versions."""
        return json.dumps({"verdict": "ready" if self.ready else "not ready", **asdict(self)}, indent=2)
