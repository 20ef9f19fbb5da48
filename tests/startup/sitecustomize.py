"""On the path of every process of the tests, see fast_start.py: what takes time and makes no difference to a test."""

import gc
import os
import sys

# The collector takes a third of the time of an import.
gc.set_threshold(100_000, 20, 20)
# A busy disk answers fsync in tenths of a second, and checkpoints ask for thousands. Files of tests need not survive a
# power cut; what a killed process wrote is seen by others without it.
os.fsync = lambda fd: None
if os.environ.get("NULL_GPU_WITHOUT_TE"):  # tests/null_gpu: as if Transformer Engine were not installed
    sys.modules["transformer_engine"] = None
