"""How a number of ranks is divided between the dimensions of parallelism."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config.tables.together import Tables
from megarl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Layout:
    """How a given number of ranks is divided, all defaults resolved."""

    world_size: int
    tp: int
    pp: int
    vpp: int | None
    cp: int
    dp: int
    """Data-parallel ranks of dense weights: world_size / (tp * pp * cp)."""
    ep: int
    etp: int
    edp: int
    """Data-parallel ranks of expert weights: world_size / (ep * etp * pp)."""
    sequences_per_rank: int
    """Responses of one mini-batch on one data-parallel rank: B * G / (N * dp); a mean if prompts differ."""


def divide_ranks(tables: Tables, world_size: int) -> Layout:
    """The layout of world_size ranks; ConfigError if the layout or the batch does not come out even."""
    p, n = tables.parallel, tables.train.mini_batches
    dense, expert = p.tp * p.pp * p.cp, p.ep * p.expert_tp * p.pp
    for names, sizes, product in (
        ("tp * pp * cp", f"{p.tp} * {p.pp} * {p.cp}", dense),
        ("ep * etp * pp", f"{p.ep} * {p.expert_tp} * {p.pp}", expert),
    ):
        if world_size % product:
            raise ConfigError(
                f"parallel: found {world_size} ranks, expected a multiple of {names} = {sizes} = {product}; start "
                "another number of processes or change the layout"
            )
    dp = world_size // dense
    if not tables.sampling.fixed and tables.rollout.prompts_per_step < n * dp:
        raise ConfigError(
            f"rollout: found prompts_per_step = {tables.rollout.prompts_per_step}, expected at least "
            f"train.mini_batches * dp = {n} * {dp} = {n * dp}: each rank trains on whole groups"
        )
    if tables.sampling.fixed and tables.responses_per_step % (n * dp):
        raise ConfigError(
            f"rollout: found prompts_per_step * group_size = {tables.responses_per_step} responses, expected a "
            f"multiple of train.mini_batches * dp = {n} * {dp} = {n * dp}; change one of them"
        )
    if tables.sft is not None and tables.sft.batch_size % dp:
        raise ConfigError(f"sft.batch_size: found {tables.sft.batch_size}, expected a multiple of dp = {dp}")
    return Layout(
        world_size=world_size,
        tp=p.tp,
        pp=p.pp,
        vpp=p.vpp,
        cp=p.cp,
        dp=dp,
        ep=p.ep,
        etp=p.expert_tp,
        edp=world_size // expert,
        sequences_per_rank=tables.responses_per_step // (n * dp),
    )
