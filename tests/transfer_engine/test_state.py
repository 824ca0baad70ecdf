"""The pure parts against naive models: handles, regions, slices, requests, batches."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake.common.errors import ConfigError, InvalidHandle, NotRegistered, Overloaded, RegionOverlap, TransferTimeout
from transfer_engine import (
    EngineConfig,
    Opcode,
    SegmentHandle,
    TransferEngine,
    TransferError,
    TransferRequest,
    TransferState,
)
from transfer_engine.batch import Batch, Submission
from transfer_engine.handles import HandleTable
from transfer_engine.memory import Region, RegionTable
from transfer_engine.requests import parse
from transfer_engine.slices import Columns, coalesce, coalesce_one, cut, split


def _u64(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)


# --- handles --------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=120))
def test_handles_name_exactly_what_lives(steps: list[tuple[bool, int]]) -> None:
    table: HandleTable[int] = HandleTable(8, "test")
    live: dict[int, int] = {}
    dead: set[int] = set()
    for number, (allocate, pick) in enumerate(steps):
        if allocate:
            if len(live) == 8:
                with pytest.raises(Overloaded):
                    table.allocate(number)
                continue
            handle = table.allocate(number)
            assert 0 < handle < 1 << 63 and handle not in live and handle not in dead
            live[handle] = number
        elif live:
            handle = sorted(live)[pick % len(live)]
            assert table.free(handle) == live.pop(handle)
            dead.add(handle)
        for handle, value in live.items():
            assert table.get(handle) == value
        for handle in dead:
            with pytest.raises(InvalidHandle):
                table.get(handle)


@given(st.integers(-(1 << 70), 1 << 70))
def test_no_number_is_a_handle_by_chance(number: int) -> None:
    table: HandleTable[str] = HandleTable(4, "test")
    mine = table.allocate("x")
    if number != mine:
        with pytest.raises(InvalidHandle):
            table.get(number)


def test_handles_of_another_table_or_type_are_refused() -> None:
    one, other = HandleTable[str](4, "test"), HandleTable[str](4, "test")
    handle = one.allocate("a")
    other.allocate("b")
    for bad in (handle, 0, "1", None, 1.0):
        with pytest.raises(InvalidHandle):
            other.get(bad)  # type: ignore[arg-type]


# --- regions --------------------------------------------------------------------------------------------------------

_range = st.tuples(st.integers(1, 60), st.integers(1, 12))


@given(st.lists(st.tuples(st.booleans(), _range), max_size=40), st.lists(_range, min_size=1, max_size=5))
@settings(max_examples=200)
def test_regions_against_a_set_of_bytes(
    steps: list[tuple[bool, tuple[int, int]]], ranges: list[tuple[int, int]]
) -> None:
    table = RegionTable()
    model: dict[tuple[int, int], int] = {}
    for add, (address, length) in steps:
        taken = {byte for a, n in model for byte in range(a, a + n)}
        wanted = set(range(address, address + length))
        if add and (address, length) in model:
            table.add(Region(address, length))
            model[address, length] += 1
        elif add and taken & wanted:
            with pytest.raises(RegionOverlap):
                table.add(Region(address, length))
        elif add:
            table.add(Region(address, length))
            model[address, length] = 1
        else:
            key = next(((a, n) for a, n in model if a == address), None)
            if key is None:
                with pytest.raises(NotRegistered):
                    table.drop_reference(address)
                continue
            gone = table.drop_reference(address)
            model[key] -= 1
            assert (gone is not None) == (model[key] == 0)
            if gone is not None:
                table.wait_unused(gone, 0.0)
                table.remove(gone)
                del model[key]
    bytes_in = {byte for a, n in model for byte in range(a, a + n)}
    inside = [set(range(a, a + n)) <= bytes_in for a, n in ranges]
    columns = _u64(*(a for a, _ in ranges)), _u64(*(n for _, n in ranges))
    if all(inside):
        hold = table.hold(*columns)
        touched = {(a, n) for a, n in model if any(a < s + m and s < a + n for s, m in ranges)}
        assert {(r.address, r.length) for r in hold.regions} == touched
        table.release(hold)
    else:
        with pytest.raises(NotRegistered):
            table.hold(*columns)
    assert all(region.uses == 0 for region in table.regions())


def test_a_used_region_cannot_go_and_a_closing_one_takes_no_use() -> None:
    table = RegionTable()
    table.add(Region(4096, 4096))
    hold = table.hold(_u64(5000), _u64(10))
    region = table.drop_reference(4096)
    assert region is not None
    with pytest.raises(TransferTimeout):
        table.wait_unused(region, 0.01)
    with pytest.raises(NotRegistered):
        table.hold(_u64(5000), _u64(10))
    threading.Timer(0.02, table.release, (hold,)).start()
    table.wait_unused(region, 2.0)


def test_remote_access_off_hides_a_region_from_peers_only() -> None:
    table = RegionTable()
    table.add(Region(4096, 4096, remote_access=False))
    table.release(table.hold(_u64(4096), _u64(1)))
    with pytest.raises(NotRegistered):
        table.hold(_u64(4096), _u64(1), remote=True)


def test_wrapping_ranges_are_outside() -> None:
    table = RegionTable()
    table.add(Region(4096, 4096))
    for address, length in ((4096, (1 << 64) - 1), ((1 << 64) - 8, 4200), (8191, 2), (4095, 1)):
        with pytest.raises(NotRegistered):
            table.hold(_u64(address), _u64(length))


# --- slices ---------------------------------------------------------------------------------------------------------

_requests = st.lists(st.tuples(st.integers(0, 500), st.integers(0, 500), st.integers(0, 60)), max_size=30)


def _columns(requests: list[tuple[int, int, int]]) -> Columns:
    table = np.array(requests, np.uint64).reshape(-1, 3)
    return Columns(table[:, 0], table[:, 1], table[:, 2], np.arange(len(table)))


def _bytes(a: np.ndarray, b: np.ndarray, length: np.ndarray) -> list[tuple[int, int]]:
    return [(x + i, y + i) for x, y, n in zip(a.tolist(), b.tolist(), length.tolist(), strict=True) for i in range(n)]


@given(_requests, st.integers(1, 70))
def test_split_keeps_every_byte_and_its_request(requests: list[tuple[int, int, int]], limit: int) -> None:
    columns = _columns(requests)
    pieces = split(columns, limit)
    assert _bytes(*pieces[:3]) == _bytes(*columns[:3])
    assert all(0 < n <= limit for n in pieces.length.tolist())
    for row, (_, _, n) in enumerate(requests):
        assert int(pieces.length[pieces.index == row].sum()) == n


@given(_requests, st.integers(1, 200), st.integers(1, 9))
def test_cut_covers_all_within_the_limits(requests: list[tuple[int, int, int]], size: int, pieces: int) -> None:
    lengths = _columns(requests).length
    bounds = cut(lengths, size, pieces)
    assert bounds[0] == 0 and bounds[-1] == len(lengths) and bounds == sorted(set(bounds))
    for low, high in itertools.pairwise(bounds):
        assert high - low <= pieces and (high - low == 1 or int(lengths[low:high].sum()) <= size)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9)), min_size=1, max_size=30))
def test_coalesce_joins_only_neighbours(parts: list[tuple[bool, int]]) -> None:
    a, b, rows = 100, 900, []
    for gap, length in parts:
        a, b = a + 5 * gap, b + 7 * gap
        rows.append((a, b, length))
        a, b = a + length, b + length
    columns = _columns(rows)
    joined = coalesce(*columns[:3])
    assert _bytes(*joined) == _bytes(*columns[:3])
    assert len(joined[0]) == 1 + sum(gap for gap, _ in parts[1:])
    one = coalesce_one(columns.local, columns.length)
    assert _bytes(one[0], one[0], one[1]) == _bytes(columns.local, columns.local, columns.length)


# --- requests -------------------------------------------------------------------------------------------------------


def test_requests_are_grouped_by_target_and_direction() -> None:
    a, b = SegmentHandle(1), SegmentHandle(2)
    mixed = [
        TransferRequest(Opcode.READ, 1, a, 2, 3),
        TransferRequest(Opcode.WRITE, 4, a, 5, 6),
        TransferRequest(Opcode.READ, 7, b, 1 << 63, 9),
    ]
    parts, lengths = parse(mixed)
    assert lengths.tolist() == [3, 6, 9]
    assert [(t, o, c.index.tolist(), c.remote.tolist()) for t, o, c in parts] == [
        (a, Opcode.READ, [0], [2]), (a, Opcode.WRITE, [1], [5]), (b, Opcode.READ, [2], [1 << 63]),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "bad", [(-1, 1, 1), (1, -1, 1), (1, 1, -1), (1 << 64, 1, 1), (1, 1.5, 1), ("x", 1, 1), (1, None, 1)]
)
def test_malformed_numbers_are_value_errors(bad: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError):
        parse([TransferRequest(Opcode.READ, bad[0], SegmentHandle(1), bad[1], bad[2])])


def test_a_wrapping_target_is_not_registered() -> None:
    with pytest.raises(NotRegistered):
        parse([TransferRequest(Opcode.READ, 1, SegmentHandle(1), (1 << 64) - 1, 10)])


# --- batches --------------------------------------------------------------------------------------------------------


class _Effects:
    def __init__(self) -> None:
        self.log: list[str] = []

    def bytes_placed(self, submission: Submission) -> None:
        self.log.append("placed")

    def settled(self, submission: Submission) -> None:
        self.log.append(submission.state.value)


@given(
    st.lists(st.sampled_from(["start", "finish", "fail", "return", "abort", "notified", "open"]), max_size=40),
    st.booleans(),
)
def test_a_submission_settles_once_and_only_when_quiet(steps: list[str], notify: bool) -> None:
    effects = _Effects()
    batch = Batch(4)
    lengths = np.full(4, 10, np.uint64)
    submission = Submission(
        batch,
        lengths,
        deadline=0.0,
        group=0,
        priority=0,
        notify=b"n" if notify else None,
        peers=frozenset(),
        effects=effects,
    )
    batch.admit(submission)
    running, waiting, opened = 0, 4, False
    for step in steps:
        before = submission.state
        match step:
            case "start" if waiting and submission.start_slice():
                running, waiting = running + 1, waiting - 1
            case "finish" if running:
                running -= 1
                row = np.array([int(submission.bytes_left // 10) - 1])
                submission.finish_slice(row, _u64(10), 10)
            case "fail" if running:
                running -= 1
                submission.fail_slice(TransferError("x"))
            case "return" if running:
                running, waiting = running - 1, waiting + 1
                submission.return_slice()
            case "abort":
                submission.abort(TransferState.CANCELLED, TransferError("x"), 0.0)
            case "notified" if "placed" in effects.log and submission.notify is not None:
                submission.notified(None)
            case "open":
                opened = True
                submission.open()
        if before.terminal:
            assert submission.state is before
        if submission.terminal:
            assert running == 0 and opened
    settled = [entry for entry in effects.log if entry != "placed"]
    assert len(settled) == int(submission.terminal) and batch.idle == submission.terminal
    assert effects.log.count("placed") <= int(notify)
    if submission.state is TransferState.COMPLETED:
        assert submission.done.tolist() == [10] * 4 and (not notify or "placed" in effects.log)


# --- the engine's own edges -----------------------------------------------------------------------------------------


def test_registering_memory(engine: TransferEngine) -> None:
    array = np.zeros(10000, np.uint8)
    address = engine.register_buffer(array)
    engine.register_local_memory(address, 10000)
    with pytest.raises(RegionOverlap):
        engine.register_local_memory(address + 5, 10)
    engine.unregister_local_memory(address)
    engine.unregister_local_memory(address)
    with pytest.raises(NotRegistered):
        engine.unregister_local_memory(address)
    for bad in (b"read only", np.zeros((4, 4))[:, 1], object()):
        with pytest.raises(ValueError):
            engine.register_buffer(bad)
    for address, length in ((0, 10), (4096, 0), (-5, 10), (4096, 10), (1 << 63, 10), ((1 << 64) - 1, 10)):
        with pytest.raises(ValueError):
            engine.register_local_memory(address, length)


def test_foreign_handles_are_refused(engine: TransferEngine) -> None:
    with TransferEngine(EngineConfig(cluster_token=engine.config.cluster_token)) as other:
        batch, segment = other.allocate_batch_id(1), other.open_segment(engine.address)
        array = np.zeros(100, np.uint8)
        at = engine.register_buffer(array)
        mine = engine.allocate_batch_id(1)
        with pytest.raises(InvalidHandle):
            engine.wait(batch, 0.0)
        with pytest.raises(InvalidHandle):
            engine.submit_transfer(mine, [TransferRequest(Opcode.READ, at, segment, at, 1)], deadline_s=1.0)
        with pytest.raises(InvalidHandle):
            engine.send_notify(segment, b"")
        other.close_segment(segment)
        with pytest.raises(InvalidHandle):
            other.close_segment(segment)


def test_limits_and_nonsense(engine: TransferEngine) -> None:
    with pytest.raises(ConfigError):
        TransferEngine(EngineConfig(transports=("carrier-pigeon",)))
    for bad in ({"port": -1}, {"slice_bytes": 1}, {"max_batches": 0}, {"fence_ttl_s": 1.0}, {"transports": ()}):
        with pytest.raises(ConfigError):
            EngineConfig(**bad)  # type: ignore[arg-type]
    batch = engine.allocate_batch_id(1)
    for deadline_s in (0.0, -1.0, 1e9):
        with pytest.raises(ValueError):
            engine.submit_transfer(batch, [], deadline_s=deadline_s)
    with pytest.raises(ValueError):
        engine.submit_transfer(batch, [], deadline_s=1.0, notify=b"x" * 65537)
    with pytest.raises(ValueError):
        engine.allocate_batch_id(0)


def test_batches_are_bounded() -> None:
    with TransferEngine(EngineConfig(max_batches=3)) as engine:
        batches = [engine.allocate_batch_id(1) for _ in range(3)]
        with pytest.raises(Overloaded):
            engine.allocate_batch_id(1)
        engine.free_batch_id(batches[0])
        engine.allocate_batch_id(1)


def test_ipv6_and_two_engines_of_one_process() -> None:
    with (
        TransferEngine(EngineConfig(host="::1")) as one,
        TransferEngine(EngineConfig(host="::1", transports=("tcp",))) as other,
    ):
        assert one.address.startswith("[::1]:")
        target, source = np.zeros(100000, np.uint8), np.full(100000, 7, np.uint8)
        base, at = one.register_buffer(target), other.register_buffer(source)
        segment = other.open_segment(one.address)
        other.transfer_sync([TransferRequest(Opcode.WRITE, at, segment, base, 100000)], 5.0)
        assert target.all()


def test_an_engine_is_its_own_peer(engine: TransferEngine) -> None:
    heard = threading.Event()
    engine.on_notify(lambda *_: heard.set())
    memory = np.arange(100000, dtype=np.uint32)
    at = engine.register_buffer(memory)
    segment = engine.open_segment(engine.address, instance_id=engine.instance_id)
    engine.transfer_sync([TransferRequest(Opcode.WRITE, at, segment, at + 200000, 200000)], 5.0, notify=b"self")
    assert heard.wait(2.0) and np.array_equal(memory[50000:], np.arange(50000))
    assert engine.send_probe(engine.address) and engine.stats()["local_write_bytes"] == 200000


def test_more_urgent_work_overtakes(engine: TransferEngine) -> None:
    """A background batch of gigabytes must not hold up a small urgent one."""
    memory = np.zeros(64 << 20, np.uint8)
    at = engine.register_buffer(memory)
    segment = engine.open_segment(engine.address)
    half = 32 << 20
    slow, fast = engine.allocate_batch_id(64), engine.allocate_batch_id(1)
    engine.submit_transfer(
        slow, [TransferRequest(Opcode.WRITE, at, segment, at + half, half)] * 64, deadline_s=60.0, priority=-1
    )
    engine.submit_transfer(fast, [TransferRequest(Opcode.WRITE, at, segment, at + half, 100)], deadline_s=60.0)
    assert engine.wait(fast, 10.0).ok
    assert engine.get_batch_status(slow).state is TransferState.RUNNING
    engine.cancel(slow)
    engine.wait(slow, 5.0)
