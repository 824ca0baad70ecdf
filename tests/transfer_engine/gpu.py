"""Device memory for tests, by the driver API alone: on the fake driver (fakecuda.c), and unchanged on a real one."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest

from mooncake.common.errors import ConfigError
from tests.native import build
from transfer_engine.device import cuda_driver

REAL = "libcuda.so.1"
EAGER, LAZY, MOODY = range(3)
"""Tempers of the fake: when a copy that was started really happens."""


def fake_driver() -> str:
    """Path of the built fake. Skips the test where it cannot be built."""
    return str(build(Path(__file__).with_name("fakecuda.c"), "-lpthread"))


def real_driver() -> str:
    """Skips the test on a machine without a GPU."""
    try:
        cuda_driver.load(REAL)
    except ConfigError as error:
        pytest.skip(f"no GPU: {error}")
    return REAL


class Gpu:
    """Owns device memory in this process."""

    def __init__(self, path: str) -> None:
        self.driver = cuda_driver.load(path)
        self.fake = path != REAL
        self._library = library = ctypes.CDLL(path)
        library.cuMemcpyHtoD_v2.argtypes = [ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t]
        library.cuMemcpyDtoH_v2.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t]
        library.cuMemAlloc_v2.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        library.cuMemFree_v2.argtypes = [ctypes.c_uint64]
        if self.fake:
            library.fake_fail.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_int]
        self._owned: dict[int, int] = {}

    def ordinal(self, wanted: int) -> int:
        return min(wanted, self.driver.device_count - 1)

    def allocate(self, length: int, device: int = 0) -> int:
        address = ctypes.c_uint64()
        with self.driver.on(device):
            assert self._library.cuMemAlloc_v2(ctypes.byref(address), length) == 0
        self._owned[address.value] = device
        return address.value

    def free(self, address: int) -> None:
        with self.driver.on(self._owned.pop(address)):
            assert self._library.cuMemFree_v2(address) == 0

    def free_all(self) -> None:
        for address in list(self._owned):
            self.free(address)

    def fill(self, address: int, content: np.ndarray | bytes) -> None:
        data = np.frombuffer(content, np.uint8)
        with self.driver.on(0):
            assert self._library.cuMemcpyHtoD_v2(address, data.ctypes.data, data.nbytes) == 0

    def read(self, address: int, length: int) -> np.ndarray:
        found = np.empty(length, np.uint8)
        with self.driver.on(0):
            assert self._library.cuMemcpyDtoH_v2(found.ctypes.data, address, length) == 0
        return found

    # --- the fake's own -----------------------------------------------------------------------------------------------

    def temper(self, which: int) -> None:
        if self.fake:
            self._library.fake_temper(which)

    def fail(self, name: str, nth: int = 1, code: int = 700) -> None:
        """The nth call of a driver function from now on returns `code`; "copy": the nth copy fails on its stream."""
        self._library.fake_fail(name.encode(), nth, code)

    def dmabuf(self, able: bool) -> None:
        """Whether GPU, driver and kernel can export memory."""
        self._library.fake_dmabuf(int(able))

    def failures(self) -> int:
        """Failures met since `fail`."""
        return int(self._library.fake_failures())

    def pinned_bytes(self) -> int:
        return int(self._library.fake_pinned_bytes())

    def streams(self) -> int:
        return int(self._library.fake_streams())


class Tensor:
    """What `register_buffer` looks at of a torch tensor on a GPU."""

    is_cuda = True

    def __init__(self, address: int, length: int, index: int) -> None:
        self._address, self._length, self.device = address, length, self
        self.index = index

    def data_ptr(self) -> int:
        return self._address

    def numel(self) -> int:
        return self._length

    def element_size(self) -> int:
        return 1

    def is_contiguous(self) -> bool:
        return True
