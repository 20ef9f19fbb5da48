"""Convert a checkpoint between Hugging Face and Megatron's torch_dist format: ``megarl convert`` as a script.

    python tools/convert_checkpoint.py Qwen3-30B-A3B Qwen3-30B-A3B-megatron --dtype bf16
    torchrun --nproc-per-node 8 tools/convert_checkpoint.py ...          # the ranks divide the files

docs/convert.md says what it reads, writes and checks.
"""

from __future__ import annotations

import sys

from megarl import cli

if __name__ == "__main__":
    sys.exit(cli.main(["convert", *sys.argv[1:]]))
