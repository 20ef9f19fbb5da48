"""Write a checkpoint with FP8 weights, as SGLang and transformers read it, from a Hugging Face folder or from Megatron.

    python tools/quantize_fp8.py SOURCE OUT [--model FOLDER] [--block 128 128] [--keep GLOB ...] [--shard-gib 2]
        [--overwrite] [--no-verify]

SOURCE is a folder of safetensors files, or a torch_dist checkpoint, of a run or converted. OUT appears when it is
whole and has been read back; an interrupted command goes on when it is given again. Under torchrun the ranks divide
the files.
``OUT/fp8_errors.json`` has the errors of each tensor. See docs/fp8.md.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from pathlib import Path

from rich.filesize import decimal

from megarl.convert.fp8_selection import is_misread
from megarl.convert.job import Ranks
from megarl.convert.quantization import Options, Quantized, quantize
from megarl.errors import MegarlError
from megarl.models.hf_files import FP8_ERRORS, some

NUM_WORST = 5
HEADER = ("rel. error", "max error", "of block", "underflow", "zero blocks", "saturated")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path, help="config and tokenizer, for a Megatron checkpoint that has none")
    parser.add_argument("--block", type=int, nargs=2, default=(128, 128), metavar=("ROWS", "COLUMNS"))
    parser.add_argument("--keep", nargs="+", default=[], metavar="GLOB", help="tensors to leave in high precision too")
    parser.add_argument("--shard-gib", type=float, default=2.0, help="largest file")
    parser.add_argument("--overwrite", action="store_true", help="replace OUT, in one step, when all is done")
    parser.add_argument("--no-verify", action="store_true", help="do not read everything back")
    words = parser.parse_args()
    if not 0 < words.shard_gib < math.inf:
        parser.error("--shard-gib takes a number above 0")
    return words


def show(found: Quantized, options: Options) -> None:
    """What was written, and the tensors that lost most."""
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
        figures = (
            f"{one.relative_error:11.5f} {one.max_error:11.3g} {one.max_error_of_block:11.5f} {one.underflow:11.3g}"
        )
        print(f"{figures} {one.num_zero_blocks:11d} {one.num_saturated:11d}  {name}")
    median = statistics.median(one.relative_error for one in found.errors.values())
    zeros, saturated = (sum(getattr(one, key) for one in found.errors.values()) for key in _COUNTS)
    print(
        f"{median:11.5f} median; {zeros} blocks of zeros, {saturated} saturated values; all in {found.out / FP8_ERRORS}"
    )
    ragged = [name for name in found.errors if is_misread(found.shapes[name], options.block)]
    if ragged:
        print(
            f"note: {some(ragged)} are no whole number of blocks; transformers 5.12 refuses or misreads such weights "
            "where it dequantises, and SGLang refuses some of them"
        )


_COUNTS = ("num_zero_blocks", "num_saturated")


def main() -> int:
    words = parse()
    options = Options(
        block=tuple(words.block),
        keep=tuple(words.keep),
        shard_bytes=int(words.shard_gib * 2**30),
        verify=not words.no_verify,
        overwrite=words.overwrite,
    )
    ranks = Ranks()
    try:
        found = quantize(words.source, words.out, words.model, options, ranks)
    except MegarlError as error:
        print(f"quantize_fp8: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    if ranks.rank == 0:
        show(found, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
