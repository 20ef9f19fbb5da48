"""Python imports this module when it starts: the runs of tools/gpu_smoke.py compute here, also Transformer Engine's."""

import atexit
import sys

if sys.orig_argv[1:2] == ["-c"] and "megarl" in sys.orig_argv[2]:
    from null_gpu.computing import computing

    running = computing()
    running.__enter__()
    atexit.register(running.__exit__, None, None, None)
    if "transformer_engine" not in sys.orig_argv[2]:  # the run without it hides it
        from null_gpu.te import install

        install()
