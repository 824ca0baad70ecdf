"""Memory as the drop-in API sees it: ranges by address that the application registered, and managed buffers.

Knows: which ranges are whose, all-or-nothing batches, copying bytes in and out. Does not know: peers. The engine counts
registrations of the same range, because the store may share it; here a range is registered once, however often it is asked for,
and one unregistration ends it.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Sequence

from mooncake.common.errors import MooncakeError, NotRegistered, Overloaded
from mooncake.drop_in.results import FAILURES
from transfer_engine import SharedBuffer, TransferEngine
from transfer_engine.transports import sysio

MAX_MANAGED = 4096
_PHYSICAL_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class Buffers:
    """Thread-safe. Errors are those of the engine's methods, ValueError for a range that is none."""

    def __init__(self, engine: TransferEngine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._registered: dict[int, int] = {}
        self._closing: set[int] = set()
        """Unregistered, but a peer has not let go yet."""
        self._managed: dict[int, SharedBuffer] = {}

    def register(self, addresses: Sequence[int], lengths: Sequence[int], location: str) -> None:
        """All or nothing."""
        if len(addresses) != len(lengths):
            raise ValueError(f"{len(addresses)} addresses but {len(lengths)} lengths")
        added: list[int] = []
        with self._lock:
            try:
                for address, length in zip(addresses, lengths, strict=True):
                    if self._registered.get(address) != length:
                        self._engine.register_local_memory(address, length, location=location)
                        added.append(address)
                        self._registered[address] = length
            except FAILURES:
                for address in added:
                    del self._registered[address]
                    self._engine.unregister_local_memory(address)
                raise

    def unregister(self, addresses: Sequence[int]) -> None:
        """Every one that can be; raises the first error after that: NotRegistered for an unknown one, TransferTimeout for one that
        a peer does not let go of. That one is closed to new work, and is to be unregistered again."""
        problem: MooncakeError | None = None
        for address in addresses:
            try:
                self._unregister(address)
            except MooncakeError as error:
                problem = problem or error
        if problem is not None:
            raise problem

    def _unregister(self, address: int) -> None:
        with self._lock:
            if self._registered.pop(address, None) is not None:
                self._closing.add(address)
            elif address not in self._closing:
                raise NotRegistered(f"no memory is registered at {address:#x}")
        self._engine.unregister_local_memory(address)
        with self._lock:
            self._closing.discard(address)

    def allocate(self, length: int) -> int:
        """Address of zeroed, registered memory; peers on this host may map it. Raises Overloaded, ValueError, OSError."""
        if len(self._managed) >= MAX_MANAGED:
            raise Overloaded(f"{MAX_MANAGED} managed buffers are in use: free some")
        if length > _PHYSICAL_BYTES:
            raise Overloaded(f"{length} bytes are more than this machine has")  # they could be mapped, but never filled
        buffer = self._engine.allocate_shared(length, "mooncake-managed")
        self._managed[buffer.address] = buffer
        return buffer.address

    def free(self, address: int) -> None:
        """Raises NotRegistered, and TransferTimeout while a peer uses it."""
        buffer = self._managed.get(address)
        if buffer is None:
            raise NotRegistered(f"no managed buffer starts at {address:#x}")
        buffer.close()
        self._managed.pop(address, None)

    def write(self, address: int, data: bytes, length: int) -> None:
        """The first `length` bytes of `data`. Raises ValueError (data is shorter), NotRegistered."""
        if length > len(data):
            raise ValueError(f"cannot write {length} bytes: only {len(data)} were given")
        self._inside(address, length)
        ctypes.memmove(address, data, length)

    def read(self, address: int, length: int) -> bytes:
        """Raises NotRegistered."""
        self._inside(address, length)
        return ctypes.string_at(address, length)

    def _inside(self, address: int, length: int) -> None:
        """Anything else, and memory of a GPU, could end the process."""
        with self._lock:
            ranges = [*self._registered.items(), *((b.address, b.length) for b in self._managed.values())]
        covered = any(start <= address and address + length <= start + size for start, size in ranges)
        if not covered or (length and not sysio.is_mapped(address, length)):
            raise NotRegistered(f"[{address:#x}, +{length}) is not in one registered or managed buffer of the host")

    def close(self) -> None:
        for address in list(self._managed):
            self.free(address)
