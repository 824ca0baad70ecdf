"""Integer handles with generations.

Knows: how a number names a slot, a life of that slot, and the engine that gave it out. A freed, doubled or foreign handle is
InvalidHandle, never somebody else's object. Does not know: what the slots hold.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from typing import Generic, TypeVar

from mooncake.common.errors import InvalidHandle, Overloaded

T = TypeVar("T")

_INDEX_BITS, _GENERATION_BITS, _SERIAL_BITS = 20, 28, 15
_serials = itertools.count(1)


def next_serial() -> int:
    """A number for a new table, distinct within the process (15 bits, then it wraps)."""
    return next(_serials) & ((1 << _SERIAL_BITS) - 1)


class HandleTable(Generic[T]):
    """Bounded slots. A handle is serial | generation | index + 1: 63 bits, never 0. Thread-safe."""

    def __init__(self, capacity: int, kind: str) -> None:
        if not 0 < capacity < 1 << _INDEX_BITS:
            raise ValueError(f"capacity must be 1 to {(1 << _INDEX_BITS) - 1}")
        self._kind = kind
        self._capacity = capacity
        self._serial = next_serial()
        self._lock = threading.Lock()
        self._slots: list[T | None] = []
        self._generations: list[int] = []
        self._vacant: deque[int] = deque()

    def allocate(self, value: T) -> int:
        """Raises Overloaded when all slots are taken."""
        with self._lock:
            if self._vacant:
                index = self._vacant.popleft()
            elif len(self._slots) < self._capacity:
                index = len(self._slots)
                self._slots.append(None)
                self._generations.append(0)
            else:
                raise Overloaded(f"all {self._capacity} {self._kind} handles are in use; free some")
            self._slots[index] = value
            return self._pack(index)

    def get(self, handle: int) -> T:
        """Raises InvalidHandle."""
        with self._lock:
            value = self._slots[self._index(handle)]
            assert value is not None
            return value

    def free(self, handle: int) -> T:
        """Take the value out; the handle is dead from now on. Raises InvalidHandle."""
        with self._lock:
            index = self._index(handle)
            value = self._slots[index]
            assert value is not None
            self._slots[index] = None
            self._generations[index] = (self._generations[index] + 1) & ((1 << _GENERATION_BITS) - 1)
            self._vacant.append(index)
            return value

    def values(self) -> list[T]:
        with self._lock:
            return [value for value in self._slots if value is not None]

    def _pack(self, index: int) -> int:
        return (self._serial << _GENERATION_BITS | self._generations[index]) << _INDEX_BITS | (index + 1)

    def _index(self, handle: int) -> int:
        if isinstance(handle, int) and handle > 0:
            index = (handle & ((1 << _INDEX_BITS) - 1)) - 1
            if 0 <= index < len(self._slots) and self._slots[index] is not None and self._pack(index) == handle:
                return index
        raise InvalidHandle(f"{handle!r} is not a live {self._kind} handle of this engine")
