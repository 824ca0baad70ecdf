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

from mooncake.common.errors import NotRegistered, RegionOverlap, TransferTimeout
from transfer_engine.slices import U64, Index


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

    @property
    def end(self) -> int:
        return self.address + self.length


class _Snapshot(NamedTuple):
    starts: U64
    ends: U64
    regions: tuple[Region, ...]
    addresses: list[int]

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
        self._changed = threading.Condition(threading.Lock())
        self._regions: dict[int, Region] = {}
        self._leaving: set[Region] = set()
        self._all = self._remote = _snapshot([])
        self.version = 0

    def add(self, region: Region) -> Region:
        """Register; the same range again only counts up. Raises RegionOverlap, ValueError (empty, wraps), NotRegistered (closing)."""
        if region.length <= 0 or region.address <= 0 or region.end >= 1 << 64:
            raise ValueError(f"not a memory range: address {region.address:#x}, length {region.length}")
        with self._changed:
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
        with self._changed:
            self._reject_overlap(region)

    def _reject_overlap(self, region: Region) -> None:
        _, ends, regions, _ = self._all
        at = int(np.searchsorted(ends, np.uint64(region.address), side="right"))
        if at < len(regions) and regions[at].address < region.end:
            other = regions[at]
            raise RegionOverlap(
                f"[{region.address:#x}, +{region.length}) overlaps the registered [{other.address:#x}, +{other.length})"
            )

    def drop_reference(self, address: int) -> Region | None:
        """Count down. Returns the region, now closing (no new use), when it was the last one; else None. Raises NotRegistered."""
        with self._changed:
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
        with self._changed:
            if not self._changed.wait_for(lambda: region.uses == 0, timeout_s):
                raise TransferTimeout(f"region {region.address:#x} is still in use after {timeout_s} s")

    def remove(self, region: Region) -> None:
        """Take a closing region out for good. Idempotent."""
        with self._changed:
            if self._regions.get(region.address) is region:
                del self._regions[region.address]
                self._rebuild()

    def hold(self, address: U64, length: U64, *, remote: bool = False) -> Hold:
        """Keep the regions of all ranges. A range may span regions that touch. Raises NotRegistered for any byte outside."""
        snapshot = self._remote if remote else self._all
        starts, ends, regions, _ = snapshot
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
        with self._changed:
            for region in held:
                if region.closing:
                    raise NotRegistered(f"region {region.address:#x} is being unregistered")
            for region in held:
                region.uses += 1
        return Hold(held, rows, table)

    def release(self, hold: Hold) -> None:
        with self._changed:
            free = False
            for region in hold.regions:
                region.uses -= 1
                free |= region.closing and region.uses == 0
            if free:
                self._changed.notify_all()

    def rows(self, address: U64, length: U64) -> tuple[Index, tuple[Region, ...]]:
        """Row of the region that wholly contains each range, or -1. Holds nothing."""
        starts, ends, regions, _ = snapshot = self._all
        if len(address) == 1:
            return np.array([snapshot.row_of(int(address[0]), int(length[0]))]), regions
        if len(regions) == 0:
            return np.full(len(address), -1, np.intp), regions
        rows = np.searchsorted(starts, address, side="right") - 1
        stop = address + length
        return np.where((rows >= 0) & (stop <= ends[rows]) & (stop >= address), rows, -1), regions

    def replace(self, fresh: Iterable[Region], version: int, keep: Callable[[Region, Region], bool]) -> list[Region]:
        """Make the table equal to `fresh`, keeping the known object of a range where `keep(old, new)`. Returns what left it."""
        with self._changed:
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
        with self._changed:
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
        with self._changed:
            return list(self._regions.values())

    def clear(self) -> None:
        with self._changed:
            self._regions.clear()
            self._leaving.clear()
            self._rebuild()

    def _rebuild(self) -> None:
        ordered = sorted(self._regions.values(), key=lambda r: r.address)
        self._all = _snapshot(ordered)
        self._remote = _snapshot([r for r in ordered if r.remote_access])


def _snapshot(ordered: list[Region]) -> _Snapshot:
    addresses = [r.address for r in ordered]
    ends = np.array([r.end for r in ordered], np.uint64)
    return _Snapshot(np.array(addresses, np.uint64), ends, tuple(ordered), addresses)


def _span(snapshot: _Snapshot, address: int, length: int) -> list[int]:
    """Rows of the touching regions that cover the range. Raises NotRegistered."""
    starts, _, regions, _ = snapshot
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
