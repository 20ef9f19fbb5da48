"""What forked ranks run: a step on the fixed rollouts, the sampling of a step, and whole runs that are killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from local_engines import local_engine
from safetensors.torch import load_file, save_file
from train_world import NUM_GROUPS, NUM_SEQUENCES, Going, Taken, World, layout, take_step, training, weights_of
from transformers import AutoConfig

from megarl.config import Config
from megarl.core.metrics import Stat, finalize
from megarl.core.packing import drop_routes
from megarl.core.sampling.collector import Selection
from megarl.core.types import Rollout
from megarl.engines.local.engine import LocalEngine
from megarl.errors import MegarlError
from megarl.megatron import distributed
from megarl.megatron.checkpoints import saver
from megarl.megatron.checkpoints.checkpoint import FrozenModel
from megarl.megatron.hf_weights import save_hf
from megarl.ops.evaluate.evaluation import evaluate
from megarl.ops.evaluate.request import eval_request
from megarl.run.metrics_log import MetricsLog
from megarl.trainer.loop import train
from megarl.trainer.sampling.assignment import split_sequences
from megarl.trainer.sampling.gradient_norms import gradient_norms
from megarl.trainer.sampling.sampler import Sampler
from megarl.trainer.sampling.step_rollouts import StepRollouts
from megarl.trainer.step import TrainStep


def steps(world: World, variants: Mapping[str, Mapping[str, Any]]) -> dict[str, Taken | None]:
    """A step of a fresh policy for each variant of the settings."""
    found = {}
    for name, overrides in variants.items():
        with training(world.settings(**overrides)) as step:
            found[name] = take_step(step, world.rollouts())
    return found


def drifts(world: World, variants: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """By variant, after the first update: drift of the routers [t] by sequence of the second mini-batch, and weights.

    Also the metrics of the second update.
    """
    found = {}
    for name, overrides in variants.items():
        with training(world.settings(train__objective="rspo", optim__lr=0.01, **overrides)) as step:
            going = Going(step, world.rollouts("fp32")).look()
            first = going.collect_update(0)
            weights = weights_of(step.policy)
            metrics = going.collect_update(1)
            mini, mine = going.minis[1], {}
            for micro, drift in zip(mini.micro_batches, mini.router_drift or [], strict=True):
                parts = np.split(drift.numpy(), micro.batch.cu_seqlens[1:-1].tolist())
                mine |= {going.owned[1][row]: part for row, part in zip(micro.sequences, parts, strict=True)}
            ranks: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(ranks, mine)
            by_sequence = {sequence: part for of_rank in ranks for sequence, part in of_rank.items()}
            found[name] = {"drift": by_sequence, "weights": weights, "metrics": (first, metrics)}
    return found


def both_ways(world: World, rollouts: list[Rollout], variants: Mapping[str, Mapping[str, Any]]) -> dict[str, list[Any]]:
    """By variant, a step with the first mini-batch in the old-log-prob pass and one without: what is taken, weights."""
    found = {}
    for name, overrides in variants.items():
        found[name] = []
        for old_pass in (True, False):
            with training(world.settings(optim__lr=0.01, **overrides)) as step:
                taken = take_step(step, rollouts, old_pass=old_pass)
                weights = {key: value.detach().cpu().numpy().copy() for key, value in step.policy.export()}
                found[name].append((taken, weights))
    return found


def overlapped(world: World, variants: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Two steps, the gradient norms of samples between them, and the exported weights after each, by rank 0."""
    found = {}
    for name, overrides in variants.items():
        with training(world.settings(**overrides)) as step:
            chunk, rollouts = step.policy.chunks[0], world.rollouts()
            assert chunk.use_forward_hook == chunk.ddp_config.overlap_grad_reduce
            taken, weights, norms = [], [], []
            for index in range(2):
                taken.append(take_step(step, rollouts))
                weights.append({key: value.numpy().copy() for key, value in step.policy.export()})
                if index == 0:
                    norms = gradient_norms(step, rollouts[:1], "embedding")
            found[name] = {"overlaps": chunk.use_forward_hook, "steps": taken, "weights": weights, "norms": norms}
    return found


def misrouted(world: World, dp_rank: int) -> list[str]:
    """What each rank is told where the routes of one data-parallel rank are shifted by one token."""
    rollouts = world.rollouts()
    with training(world.settings()) as step:
        for sequence in chain(*split_sequences(NUM_SEQUENCES, 2, dp_rank, distributed.dp_size())):
            experts = rollouts[sequence].routed_experts
            rollouts[sequence] = replace(rollouts[sequence], routed_experts=np.roll(experts, 1, 0))
        try:
            take_step(step, rollouts)
            told = "trained"
        except MegarlError as error:
            told = f"{type(error).__name__}: {error}"
        by_rank = [""] * dist.get_world_size()
        dist.all_gather_object(by_rank, told)
    return by_rank


