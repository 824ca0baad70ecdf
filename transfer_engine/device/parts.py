"""Cutting ranges into parts that fit a staging buffer.

Knows: arithmetic. Host ranges stay where they are; device ranges get a place in the buffer, one behind the other. Does not
know: copies, streams, what the parts are for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from transfer_engine.memory import HOST, Located
from transfer_engine.slices import U64, Index


class Copy(NamedTuple):
    """One device range and its place in host memory."""

    device: int
    address: int
    host: int
    length: int


class Part(NamedTuple):
    """What the CPU can work on at a time, as columns: ranges of host memory in the order of the ranges they stand for.
    Range i stands for the bytes from `offset[i]` on of the given range `row[i]`. `copies` are due before or after."""

    address: U64
    length: U64
    row: Index
    offset: U64
    copies: list[Copy]

    @property
    def n_bytes(self) -> int:
        return int(self.length.sum())


def cut_to_fit(ranges: Located, halves: tuple[int, int], half_bytes: int) -> Iterator[Part]:
    """Parts with at most `half_bytes` of device memory each, placed in turn at the addresses `halves`."""
    turn, room = 0, half_bytes
    rows: list[tuple[int, int, int, int]] = []
    copies: list[Copy] = []
    for address, length, device, row, offset in zip(*(column.tolist() for column in ranges), strict=True):
        if device == HOST:
            rows.append((address, length, row, offset))
            continue
        while length:
            if room == 0:
                yield _part(rows, copies)
                turn, room, rows, copies = 1 - turn, half_bytes, [], []
            count, at = min(length, room), halves[turn] + half_bytes - room
            rows.append((at, count, row, offset))
            copies.append(Copy(device, address, at, count))
            address, offset, length, room = address + count, offset + count, length - count, room - count
    yield _part(rows, copies)


def whole(ranges: Located) -> Part:
    """Host ranges need no buffer."""
    return Part(ranges.address, ranges.length, ranges.row, ranges.offset, [])


def _part(rows: list[tuple[int, int, int, int]], copies: list[Copy]) -> Part:
    table = np.array(rows, np.uint64).reshape(-1, 4)
    return Part(table[:, 0], table[:, 1], table[:, 2].astype(np.intp), table[:, 3], copies)
