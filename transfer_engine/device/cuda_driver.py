"""The CUDA driver API, as far as moving bytes needs it, through ctypes.

Knows: loading the library once per process and path, primary contexts, pinned memory, streams, asynchronous copies, what a
pointer points at, dmabuf handles; every status becomes a DeviceError with the driver's own words. Does not know: regions,
pools, transports. Loaded when a "cuda:N" location is registered or a pointer must be looked up, never at import. ctypes
calls run without the GIL. Source: CUDA Driver API reference; `_v2` names are what cuda.h maps the plain names to.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator

from mooncake.common.errors import ConfigError, DeviceError

_INVALID_VALUE, _NO_DEVICE = 1, 100
_MEMORY_TYPE_DEVICE = 2
_POINTER_MEMORY_TYPE, _POINTER_SYNC_MEMOPS, _POINTER_DEVICE_ORDINAL = 2, 6, 9
_DEVICE_DMA_BUF_SUPPORTED = 124
_HOST_ALLOC_PORTABLE = 1  # pinned for every context, so that one pool serves all devices
_STREAM_NON_BLOCKING = 1  # not ordered against the application's default stream
_HANDLE_DMA_BUF_FD = 1

_P, _U64, _SIZE, _INT, _UINT = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int, ctypes.c_uint
_SIGNATURES: dict[str, tuple[object, ...]] = {
    "cuInit": (_UINT,),
    "cuGetErrorString": (_INT, _P),
    "cuDeviceGetCount": (_P,),
    "cuDeviceGet": (_P, _INT),
    "cuDeviceGetAttribute": (_P, _INT, _INT),
    "cuDevicePrimaryCtxRetain": (_P, _INT),
    "cuCtxPushCurrent_v2": (_P,),
    "cuCtxPopCurrent_v2": (_P,),
    "cuMemHostAlloc": (_P, _SIZE, _UINT),
    "cuMemFreeHost": (_P,),
    "cuStreamCreate": (_P, _UINT),
    "cuStreamDestroy_v2": (_P,),
    "cuStreamSynchronize": (_P,),
    "cuMemcpyAsync": (_U64, _U64, _SIZE, _P),
    "cuPointerGetAttribute": (_P, _INT, _U64),
    "cuPointerSetAttribute": (_P, _INT, _U64),
}
_OPTIONAL: dict[str, tuple[object, ...]] = {"cuMemGetHandleForAddressRange": (_P, _U64, _SIZE, _INT, _U64)}
"""Since CUDA 11.7."""


class CudaDriver:
    """One loaded driver. Raises ConfigError when there is none, or it finds no GPU."""

    def __init__(self, path: str) -> None:
        try:
            library = ctypes.CDLL(path)
            self._call = {name: _declare(library, name, args) for name, args in _SIGNATURES.items()}
        except (OSError, AttributeError) as error:
            raise ConfigError(
                f"memory on a GPU needs the NVIDIA driver, and {path} cannot be used ({error}): install the driver, set the engine's "
                "`cuda_driver` to its library, or register host memory (location 'cpu')"
            ) from error
        self._call |= {n: _declare(library, n, args) for n, args in _OPTIONAL.items() if hasattr(library, n)}
        self._lock = threading.Lock()
        self._contexts: dict[int, int] = {}
        self.device_count = self._start(path)

    def _start(self, path: str) -> int:
        count = ctypes.c_int()
        code = self._call["cuInit"](0) or self._call["cuDeviceGetCount"](ctypes.byref(count))
        if code == _NO_DEVICE or (code == 0 and count.value == 0):
            raise ConfigError(f"{path} finds no GPU: check nvidia-smi and CUDA_VISIBLE_DEVICES")
        if code:
            raise ConfigError(f"{path} does not start: {self._words(code)}; check nvidia-smi")
        return count.value

    def _words(self, code: int) -> str:
        text = ctypes.c_char_p()
        self._call["cuGetErrorString"](code, ctypes.byref(text))
        return f"{(text.value or b'unknown error').decode(errors='replace')} ({code})"

    def _do(self, name: str, *arguments: object) -> None:
        code = self._call[name](*arguments)
        if code:
            raise DeviceError(f"{name}: {self._words(code)}")

    @contextlib.contextmanager
    def on(self, device: int) -> Iterator[None]:
        """Run with the device's primary context (the one that torch uses) current. Raises DeviceError."""
        self._do("cuCtxPushCurrent_v2", self._context(device))
        try:
            yield
        finally:
            self._call["cuCtxPopCurrent_v2"](ctypes.byref(_P()))

    def _context(self, device: int) -> int:
        """Retained once and kept for the life of the process, as torch does."""
        with self._lock:
            if device not in self._contexts:
                handle, context = ctypes.c_int(), _P()
                self._do("cuDeviceGet", ctypes.byref(handle), device)
                self._do("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
                self._contexts[device] = context.value or 0
            return self._contexts[device]

    # --- pointers ---------------------------------------------------------------------------------------------------

    def device_of(self, address: int) -> int | None:
        """Ordinal of the device whose memory an address is in; None for host memory and unknown addresses. Raises DeviceError."""
        kind, ordinal = ctypes.c_uint(), ctypes.c_int()
        code = self._call["cuPointerGetAttribute"](ctypes.byref(kind), _POINTER_MEMORY_TYPE, address)
        if code == _INVALID_VALUE or (code == 0 and kind.value != _MEMORY_TYPE_DEVICE):
            return None
        if code:
            raise DeviceError(f"cuPointerGetAttribute: {self._words(code)}")
        self._do("cuPointerGetAttribute", ctypes.byref(ordinal), _POINTER_DEVICE_ORDINAL, address)
        return ordinal.value

    def order_for_nics(self, address: int) -> None:
        """Make the application's synchronous copies on that allocation complete before they return, which a NIC that reads it
        relies on (GPUDirect RDMA guide, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS)."""
        self._do("cuPointerSetAttribute", ctypes.byref(ctypes.c_uint(1)), _POINTER_SYNC_MEMOPS, address)

    def dmabuf(self, device: int, address: int, length: int) -> int | None:
        """A new dmabuf descriptor of a page-aligned range; None where GPU, driver or kernel cannot."""
        export = self._call.get("cuMemGetHandleForAddressRange")
        handle, able, fd = ctypes.c_int(), ctypes.c_int(), ctypes.c_int(-1)
        self._do("cuDeviceGet", ctypes.byref(handle), device)
        self._do("cuDeviceGetAttribute", ctypes.byref(able), _DEVICE_DMA_BUF_SUPPORTED, handle)
        if export is None or not able.value:
            return None
        with self.on(device):
            code = export(ctypes.byref(fd), address, length, _HANDLE_DMA_BUF_FD, 0)
        return fd.value if code == 0 and fd.value >= 0 else None

    # --- pinned memory, streams, copies: with a context current (`on`) --------------------------------------------------

    def allocate_pinned(self, length: int) -> int:
        address = _P()
        self._do("cuMemHostAlloc", ctypes.byref(address), length, _HOST_ALLOC_PORTABLE)
        return address.value or 0

    def free_pinned(self, address: int) -> None:
        self._do("cuMemFreeHost", address)

    def create_stream(self) -> int:
        stream = _P()
        self._do("cuStreamCreate", ctypes.byref(stream), _STREAM_NON_BLOCKING)
        return stream.value or 0

    def destroy_stream(self, stream: int) -> None:
        self._do("cuStreamDestroy_v2", stream)

    def copy(self, target: int, source: int, length: int, stream: int) -> None:
        """Start a copy in any direction (unified addressing tells which). Both ranges must stay until `synchronize`."""
        self._do("cuMemcpyAsync", target, source, length, stream)

    def synchronize(self, stream: int) -> None:
        """Returns when everything on the stream is done; raises the DeviceError of what failed."""
        self._do("cuStreamSynchronize", stream)


def _declare(library: ctypes.CDLL, name: str, arguments: tuple[object, ...]) -> Callable[..., int]:
    function = getattr(library, name)
    function.restype, function.argtypes = ctypes.c_int, list(arguments)
    return function


_lock = threading.Lock()
_loaded: dict[str, CudaDriver] = {}


def load(path: str) -> CudaDriver:
    """The process's driver from that library. Raises ConfigError; not remembered, so an installed driver is found later."""
    with _lock:
        if path not in _loaded:
            _loaded[path] = CudaDriver(path)
        return _loaded[path]
