"""Attacks small runs at random for some minutes, and prints a table of what happened.

    .venv/bin/python tools/chaos.py --minutes 20 --seed 0
    .venv/bin/python tools/chaos.py --kinds damage --seed 17 --episodes 1    # an episode again
    .venv/bin/python tools/chaos.py --kinds wire_lies proxy_away             # with a real SGLang server

Kills processes of every kind, damages checkpoints and other files, fills disks (as root), and lets engines lie. After
each episode it checks that the run has come to its end, or has stopped with a sentence that names the cause, and that
nothing is lost, trained twice or left behind (tests/chaos). Exit code 1 if something did not hold.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from contextlib import ExitStack, nullcontext
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "chaos")]
from episodes import EPISODES, Arena, Happened, play, table  # noqa: E402  (the tests' own)
from server_episodes import SERVER_EPISODES, shared_server  # noqa: E402

ALL = EPISODES | SERVER_EPISODES


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0, help="of the first episode; the next one has the next number")
    parser.add_argument("--kinds", nargs="+", choices=list(ALL), default=list(EPISODES))
    parser.add_argument("--episodes", type=int, default=1_000_000, help="most episodes")
    given = parser.parse_args()
    happened: list[Happened] = []
    failures = 0
    until = time.monotonic() + 60.0 * given.minutes
    with tempfile.TemporaryDirectory(prefix="megarl-chaos-") as folder, ExitStack() as held:
        arena = Arena(Path(folder))
        held.enter_context(shared_server(arena) if {*given.kinds} & {*SERVER_EPISODES} else nullcontext())
        for number in range(given.episodes):
            if time.monotonic() > until:
                break
            kind, seed, began = given.kinds[number % len(given.kinds)], given.seed + number, time.monotonic()
            try:
                found = play(arena, kind, seed, ALL)
            except AssertionError as error:
                failures += 1
                print(f"FAILED: {error}\n", flush=True)
            else:
                happened += found
                what = "; ".join(f"{each.attack}: {each.outcome}" for each in found)
                print(f"{kind} --seed {seed}: {time.monotonic() - began:.1f} s: {what}", flush=True)
    print(f"\n{len(happened)} attacks; {failures} episodes in which something did not hold\n\n{table(happened)}")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
