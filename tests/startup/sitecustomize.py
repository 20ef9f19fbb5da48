"""On the path of every process of the tests, see fast_start.py: what takes time and makes no difference to a test."""

import gc
import os

# The collector takes a third of the time of an import.
gc.set_threshold(100_000, 20, 20)
# A busy disk answers fsync in tenths of a second, and checkpoints ask for thousands. Files of tests need not survive a
# power cut; what a killed process wrote is seen by others without it.
os.fsync = lambda fd: None
