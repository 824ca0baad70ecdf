"""Peers that die, freeze or come back as another; engines that close in the middle."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from mooncake.common.errors import MooncakeError
from tests.transfer_engine.conftest import TOKEN
from tests.transfer_engine.peer import Peer
from transfer_engine import (
    AuthenticationFailed,
    EngineConfig,
    Opcode,
    PeerUnavailable,
    TransferEngine,
    TransferError,
    TransferRequest,
    TransferState,
    TransferTimeout,
)

MIB = 1 << 20


@pytest.fixture
def peer() -> Iterator[Peer]:
    with Peer(EngineConfig(cluster_token=TOKEN)) as made:
        yield made


@pytest.fixture(params=["shm-mapped", "shm-cma", "tcp"])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def _engine(way: str = "tcp", **more: object) -> TransferEngine:
    config = {"transports": (way.split("-")[0],), "cluster_token": TOKEN} | more
    return TransferEngine(EngineConfig(**config))  # type: ignore[arg-type]


def _requests(
    engine: TransferEngine, peer: Peer, way: str, count: int, opcode: Opcode = Opcode.WRITE
) -> list[TransferRequest]:
    local = np.ones(64 * MIB, np.uint8)
    at, base = engine.register_buffer(local), peer.call("allocate", 64 * MIB, way == "shm-mapped")
    segment = engine.open_segment(peer.address, instance_id=peer.instance_id)
    return [TransferRequest(opcode, at, segment, base, 64 * MIB)] * count


def test_a_killed_peer_costs_no_deadline_and_then_fails_fast(peer: Peer, way: str) -> None:
    with _engine(way) as engine:
        requests = _requests(engine, peer, way, 100)
        batch = engine.allocate_batch_id(100)
        engine.submit_transfer(batch, requests, deadline_s=20.0)
        while not engine.get_batch_status(batch).transferred_bytes:
            time.sleep(0.001)
        peer.signal(signal.SIGKILL)
        began = time.monotonic()
        status = engine.wait(batch, 10.0)
        assert status.state is TransferState.FAILED and isinstance(status.error, MooncakeError)
        assert time.monotonic() - began < 2.0
        for _ in range(5):
            began = time.monotonic()
            with pytest.raises(PeerUnavailable):
                engine.transfer_sync(requests[:1], 5.0)
            assert time.monotonic() - began < 0.5


def test_a_frozen_peer_costs_the_deadline_and_works_when_thawed(peer: Peer) -> None:
    with _engine("tcp") as engine:
        requests = _requests(engine, peer, "tcp", 1)
        engine.transfer_sync(requests, 5.0)
        for opcode in Opcode:
            peer.signal(signal.SIGSTOP)
            began = time.monotonic()
            with pytest.raises(TransferTimeout):
                engine.transfer_sync([requests[0]._replace(opcode=opcode)], 0.4)
            assert time.monotonic() - began < 1.2
            peer.signal(signal.SIGCONT)
            engine.transfer_sync([requests[0]._replace(opcode=opcode)], 10.0)


def test_a_frozen_peer_is_found_down_after_the_stall_limit(peer: Peer) -> None:
    with _engine("tcp", stall_timeout_s=0.5, peer_rest_s=5.0) as engine:
        requests = _requests(engine, peer, "tcp", 1)
        engine.transfer_sync(requests, 5.0)
        peer.signal(signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(PeerUnavailable):
            engine.transfer_sync(requests, 60.0)
        with pytest.raises(PeerUnavailable):
            engine.transfer_sync(requests, 60.0)
        assert time.monotonic() - began < 2.0
        peer.signal(signal.SIGCONT)


def test_jobs_queued_behind_a_frozen_peer_keep_their_own_deadlines(peer: Peer) -> None:
    with _engine("tcp") as engine:
        requests = _requests(engine, peer, "tcp", 2)
        engine.transfer_sync(requests[:1], 5.0)
        peer.signal(signal.SIGSTOP)
        slow, fast = engine.allocate_batch_id(2), engine.allocate_batch_id(1)
        engine.submit_transfer(slow, requests, deadline_s=1.2)
        engine.submit_transfer(fast, requests[:1], deadline_s=0.2)
        began = time.monotonic()
        assert engine.wait(fast, 5.0).state is TransferState.TIMED_OUT
        assert time.monotonic() - began < 0.8
        assert engine.wait(slow, 5.0).state is TransferState.TIMED_OUT
        peer.signal(signal.SIGCONT)


def test_a_restarted_peer_on_the_same_port_is_another_peer(way: str) -> None:
    with Peer(EngineConfig(cluster_token=TOKEN)) as old, _engine(way) as engine:
        requests = _requests(engine, old, way, 1)
        engine.transfer_sync(requests, 5.0)
        port = int(old.address.rsplit(":", 1)[1])
        old.signal(signal.SIGKILL)
        old.process.join(5)
        with Peer(EngineConfig(cluster_token=TOKEN, port=port)) as new:
            assert new.address == old.address
            with pytest.raises(PeerUnavailable):
                engine.transfer_sync(requests, 5.0)
            with pytest.raises(PeerUnavailable):
                engine.open_segment(new.address, instance_id=old.instance_id)
            segment = engine.open_segment(new.address)
            assert engine.segment_instance(segment) == new.instance_id
            base = new.call("allocate", MIB, False)
            engine.transfer_sync([TransferRequest(Opcode.WRITE, requests[0].source, segment, base, MIB)], 5.0)
            assert set(new.call("read", base, MIB)) == {1}


@pytest.mark.parametrize("tokens", [(b"right", b"wrong"), (b"", b"right"), (b"right", b"")])
def test_a_wrong_token_is_refused_both_ways(tokens: tuple[bytes, bytes]) -> None:
    with (
        TransferEngine(EngineConfig(cluster_token=tokens[0])) as one,
        TransferEngine(EngineConfig(cluster_token=tokens[1])) as other,
    ):
        with pytest.raises(AuthenticationFailed):
            one.open_segment(other.address)
        assert not other.send_probe(one.address)


def test_an_unreachable_address_fails_fast(engine: TransferEngine) -> None:
    began = time.monotonic()
    with pytest.raises(PeerUnavailable):
        engine.open_segment("127.0.0.1:1")
    assert not engine.send_probe("127.0.0.1:1")
    assert time.monotonic() - began < 1.0
    for bad in ("localhost", "::1:80", "127.0.0.1:0", ":80"):
        with pytest.raises(ValueError):
            engine.open_segment(bad)


def test_lost_connections_are_dialled_again(peer: Peer) -> None:
    with _engine("tcp", idle_timeout_s=0.1) as engine:
        requests = _requests(engine, peer, "tcp", 1)
        for _ in range(3):
            engine.transfer_sync(requests, 5.0)
            until = time.monotonic() + 3.0
            while engine.stats()["open_streams"] and time.monotonic() < until:
                time.sleep(0.02)
            assert engine.stats()["open_streams"] == 0
        for link in engine.connections.links():
            link.close()
        engine.transfer_sync(requests, 5.0, notify=b"over a new link")
        assert peer.call("wait_notes", 1, 2.0) == [b"over a new link"]


@pytest.mark.parametrize("opcode", list(Opcode))
def test_streams_cut_in_the_middle_are_repaired(peer: Peer, opcode: Opcode) -> None:
    with _engine("tcp", max_retries=50) as engine:
        requests = _requests(engine, peer, "tcp", 8, opcode)
        batch = engine.allocate_batch_id(8)
        engine.submit_transfer(batch, requests, deadline_s=30.0)
        tcp = engine._transports[0]
        for _ in range(6):
            time.sleep(0.03)
            for stream in list(tcp._streams):  # type: ignore[attr-defined]
                with contextlib.suppress(OSError):
                    stream._sock.shutdown(socket.SHUT_RDWR)
        assert engine.wait(batch, 30.0).ok


@pytest.mark.parametrize("frozen", [False, True])
def test_close_with_transfers_outstanding_takes_under_three_seconds(peer: Peer, way: str, frozen: bool) -> None:
    engine = _engine(way)
    requests = _requests(engine, peer, way, 100)
    engine.transfer_sync(requests[:1], 5.0)
    if frozen:
        peer.signal(signal.SIGSTOP)
    batches = [engine.allocate_batch_id(100) for _ in range(4)]
    for batch in batches:
        engine.submit_transfer(batch, requests, deadline_s=60.0)
    waiter = threading.Thread(target=engine.wait, args=(batches[0], 30.0))
    waiter.start()
    began = time.monotonic()
    engine.close()
    assert time.monotonic() - began < 3.0
    waiter.join(1.0)
    assert not waiter.is_alive()
    assert all(engine.get_batch_status(batch).state.terminal for batch in batches)
    with pytest.raises(TransferError):
        engine.allocate_batch_id(1)
    engine.close()


def test_nothing_is_left_behind(way: str) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    def one() -> None:
        with Peer(EngineConfig(cluster_token=TOKEN)) as peer, _engine(way) as engine:
            shared = engine.allocate_shared(MIB)
            requests = _requests(engine, peer, way, 1)
            engine.transfer_sync(requests, 5.0)
            shared.close()

    one()
    before, threads = descriptors(), threading.active_count()
    one()
    assert descriptors() <= before + 1 and threading.active_count() <= threads + 1


def test_a_closed_target_says_goodbye(peer: Peer, way: str) -> None:
    with _engine(way) as engine:
        requests = _requests(engine, peer, way, 1)
        engine.transfer_sync(requests, 5.0)
        peer.call("close")
        began = time.monotonic()
        with pytest.raises(PeerUnavailable):
            engine.transfer_sync(requests, 5.0)
        assert time.monotonic() - began < 1.0
