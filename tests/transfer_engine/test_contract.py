"""What every transport must do, run on each of them (paper 3.2)."""

from __future__ import annotations

import hashlib
import threading
import time

import numpy as np
import pytest

from tests.transfer_engine.conftest import TARGET_BYTES, Pair
from transfer_engine import (
    InvalidHandle,
    NotRegistered,
    Opcode,
    TransferCancelled,
    TransferError,
    TransferState,
    TransferStatus,
    TransferVector,
)

SIZES = [1, 7, 4095, 4096, 65537, 1 << 20, (1 << 20) + 13, 64 << 20]


def _random(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, length, dtype=np.uint8)


@pytest.mark.parametrize("size", SIZES)
def test_a_write_and_a_read_carry_the_bytes(pair: Pair, size: int) -> None:
    pair.local[3 : 3 + size] = _random(size, size)
    status = pair.engine.transfer_sync([pair.request(Opcode.WRITE, 3, 11, size)], 20.0)
    assert status == TransferStatus(TransferState.COMPLETED, size)
    digest = hashlib.sha256(pair.local[3 : 3 + size]).hexdigest()
    assert pair.target.call("digest", pair.base + 11, size) == digest
    pair.local[: size + 8] = 0
    pair.engine.transfer_sync([pair.request(Opcode.READ, 5, 11, size)], 20.0)
    assert hashlib.sha256(pair.local[5 : 5 + size]).hexdigest() == digest
    assert not pair.local[:5].any() and not pair.local[5 + size : size + 8].any()


def test_neighbours_of_a_write_stay_untouched(pair: Pair) -> None:
    pair.target.call("fill", pair.base, 1, 4096)
    before = pair.target.call("read", pair.base, 4096)
    pair.local[:100] = 255
    pair.engine.transfer_sync([pair.request(Opcode.WRITE, 0, 1001, 100)], 5.0)
    after = pair.target.call("read", pair.base, 4096)
    assert after == before[:1001] + b"\xff" * 100 + before[1101:]


def test_a_thousand_scattered_blocks_each_way(pair: Pair) -> None:
    block, count = 16384, 1000
    order = np.random.default_rng(7).permutation(count)
    pair.local[: block * count] = _random(8, block * count)
    pair.engine.transfer_sync(
        [pair.request(Opcode.WRITE, int(i) * block, j * block, block) for j, i in enumerate(order)], 20.0
    )
    expected = pair.local[: block * count].reshape(count, block)[order]
    assert pair.target.call("digest", pair.base, block * count) == hashlib.sha256(expected).hexdigest()
    original = pair.local[: block * count].copy()
    pair.local[:] = 0
    vector = TransferVector(
        Opcode.READ,
        pair.segment,
        np.uint64(pair.at) + order.astype(np.uint64) * np.uint64(block),
        np.uint64(pair.base) + np.arange(count, dtype=np.uint64) * np.uint64(block),
        np.full(count, block),
    )
    pair.engine.transfer_sync(vector, 20.0)
    assert np.array_equal(pair.local[: block * count], original)


