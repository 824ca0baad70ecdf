"""GPU memory as the CPU's transports see it: staged through pinned buffers, or copied by the GPU itself.

Knows: which registered ranges are device memory, and how to lend host ranges in their place. Does not know: what moves the
host ranges (sockets, other processes), NICs. Paper 3.2: one engine over DRAM and VRAM.

Deadlock is excluded by two pools. What is on its way out (read from the device, then sent) may wait for the peer, which may wait
for one of *its* buffers of the way in. The way in (received, then written to the device) takes its buffer when the bytes
are about to come, and waits for nobody's buffer.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Generator
from typing import NamedTuple

import numpy as np

from mooncake.common.errors import DeviceError
from transfer_engine.config import EngineConfig
from transfer_engine.device import cuda_driver
from transfer_engine.device.cuda_driver import CudaDriver
from transfer_engine.device.parts import Part, cut_to_fit, whole
from transfer_engine.device.pool import Buffer, Pool
from transfer_engine.memory import HOST, Located, Region, RegionTable
from transfer_engine.slices import U64

Check = Callable[[], None]
Parts = Generator[Part, None, None]


class DmaBuf(NamedTuple):
    """`fd` is the caller's to close; the region starts `offset` bytes into it."""

    fd: int
    offset: int


class DeviceMemory:
    """One per engine. `memory` holds the engine's own regions."""

    def __init__(self, config: EngineConfig, memory: RegionTable) -> None:
        self._path = config.cuda_driver
        self._memory = memory
        self._half = max(1, config.slice_bytes // 2)
        self._out = Pool(config.staging_buffers, 2 * self._half)
        self._in = Pool(config.staging_buffers, 2 * self._half)
        self._direct = Pool(config.staging_buffers, 0)

    @property
    def active(self) -> bool:
        """Whether any own region is device memory. Transports need not look further when not."""
        return self._memory.has_devices

    def driver(self) -> CudaDriver:
        """Raises ConfigError where there is none."""
        return cuda_driver.load(self._path)

    def outgoing(self, address: U64, length: U64, check: Check) -> Parts:
        """Host ranges that hold the bytes of own registered ranges, part after part; each is valid until the next is asked
        for. While one is in use, the next is copied. Close the generator (`contextlib.closing`). Waits for a buffer, asking
        `check`. Raises DeviceError, NotRegistered and what `check` raises, the first time before any bytes are out."""
        ranges = self._memory.locate(address, length)
        if (ranges.device == HOST).all():
            yield whole(ranges)
            return
        with self._buffer(self._out, ranges, check) as buffer:
            previous: Part | None = None
            for part in cut_to_fit(ranges, self._halves(buffer), self._half):
                buffer.start(part.copies, to_device=False)
                if previous is not None:
                    yield previous
                buffer.synchronize()
                previous = part
            if previous is not None:
                yield previous

    def incoming(self, address: U64, length: U64, check: Check) -> Parts:
        """Host ranges to be filled in the place of own registered ranges, part after part; what was filled in goes to the
        device when the next part is asked for, and all of it is there when the generator ends by itself. A part under way
        when the generator is closed is lost. Waits and raises like `outgoing`."""
        ranges = self._memory.locate(address, length)
        if (ranges.device == HOST).all():
            yield whole(ranges)
            return
        with self._buffer(self._in, ranges, check) as buffer:
            for part in cut_to_fit(ranges, self._halves(buffer), self._half):
                yield part
                buffer.synchronize()
                buffer.start(part.copies, to_device=True)
            buffer.synchronize()

    @contextlib.contextmanager
    def _buffer(self, pool: Pool, ranges: Located, check: Check) -> Generator[Buffer, None, None]:
        buffer = pool.take(self.driver(), int(ranges.device.max()), check)
        try:
            yield buffer
        finally:
            pool.give(buffer)

    def _halves(self, buffer: Buffer) -> tuple[int, int]:
        return buffer.address, buffer.address + self._half

    def copy(self, target: Located, source: Located, check: Check) -> None:
        """Copy ranges of this process, each at least on one side device memory, by the driver; done on return. Both have equal
        rows. Raises DeviceError and what `check` raises."""
        device = np.maximum(target.device, source.device)
        rows = zip(
            device.tolist(), target.address.tolist(), source.address.tolist(), target.length.tolist(), strict=True
        )
        with self._buffer(self._direct, target._replace(device=device), check) as buffer:
            buffer.start_pairs(rows)
            buffer.synchronize()

    def dmabuf_fd(self, region: Region) -> DmaBuf | None:
        """For a transport that registers device memory with a NIC (`KeyedTransport.register`): the region as a dmabuf, to be
        given to `ibv_reg_dmabuf_mr(pd, offset, length, iova=region.address, fd, access)`; close `fd` when it is registered.
        None where GPU, driver or kernel cannot: then try a plain registration of `region.address` (nvidia-peermem); where
        that fails too, return no keys, and the region's transfers go by tcp, staged through pinned memory. Never raises for
        what the hardware lacks."""
        if region.device == HOST:
            return None
        page = mmap.PAGESIZE
        first, end = region.address // page * page, -(-region.end // page) * page
        try:
            self.driver().order_for_nics(region.address)
            fd = self.driver().dmabuf(region.device, first, end - first)
        except DeviceError:
            return None
        return None if fd is None else DmaBuf(fd, region.address - first)

    def stats(self) -> dict[str, float]:
        """Gauge `staging_buffers` (pinned, of `slice_bytes`), and how often one had to be waited for."""
        pools = (self._out, self._in)
        return {"staging_buffers": sum(p.made for p in pools), "staging_waits": sum(p.waits for p in pools)}

    def trim(self) -> None:
        """Free pinned memory and streams unless device memory is still registered."""
        if not self.active:
            for pool in (self._out, self._in, self._direct):
                pool.trim()

    def close(self) -> None:
        for pool in (self._out, self._in, self._direct):
            pool.close()
