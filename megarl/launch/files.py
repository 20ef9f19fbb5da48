"""Files by which the launcher and the servers' steps speak; they lie beside launch.json."""

from __future__ import annotations

from pathlib import Path


def ready_file(launch_file: Path, node: int) -> Path:
    """There when the servers of a node answer."""
    return launch_file.with_name(f"servers{node}.json")


def end_file(launch_file: Path, node: int) -> Path:
    """Holds the name of the launch whose servers on a node are to end; those of another launch stay."""
    return launch_file.with_name(f"servers{node}.end")
