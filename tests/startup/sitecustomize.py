"""See fast_imports.py."""

import gc

gc.set_threshold(100_000, 20, 20)
