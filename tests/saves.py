"""A checkpoint saved as the trainer saves it, and waited for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.megatron.checkpoints.saver import Saver
from megarl.megatron.policy import Policy


def save(folder: Path, step: int, policy: Policy, loop: Mapping[str, Any], keep: int, run: str = "") -> Path:
    """Save checkpoint ``step``; a collective call."""
    saver = Saver(folder, keep, run)
    saver.begin(step, policy, loop)
    path = saver.poll(wait=True)
    assert path is not None
    return path
