"""Every call that moves bytes, between two processes, and what it returns."""

from __future__ import annotations

import itertools
import mmap
import threading
import time

import numpy as np
import pytest

from mooncake.engine import TransferEngine, TransferNotify, TransferOpcode
from tests.drop_in.conftest import BYTES, Pair

MIB = 1 << 20


def test_the_bytes_take_the_way_that_was_asked_for(pair: Pair) -> None:
    assert pair.engine.transfer_sync_write(pair.peer.name, pair.here.at, pair.base, 4096) == 0
    used = {name.split("_")[0] for name in pair.engine.get_engine().stats() if name.endswith("_write_bytes")}
    assert used == {"tcp" if pair.way == "tcp" else "shm"}


@pytest.mark.parametrize("length", [1, 4097, 3 * MIB + 5])
def test_one_range_there_and_back(pair: Pair, length: int) -> None:
    array, at = pair.here.array, pair.here.at
    assert pair.engine.transfer_sync_write(pair.peer.name, at + 1, pair.base + 3, length) == 0
    assert pair.peer.call("read", pair.base, 3, length) == array[1 : 1 + length].tobytes()
    back = 4 * MIB
    assert pair.engine.transfer_sync_read(pair.peer.name, at + back, pair.base + 3, length) == 0
    assert (array[back : back + length] == array[1 : 1 + length]).all()


def test_batches_and_opcodes(pair: Pair) -> None:
    engine, array, at, name = pair.engine, pair.here.array, pair.here.at, pair.peer.name
    sources, targets, lengths = [at, at + 100, at + 5000], [pair.base + 6000, pair.base, pair.base + 77], [1000, 70, 3]
    for kind in (list, tuple, np.array):
        array[:8000] = np.random.default_rng(len(str(kind))).integers(0, 256, 8000, dtype=np.uint8)
        assert engine.batch_transfer_sync_write(name, kind(sources), kind(targets), kind(lengths)) == 0
        for source, target, length in zip(sources, targets, lengths, strict=True):
            got = pair.peer.call("read", pair.base, target - pair.base, length)
            assert got == array[source - at :][:length].tobytes()
    array[9000:10000] = 0
    assert engine.batch_transfer_sync(name, [at + 9000], [targets[0]], [1000], TransferOpcode.Read) == 0
    assert (array[9000:10000] == array[:1000]).all()
    assert engine.transfer_sync(name, at, pair.base, 10, TransferEngine.TransferOpcode.Write) == 0
    assert engine.batch_transfer_sync_read(name, [at + 9000], [pair.base], [10]) == 0
    assert (array[9000:9010] == array[:10]).all()


def test_nothing_to_move_is_success_and_unequal_lists_are_not(pair: Pair) -> None:
    assert pair.engine.transfer_sync_write(pair.peer.name, pair.here.at, pair.base, 0) == 0
    assert pair.engine.batch_transfer_sync_write(pair.peer.name, [], [], []) == 0
    assert pair.engine.batch_transfer_sync_write(pair.peer.name, [pair.here.at], [], [1]) == -1
    assert pair.engine.batch_transfer_async_write(pair.peer.name, [pair.here.at], [pair.base], []) == 0


def test_ids_of_batches(pair: Pair) -> None:
    engine, at, name = pair.engine, pair.here.at, pair.peer.name
    ids = [engine.batch_transfer_async_write(name, [at + MIB * i], [pair.base + MIB * i], [MIB]) for i in range(4)]
    assert all(ids) and len(set(ids)) == 4
    assert engine.get_batch_transfer_status(ids) == 0
    assert pair.peer.call("read", pair.base, 0, 4 * MIB) == pair.here.array[: 4 * MIB].tobytes()
    assert engine.get_batch_transfer_status(ids) == -1, "they were freed"
    assert engine.get_batch_transfer_status([]) == 0
    good = engine.batch_transfer_async_read(name, [at], [pair.base], [10])
    bad = engine.batch_transfer_async(name, [at], [pair.base + BYTES], [10], TransferOpcode.Write)
    assert engine.get_batch_transfer_status([good, bad]) == -1
    assert engine.get_batch_transfer_status([good]) == -1, "a failure frees all of them"


def test_an_id_is_asked_until_it_is_over(pair: Pair) -> None:
    ident = pair.engine.transfer_submit_write(pair.peer.name, pair.here.at, pair.base, BYTES)
    assert ident != 0
    while (state := pair.engine.transfer_check_status(ident)) == 0:
        time.sleep(0.001)
    assert state == 1
    assert pair.engine.transfer_check_status(ident) == -1, "it was freed"
    assert pair.engine.transfer_check_status(12345) == -1
    ident = pair.engine.transfer_submit_write(pair.peer.name, pair.here.at, pair.base + BYTES - 5, 10)
    while (state := pair.engine.transfer_check_status(ident)) == 0:
        time.sleep(0.001)
    assert state == -1


def test_notifications_come_with_the_bytes(pair: Pair) -> None:
    engine, at, name = pair.engine, pair.here.at, pair.peer.name
    assert pair.peer.do("get_notifies") == []
    assert engine.transfer_sync(name, at, pair.base, 10, TransferOpcode.Write, TransferNotify("a", "1")) == 0
    note = TransferNotify()
    note.name, note.msg = "b", "ü" * 1000
    assert engine.batch_transfer_sync(name, [at], [pair.base], [10], TransferOpcode.Read, notify=note) == 0
    deadline, got = time.monotonic() + 10, []
    while (
        len(got) < 2 and time.monotonic() < deadline
    ):  # they are queued when the call returns, and handed over at once
        got += pair.peer.do("get_notifies")
    assert got == [("a", "1"), ("b", "ü" * 1000)]
    assert engine.transfer_sync(name, at, pair.base, 1, TransferOpcode.Write, TransferNotify("c", "x" * 70000)) == -1


