"""What is run on every release of Megatron-Core: by ``test_release_training.py`` and ``test_megatron_versions.py`` in
part, by ``tools/version_matrix.py`` as a whole."""

from __future__ import annotations

import base64
import csv
import functools
import hashlib
import importlib.util
import os
import pickle
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import preloaded
from megatron_releases import installed

if TYPE_CHECKING:
    from forks import Ended
    from train_world import World

HERE = Path(__file__).parent
PATCH = ("-m", "megarl.cli", "patch")
OLDER = ("0.12.3", "0.13.1", "0.14.0", "0.15.3")
PATCHED = (*OLDER, "0.16.1")
NEWER = ("0.17.1", "0.18.2", "0.19.2")
TRAINED = ("0.16.0", "0.16.1", *NEWER)
"""Those that the trainer runs on; 0.16.0 and the newer ones need no patch and have none."""
RELEASES = (*OLDER, *TRAINED)
"""All that replay in a loop of one's own runs on."""

_POINT = "megatron/test_megatron_matrix.py::test_acceptance_replay_holds_at_every_point_of_the_layout"
REPLAY_TESTS = (
    "megatron/test_megatron_replay_semantics.py",
    "megatron/test_megatron_replay_errors.py",
    "verify/test_watch.py",
    *(f"{_POINT}[{layout}]" for layout in ("single", "tp2-ep2-etp1", "pp2-vpp2")),
)

CHECKPOINT_TESTS = tuple(
    f"megatron/test_megatron_checkpoint.py::test_a_{name}"
    for name in (
        "resumed_run_equals_the_uninterrupted_one_bit_for_bit",
        "run_resumes_in_its_own_and_in_other_layouts",
        "checkpoint_of_another_model_is_refused",
    )
)
LAYOUT_TESTS = ("megatron/test_megatron_matrix.py",)
"""Replay in every layout, with every recomputation."""
CONVERSION_TESTS = (
    *(
        f"megatron/test_megatron_conversion.py::TestRoundTrip::test_every_bit_comes_back[{family}-local]"
        for family in ("qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe", "llama")
    ),
    "megatron/test_megatron_conversion.py::TestCommand::test_checkpoints_of_runs_and_of_megatron_lm_are_found",
    "megatron/test_megatron_lm_loader.py",
)
EXPORT_TESTS = tuple(
    f"megatron/test_megatron_weights.py::test_{name}"
    for name in ("export_gives_back_every_tensor_of_the_file_bit_for_bit",)
)
_ALIKE = """
import importlib.util, itertools, sys, torch
import megatron.core
from megatron.core.transformer.moe import moe_utils

spec = importlib.util.spec_from_file_location("unpatched", sys.argv[1])
unpatched = importlib.util.module_from_spec(spec)
spec.loader.exec_module(unpatched)
name = next(n for n in ("topk_softmax_with_capacity", "topk_routing_with_score_function") if hasattr(moe_utils, n))
scorings = [dict(), dict(use_pre_softmax=True), dict(score_function="sigmoid"), dict(scaling_factor=2.5),
            dict(score_function="sigmoid", expert_bias=torch.linspace(0, 1, 8))]
groupings = [dict(), dict(num_groups=4, group_topk=2)]
same = 0
for scoring, grouping, dtype in itertools.product(scorings, groupings, (torch.float32, torch.bfloat16)):
    found = []
    for module in (unpatched, moe_utils):
        logits = torch.randn(64, 8, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
        outputs = getattr(module, name)(logits, 2, **scoring, **grouping)
        (outputs[0] * torch.arange(8)).sum().backward()
        found.append([*outputs, logits.grad])
    same += all(map(torch.equal, *found))
print(megatron.core.__version__, megatron.core.__file__, same)
"""
"""With the unpatched file as argument: prints release, place, and in how many of 20 ways of scoring the patched one,
without an object in the hook, returns the very same numbers and gradients."""


@dataclass(frozen=True)
class Ran:
    """A program that has ended."""

    status: int
    output: str
    seconds: float

    @property
    def passed(self) -> int:
        """Tests, of a pytest."""
        found = re.search(r"(\d+) passed", self.output)
        return int(found[1]) if found else 0


def prepared(version: str, folder: Path) -> Path:
    """A copy of a release in ``folder``, with its patch where it has one."""
    shutil.copytree(installed(version), folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    if importlib.util.find_spec("triton"):  # the environment's own belongs to its torch
        (folder / "triton").unlink(missing_ok=True)
    if version in PATCHED:
        run([*PATCH, "apply", str(folder)], check=True)
    return folder


def restored(version: str, folder: Path) -> list[str]:
    """Takes the patch out again; the files that then differ from the wheel's own list of hashes."""
    if version in PATCHED:
        run([*PATCH, "revert", str(folder)], check=True)
    record = next(folder.glob("megatron_core-*.dist-info/RECORD"))
    rows = [row for row in csv.reader(record.read_text().splitlines()) if row[1].startswith("sha256=")]
    assert len(rows) > 200
    return [name for name, digest, _ in rows if digest != f"sha256={_digest(folder / name)}"]


def _digest(file: Path) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(file.read_bytes()).digest()).decode().rstrip("=")


