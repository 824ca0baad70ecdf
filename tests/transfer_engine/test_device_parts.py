"""The arithmetic under GPU memory: where ranges lie, and parts that fit a buffer."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake.common.errors import NotRegistered
from transfer_engine.device.parts import cut_to_fit
from transfer_engine.memory import HOST, Located, Region, RegionTable, device_ordinal

HALVES = (10_000_000, 20_000_000)


def _u64(values: list[int]) -> np.ndarray:
    return np.array(values, np.uint64)


def _table() -> RegionTable:
    """[1000, 2000) host, [2000, 3000) cuda:0, [3000, 3500) cuda:1, [5000, 6000) cuda:0."""
    table = RegionTable()
    for address, length, location in ((1000, 1000, "cpu"), (2000, 1000, "cuda:0"), (3000, 500, "cuda:1")):
        table.add(Region(address, length, location=location))
    table.add(Region(5000, 1000, location="cuda:0"))
    return table


def _device_of_byte(address: int) -> int:
    return HOST if address < 2000 else 1 if 3000 <= address < 3500 else 0


@pytest.mark.parametrize(
    ("location", "device"),
    [("cpu", HOST), ("cpu:1", HOST), ("*", HOST), ("cuda:3", 3), ("cuda", 0), ("cuda:x", 0), ("cuda:99999", 0)],
)
def test_locations(location: str, device: int) -> None:
    assert device_ordinal(location) == device


def test_the_table_knows_whether_it_has_devices() -> None:
    table = RegionTable()
    table.add(Region(1000, 10))
    assert not table.has_devices
    region = table.add(Region(2000, 10, location="cuda:0"))
    assert table.has_devices
    assert table.drop_reference(2000) is region
    table.remove(region)
    assert not table.has_devices


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(1000, 3499), st.integers(1, 2500)), min_size=1, max_size=8))
def test_located_ranges_are_the_given_bytes_each_on_one_device(ranges: list[tuple[int, int]]) -> None:
    ranges = [(start, min(count, 3500 - start)) for start, count in ranges]
    found = _table().locate(_u64([start for start, _ in ranges]), _u64([count for _, count in ranges]))
    seen: dict[int, int] = dict.fromkeys(range(len(ranges)), 0)
    for address, length, device, row, offset in zip(*(column.tolist() for column in found), strict=True):
        assert length > 0 and offset == seen[row] and address == ranges[row][0] + offset
        assert {_device_of_byte(at) for at in range(address, address + length)} == {device}
        seen[row] += length
    assert list(seen.values()) == [count for _, count in ranges]


@pytest.mark.parametrize("at", [(999, 2), (3499, 2), (4000, 1), (2500, 3000)])
def test_bytes_outside_are_refused(at: tuple[int, int]) -> None:
    with pytest.raises(NotRegistered):
        _table().locate(_u64([1500, at[0]]), _u64([600, at[1]]))


rows = st.lists(st.tuples(st.integers(-1, 2), st.integers(1, 300)), min_size=1, max_size=12)


@settings(max_examples=60)
@given(rows, st.integers(1, 200))
def test_parts_hold_every_byte_once_in_order_and_fit(rows: list[tuple[int, int]], half: int) -> None:
    starts = np.arange(len(rows)) * 1000 + 1000
    ranges = Located(
        starts.astype(np.uint64),
        _u64([length for _, length in rows]),
        np.array([device for device, _ in rows]),
        np.arange(len(rows)),
        np.zeros(len(rows), np.uint64),
    )
    order: list[tuple[int, int, int]] = []
    for turn, part in enumerate(cut_to_fit(ranges, HALVES, half)):
        base = HALVES[turn % 2]
        staged = {copy.host: copy for copy in part.copies}
        assert part.n_bytes > 0 and sum(copy.length for copy in part.copies) <= half
        assert all(base <= copy.host and copy.host + copy.length <= base + half for copy in part.copies)
        for address, length, row, offset in zip(*(column.tolist() for column in part[:4]), strict=True):
            order.append((row, offset, length))
            device, whole = rows[row]
            if device == HOST:
                assert (address, offset, length) == (starts[row], 0, whole)
            else:
                copy = staged.pop(address)
                assert (copy.device, copy.address, copy.length) == (device, starts[row] + offset, length)
        assert not staged
    at = [0] * len(rows)
    for row, offset, length in order:
        assert offset == at[row]
        at[row] += length
    assert at == [length for _, length in rows] and [row for row, _, _ in order] == sorted(row for row, _, _ in order)
