"""Runs a script of tools on the null GPU: ``run_script.py values|shapes SCRIPT ARGUMENT ...``

values: operations on CUDA tensors have values, also Transformer Engine's. shapes: kernels leave memory as it was.
"""

from __future__ import annotations

import runpy
import sys

from null_gpu import without_values
from null_gpu.computing import computing
from null_gpu.te import install

if __name__ == "__main__":
    mode = sys.argv[1]
    del sys.argv[:2]
    if mode == "shapes":
        without_values.install()
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        with computing():
            install()
            runpy.run_path(sys.argv[0], run_name="__main__")
