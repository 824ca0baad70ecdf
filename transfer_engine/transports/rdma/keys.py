"""From a slice's columns to what a NIC wants: addresses as it knows them, and the keys of both sides.

Knows: regions and their keys. Does not know: endpoints, completions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from transfer_engine.lanes import Slice
from transfer_engine.memory import Hold, Region, RegionTable
from transfer_engine.slices import U64, Index
from transfer_engine.transports.rdma.chain import Piece
from transfer_engine.transports.rdma.device import Device


def keyed(
    piece: Slice, hold: Hold, ours: RegionTable, theirs: RegionTable, device: Device, peer_nic: int
) -> list[Piece]:
    """The slice's pieces for one NIC of ours towards one of the peer's, whose regions `hold` keeps. Raises LookupError for a
    region without keys."""
    columns = piece.columns
    rows, regions = ours.rows(columns.local, columns.length)
    local_keys = {row: device.local_key(regions[row]) for row in set(rows.tolist())}
    remote_keys = {row: hold.table[row].keys[peer_nic] for row in set(hold.rows.tolist())}
    near, far = columns.local, columns.remote
    if ours.has_devices:
        near = _as_nics_know(near, rows, regions)
    if theirs.has_devices:
        far = _as_nics_know(far, hold.rows, hold.table)
    lengths = columns.length.tolist()
    if len(local_keys) == len(remote_keys) == 1:
        lkey, rkey = next(iter(local_keys.values())), next(iter(remote_keys.values()))
        return [Piece(a, lkey, b, rkey, n) for a, b, n in zip(near.tolist(), far.tolist(), lengths, strict=True)]
    return [
        Piece(a, local_keys[here], b, remote_keys[there], n)
        for a, here, b, there, n in zip(
            near.tolist(), rows.tolist(), far.tolist(), hold.rows.tolist(), lengths, strict=True
        )
    ]


def _as_nics_know(address: U64, rows: Index, regions: Sequence[Region]) -> U64:
    """Addresses as the keys of their regions want them."""
    shifts = {row: regions[row].nic_shift for row in set(rows.tolist())}
    if not any(shifts.values()):
        return address
    return address + np.array([shifts[row] for row in rows.tolist()], np.uint64)


def location_groups(locations: list[str], rows: np.ndarray) -> dict[str, np.ndarray]:
    """Which pieces lie at which memory location; `rows` names each piece's region, `locations` each region's place."""
    names = {row: locations[row] for row in set(rows.tolist())}
    if len(set(names.values())) == 1:
        return {next(iter(names.values())): np.arange(len(rows))}
    where = np.array([names[row] for row in rows.tolist()])
    return {place: np.flatnonzero(where == place) for place in sorted(set(names.values()))}
