"""The files of signs of life, and what they say about the ranks; ``megarl.run.vitals`` writes them."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.data.files import read_record


def rank_file(folder: Path, rank: int) -> Path:
    """What a rank is doing."""
    return folder / "ranks" / f"{rank:05d}.json"


def stop_file(folder: Path) -> Path:
    """A request to stop: the name of the start of the trainer that should end."""
    return folder / "stop"


def stacks_file(folder: Path, rank: int) -> Path:
    """Stacks of the threads of a rank that hung."""
    return folder / "ranks" / f"{rank:05d}.stacks.txt"


def read_signs(folder: Path, ranks: int, attempt: str | None = None) -> list[dict[str, Any]]:
    """The last sign of each rank, of this start of the trainer if one is named; a rank without a sign has step -1."""
    signs = []
    for rank in range(ranks):
        sign = read_record(rank_file(folder, rank))
        if sign and (attempt is None or sign.get("attempt") == attempt):
            signs.append(sign)
        else:
            signs.append({"rank": rank, "host": "?", "pid": 0, "step": -1, "phase": "no sign of life", "beat": 0.0})
    return signs


def describe_ranks(signs: Sequence[Mapping[str, Any]], now: float | None) -> str:
    """Where ranks are, most suspicious first: ranks that are gone, then silent ones, then the smallest group.

    ``now`` is None if all of them have ended; then the smallest group comes first.

    E.g. "rank 1: gone in train after step 3; ranks 0, 2-3: sync after step 3".
    """
    places: dict[tuple[int, str], list[int]] = {}
    for sign in signs:
        state, rank = ("", 0) if now is None else _judge(sign, now)
        text = state + sign["phase"] + (f" after step {sign['step']}" if sign["step"] >= 0 else "")
        text += f" ({sign['error']})" if sign.get("error") else ""
        places.setdefault((rank, text), []).append(sign["rank"])
    ordered = sorted(places.items(), key=lambda item: (item[0][0], len(item[1])))
    return "; ".join(f"{_name_ranks(members)}: {text}" for (_, text), members in ordered)


def _judge(sign: Mapping[str, Any], now: float) -> tuple[str, int]:
    """What is wrong with a rank, as the beginning of a phrase, and its place in the order."""
    if sign["host"] == socket.gethostname() and sign["pid"] and not Path(f"/proc/{sign['pid']}").exists():
        return "gone in ", 0
    silent = now - sign["beat"]
    if silent > 2.5 * sign.get("beat_s", 2.0):
        return f"silent for {silent:.0f} s in " if sign["beat"] else "", 1
    return "", 2


def _name_ranks(members: list[int]) -> str:
    """ "rank 3", "ranks 0-2, 5"."""
    spans: list[list[int]] = []
    for rank in members:
        if spans and rank == spans[-1][-1] + 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    words = ", ".join("-".join(map(str, span)) for span in spans)
    return f"rank{'s' if len(members) > 1 else ''} {words}"
