"""The language of kernels: everything is a tensor on the device."""

from typing import Any

constexpr: Any

def __getattr__(name: str) -> Any: ...
