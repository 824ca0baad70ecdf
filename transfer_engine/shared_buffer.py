"""Memory that peers on the same host can map.

Knows: memfd, mapping, addresses. Does not know: who maps it. Backed by an anonymous memfd, which peers open through
/proc/<pid>/fd, so nothing is left behind in /dev/shm however the process ends.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable

from transfer_engine.protocol import RegionInfo


class SharedBuffer:
    """`length` zeroed bytes at `address`; `view` is a writable memoryview of them. `close` unregisters and frees."""

    def __init__(self, length: int, name: str, on_close: Callable[[SharedBuffer], None] | None = None) -> None:
        if length <= 0:
            raise ValueError(f"length must be positive, not {length}")
        self.length = length
        self._on_close = on_close
        self._closed = False
        self._lock = threading.Lock()
        self._fd = os.memfd_create(name or "mooncake", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self._fd, length)
            self._map = mmap.mmap(self._fd, length, mmap.MAP_SHARED)
        except BaseException:
            os.close(self._fd)
            raise
        self._anchor: ctypes.Array[ctypes.c_char] | None = (ctypes.c_char * length).from_buffer(self._map)
        self.address = ctypes.addressof(self._anchor)
        self.view = memoryview(self._map)
        self.info = RegionInfo(self.address, length, self._fd, os.fstat(self._fd).st_ino, 0)

    def close(self) -> None:
        """Idempotent. Raises TransferTimeout while a peer still touches it, and can be called again then."""
        with self._lock:
            if self._closed:
                return
            if self._on_close is not None:
                self._on_close(self)
            self._closed = True
        self.free()

    def free(self) -> None:
        """Unmap. Views that the application still holds keep the mapping alive until they are gone."""
        if self._anchor is None:
            return
        self._anchor = None
        try:
            self.view.release()
            self._map.close()
        except BufferError:
            pass
        os.close(self._fd)

    def __enter__(self) -> SharedBuffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Mapping:
    """A peer's shared buffer, mapped here. Raises OSError when it cannot be, or is another file than the one meant."""

    def __init__(self, pid: int, info: RegionInfo) -> None:
        fd = os.open(f"/proc/{pid}/fd/{info.fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            stat = os.fstat(fd)
            if stat.st_ino != info.inode or stat.st_size < info.file_offset + info.length:
                raise OSError(f"descriptor {info.fd} of process {pid} is not the shared buffer")
            self._map = mmap.mmap(fd, info.length, mmap.MAP_SHARED, offset=info.file_offset)
        finally:
            os.close(fd)
        self._anchor = (ctypes.c_char * info.length).from_buffer(self._map)
        self.address = ctypes.addressof(self._anchor)
        self.delta = (self.address - info.address) & ((1 << 64) - 1)
        """Add to an address of the peer, modulo 2**64, to get ours."""
