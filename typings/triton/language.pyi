"""The language of kernels: everything is a tensor on the device."""

from typing import Any

class constexpr:
    def __getattr__(self, name: str) -> Any: ...

def __getattr__(name: str) -> Any: ...