def rows(
    world: World, variants: Mapping[str, Mapping[str, Any]], twice: Sequence[str]
) -> dict[str, list[Taken | None]]:
    """A step on the same rollouts for each variant, two of one policy for those in ``twice``.

    Every group spans mini-batches and ranks.
    """
    groups = np.arange(NUM_SEQUENCES) % NUM_GROUPS
    found = {}
    for name, overrides in variants.items():
        with training(world.settings(**overrides)) as step:
            found[name] = [take_step(step, world.rollouts(), groups=groups) for _ in range(1 + (name in twice))]
    return found


def sampled(world: World, layouts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Sample step 1 in each layout: by layout, what every data-parallel rank trains on, and the evaluation."""
    found = {}
    for name, overrides in layouts.items():
        settings = world.settings(**overrides)
        with layout(settings):
            sampler = sampler_of(world, settings)
            drawn = sampler.sample_step(1)
            mine = {
                "dp_rank": distributed.dp_rank(),
                "tokens": [[r.tokens.tolist() for r in part] for part in drawn.mini_batches],
                "advantages": [part.tolist() for part in drawn.advantages],
                "rewards": {
                    key: stat.sums.tolist() for key, stat in drawn.metrics.items() if key.startswith("reward/")
                },
            }
            ranks: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(ranks, mine)
            found[name] = {"ranks": ranks, "eval": sampler.evaluate()}
    return found


def adaptive(world: World, layouts: Mapping[str, Mapping[str, Any]], steps: int = 2) -> dict[str, Any]:
    """Sample the first steps in each layout: by layout and step, what every rank trains on, and the metrics."""
    found = {}
    for name, overrides in layouts.items():
        with training(world.settings(**overrides)) as train_step:
            sampler = sampler_of(world, train_step.config, train_step)
            selections = recorded(sampler)
            of_steps = []
            for step in range(steps):
                drawn = sampler.sample_step(step)
                ranks: list[Any] = [None] * dist.get_world_size()
                dist.all_gather_object(ranks, trained_on(drawn, selections[-1]))
                statistics = distributed.collect([drawn.metrics])
                of_steps.append({"ranks": ranks, "metrics": None if statistics is None else finalize(statistics)})
            found[name] = of_steps
            sampler.close()
            sampler.engine.close()
    return found


def trained_on(drawn: StepRollouts, selection: Selection) -> dict[str, Any]:
    """What this rank trains on, plain."""
    return {
        "dp_rank": distributed.dp_rank(),
        "selection": [getattr(selection, name).tolist() for name in ("prompts", "samples", "rewards", "drawn")],
        "sizes": [len(part) for part in drawn.mini_batches],
        "mini_batches": [
            [
                ((r.group, r.sample), r.tokens.tolist(), r.prompt_length, float(advantage), bool(r.loss_mask.any()))
                for r, advantage, row in zip(part, advantages, rows, strict=True)
                if row < len(selection.prompts)
            ]
            for part, advantages, rows in zip(drawn.mini_batches, drawn.advantages, drawn.judged.owned, strict=True)
        ],
        "fillers_with_loss": sum(
            bool(r.loss_mask.any())
            for part, rows in zip(drawn.mini_batches, drawn.judged.owned, strict=True)
            for r, row in zip(part, rows, strict=True)
            if row == len(selection.prompts)
        ),
    }


def sampler_of(world: World, settings: Config, train_step: TrainStep | None = None) -> Sampler:
    """A sampler whose engine holds the world's checkpoint."""
    engine = LocalEngine(AutoConfig.from_pretrained(world.model), max_batch_size=settings.rollout.max_batch_size)
    source = local_engine(world.model)
    engine.update_weights(((name, view.clone()) for name, view in source._views.items()), version=1)
    source.close()
    return Sampler(settings, engine, settings.train.resolved_objective, train_step)


def recorded(sampler: Sampler) -> list[Selection]:
    """The selections of the steps that follow, filled as they come."""
    found: list[Selection] = []
    original = sampler._update_estimates

    def learn(step: int, selection: Selection) -> dict[str, Stat]:
        found.append(selection)
        return original(step, selection)

    sampler._update_estimates = learn  # type: ignore[method-assign]
    return found


class _DiesAfter(MetricsLog):
    """The metrics log of a process that is killed right after it has written one particular record."""

    record: tuple[str, int, int | None]

    def write(
        self, kind: Any, step: int, metrics: Mapping[str, float], minibatch: int | None = None, **more: Any
    ) -> None:
        super().write(kind, step, metrics, minibatch, **more)
        if (kind, step, minibatch) == self.record:
            os.kill(os.getpid(), signal.SIGKILL)


def run(world: World, overrides: Mapping[str, Any], die_after: tuple[str, int, int | None] | None = None) -> None:
    """A whole run; ``die_after`` = (kind, step, minibatch) kills rank 0 with SIGKILL behind that record."""
    import megarl.trainer.loop as loop

    if die_after is not None:
        _DiesAfter.record = die_after
        loop.MetricsLog = _DiesAfter
    train(world.settings(**overrides))


def dies_while_saving(world: World, overrides: Mapping[str, Any], step: int) -> None:
    """A run that is killed while it writes a checkpoint: all files are there, the folder has not got its name yet."""
    original = saver.publish

    def dies(path: Path, *rest: Any) -> None:
        if path.name == f"step_{step:07d}":
            os.kill(os.getpid(), signal.SIGKILL)
        original(path, *rest)

    saver.publish = dies
    train(world.settings(**overrides))


def saves_and_dies(world: World, folder: Path, at: str) -> None:
    """Save steps 1 and 2, keep one; everything dies when a call of step 2 begins as ``at`` says."""
    with training(world.settings()) as step:
        writer = saver.Saver(folder, keep=1)
        writer.begin(1, step.policy, {})
        writer.poll(wait=True)
        os.setpgid(0, 0)
        for module, name in ((os, "fsync"), (os, "rename"), (os, "replace"), (os, "mkdir"), (os, "unlink")):
            _kill_at(module, name, folder, at)
        writer.begin(2, step.policy, {})
        writer.poll(wait=True)


def _kill_at(module: Any, name: str, folder: Path, at: str) -> None:
    original = getattr(module, name)

    def watched(what: Any, *rest: Any, **more: Any) -> Any:
        path = os.readlink(f"/proc/self/fd/{what}") if isinstance(what, int) else str(what)
        if f"{name} {path.removeprefix(f'{folder}/')}".startswith(at):
            os.killpg(0, signal.SIGKILL)
        return original(what, *rest, **more)

    setattr(module, name, watched)


def evaluated(world: World, overrides: Mapping[str, Any], **asked: Any) -> None:
    """``megarl eval`` on the ranks there are."""
    evaluate(eval_request(world.settings(**overrides), **asked), int(os.environ["WORLD_SIZE"]))


def exported(world: World, overrides: Mapping[str, Any], checkpoint_path: Path, out: Path) -> int:
    """A checkpoint as a Hugging Face folder; returns its step."""
    settings = world.settings(**overrides)
    with layout(settings):
        model = FrozenModel(settings, checkpoint_path)
        save_hf(model.chunks, model.shape, world.model, out)
        return model.step


def transferred(world: World, layouts: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, list[int]]]:
    """Sample a step and prepare it for training: by layout, bytes that each rank received, by kind of call."""
    found = {}
    for name, overrides in layouts.items():
        with training(world.settings(**overrides)) as train_step:
            sampler = sampler_of(world, train_step.config, train_step)
            with counted_calls() as received:
                drawn = sampler.sample_step(1)
                minis = [
                    train_step.prepare(rollouts, advantages)
                    for rollouts, advantages in zip(drawn.mini_batches, drawn.advantages, strict=True)
                ]
            assert all(mini.routes is not None for mini in minis)
            tokens = sum(len(r.tokens) for part in drawn.mini_batches for r in part)
            ranks: list[dict[str, int]] = [{}] * dist.get_world_size()
            dist.all_gather_object(ranks, {**received, "tokens": tokens})
            found[name] = {kind: [rank.get(kind, 0) for rank in ranks] for kind in {k for rank in ranks for k in rank}}
    return found


