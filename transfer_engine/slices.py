"""Cutting requests into pieces and slices, and joining neighbours, on numpy columns.

Knows: arithmetic on (local, remote, length) columns, all uint64. Does not know: peers, states, transports.
Paper 3.2.2: requests are divided into slices, which are the unit of path choice and retry. No Python work per request here.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]
Index = npt.NDArray[np.intp]


class Columns(NamedTuple):
    """Pieces as columns of equal length. `index` names the request a piece belongs to."""

    local: U64
    remote: U64
    length: U64
    index: Index  # type: ignore[assignment]  # hides tuple.index, which nobody wants here

    def take(self, where: npt.NDArray[np.bool_] | Index | slice) -> Columns:
        return Columns(self.local[where], self.remote[where], self.length[where], self.index[where])


def split(columns: Columns, piece_bytes: int) -> Columns:
    """Requests longer than `piece_bytes` become several pieces; empty ones vanish. Does not mutate."""
    length = columns.length
    if len(length) == 1 and 0 < int(length[0]) <= piece_bytes:
        return columns
    if len(length) == 0 or (int(length.max()) <= piece_bytes and int(length.min()) > 0):
        return columns
    counts = ((length + np.uint64(piece_bytes - 1)) // np.uint64(piece_bytes)).astype(np.intp)
    row = np.repeat(np.arange(len(length)), counts)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    offset = (np.arange(len(row)) - first).astype(np.uint64) * np.uint64(piece_bytes)
    return Columns(
        columns.local[row] + offset,
        columns.remote[row] + offset,
        np.minimum(length[row] - offset, np.uint64(piece_bytes)),
        columns.index[row],
    )


def split_at(columns: Columns, borders: U64) -> Columns:
    """Pieces whose local range crosses one of the ascending `borders` become several. Does not mutate."""
    first = np.searchsorted(borders, columns.local, side="right")
    last = np.searchsorted(borders, columns.local + columns.length - np.uint64(1), side="right")
    counts = last - first + 1
    if int(counts.max(initial=1)) == 1:
        return columns
    row = np.repeat(np.arange(len(counts)), counts)
    nth = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    low, high = columns.local[row], (columns.local + columns.length)[row]
    start: U64 = np.where(nth == 0, low, borders[np.maximum(first[row] + nth - 1, 0)])
    stop = np.where(nth == counts[row] - 1, high, borders[np.minimum(first[row] + nth, len(borders) - 1)])
    return Columns(start, columns.remote[row] + (start - low), stop - start, columns.index[row])


def cut(length: U64, slice_bytes: int, max_pieces: int) -> list[int]:
    """Bounds of slices over pieces: slice k is [bounds[k], bounds[k+1]). Each holds at most `max_pieces` pieces and, unless it is
    a single piece, at most `slice_bytes` bytes."""
    if len(length) == 1:
        return [0, 1]
    total = np.cumsum(length, dtype=np.uint64)
    bounds, low, count = [0], 0, len(length)
    while low < count:
        before = int(total[low - 1]) if low else 0
        high = int(np.searchsorted(total, np.uint64(before + slice_bytes), side="right"))
        low = min(max(high, low + 1), low + max_pieces, count)
        bounds.append(low)
    return bounds


def slice_size(total_bytes: int, lanes: int, smallest: int, largest: int) -> int:
    """Adaptive slice size: about two slices a lane, within the limits."""
    return max(smallest, min(largest, -(-total_bytes // (2 * lanes))))


def coalesce(a: U64, b: U64, length: U64) -> tuple[U64, U64, U64]:
    """Join pieces that follow each other without a gap in both address spaces. Does not mutate."""
    if len(length) < 2:
        return a, b, length
    joined = (a[1:] == a[:-1] + length[:-1]) & (b[1:] == b[:-1] + length[:-1])
    if not joined.any():
        return a, b, length
    starts = np.concatenate(([0], np.flatnonzero(~joined) + 1))
    return a[starts], b[starts], np.add.reduceat(length, starts)


def coalesce_one(a: U64, length: U64) -> tuple[U64, U64]:
    """Join pieces that follow each other without a gap in one address space. Does not mutate."""
    if len(length) < 2:
        return a, length
    joined = a[1:] == a[:-1] + length[:-1]
    if not joined.any():
        return a, length
    starts = np.concatenate(([0], np.flatnonzero(~joined) + 1))
    return a[starts], np.add.reduceat(length, starts)
