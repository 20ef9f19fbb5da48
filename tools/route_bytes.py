"""Bytes of routing traces that each rank receives, as ranks are added: measured on gloo ranks of this machine.

    python tools/route_bytes.py

The same 8 ragged sequences (4 MoE layers, top-2 of 8 experts, one byte per expert) are sampled on the ranks of a model
copy in turn and delivered to the routers that replay them.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "megatron"))

from matrix_world import LAYOUTS
from ranks import Case, launch

NAMES = (
    "single",
    "dp2",
    "dp4",
    "cp2",
    "cp4",
    "pp2",
    "pp4",
    "tp2",
    "tp4",
    "cp2 ep2",
    "cp2 pp2 vpp2",
    "tp2 pp2 ep2 etp1",
)


def main() -> int:
    arguments = (("router", "softmax"),)
    cases = {name: Case(LAYOUTS[name][0], "cases_exchange:delivered", LAYOUTS[name][1], arguments) for name in NAMES}
    with tempfile.TemporaryDirectory() as folder:
        outcomes = launch(list(cases.values()), Path(folder) / "run")
    print("| layout | ranks | bytes received, by rank | largest against one rank |\n|---|---|---|---|")
    alone = outcomes[cases["single"]].value["bytes"][0]
    for name, case in cases.items():
        outcome = outcomes[case]
        if outcome.error is not None or not all(outcome.value["same"]):
            print(f"{name}: {outcome.error or 'routes differ'}", file=sys.stderr)
            return 1
        found = outcome.value["bytes"]
        print(f"| {name} | {case.world_size} | {', '.join(map(str, found))} | {max(found) / alone:.2f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
