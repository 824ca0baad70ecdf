"""cancel_incoming: after True, not one byte of the group changes our memory."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from tests.transfer_engine.conftest import TOKEN
from tests.transfer_engine.peer import Peer
from transfer_engine import EngineConfig, Opcode, TransferCancelled, TransferEngine, TransferRequest, TransferState
from transfer_engine.fence import FenceTable

MIB = 1 << 20
_groups = itertools.count(1000)


@pytest.fixture(scope="module", params=["shm-mapped", "shm-cma", "tcp"])
def target(request: pytest.FixtureRequest) -> Iterator[tuple[str, TransferEngine, Peer]]:
    """We are the target; the peer initiates."""
    way = request.param
    transports = ("tcp",) if way == "tcp" else ("shm",)
    with (
        TransferEngine(EngineConfig(cluster_token=TOKEN, transports=transports)) as engine,
        Peer(EngineConfig(cluster_token=TOKEN)) as peer,
    ):
        yield way, engine, peer


def _memory(way: str, engine: TransferEngine, length: int) -> tuple[int, np.ndarray]:
    if way == "shm-mapped":
        buffer = engine.allocate_shared(length)
        return buffer.address, np.frombuffer(buffer.view, np.uint8)
    array = np.zeros(length, np.uint8)
    return engine.register_buffer(array), array


def _wait_for_bytes(memory: np.ndarray) -> None:
    until = time.monotonic() + 10
    while not memory[-1] and time.monotonic() < until:
        time.sleep(0.0005)
    assert memory[-1]


@pytest.mark.parametrize("block", [16384, 8 * MIB])
def test_no_byte_changes_after_the_fence(target: tuple[str, TransferEngine, Peer], block: int) -> None:
    way, engine, peer = target
    address, memory = _memory(way, engine, 8 * MIB)
    for turn in range(12):
        group = next(_groups)
        memory[:] = 0
        peer.call("start_writing", engine.address, address, len(memory), group, block)
        _wait_for_bytes(memory)
        time.sleep(0.0007 * turn)
        assert engine.cancel_incoming(group, peer.address, instance_id=peer.instance_id)
        memory[:] = 0
        for _ in range(3):
            assert not memory.any()
            time.sleep(0.005)
        assert set(peer.call("end_writing")) == {"TransferCancelled"}
        assert not memory.any()
        with pytest.raises(TransferCancelled):
            peer.call("write", engine.address, *_source(peer), address, 100, 2.0, group)
        assert not memory.any()
    engine.unregister_local_memory(address)


def _source(peer: Peer) -> tuple[int]:
    return (peer.call("allocate", 4096, False),)


def test_other_groups_go_on(target: tuple[str, TransferEngine, Peer]) -> None:
    way, engine, peer = target
    address, memory = _memory(way, engine, MIB)
    kept, cancelled = next(_groups), next(_groups)
    peer.call("start_writing", engine.address, address, MIB, kept, 65536)
    for _ in range(10):
        assert engine.cancel_incoming(cancelled, peer.address)
        memory[:] = 0
        _wait_for_bytes(memory)
    assert peer.call("end_writing") == []
    engine.unregister_local_memory(address)


def test_a_fence_before_anything_was_sent_holds(target: tuple[str, TransferEngine, Peer]) -> None:
    way, engine, peer = target
    address, memory = _memory(way, engine, MIB)
    group = next(_groups)
    assert engine.cancel_incoming(group, engine.open_segment(peer.address))
    peer.call("start_writing", engine.address, address, MIB, group, MIB)
    assert set(peer.call("end_writing")) == {"TransferCancelled"}
    assert not memory.any()
    engine.unregister_local_memory(address)


def test_a_killed_initiator_is_proven_gone(target: tuple[str, TransferEngine, Peer]) -> None:
    way, engine, _ = target
    address, memory = _memory(way, engine, 8 * MIB)
    with Peer(EngineConfig(cluster_token=TOKEN)) as doomed:
        group = next(_groups)
        doomed.call("start_writing", engine.address, address, len(memory), group, 65536)
        _wait_for_bytes(memory)
        killer = threading.Timer(0.05, doomed.signal, (signal.SIGKILL,))
        killer.start()
        until = time.monotonic() + 5
        while doomed.process.is_alive() and time.monotonic() < until:
            time.sleep(0.001)
        assert engine.cancel_incoming(group, doomed.address, instance_id=doomed.instance_id)
        memory[:] = 0
        time.sleep(0.05)
        assert not memory.any()
    engine.unregister_local_memory(address)


def test_a_frozen_initiator_is_fenced_where_that_can_be_proven(target: tuple[str, TransferEngine, Peer]) -> None:
    way, engine, _ = target
    address, memory = _memory(way, engine, 8 * MIB)
    with Peer(EngineConfig(cluster_token=TOKEN)) as frozen:
        group = next(_groups)
        frozen.call("start_writing", engine.address, address, len(memory), group, 65536)
        _wait_for_bytes(memory)
        frozen.signal(signal.SIGSTOP)
        began = time.monotonic()
        done = engine.cancel_incoming(group, frozen.address, instance_id=frozen.instance_id, timeout_s=0.4)
        assert time.monotonic() - began < 1.0
        assert done is (way == "tcp")  # with direct access a frozen process may go on with a copy when it thaws
        if done:
            memory[:] = 0
        frozen.signal(signal.SIGCONT)
        if not done:
            assert engine.cancel_incoming(group, frozen.address, instance_id=frozen.instance_id, timeout_s=5.0)
            memory[:] = 0
        time.sleep(0.1)
        assert not memory.any()
        assert set(frozen.call("end_writing")) <= {"TransferCancelled", "PeerUnavailable"}
    engine.unregister_local_memory(address)


def test_an_initiator_that_never_came_is_fenced_locally(engine: TransferEngine) -> None:
    assert engine.cancel_incoming(1, "127.0.0.1:1", timeout_s=1.0)
    assert engine.cancel_incoming(1, "127.0.0.1:1", instance_id="f" * 32, timeout_s=1.0)
    with pytest.raises(ValueError):
        engine.cancel_incoming(0, "127.0.0.1:1")


def test_unregistering_waits_for_a_writer_with_direct_access(target: tuple[str, TransferEngine, Peer]) -> None:
    way, engine, peer = target
    for _ in range(5):
        address, memory = _memory(way, engine, 8 * MIB)
        group = next(_groups)
        peer.call("start_writing", engine.address, address, len(memory), group, MIB)
        _wait_for_bytes(memory)
        engine.unregister_local_memory(address)
        memory[:] = 0
        time.sleep(0.01)
        assert not memory.any()
        assert set(peer.call("end_writing")) == {"NotRegistered"}


def test_local_engines_fence_each_other() -> None:
    with TransferEngine() as one, TransferEngine() as other:
        memory, source = np.zeros(64 * MIB, np.uint8), np.ones(64 * MIB, np.uint8)
        target, at = one.register_buffer(memory), other.register_buffer(source)
        segment = other.open_segment(one.address)
        batch = other.allocate_batch_id(50)
        other.submit_transfer(
            batch, [TransferRequest(Opcode.WRITE, at, segment, target, 64 * MIB)] * 50, deadline_s=60.0, group=9
        )
        assert one.cancel_incoming(9, other.address)
        memory[:] = 0
        assert other.wait(batch, 2.0).state is TransferState.CANCELLED
        assert not memory.any()
        with pytest.raises(TransferCancelled):
            other.transfer_sync([TransferRequest(Opcode.WRITE, at, segment, target, 8)], 1.0, group=9)


def test_the_fence_table_forgets_by_time_only() -> None:
    table = FenceTable(capacity=2, ttl_s=0.05)
    table.add(("a", 1))
    table.add(("", 2))
    assert ("a", 1) in table and ("b", 1) not in table and ("anyone", 2) in table
    assert not table.enter(("a", 1)) and table.enter(("a", 3)) and table.groups_of("a") == [1, 2]
    with pytest.raises(Exception, match="remembered"):
        table.add(("c", 4))
    time.sleep(0.06)
    table.add(("c", 4))
    assert ("a", 1) not in table and table.enter(("a", 1))
    assert not table.wait_clear(("a", 1), 0.0)
    table.leave(("a", 1))
    assert table.wait_clear(("a", 1), 0.0)
