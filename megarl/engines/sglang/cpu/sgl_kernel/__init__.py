"""A stub of SGLang's compiled kernels, which are not published for CPUs.

SGLang imports names from here even if it computes with plain torch. Every name is a function that raises. A path that
needs a kernel ends with a clear error and not with wrong numbers.
"""

from collections.abc import Callable
from typing import NoReturn


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def refuse(*_: object, **__: object) -> NoReturn:
        raise RuntimeError(
            f"sgl_kernel.{name} was called, but this server runs without a GPU and without SGLang's compiled kernels: "
            "serve a model that SGLang computes with plain torch, or serve on a GPU"
        )

    return refuse
