"""Registered memory: which address ranges may be touched, and by whom they are being touched.

Knows: regions, their reference and use counts, and how to look up thousands of ranges at once. Does not know: what
backs a region, sockets, peers. The same table holds our own regions and the copy of a peer's. Paper 3.2, registerLocalMemory.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mooncake.common.errors import NotRegistered, RegionOverlap, TransferTimeout
from transfer_engine.slices import U64, Index

HOST = -1
"""In the place of a device's ordinal: memory that the CPU reaches."""


def device_ordinal(location: str) -> int:
    """N of the location `cuda:N`, HOST for every other one. A peer's malformed "cuda..." is device memory too: hands off."""
    kind, _, number = location.partition(":")
    if kind != "cuda":
        return HOST
    return int(number) if number.isdecimal() and len(number) <= 4 else 0


@dataclass(slots=True, eq=False)
class Region:
    """One registered range. `uses` counts operations in progress, `references` registrations of the same range, `keys` are its
    remote keys, one per NIC of its owner (empty: none)."""

    address: int
    length: int
    remote_access: bool = True
    location: str = "cpu"
    owner: object = None
    backing: object = None
    keys: tuple[int, ...] = ()
    references: int = 1
    uses: int = 0
    closing: bool = False
    nic_shift: int = 0
    """What NICs add to its addresses, modulo 2**64: they know a dmabuf's bytes by its offsets, everything else by our addresses."""
    device: int = field(init=False)
    """Ordinal of the GPU that holds it; HOST: none."""

    def __post_init__(self) -> None:
        self.device = device_ordinal(self.location)

    @property
    def end(self) -> int:
        return self.address + self.length


class Located(NamedTuple):
    """Ranges, each wholly on one device (or HOST). Range i lies `offset[i]` bytes into range `row[i]` of those it was made from."""

    address: U64
    length: U64
    device: Index
    row: Index
    offset: U64

    def take(self, where: npt.NDArray[np.bool_]) -> Located:
        return Located(self.address[where], self.length[where], self.device[where], self.row[where], self.offset[where])

    def refine(self, finer: Located) -> Located:
        """These ranges cut where `finer`, which was made from as many ranges of the same lengths, is cut."""
        row = finer.row
        address, offset = self.address[row] + finer.offset, self.offset[row] + finer.offset
        return Located(address, finer.length, self.device[row], self.row[row], offset)


class _Snapshot(NamedTuple):
    starts: U64
    ends: U64
    regions: tuple[Region, ...]
    addresses: list[int]
    devices: Index

    def row_of(self, address: int, length: int) -> int:
        """Row of the region that wholly contains a range, or -1. Much cheaper than numpy for one range."""
        row = bisect.bisect_right(self.addresses, address) - 1
        return row if row >= 0 and address + length <= self.regions[row].end else -1


@dataclass(slots=True)
class Hold:
    """Regions kept from being unregistered; give it back with `RegionTable.release`. `rows` maps each range to its region."""

    regions: tuple[Region, ...]
    rows: Index
    table: tuple[Region, ...] = field(default=(), repr=False)


