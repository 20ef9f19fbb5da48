"""Sizes of the blocks of logits that the kernels of ``logprobs`` compute. Imports no torch: plans ask too."""

FUSED_ROWS = 8192
FUSED_BYTES = 128 << 20
"""Rows and fp32 bytes of the largest block for the Triton kernels. A wide block seldom adds to the states' gradients, a
high one to the weight's.
"""


def fused_shape(num_rows: int, num_columns: int) -> tuple[int, int]:
    """(rows, columns) of a block for the kernels: as many rows as possible, and blocks of equal width."""
    rows = max(1, min(num_rows, FUSED_ROWS))
    count = max(1, -(-num_columns * rows * 4 // FUSED_BYTES))
    return rows, round_up(max(1, -(-num_columns // count)), 128)


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
