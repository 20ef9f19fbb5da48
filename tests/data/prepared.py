"""tools/prepare_data.py as a module."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

sys.modules.setdefault("prepare_data", SimpleNamespace())  # type: ignore[arg-type]  # for its dataclass
tool = SimpleNamespace(
    **runpy.run_path(str(Path(__file__).parents[2] / "tools" / "prepare_data.py"), run_name="prepare_data")
)
