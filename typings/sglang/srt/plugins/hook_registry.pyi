# What megarl's plugin calls in SGLang, whose environment is another one.
from collections.abc import Callable
from enum import Enum

class HookType(Enum):
    AROUND = ...

class HookRegistry:
    @staticmethod
    def register(target: str, hook: Callable[..., object], hook_type: HookType) -> None: ...
