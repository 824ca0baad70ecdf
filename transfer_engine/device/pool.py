"""Pinned host buffers with streams: few, shared, given back.

Knows: how many buffers there may be, who waits, that a buffer in doubt is never used again. Does not know: what is staged. A
buffer serves all devices: it is pinned for every context, and has a stream on each device that it ever copied from or to.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable

from mooncake.common.errors import DeviceError, TransferError
from transfer_engine.device.cuda_driver import CudaDriver
from transfer_engine.device.parts import Copy

_TICK_S = 0.05
"""Who waits for a buffer looks this often whether it still should."""


class Buffer:
    """`length` pinned bytes (0: streams only). Used by one thread at a time."""

    def __init__(self, driver: CudaDriver, device: int, length: int) -> None:
        self._driver = driver
        self._home = device
        self._streams: dict[int, int] = {}
        self._busy: set[int] = set()
        self.address = 0
        if length:
            with driver.on(device):
                self.address = driver.allocate_pinned(length)

    def start(self, copies: Iterable[Copy], *, to_device: bool) -> None:
        """Start copies between device and host memory. Raises DeviceError."""
        self.start_pairs(
            (c.device, c.address, c.host, c.length) if to_device else (c.device, c.host, c.address, c.length)
            for c in copies
        )

    def start_pairs(self, copies: Iterable[tuple[int, int, int, int]]) -> None:
        """Start copies (device whose stream does it, target, source, length). Raises DeviceError."""
        by_device: dict[int, list[tuple[int, int, int]]] = {}
        for device, target, source, length in copies:
            by_device.setdefault(device, []).append((target, source, length))
        for device, rows in by_device.items():
            with self._driver.on(device):
                stream = self._stream(device)
                self._busy.add(device)
                for target, source, length in rows:
                    self._driver.copy(target, source, length, stream)

    def _stream(self, device: int) -> int:
        if device not in self._streams:
            self._streams[device] = self._driver.create_stream()
        return self._streams[device]

    def synchronize(self) -> None:
        """Returns when all copies started are done. Raises DeviceError; the rest is waited for even so."""
        errors: list[DeviceError] = []
        for device in tuple(self._busy):
            try:
                with self._driver.on(device):
                    self._driver.synchronize(self._streams[device])
                self._busy.discard(device)
            except DeviceError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def settle(self) -> bool:
        """Wait for whatever still runs. False: unknown, the buffer must not be used again."""
        with contextlib.suppress(DeviceError):
            self.synchronize()
        return not self._busy

    def free(self) -> None:
        """Waits for the device where it must; a driver that refuses keeps what is left."""
        for device, stream in self._streams.items():
            with contextlib.suppress(DeviceError), self._driver.on(device):
                self._driver.destroy_stream(stream)
        self._streams.clear()
        if self.address:
            with contextlib.suppress(DeviceError), self._driver.on(self._home):
                self._driver.free_pinned(self.address)
            self.address = 0


class Pool:
    """At most `limit` buffers, made on demand and kept until `trim`."""

    def __init__(self, limit: int, length: int) -> None:
        self._limit = limit
        self._length = length
        self._lock = threading.Lock()  # this one is entered, not the condition: threads.py
        self._ready = threading.Condition(self._lock)
        self._free: list[Buffer] = []
        self._made = 0
        self._closed = False
        self._keep = True
        self.waits = 0

    @property
    def made(self) -> int:
        return self._made

    def take(self, driver: CudaDriver, device: int, check: Callable[[], None]) -> Buffer:
        """A buffer, new (near `device`) or used before. While there is none, `check` is called and may raise. Raises
        DeviceError, TransferError (closed)."""
        with self._lock:
            self.waits += not self._free and self._made >= self._limit
            while not self._free and self._made >= self._limit and not self._closed:
                self._ready.wait(_TICK_S)
                check()
            if self._closed:
                raise TransferError("the transfer engine is closed")
            if self._free:
                return self._free.pop()
            self._made += 1
            self._keep = True
        try:
            return Buffer(driver, device, self._length)
        except BaseException:
            self._forget(1)
            raise

    def give(self, buffer: Buffer) -> None:
        sound = buffer.settle()
        with self._lock:
            if sound and self._keep and not self._closed:
                self._free.append(buffer)
                self._ready.notify()
                return
        buffer.free()
        self._forget(1)

    def _forget(self, count: int) -> None:
        with self._lock:
            self._made -= count
            self._ready.notify(count)

    def trim(self) -> None:
        """Free what is not in use now; what is in use is freed when it comes back, unless a new one was made meanwhile."""
        with self._lock:
            self._keep = False
            idle, self._free = self._free, []
        for buffer in idle:
            buffer.free()
        self._forget(len(idle))

    def close(self) -> None:
        self._closed = True
        self.trim()
