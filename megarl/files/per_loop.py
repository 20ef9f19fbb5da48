"""A value for each event loop in use: semaphores and queues of asyncio belong to the loop in which they wait."""

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class PerLoop(Generic[T]):
    """Holds ``make()`` for the running event loop; another loop gets a new value."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._value: tuple[asyncio.AbstractEventLoop, T] | None = None

    def get(self) -> T:
        """Return the value of the running loop. RuntimeError outside of a loop."""
        loop = asyncio.get_running_loop()
        if self._value is None or self._value[0] is not loop:
            self._value = loop, self._make()
        return self._value[1]