def environment(folder: Path | None) -> dict[str, str]:
    """Of a process that finds this Megatron-Core before the environment's own."""
    path = [*([str(folder)] if folder else []), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}


class ReleasePopen(preloaded.ForkedPopen):
    """A fork of a process that has imported what no release of Megatron-Core changes."""

    def _zygote(self, words: Sequence[str], environment: Mapping[str, str]) -> preloaded.Zygote:
        return _without_megatron()


@functools.cache
def _without_megatron() -> preloaded.Zygote:
    modules = ("torch._dynamo", "torch.distributed.run", "torch.distributed.tensor", "aiohttp", "pytest")
    models = ("transformers.masking_utils", "transformers.models.auto.modeling_auto")
    return preloaded.Zygote(sys.executable, modules + models, environment(None))


def run(words: Sequence[str], folder: Path | None = None, check: bool = False, timeout: float = 3600) -> Ran:
    """``python`` with these arguments on the Megatron-Core in ``folder``."""
    started = time.perf_counter()
    done = preloaded.run(
        [sys.executable, *words],
        start=ReleasePopen,
        env=environment(folder),
        stdin=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
        timeout=timeout,
        cwd=HERE.parent,
    )
    assert not check or done.returncode == 0, done.stdout[-3000:]
    return Ran(done.returncode, done.stdout, time.perf_counter() - started)


def run_tests(folder: Path | None, tests: Sequence[str] = REPLAY_TESTS) -> Ran:
    return run(["-m", "pytest", "-q", "-p", "no:cacheprovider", *(str(HERE / test) for test in tests)], folder)


def routes_alike(version: str, folder: Path) -> int:
    """In how many of 20 ways of scoring the patched release routes bit for bit as the unpatched one."""
    plain = installed(version) / "megatron/core/transformer/moe/moe_utils.py"
    said = run(["-W", "ignore", "-c", _ALIKE, str(plain)], folder, check=True).output.split()
    assert said[-3] == version, said
    assert Path(said[-2]).is_relative_to(folder), said
    return int(said[-1])


def run_example(folder: Path | None, *words: str) -> Ran:
    """examples/plugged_in.py on two ranks."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    return run([*launcher, str(HERE.parent / "examples" / "plugged_in.py"), *words], folder)


RECOMPUTE = {"recompute__granularity": "full", "recompute__method": "uniform", "recompute__num_layers": 1}
VARIANTS: dict[str, dict[str, Any]] = {
    "r3, tp 2, all recomputed": {"train__replay": "r3", "parallel__tp": 2, **RECOMPUTE},
    "r2, ep 2, experts recomputed": {
        "train__replay": "r2",
        "parallel__ep": 2,
        "recompute__granularity": "selective",
        "recompute__modules": ["moe"],
    },
    "r3, pp 2, all recomputed": {"train__replay": "r3", "parallel__pp": 2, **RECOMPUTE},
    "r3, kl_grpo": {"train__replay": "r3", "train__objective": "kl_grpo"},
}
"""A step of megarl's trainer on two ranks in each of these settings."""


def trained(folder: Path | None, world: World, where: Path) -> tuple[dict[str, Ended], float]:
    """Steps of the trainer in all VARIANTS, and a run of two steps with R3 that is resumed for a third.

    How each job ended, by variant, and "run" and "resumed"; all on two ranks, each in processes of its own, for 0.12
    does not forget the embedding ranks of an earlier layout. Then the seconds. The run is in ``where / run``.
    """
    from forks import Job, _ended

    def run_job(name: str, steps: int) -> Job:
        overrides = {
            "run__dir": str(where / "run"),
            "run__steps": steps,
            "checkpoint__every": 2,
            "train__replay": "r3",
            "parallel__ep": 2,
            **RECOMPUTE,
        }
        return Job(name, 2, "train_jobs:run", {"world": world, "overrides": overrides})

    jobs = [
        *(Job(name, 2, "train_jobs:steps", {"world": world, "variants": {name: VARIANTS[name]}}) for name in VARIANTS),
        run_job("run", 2),
        run_job("resumed", 3),
    ]
    where.mkdir(parents=True)
    (where / "plan.pkl").write_bytes(pickle.dumps(jobs))
    ran = run([str(HERE / "trainer" / "fork_worker.py"), str(where)], folder)
    assert (where / "codes.pkl").is_file(), ran.output[-3000:]
    codes = pickle.loads((where / "codes.pkl").read_bytes())
    return {job.name: _ended(where, index, codes[index]) for index, job in enumerate(jobs)}, ran.seconds
