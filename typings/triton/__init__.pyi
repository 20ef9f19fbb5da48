"""What megarl uses of Triton, which torch's builds for CPUs come without."""

from typing import Any

jit: Any

def next_power_of_2(n: int) -> int: ...
