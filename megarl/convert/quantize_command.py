"""``megarl quantize``: write a checkpoint with FP8 weights, and print the tensors that lost most (docs/fp8.md)."""

import statistics
from pathlib import Path

from rich.filesize import decimal

from megarl.convert.fp8_selection import is_misread
from megarl.convert.job import Ranks
from megarl.convert.quantization import Options, quantize
from megarl.models.hf_files import FP8_ERRORS, some

NUM_WORST = 5
HEADER = ("rel. error", "max error", "of block", "underflow", "zero blocks", "saturated")


def quantize_and_show(source: Path, out: Path, model: Path | None, options: Options) -> None:
    """``quantize`` on all ranks; the first prints what was written, and the tensors that lost most."""
    ranks = Ranks()
    found = quantize(source, out, model, options, ranks)
    if ranks.rank != 0:
        return
    files = f"{found.num_files} file" + "s" * (found.num_files > 1)
    if found.num_resumed:
        files += f", {found.num_resumed} of them from an interrupted start"
    before, after = (decimal(number) for number in (found.bytes_before, found.bytes_after))
    print(
        f"{len(found.errors)} of {len(found.shapes)} tensors in FP8, blocks of {options.block[0]} x "
        f"{options.block[1]}; {before} -> {after} in {files}; {'verified' if options.verify else 'not verified'}"
    )
    worst = sorted(found.errors.items(), key=lambda item: -item[1].relative_error)
    print(*(f"{word:>11}" for word in HEADER), " tensor")
    for name, one in worst[:NUM_WORST]:
        figures = f"{one.relative_error:11.5f} {one.max_error:11.3g} {one.max_error_of_block:11.5f}"
        print(f"{figures} {one.underflow:11.3g} {one.num_zero_blocks:11d} {one.num_saturated:11d}  {name}")
    median = statistics.median(one.relative_error for one in found.errors.values())
    zeros = sum(one.num_zero_blocks for one in found.errors.values())
    saturated = sum(one.num_saturated for one in found.errors.values())
    totals = f"{zeros} blocks of zeros, {saturated} saturated values"
    print(f"{median:11.5f} median; {totals}; all in {found.out / FP8_ERRORS}")
    ragged = [name for name in found.errors if is_misread(found.shapes[name], options.block)]
    if ragged:
        print(
            f"note: {some(ragged)} are no whole number of blocks; transformers 5.12 refuses or misreads such weights "
            "where it dequantises, and SGLang refuses some of them"
        )
