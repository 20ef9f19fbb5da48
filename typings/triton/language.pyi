"""The language of kernels: everything is a tensor on the device."""

from typing import Any

class constexpr(int): ...  # noqa: N801

def __getattr__(name: str) -> Any: ...
