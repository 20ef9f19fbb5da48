"""Python imports this module when it starts: the runs of tools/gpu_smoke.py compute here, also Transformer Engine's."""

import atexit
import os
import sys
import traceback


def compute_here() -> None:
    from null_gpu.computing import computing

    running = computing()
    running.__enter__()
    atexit.register(running.__exit__, None, None, None)
    if "transformer_engine" not in sys.orig_argv[2]:  # the run without it hides it
        from null_gpu.te import install

        install()


if sys.orig_argv[1:2] == ["-c"] and "megarl" in sys.orig_argv[2]:
    try:
        compute_here()
    except BaseException:  # Python would go on without this module, and the run would train without values
        traceback.print_exc()
        os._exit(70)