@contextmanager
def counted_calls() -> Iterator[dict[str, int]]:
    """Bytes of routes that this rank receives from others."""
    received: dict[str, int] = {"routes": 0}
    original = dist.all_to_all_single

    def all_to_all_single(output: Any, given: Any, output_sizes: Any, *sizes: Any, **rest: Any) -> Any:
        own = output_sizes[dist.get_rank(rest["group"])]
        received["routes"] += output.nbytes - own * output.element_size()
        return original(output, given, output_sizes, *sizes, **rest)

    dist.all_to_all_single = all_to_all_single
    try:
        yield received
    finally:
        dist.all_to_all_single = original


def judged(
    world: World, rollouts: list[Rollout], variants: Mapping[str, Mapping[str, Any]]
) -> dict[str, tuple[dict[tuple[int, int], str], np.ndarray, dict[str, float], float]]:
    """By variant: why sequences are dropped, k3, flip and foreign run of all, metrics, and the last gradient norm."""
    found = {}
    for name, overrides in variants.items():
        with training(world.settings(**overrides)) as step:
            taken = take_step(step, rollouts)
            verdict = step.tripwires.verdict
            assert verdict is not None
            mine = verdict.gaps.tobytes()
            of_ranks = [mine] * dist.get_world_size()
            dist.all_gather_object(of_ranks, mine)
            assert of_ranks == [mine] * len(of_ranks)
            order = np.lexsort((verdict.gaps[:, 1], verdict.gaps[:, 0]))
            if taken is not None:
                norm = taken.updates[-1]["grad_norm"]
                figures = np.concatenate([verdict.figures, verdict.gaps[:, 10:]], 1)
                found[name] = verdict.reasons(), figures[order], taken.step, norm
    return found


