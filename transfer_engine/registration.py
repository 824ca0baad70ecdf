"""Registering and unregistering memory, and shared buffers.

Knows: the region table together with what peers with direct access hold of it. Does not know: transfers.
Paper 3.2, registerLocalMemory and unregisterLocalMemory.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np

from transfer_engine import numa
from transfer_engine.control import Control
from transfer_engine.device import location as locations
from transfer_engine.device.staging import DeviceMemory
from transfer_engine.memory import Region, RegionTable
from transfer_engine.shared_buffer import SharedBuffer
from transfer_engine.transports.base import KeyedTransport


class Registration:
    """Errors are those of `TransferEngine`'s methods of the same names."""

    def __init__(self, table: RegionTable, control: Control, devices: DeviceMemory, cuda_driver: str) -> None:
        self._table = table
        self._control = control
        self._devices = devices
        self._cuda_driver = cuda_driver
        self._lock = threading.Lock()
        self._buffers: set[SharedBuffer] = set()
        self._closed = False
        self.keyed: KeyedTransport | None = None
        """Gives every region its remote keys; set before the first registration."""

    def register(self, address: int, length: int, owner: object, location: str, remote_access: bool) -> None:
        if length > 0 and address > 0 and address + length < 1 << 64:
            location = locations.settle(address, length, location, self._cuda_driver)
        self._add(Region(address, length, remote_access, location, owner))

    def _add(self, region: Region) -> None:
        """Into the table, with its keys: peers must never see a region without them."""
        if self.keyed is None or region.length <= 0 or region.address <= 0:
            self._table.add(region)
            return
        with self._lock:
            if self._table.known(region.address, region.length):
                self._table.add(region)
                return
            self._table.reject_overlap(region)  # before the NICs pin it
            region.keys = self.keyed.register(region)
            region.location = _settled(region)
            try:
                self._table.add(region)
            except BaseException:
                self.keyed.unregister(region)
                raise

    def unregister(self, address: int, timeout_s: float) -> None:
        region = self._table.drop_reference(address)
        if region is None:
            return
        deadline = time.monotonic() + timeout_s
        if region.remote_access and not self._closed:
            self._control.revoke(region.address, region.length, timeout_s)
        self._table.wait_unused(region, max(0.0, deadline - time.monotonic()))
        if self.keyed is not None:
            self.keyed.unregister(region)
        self._table.remove(region)
        self._devices.trim()

    def allocate_shared(self, length: int, name: str) -> SharedBuffer:
        buffer = SharedBuffer(length, name, self._release_shared)
        try:
            self._add(Region(buffer.address, length, backing=buffer.info))
        except BaseException:
            buffer.free()
            raise
        with self._lock:
            self._buffers.add(buffer)
        return buffer

    def _release_shared(self, buffer: SharedBuffer) -> None:
        if not self._closed:
            self.unregister(buffer.address, 5.0)
        with self._lock:
            self._buffers.discard(buffer)

    def close(self) -> None:
        """Give everything back; peers were told before."""
        self._closed = True
        for buffer in list(self._buffers):
            buffer.close()
        self._table.clear()
        self._devices.close()


def _settled(region: Region) -> str:
    """`cpu` becomes `cpu:<NUMA node>` where all of it lies on one. Only now that NICs have pinned it is all of it somewhere."""
    node = numa.node_of(region.address, region.length) if region.location == "cpu" else None
    return region.location if node is None else f"cpu:{node}"


def extent(buffer: Any) -> tuple[int, int, str]:
    """(address, bytes, location) of a writable contiguous buffer, numpy array or torch tensor. Raises ValueError."""
    if hasattr(buffer, "data_ptr"):
        if not buffer.is_contiguous():
            raise ValueError("a tensor must be contiguous to be registered")
        location = f"cuda:{buffer.device.index}" if buffer.is_cuda else "cpu"
        return buffer.data_ptr(), buffer.numel() * buffer.element_size(), location
    try:
        view = memoryview(buffer)
    except TypeError as error:
        raise ValueError(f"{type(buffer).__name__} is not a buffer") from error
    if view.readonly or not view.c_contiguous:
        raise ValueError("a buffer must be writable and contiguous to be registered")
    return np.frombuffer(view, np.uint8).ctypes.data, view.nbytes, "cpu"
