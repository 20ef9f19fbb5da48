"""Puts ``startup`` on the path of this process and of those that the tests start."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

STARTUP = str(Path(__file__).parent / "startup")
"""On the path of every process of the tests; Python itself imports what is there."""

if STARTUP not in sys.path:
    sys.path.append(STARTUP)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), STARTUP]))
    importlib.import_module("sitecustomize")
