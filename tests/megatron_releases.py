"""Other releases of Megatron-Core, installed once for all clones (see tools/environments.py)."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

from environments import megatron_release as installed

__all__ = ["installed"]