class RegionTable:
    """Thread-safe set of disjoint regions. `version` grows with every change that peers can see."""

    def __init__(self, capacity: int = 1 << 16) -> None:
        self._capacity = capacity
        self._lock = threading.Lock()  # this one is entered, not the condition: threads.py
        self._changed = threading.Condition(self._lock)
        self._regions: dict[int, Region] = {}
        self._leaving: set[Region] = set()
        self._all = self._remote = _snapshot([])
        self.has_devices = False
        """Whether any region is device memory; what transports ask before they look closer."""
        self.version = 0

    def add(self, region: Region) -> Region:
        """Register; the same range again only counts up. Raises RegionOverlap, ValueError (empty, wraps), NotRegistered (closing)."""
        if region.length <= 0 or region.address <= 0 or region.end >= 1 << 64:
            raise ValueError(f"not a memory range: address {region.address:#x}, length {region.length}")
        with self._lock:
            known = self._regions.get(region.address)
            if known is not None and known.length == region.length:
                if known.closing:
                    raise NotRegistered(f"region {region.address:#x} is being unregistered")
                known.references += 1
                return known
            self._reject_overlap(region)
            if len(self._regions) >= self._capacity:
                raise ValueError(f"more than {self._capacity} memory regions")
            self._regions[region.address] = region
            self.version += 1
            self._rebuild()
            return region

    def known(self, address: int, length: int) -> bool:
        """Whether exactly this range is registered and not closing."""
        region = self._regions.get(address)
        return region is not None and region.length == length and not region.closing

    def reject_overlap(self, region: Region) -> None:
        """Raises RegionOverlap when another range shares bytes with this one."""
        with self._lock:
            self._reject_overlap(region)

    def _reject_overlap(self, region: Region) -> None:
        ends, regions = self._all.ends, self._all.regions
        at = int(np.searchsorted(ends, np.uint64(region.address), side="right"))
        if at < len(regions) and regions[at].address < region.end:
            other = regions[at]
            raise RegionOverlap(
                f"[{region.address:#x}, +{region.length}) overlaps the registered [{other.address:#x}, +{other.length})"
            )

    def drop_reference(self, address: int) -> Region | None:
        """Count down. Returns the region, now closing (no new use), when it was the last one; else None. Raises NotRegistered."""
        with self._lock:
            region = self._regions.get(address)
            if region is None:
                raise NotRegistered(f"no region starts at {address:#x}")
            if region.references > 1:
                region.references -= 1
                return None
            region.closing = True
            self.version += 1
            return region

    def wait_unused(self, region: Region, timeout_s: float) -> None:
        """Raises TransferTimeout while somebody still uses it."""
        with self._lock:
            if not self._changed.wait_for(lambda: region.uses == 0, timeout_s):
                raise TransferTimeout(f"region {region.address:#x} is still in use after {timeout_s} s")

    def remove(self, region: Region) -> None:
        """Take a closing region out for good. Idempotent."""
        with self._lock:
            if self._regions.get(region.address) is region:
                del self._regions[region.address]
                self._rebuild()

    def hold(self, address: U64, length: U64, *, remote: bool = False) -> Hold:
        """Keep the regions of all ranges. A range may span regions that touch. Raises NotRegistered for any byte outside."""
        snapshot = self._remote if remote else self._all
        starts, ends, regions = snapshot.starts, snapshot.ends, snapshot.regions
        if len(address) == 1 and (row := snapshot.row_of(int(address[0]), int(length[0]))) >= 0:
            return self._hold((regions[row],), np.array([row]), regions)
        if len(regions) == 0:
            raise NotRegistered("no memory is registered" if len(address) else "nothing to hold")
        rows = np.searchsorted(starts, address, side="right") - 1
        stop = address + length
        good = (rows >= 0) & (stop <= ends[rows]) & (stop >= address)
        wanted = set(rows.tolist())
        if not good.all():
            wanted = {row for row in wanted if row >= 0}
            for at in np.flatnonzero(~good).tolist():
                wanted.update(_span(snapshot, int(address[at]), int(length[at])))
        return self._hold(tuple(regions[row] for row in wanted), rows, regions)

    def _hold(self, held: tuple[Region, ...], rows: Index, table: tuple[Region, ...]) -> Hold:
        with self._lock:
            for region in held:
                if region.closing:
                    raise NotRegistered(f"region {region.address:#x} is being unregistered")
            for region in held:
                region.uses += 1
        return Hold(held, rows, table)

    def release(self, hold: Hold) -> None:
        with self._lock:
            free = False
            for region in hold.regions:
                region.uses -= 1
                free |= region.closing and region.uses == 0
            if free:
                self._changed.notify_all()

    def hold_one(self, address: int, length: int, *, remote: bool = False) -> Region | None:
        """`hold` for one range within one region, without arrays; None when there is none. Give it back with `release_one`."""
        snapshot = self._remote if remote else self._all
        row = snapshot.row_of(address, length)
        if row < 0:
            return None
        region = snapshot.regions[row]
        with self._lock:
            if region.closing:
                return None
            region.uses += 1
        return region

    def release_one(self, region: Region) -> None:
        with self._lock:
            region.uses -= 1
            if region.closing and region.uses == 0:
                self._changed.notify_all()

    def rows(self, address: U64, length: U64) -> tuple[Index, tuple[Region, ...]]:
        """Row of the region that wholly contains each range, or -1. Holds nothing."""
        snapshot = self._all
        return _rows(snapshot, address, length), snapshot.regions

    def locate(self, address: U64, length: U64) -> Located:
        """Where registered ranges lie; one that spans touching regions is cut between them. Raises NotRegistered."""
        snapshot = self._all
        rows = _rows(snapshot, address, length)
        if len(snapshot.devices) and (rows >= 0).all():
            return Located(
                address, length, snapshot.devices[rows], np.arange(len(rows)), np.zeros(len(rows), np.uint64)
            )
        pieces = [
            (max(region.address, start), min(region.end, start + count), region.device, row, start)
            for row, (start, count) in enumerate(zip(address.tolist(), length.tolist(), strict=True))
            for region in (snapshot.regions[at] for at in _span(snapshot, start, count))
        ]
        first = np.array([piece[0] for piece in pieces], np.uint64)
        return Located(
            first,
            np.array([piece[1] for piece in pieces], np.uint64) - first,
            np.array([piece[2] for piece in pieces], np.intp),
            np.array([piece[3] for piece in pieces], np.intp),
            first - np.array([piece[4] for piece in pieces], np.uint64),
        )

    def replace(self, fresh: Iterable[Region], version: int, keep: Callable[[Region, Region], bool]) -> list[Region]:
        """Make the table equal to `fresh`, keeping the known object of a range where `keep(old, new)`. Returns what left it."""
        with self._lock:
            old, self._regions = self._regions, {}
            for region in fresh:
                known = old.get(region.address)
                if known is not None and known.length == region.length and not known.closing and keep(known, region):
                    region = known
                self._regions[region.address] = region
            self._rebuild()
            self.version = version
            gone = [region for region in old.values() if self._regions.get(region.address) is not region]
            for region in gone:
                region.closing = True
                if region.uses:
                    self._leaving.add(region)
            return gone

    def revoke(self, address: int, length: int, timeout_s: float, version: int = 0) -> bool:
        """Drop every region within the range (length 0: all); True once none of them is in use."""
        stop = address + length if length else 1 << 64
        with self._lock:
            for region in [r for r in self._regions.values() if address <= r.address < stop]:
                region.closing = True
                del self._regions[region.address]
                self._leaving.add(region)
            self._rebuild()
            self.version = max(self.version, version)
            leaving = [r for r in self._leaving if address <= r.address < stop]
            done = self._changed.wait_for(lambda: not any(r.uses for r in leaving), timeout_s)
            self._leaving = {r for r in self._leaving if r.uses}
            return done

    def regions(self) -> list[Region]:
        with self._lock:
            return list(self._regions.values())

    def clear(self) -> None:
        with self._lock:
            self._regions.clear()
            self._leaving.clear()
            self._rebuild()

    def _rebuild(self) -> None:
        ordered = sorted(self._regions.values(), key=lambda r: r.address)
        self._all = _snapshot(ordered)
        self._remote = _snapshot([r for r in ordered if r.remote_access])
        self.has_devices = bool((self._all.devices != HOST).any())


