"""Trains the quickstart's model in every layout of launch/, with real SGLang servers, on a Slurm of two nodes.

    make quickstart sglang-cpu && .venv/bin/python tools/slurm_layouts.py OUT [--steps 20] [--layouts local colocated]

The nodes are two daemons on this machine, which needs root, Slurm and munge. Prints held-out pass rates, the
disagreement between sampling engine and trainer, and how many samples the audit log says were trained.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from megarl.ops.shipped import find
from megarl.run.audit import check
from megarl.run.metrics_log import read_metrics

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "ops" / "launch"))
from slurm_cluster import Cluster  # noqa: E402  (the tests' own)

RECIPE = str(find("cpu-quickstart"))
LAYOUTS = {
    "local": ["--launch.ranks_per_node", "2"],
    "colocated": ["--launch.nodes", "2", "--launch.ranks_per_node", "2"],
    "disaggregated": ["--launch.ranks_per_node", "2", "--launch.server_nodes", "1"],
    "heterogeneous": ["--launch.ranks_per_node", "2", "--launch.server_nodes", "1"],
}
KEY = "QUICKSTART_SERVER_KEY"


def main() -> None:
    """Each layout in turn, each in a run folder of its own under OUT."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    options = parser.parse_args()
    out: Path = options.out.resolve()
    out.mkdir(parents=True)
    with Cluster(out / "slurm") as cluster:
        for layout in options.layouts:
            started = time.monotonic()
            ended = train(cluster, layout, out, options.steps)
            tell(layout, out / layout, options.steps, f"{ended}, {time.monotonic() - started:.0f} s")


def train(cluster: Cluster, layout: str, out: Path, steps: int) -> str:
    """Submit the run as a user would, and return how it ended."""
    python = ROOT / ".venv-sglang/bin/python"
    words = [RECIPE, "--run.dir", str(out / layout), "--run.steps", str(steps), "--eval.every", str(max(steps // 2, 1))]
    words += ["--rollout.engine", "sglang", "--sglang.python", str(python), "--sglang.max_total_tokens", "8192"]
    words += ["--sglang.api_key_env", KEY, *LAYOUTS[layout]]
    env = {**os.environ, KEY: os.urandom(16).hex(), "MEGARL_PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    if layout == "local":
        with (out / "local.log").open("w") as log:
            code = subprocess.run([find("local.sh"), *words], cwd=ROOT, env=env, stderr=log, check=False).returncode
        return f"exit code {code}"
    nodes = [] if layout == "heterogeneous" else ["--nodes=2"]
    job = cluster.submit(*nodes, f"--output={out}/{layout}.log", find(f"{layout}.sbatch"), *words, env=env, cwd=ROOT)
    return cluster.wait(job, 3600.0)["JobState"]


def tell(layout: str, run: Path, steps: int, ended: str) -> None:
    """Print one line about a finished run."""
    records = list(read_metrics(run / "metrics.jsonl"))
    rates = " -> ".join(f"{record['eval/pass_rate']:.1%}" for record in records if record["kind"] == "eval")
    last = [record for record in records if record["kind"] == "step"][-1]
    gaps = f"k3 {last['rollout/k3']:.1e}  native flip {last['router/native/flip']:.2%}"
    trained = check(run / "samples.jsonl", steps)
    print(f"{layout:<14} {ended:<18} held out {rates}  {gaps}  samples {trained}", flush=True)


if __name__ == "__main__":
    main()