def test_ten_threads_mixing_reads_and_writes_never_mix_bytes(pair: Pair) -> None:
    share = TARGET_BYTES // 16
    problems: list[str] = []

    def work(me: int) -> None:
        random = np.random.default_rng(me)
        mirror = np.zeros(share, np.uint8)
        offset = me * share
        pair.engine.transfer_sync([pair.request(Opcode.WRITE, offset, offset, share)], 30.0)
        mirror[:] = pair.local[offset : offset + share]
        for _ in range(12):
            sizes = random.integers(1, 60000, 40)
            starts = np.cumsum(sizes) - sizes
            batch = []
            for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
                pair.local[offset + start : offset + start + size] = me + 1
                mirror[start : start + size] = me + 1
                batch.append(pair.request(Opcode.WRITE, offset + start, offset + start, size))
            pair.engine.transfer_sync(batch, 30.0)
            end = int(starts[-1] + sizes[-1])
            pair.local[offset : offset + end] = 0
            pair.engine.transfer_sync([pair.request(Opcode.READ, offset, offset, end)], 30.0)
            if not np.array_equal(pair.local[offset : offset + end], mirror[:end]):
                problems.append(f"thread {me}: wrong bytes")

    pair.local[:] = 0
    threads = [threading.Thread(target=work, args=(me,)) for me in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not problems and not any(thread.is_alive() for thread in threads)


def test_reads_and_writes_in_one_batch(pair: Pair) -> None:
    pair.target.call("fill", pair.base, 5, 50000)
    pair.local[100000:150000] = _random(6, 50000)
    pair.engine.transfer_sync(
        [pair.request(Opcode.READ, 0, 0, 50000), pair.request(Opcode.WRITE, 100000, 100000, 50000)], 10.0
    )
    assert pair.local[:50000].tobytes() == pair.target.call("read", pair.base, 50000)
    assert pair.target.call("read", pair.base + 100000, 50000) == pair.local[100000:150000].tobytes()


def test_empty_requests_and_batches_complete(pair: Pair) -> None:
    assert pair.engine.transfer_sync([], 1.0).ok
    assert pair.engine.transfer_sync([pair.request(Opcode.WRITE, 0, 0, 0)], 1.0).ok


@pytest.mark.parametrize("offset", [-1, TARGET_BYTES - 10, 1 << 46])
def test_an_unregistered_target_range_is_refused_and_untouched(pair: Pair, offset: int) -> None:
    before = pair.target.call("digest", pair.base, 1 << 20)
    with pytest.raises(NotRegistered):
        pair.engine.transfer_sync([pair.request(Opcode.WRITE, 0, offset, 100)], 5.0)
    with pytest.raises(NotRegistered):
        pair.engine.transfer_sync([pair.request(Opcode.READ, 0, offset, 100)], 5.0)
    assert pair.target.call("digest", pair.base, 1 << 20) == before
    assert pair.engine.transfer_sync([pair.request(Opcode.READ, 0, 0, 100)], 5.0).ok


def test_an_unregistered_source_is_refused_at_once(pair: Pair) -> None:
    batch = pair.engine.allocate_batch_id(1)
    with pytest.raises(NotRegistered):
        pair.engine.submit_transfer(batch, [pair.request(Opcode.WRITE, TARGET_BYTES - 10, 0, 100)], deadline_s=1.0)
    pair.engine.free_batch_id(batch)


def test_memory_that_the_target_unregistered_is_refused(pair: Pair) -> None:
    address = pair.target.call("allocate", 1 << 20, pair.way == "shm-mapped")
    request = pair.request(Opcode.WRITE, 0, address - pair.base, 1 << 20)
    assert pair.engine.transfer_sync([request], 5.0).ok
    pair.target.call("unregister", address)
    with pytest.raises(NotRegistered):
        pair.engine.transfer_sync([request], 5.0)


def test_status_of_requests_and_batch(pair: Pair) -> None:
    batch = pair.engine.allocate_batch_id(3)
    pair.engine.submit_transfer(
        batch, [pair.request(Opcode.WRITE, 0, 0, 100), pair.request(Opcode.WRITE, 0, 200, 50)], deadline_s=5.0
    )
    assert pair.engine.wait(batch, 5.0) == TransferStatus(TransferState.COMPLETED, 150)
    assert pair.engine.get_transfer_status(batch, 1) == TransferStatus(TransferState.COMPLETED, 50)
    pair.engine.submit_transfer(batch, [pair.request(Opcode.READ, 0, 0, 10)], deadline_s=5.0)
    assert pair.engine.wait(batch, 5.0).transferred_bytes == 160
    with pytest.raises(InvalidHandle):
        pair.engine.submit_transfer(batch, [pair.request(Opcode.READ, 0, 0, 10)], deadline_s=5.0)
    with pytest.raises(InvalidHandle):
        pair.engine.get_transfer_status(batch, 3)
    pair.engine.free_batch_id(batch)


def test_callbacks_and_asyncio(pair: Pair) -> None:
    import asyncio

    seen: list[TransferStatus] = []
    told = threading.Event()
    batch = pair.engine.allocate_batch_id(1)
    pair.engine.submit_transfer(batch, [pair.request(Opcode.WRITE, 0, 0, 1 << 20)], deadline_s=5.0)
    pair.engine.add_done_callback(batch, lambda status: (seen.append(status), told.set()))
    assert asyncio.run(pair.engine.wait_async(batch)).ok
    assert told.wait(2.0) and seen[0].ok
    pair.engine.free_batch_id(batch)


def test_a_notification_comes_after_the_bytes(pair: Pair) -> None:
    known = len(pair.target.call("wait_notes", 0, 0.0))
    for turn in range(20):
        pair.local[: 1 << 20] = turn + 1
        pair.engine.transfer_sync([pair.request(Opcode.WRITE, 0, 0, 1 << 20)], 5.0, notify=b"turn %d" % turn)
        notes = pair.target.call("wait_notes", known + turn + 1, 2.0)
        assert notes[known + turn] == b"turn %d" % turn
        assert set(pair.target.call("read", pair.base, 1 << 20)) == {turn + 1}
    pair.engine.send_notify(pair.segment, b"x" * 65536)
    assert pair.target.call("wait_notes", known + 21, 2.0)[-1] == b"x" * 65536


def test_cancel_ends_a_batch_soon(pair: Pair) -> None:
    batch = pair.engine.allocate_batch_id(400)
    requests = [pair.request(Opcode.WRITE, 0, 0, 64 << 20)] * 40
    pair.engine.submit_transfer(batch, requests, deadline_s=60.0)
    pair.engine.cancel(batch)
    began = time.monotonic()
    status = pair.engine.wait(batch, 10.0)
    assert status.state in (TransferState.CANCELLED, TransferState.COMPLETED)  # the fake is done before
    assert time.monotonic() - began < pair.patience_s
    if status.state is TransferState.CANCELLED:
        assert isinstance(status.error, TransferCancelled) and status.transferred_bytes < 40 * 64 << 20
    pair.engine.free_batch_id(batch)


def test_a_deadline_ends_a_batch(pair: Pair) -> None:
    batch = pair.engine.allocate_batch_id(100)
    began = time.monotonic()
    pair.engine.submit_transfer(batch, [pair.request(Opcode.READ, 0, 0, 64 << 20)] * 100, deadline_s=0.05)
    status = pair.engine.wait(batch, 10.0)
    if pair.way != "fake":
        assert status.state is TransferState.TIMED_OUT and time.monotonic() - began < pair.patience_s
    # Local memory is quiet from now on.
    pair.local[:] = 0
    time.sleep(0.1)
    assert not pair.local.any()
    pair.engine.free_batch_id(batch)


def test_freeing_a_running_batch_is_an_error(pair: Pair) -> None:
    batch = pair.engine.allocate_batch_id(20)
    pair.engine.submit_transfer(batch, [pair.request(Opcode.WRITE, 0, 0, 64 << 20)] * 20, deadline_s=60.0)
    if pair.way != "fake":
        with pytest.raises(TransferError):
            pair.engine.free_batch_id(batch)
    pair.engine.cancel(batch)
    pair.engine.wait(batch, 5.0)
    pair.engine.free_batch_id(batch)
    for use in (pair.engine.free_batch_id, pair.engine.get_batch_status, pair.engine.cancel):
        with pytest.raises(InvalidHandle):
            use(batch)


def test_overlapping_batches_keep_their_bytes_and_ends_apart(pair: Pair) -> None:
    """Many batches at once: those that share a source or are read twice agree, and where two write the same range, each byte is one's."""
    length, count = 300_001, 12
    pair.target.call("fill", pair.base, 9, length)
    for turn in range(count):
        pair.local[(2 + turn) * length : (3 + turn) * length] = turn + 1
    handles = []
    for turn in range(count):
        batch = pair.engine.allocate_batch_id(3)
        requests = [
            pair.request(Opcode.READ, (20 + turn) * length, 0, length),  # all read the same range
            pair.request(Opcode.WRITE, (2 + turn) * length, (1 + turn) * length, length),  # each its own
            pair.request(
                Opcode.WRITE, (2 + turn) * length, (15 + turn // 2) * length + turn % 2, length
            ),  # two a range
        ]
        pair.engine.submit_transfer(batch, requests, deadline_s=20.0)
        handles.append(batch)
    for batch in handles:
        assert pair.engine.wait(batch, 30.0) == TransferStatus(TransferState.COMPLETED, 3 * length)
        pair.engine.free_batch_id(batch)
    common = pair.target.call("read", pair.base, length)
    for turn in range(count):
        assert pair.local[(20 + turn) * length : (21 + turn) * length].tobytes() == common
        assert set(pair.target.call("read", pair.base + (1 + turn) * length, length)) == {turn + 1}
    for two in range(count // 2):
        shared = pair.target.call("read", pair.base + (15 + two) * length + 1, length - 1)
        assert set(shared) <= {2 * two + 1, 2 * two + 2}