def test_what_is_not_registered_is_refused_on_both_sides(pair: Pair) -> None:
    engine, at, name = pair.engine, pair.here.at, pair.peer.name
    for source, target in (
        (at, pair.base + BYTES),
        (at, pair.base + BYTES - 50),
        (at + BYTES - 50, pair.base),
        (64, pair.base),
    ):
        assert engine.transfer_sync_write(name, source, target, 100) == -1
        assert engine.transfer_sync_read(name, source, target, 100) == -1
        assert engine.batch_transfer_sync_write(name, [at, source], [pair.base, target], [10, 100]) == -1
    assert engine.transfer_sync_write(name, at, pair.base, 100) == 0, "and that did no harm"


@pytest.mark.parametrize("length", [(1 << 32) + 10, 5 << 30, (1 << 63) + 1])
def test_lengths_are_not_cut_to_32_bits(pair: Pair, length: int) -> None:
    """Cut, each of them would lie inside the registered memory and succeed."""
    assert pair.engine.transfer_sync_write(pair.peer.name, pair.here.at, pair.base, length) == -1
    assert pair.engine.transfer_submit_write(pair.peer.name, pair.here.at, pair.base, length) == 0


def test_managed_buffers(pair: Pair) -> None:
    engine, name = pair.engine, pair.peer.name
    there = pair.peer.do("allocate_managed_buffer", MIB)
    mine = engine.allocate_managed_buffer(MIB)
    assert mine and there
    assert engine.write_bytes_to_buffer(mine + 5, b"abc\0defgh", 7) == 0
    assert engine.transfer_sync_write(name, mine + 5, there, 7) == 0
    assert pair.peer.do("read_bytes_from_buffer", there, 7) == b"abc\0def"
    assert engine.write_bytes_to_buffer(mine, b"abc", 4) == -1
    assert engine.write_bytes_to_buffer(mine + MIB - 1, b"abc", 3) == -1
    assert engine.read_bytes_from_buffer(mine + MIB, 1) == b""
    assert engine.read_bytes_from_buffer(64, 1) == b""
    assert engine.free_managed_buffer(mine, MIB) == 0
    assert engine.free_managed_buffer(mine, MIB) == -1
    assert pair.peer.do("free_managed_buffer", there, MIB) == 0
    assert engine.allocate_managed_buffer(0) == 0
    assert engine.allocate_managed_buffer(1 << 60) == 0


def test_what_one_can_ask_of_a_peer(pair: Pair) -> None:
    engine, name = pair.engine, pair.peer.name
    assert engine.send_probe(name) == 0
    assert engine.warmup_efa_segment(name) == 0
    assert engine.get_first_buffer_address(name) == pair.base
    assert engine.send_probe("127.0.0.1:1") == -102
    assert engine.send_probe("nonsense") == -101
    assert engine.get_first_buffer_address("127.0.0.1:1") == 0
    assert engine.warmup_efa_segment("127.0.0.1:1") == -1


def test_ten_threads_never_mix_bytes(pair: Pair) -> None:
    slot, rounds, results = BYTES // 10, 12, []

    def write(thread: int) -> None:
        rng = np.random.default_rng(thread)
        for _ in range(rounds):
            cuts = [0, *sorted(rng.choice(slot, 20, replace=False).tolist()), slot]
            rows = [(thread * slot + a, b - a) for a, b in itertools.pairwise(cuts)]
            rng.shuffle(rows)
            sources, targets = [pair.here.at + o for o, _ in rows], [pair.base + o for o, _ in rows]
            results.append(
                pair.engine.batch_transfer_sync_write(pair.peer.name, sources, targets, [n for _, n in rows])
            )
            pair.here.array[thread * slot : (thread + 1) * slot] = rng.integers(0, 256, slot, dtype=np.uint8)
        whole = pair.here.at + thread * slot, pair.base + thread * slot, slot
        results.append(pair.engine.transfer_sync_write(pair.peer.name, *whole))

    threads = [threading.Thread(target=write, args=(n,)) for n in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == [0] * (10 * (rounds + 1))
    assert pair.peer.call("read", pair.base, 0, 10 * slot) == pair.here.array[: 10 * slot].tobytes()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_more_than_4_gib_in_one_call() -> None:
    """Over tcp, between two ends of this process: one mapping each, marks around every multiple of 4 GiB."""
    length = (4 << 30) + 5000
    with mmap.mmap(-1, length) as source, mmap.mmap(-1, length) as target:
        a, b = np.frombuffer(source, np.uint8), np.frombuffer(target, np.uint8)
        engines = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MC_FORCE_TCP", "1")
            for array in (a, b):
                engines.append(TransferEngine())
                assert engines[-1].initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
                assert engines[-1].register_memory(array.ctypes.data, length) == 0
        marks = (0, 4999, (1 << 31) + 1, (1 << 32) - 1, 1 << 32, length - 1)
        for n, at in enumerate(marks):
            a[at] = n + 1
        name = f"127.0.0.1:{engines[1].get_rpc_port()}"
        assert engines[0].transfer_sync_write(name, a.ctypes.data, b.ctypes.data, length) == 0
        assert [int(b[at]) for at in marks] == list(range(1, len(marks) + 1))
        assert int(b.sum(dtype=np.uint64)) == sum(range(1, len(marks) + 1))
        for engine in engines:
            engine.close()
        del a, b, array
