"""Rules on the number of ranks: what has to divide."""

from collections.abc import Iterator

from megarl.config.rows import Row
from megarl.config.tables import Tables


def for_ranks(config: Tables, world_size: int) -> Iterator[Row]:
    """Yield the rules for ``world_size`` ranks."""
    p, num = config.parallel, config.train.mini_batches
    dense, expert = p.tp * p.pp * p.cp, p.ep * p.expert_tp * p.pp
    for names, sizes, product in (
        ("tp * pp * cp", f"{p.tp} * {p.pp} * {p.cp}", dense),
        ("ep * etp * pp", f"{p.ep} * {p.expert_tp} * {p.pp}", expert),
    ):
        yield (
            world_size % product,
            f"parallel: found {world_size} ranks, expected a multiple of {names} = {sizes} = {product}",
            "start another number of processes or change the layout",
        )
    dp = world_size // dense
    shares, prompts = f"train.mini_batches * dp = {num} * {dp} = {num * dp}", config.rollout.prompts_per_step
    yield (
        not config.sampling.fixed and prompts < num * dp,
        f"rollout: found prompts_per_step = {prompts}, expected at least {shares}: each rank trains on whole groups",
    )
    yield (
        config.sampling.fixed and config.responses_per_step % (num * dp),
        f"rollout: found prompts_per_step * group_size = {config.responses_per_step} responses, expected a multiple of "
        f"{shares}",
        "change one of them",
    )
    size = config.sft.batch_size if config.sft else 0
    yield size % dp, f"sft.batch_size: found {size}, expected a multiple of dp = {dp}"
