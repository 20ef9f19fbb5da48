"""Files of tests need not survive a power cut."""

from __future__ import annotations

import os


def skip_fsync() -> None:
    """``os.fsync`` does nothing in this process and in those forked from it.

    A busy disk answers fsync in tenths of a second, and checkpoints ask for thousands. No test can tell the difference:
    what a killed process wrote is seen by others without it.
    """
    os.fsync = lambda fd: None
