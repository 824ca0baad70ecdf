"""Reading the start of frames with few system calls.

Knows: a small buffer in front of a data connection. One receive brings a frame's header, its table and a small payload
together; of a large payload only the first bytes pass through the buffer, the rest is received where it belongs. Does not
know: what frames mean, deadlines (the check it is given raises).
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import numpy as np

from transfer_engine.config import MAX_IOV
from transfer_engine.slices import U64
from transfer_engine.transports import sysio
from transfer_engine.transports.tls_io import Check, DataPath

_AHEAD_BYTES = 8 << 10
_CAPACITY = 16 * MAX_IOV
"""The longest thing that must lie in one piece: a table."""


class ReadAhead:
    """Used by one thread."""

    def __init__(self, path: DataPath) -> None:
        self._path = path
        self._buffer = np.empty(_CAPACITY, np.uint8)
        self._view = self._buffer.data
        self._at = self._buffer.ctypes.data
        self._vector = sysio.Vector.of(self._buffer)
        self._start = self._end = 0

    @property
    def empty(self) -> bool:
        return self._start == self._end

    @property
    def buffered(self) -> int:
        return self._end - self._start

    def fetch(self, count: int, check: Check) -> None:
        """Receive until `count` (at most 16 KiB) bytes are buffered, and what comes with them. Raises like `sysio.receive`."""
        kept = self._end - self._start
        if kept and self._start:
            self._buffer[:kept] = self._buffer[self._start : self._end].copy()
        self._start, self._end = 0, kept
        while self._end < count:
            self._vector.aim(self._at + self._end, max(count, _AHEAD_BYTES) - self._end)
            self._end += self._path.some(self._vector, check)

    def fetch_soon(self) -> None:
        """Receive what comes within microseconds, while nothing is buffered."""
        self._vector.aim(self._at, _AHEAD_BYTES)
        self._start, self._end = 0, self._path.soon(self._vector)

    def take(self, count: int) -> memoryview:
        """The next `count` buffered bytes, valid until the next `fetch`."""
        start = self._start
        self._start += count
        return self._view[start : start + count]

    def peek(self, layout: struct.Struct) -> tuple[Any, ...]:
        return layout.unpack_from(self._view, self._start)

    def give(self, address: U64, length: U64) -> int:
        """Copy what is buffered to the start of these ranges; returns how many bytes that were."""
        given = 0
        for to, count in zip(address.tolist(), length.tolist(), strict=True):
            part = min(count, self._end - self._start)
            if not part:
                break
            ctypes.memmove(to, self._at + self._start, part)
            self._start += part
            given += part
        return given

    def give_one(self, address: int, length: int) -> int:
        """`give` for one range."""
        part = min(length, self._end - self._start)
        ctypes.memmove(address, self._at + self._start, part)
        self._start += part
        return part

    def drop(self, most: int) -> int:
        """Forget at most `most` buffered bytes; returns how many."""
        part = min(most, self._end - self._start)
        self._start += part
        return part
