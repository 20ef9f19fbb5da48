"""Rules on the memory of a GPU; amounts are what `megarl plan` computes, in bytes."""

from collections.abc import Iterable, Iterator

from megarl.config.rows import Row

GIB = 2**30


def for_cache(weights: int, tokens: int, sequences: int, longest: int) -> Iterator[Row]:
    """Yield the rule that a server's cache holds one sequence of maximum length."""
    yield (
        sequences < 1,
        f"sglang.mem_fraction: a server's GPU holds {weights / GIB:.1f} GiB of weights and then {tokens} tokens of "
        f"cache, expected at least one sequence of {longest}",
        "raise sglang.mem_fraction, sglang.tp or sglang.max_total_tokens",
    )


def for_gpus(limit_gib: float | None, needs: Iterable[tuple[str, int, str]]) -> Iterator[Row]:
    """Yield the rule that a GPU has enough memory for each holder: (holder, bytes, remedy)."""
    if limit_gib is None:
        return
    for holder, amount, remedy in needs:
        yield (
            amount > limit_gib * GIB,
            f"launch.gpu_memory_gib: {holder} needs {amount / GIB:.1f} GiB, expected at most {limit_gib:g}",
            remedy,
        )