def _snapshot(ordered: list[Region]) -> _Snapshot:
    addresses = [r.address for r in ordered]
    ends = np.array([r.end for r in ordered], np.uint64)
    devices = np.array([r.device for r in ordered], np.intp)
    return _Snapshot(np.array(addresses, np.uint64), ends, tuple(ordered), addresses, devices)


def _rows(snapshot: _Snapshot, address: U64, length: U64) -> Index:
    if len(address) == 1:
        return np.array([snapshot.row_of(int(address[0]), int(length[0]))])
    if len(snapshot.regions) == 0:
        return np.full(len(address), -1, np.intp)
    rows = np.searchsorted(snapshot.starts, address, side="right") - 1
    stop = address + length
    return np.where((rows >= 0) & (stop <= snapshot.ends[rows]) & (stop >= address), rows, -1)


def _span(snapshot: _Snapshot, address: int, length: int) -> list[int]:
    """Rows of the touching regions that cover the range. Raises NotRegistered."""
    starts, regions = snapshot.starts, snapshot.regions
    row = int(np.searchsorted(starts, np.uint64(address), side="right")) - 1
    stop, rows = address + length, []
    at = address
    while 0 <= row < len(regions) and regions[row].address <= at < regions[row].end:
        rows.append(row)
        at = regions[row].end
        if at >= stop:
            return rows
        row += 1
    if length == 0 and rows:
        return rows
    raise NotRegistered(f"[{address:#x}, +{length}) is not inside registered memory")
