"""Five gigabytes in one request, each way: no 32 bit count anywhere. Our own side costs 61 MiB: one file mapped over and over."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from tests.transfer_engine.chaos import config
from tests.transfer_engine.peer import _Main
from tests.transfer_engine.zygote import Zygote
from transfer_engine import Opcode, TransferEngine, TransferRequest

LENGTH = (5 << 30) + 12345
PERIOD = 61 << 20  # no multiple of a slice: a slice at a wrong place shows
PAGE = 4096
MARKS = [0, 1 << 31, (1 << 32) - PAGE, 1 << 32, 5 << 30]
"""Pages of their own content, where counts of 31 and 32 bits would wrap."""
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]


def _pattern() -> np.ndarray:
    return np.random.default_rng(61).integers(0, 256, PERIOD, np.uint8)


def _mark(at: int) -> np.ndarray:
    return np.random.default_rng(at).integers(0, 256, PAGE, np.uint8)


class Repeated:
    """LENGTH bytes of address space that show PERIOD bytes of memory again and again, but for the marks."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("repeated")
        os.ftruncate(self.fd, PERIOD + PAGE * len(MARKS))
        self.content = np.frombuffer(mmap.mmap(self.fd, 0), np.uint8)
        pages = -(-LENGTH // PAGE) * PAGE
        self.whole = mmap.mmap(-1, pages, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
        self.at = ctypes.addressof(ctypes.c_char.from_buffer(self.whole))
        for offset in range(0, pages, PERIOD):
            self._map(offset, min(PERIOD, pages - offset), 0)
        for index, offset in enumerate(MARKS):
            self._map(offset, PAGE, PERIOD + index * PAGE)

    def _map(self, offset: int, length: int, of: int) -> None:
        made = _libc.mmap(self.at + offset, length, 3, mmap.MAP_SHARED | _MAP_FIXED, self.fd, of)
        assert made == self.at + offset, os.strerror(ctypes.get_errno())

    def expected(self) -> np.ndarray:
        return np.concatenate([_pattern(), *map(_mark, MARKS)])


class _Big(_Main):
    """Holds LENGTH bytes for real."""

    def hold(self, shared: bool) -> int:
        if shared:
            self.big = self.engine.allocate_shared(LENGTH)
            self.memory = np.frombuffer(self.big.view, np.uint8)
            return self.big.address
        self.memory = np.frombuffer(
            mmap.mmap(-1, LENGTH, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE), np.uint8
        )
        return self.engine.register_buffer(self.memory)

    def wrong(self) -> int:
        """How many bytes are not what they should be; at most 1000 are counted a period."""
        pattern, found = _pattern(), 0
        for offset in range(0, LENGTH, PERIOD):
            part = self.memory[offset : offset + PERIOD]
            expected = pattern[: len(part)]
            for at in MARKS:
                if offset <= at < offset + len(part):
                    expected = expected.copy() if expected.base is not None or expected is pattern else expected
                    end = min(at - offset + PAGE, len(part))
                    expected[at - offset : end] = _mark(at)[: end - (at - offset)]
            if not np.array_equal(part, expected):
                found += min(1000, int(np.count_nonzero(part != expected)))
        return found


def _available_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) << 10


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("way", ["shm-mapped", "tcp"])
def test_five_gibibytes_in_one_request(way: str) -> None:
    if _available_bytes() < 8 << 30:
        pytest.skip("needs 8 GiB of available memory")
    with Zygote(preload=False) as zygote, TransferEngine(config(way, stall_timeout_s=20.0)) as engine:
        target = zygote.fork(config(way, stall_timeout_s=20.0), _Big)
        try:
            ours = Repeated()
            engine.register_local_memory(ours.at, LENGTH, owner=ours)
            segment, base = engine.open_segment(target.address), target.call("hold", way == "shm-mapped")
            ours.content[:] = ours.expected()
            request = TransferRequest(Opcode.WRITE, ours.at, segment, base, LENGTH)
            assert engine.transfer_sync([request], 120.0).transferred_bytes == LENGTH
            assert target.call("wrong", timeout_s=100.0) == 0
            ours.content[:] = 0
            assert engine.transfer_sync([request._replace(opcode=Opcode.READ)], 120.0).transferred_bytes == LENGTH
            assert np.array_equal(ours.content, ours.expected())
        finally:
            target.kill()