BLOCKS = {"embedding": ["model.embed_tokens.weight"], "output_layer": ["lm_head.weight"]}
"""Names in transformers by block."""


@dataclass(frozen=True)
class Case:
    """A model in a layout, and how many of the first rollouts each copy of it holds."""

    overrides: Mapping[str, Any]
    counts: Sequence[int]
    tied: bool = False
    engine: str = "fp32"
    blocks: Sequence[str] = field(default_factory=lambda: tuple(BLOCKS))


def tied_model(world: World) -> Path:
    """The world's model whose output layer is its embedding."""
    folder = world.folder / "tied"
    if not folder.exists():
        shutil.copytree(world.model, folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
        for file in folder.glob("*.safetensors"):
            kept = {name: weight for name, weight in load_file(file).items() if name != "lm_head.weight"}
            save_file(kept, file, metadata={"format": "pt"})
    return folder


def case_training(world: World, case: Case) -> AbstractContextManager[TrainStep]:
    model = tied_model(world) if case.tied else world.model
    # Rollouts are of world.model.
    fixed = {"train__replay": "none", "train__max_k3": "off", "model__path": str(model), "rollout__temperature": 0.9}
    return training(world.settings(**{**fixed, **case.overrides}))


def rollouts_here(world: World, case: Case) -> list[Rollout]:
    """Those of this model copy; each has its routes on one of the copy's ranks only."""
    first = sum(case.counts[: distributed.dp_rank()])
    mine = world.rollouts(case.engine)[first : first + case.counts[distributed.dp_rank()]]
    group = distributed.model_group()
    return [r if i % group.size() == group.rank() else drop_routes(r) for i, r in enumerate(mine)]


def norms(world: World, cases: Mapping[str, Case]) -> dict[str, dict[str, np.ndarray]]:
    """By case and block, the norms of all copies' rollouts; the ranks of a copy must agree on theirs."""
    found: dict[str, dict[str, np.ndarray]] = {}
    for name, case in cases.items():
        with case_training(world, case) as step:
            mine = rollouts_here(world, case)
            found[name] = {block: of_all_copies(gradient_norms(step, mine, block)) for block in case.blocks}
    return found


def of_all_copies(values: np.ndarray) -> np.ndarray:
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, (distributed.dp_rank(), values))
    by_copy: dict[int, np.ndarray] = {}
    for copy, of_rank in ranks:
        assert np.array_equal(by_copy.setdefault(copy, of_rank), of_rank), f"ranks of copy {copy} differ"
    return np.concatenate([by_copy[copy] for copy in sorted(by_copy)])


def steps_around(world: World, cases: Mapping[str, Case]) -> dict[str, list[Any]]:
    """By case, a step of a fresh policy without and with gradient norms before it: metrics, and weights after it."""
    found: dict[str, list[Any]] = {}
    for name, case in cases.items():
        found[name] = []
        for looks in (False, True):
            with case_training(world, case) as step:
                if looks:
                    before = [chunk.training for chunk in step.policy.chunks]
                    for block in case.blocks:
                        gradient_norms(step, rollouts_here(world, case), block)
                    assert before == [True] * len(before)
                    assert all(not p.main_grad.any() and p.grad is None for p in parameters_of(step))
                taken = take_step(step, world.rollouts())
                weights = weights_of(step.policy)
                found[name].append((taken, weights))
    return found


def parameters_of(step: TrainStep) -> list[Any]:
    found = [parameter for chunk in step.policy.chunks for parameter in chunk.parameters()]
    assert all(parameter.requires_grad for parameter in found)
    return found
