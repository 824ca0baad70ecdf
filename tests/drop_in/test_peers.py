"""Peers that die, freeze, restart, are many, or are addressed in unusual ways."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mooncake.drop_in.names import Addresses
from mooncake.drop_in.peers import Peers
from mooncake.engine import TransferEngine
from tests.drop_in.conftest import Here
from tests.drop_in.peer import Peer

MIB = 1 << 20
MakePeer = Callable[..., Peer]


@pytest.fixture
def tcp_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frozen peers matter only where their help is needed."""
    monkeypatch.setenv("MC_FORCE_TCP", "1")


def _at_once(count: int, call: Callable[[], int]) -> tuple[list[int], float]:
    results: list[int] = []
    threads = [threading.Thread(target=lambda: results.append(call())) for _ in range(count)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results, time.monotonic() - began


def test_a_peer_that_never_answers_costs_its_time_once(tcp_only: None, here: Here, make_peer: MakePeer) -> None:
    peer = make_peer()
    base = peer.call("allocate", MIB)
    peer.freeze()  # the kernel still accepts connections for it
    results, took = _at_once(10, lambda: here.engine.transfer_sync_write(peer.name, here.at, base, 10))
    assert results == [-1] * 10
    assert took < 5.0, "one thread dials, the others wait for what it finds"
    results, took = _at_once(10, lambda: here.engine.transfer_sync_write(peer.name, here.at, base, 10))
    assert results == [-1] * 10
    assert took < 3.0, "it is resting"
    peer.signal(signal.SIGCONT)
    assert here.engine.send_probe(peer.name) == 0
    assert here.engine.transfer_sync_write(peer.name, here.at, base, 10) == 0, "a good probe ends the rest"


def test_a_peer_that_freezes_in_use(tcp_only: None, here: Here, make_peer: MakePeer) -> None:
    peer = make_peer()
    base = peer.call("allocate", MIB)
    assert here.engine.transfer_sync_write(peer.name, here.at, base, 10) == 0
    peer.freeze()
    moved: list[int] = []
    waiter = threading.Thread(
        target=lambda: moved.append(here.engine.transfer_sync_write(peer.name, here.at, base, MIB))
    )
    waiter.start()
    steps = 0
    while waiter.is_alive():
        time.sleep(0.001)
        steps += 1
    assert steps > 100, "this thread went on: the GIL is free while the other one waits"
    assert moved == [-1]
    results, took = _at_once(10, lambda: here.engine.transfer_sync_write(peer.name, here.at, base, 10))
    assert results == [-1] * 10
    assert took < 6.0
    peer.signal(signal.SIGCONT)
    deadline = time.monotonic() + 10
    while here.engine.transfer_sync_write(peer.name, here.at, base, MIB) != 0:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert peer.call("read", base, 0, MIB) == here.array[:MIB].tobytes()


def test_a_transfer_that_its_time_runs_out_for(
    tcp_only: None, here: Here, make_peer: MakePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = make_peer()
    base = peer.call("allocate", 8 * MIB)
    assert here.engine.transfer_sync_write(peer.name, here.at, base, 10) == 0
    peer.freeze()
    monkeypatch.setenv("MC_TRANSFER_TIMEOUT", "1")
    ident = here.engine.transfer_submit_write(peer.name, here.at, base, 8 * MIB)
    while (state := here.engine.transfer_check_status(ident)) == 0:
        time.sleep(0.01)
    assert state == -2
    assert here.engine.transfer_check_status(ident) == -1, "it was freed"


@pytest.mark.parametrize("way", ["tcp", "shm"])
def test_a_peer_that_restarts_on_its_port_is_another_one(
    way: str, make_peer: MakePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {"MC_FORCE_TCP": "1" if way == "tcp" else "0"}
    monkeypatch.setenv("MC_FORCE_TCP", environ["MC_FORCE_TCP"])
    here = Here()
    name = ""
    for life in range(3):
        peer = make_peer(host=name or "127.0.0.1", environ=environ)
        assert name in ("", peer.name), "the port that was asked for"
        name = peer.name
        base = peer.call("allocate", MIB)
        assert here.engine.transfer_sync_write(name, here.at + life, base, MIB) == 0, "the first try in each life"
        assert peer.call("read", base, 0, MIB) == here.array[life : life + MIB].tobytes()
        peer.kill()
        if life == 0:
            began = time.monotonic()
            assert here.engine.transfer_sync_write(name, here.at, base, MIB) == -1
            assert time.monotonic() - began < 5.0
    here.engine.close()


def test_a_port_that_is_taken_is_replaced(here: Here) -> None:
    other = TransferEngine()
    taken = here.engine.get_rpc_port()
    assert other.initialize(f"127.0.0.1:{taken}", "P2PHANDSHAKE", "tcp", "") == 0
    assert other.get_rpc_port() not in (taken, 0)
    other.close()


def test_the_first_transfer_after_its_connections_were_lost(here: Here, make_peer: MakePeer) -> None:
    peer = make_peer()
    base = peer.call("allocate", MIB)
    assert here.engine.transfer_sync_write(peer.name, here.at, base, MIB) == 0
    for link in here.engine.get_engine().connections.links():
        link.close()  # what a firewall does to an idle connection
    assert here.engine.transfer_sync_write(peer.name, here.at + 1, base, MIB) == 0
    assert peer.call("read", base, 0, MIB) == here.array[1 : 1 + MIB].tobytes()


def test_ipv6_with_and_without_brackets() -> None:
    here, there = Here(host="::1", length=4096), Here(host="[::1]:0", length=4096)
    for name in (f"[::1]:{there.engine.get_rpc_port()}", f"::1:{there.engine.get_rpc_port()}"):
        here.array[:] += 1
        assert here.engine.transfer_sync_write(name, here.at, there.at, 4096) == 0
        assert (there.array == here.array).all()
        assert here.engine.send_probe(name) == 0
    here.engine.close()
    there.engine.close()


def test_an_engine_reaches_itself(here: Here) -> None:
    name = f"127.0.0.1:{here.engine.get_rpc_port()}"
    assert here.engine.transfer_sync_write(name, here.at, here.at + MIB, MIB) == 0
    assert (here.array[:MIB] == here.array[MIB : 2 * MIB]).all()


def test_open_segments_are_bounded() -> None:
    here, others = Here(length=4096), [Here(length=4096) for _ in range(5)]
    names = [f"127.0.0.1:{other.engine.get_rpc_port()}" for other in others]
    engine = here.engine.get_engine()
    peers = Peers(engine, Addresses(), capacity=2)
    for name in names * 2:
        with peers.use(name) as segment, peers.use(name) as again:
            assert segment == again, "kept while it is good"
            assert engine.segment_is_up(segment)
        assert len(peers) <= 2
    for one in (here, *others):
        one.engine.close()


def test_engines_of_another_cluster_are_strangers(make_peer: MakePeer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONCAKE_CLUSTER_TOKEN", "ours")
    here = Here(length=4096)
    friend, stranger = (make_peer(environ={"MOONCAKE_CLUSTER_TOKEN": token}) for token in ("ours", "theirs"))
    for peer, code in ((friend, 0), (stranger, -1)):
        base = peer.call("allocate", 4096)
        assert here.engine.transfer_sync_write(peer.name, here.at, base, 4096) == code
        assert here.engine.send_probe(peer.name) == (0 if code == 0 else -102)
    assert not any(stranger.call("read", base, 0, 4096))
    here.engine.close()


def test_an_engine_ends_with_its_object() -> None:
    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    address = ("127.0.0.1", engine.get_rpc_port())
    socket.create_connection(address, timeout=5).close()
    del engine
    gc.collect()
    with pytest.raises(OSError):
        socket.create_connection(address, timeout=5)


def test_initializing_again_starts_anew(here: Here) -> None:
    old = here.engine.get_rpc_port()
    assert here.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    assert here.engine.get_rpc_port() != old
    assert here.engine.unregister_memory(here.at) == -3, "nothing is registered any more"
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", old), timeout=5)


def test_memory_that_a_frozen_peer_reaches_stays_closed_until_it_lets_go(here: Here, make_peer: MakePeer) -> None:
    """By shared memory a peer needs no help of ours, so it must agree before a range is gone."""
    peer = make_peer()
    there = peer.call("allocate", 4096)
    name = f"127.0.0.1:{here.engine.get_rpc_port()}"
    assert peer.do("transfer_sync_write", name, there, here.at, 4096) == 0
    peer.freeze()
    assert here.engine.unregister_memory(here.at) == -1
    assert here.engine.register_memory(here.at, len(here.array)) < 0, "not as if nothing had happened"
    peer.signal(signal.SIGCONT)
    assert here.engine.unregister_memory(here.at) == 0
    assert here.engine.unregister_memory(here.at) == -3
    assert peer.do("transfer_sync_write", name, there, here.at, 4096) == -1
    assert here.engine.register_memory(here.at, len(here.array)) == 0
    assert peer.do("transfer_sync_write", name, there, here.at, 4096) == 0


FORKING = """
import os, sys
import numpy as np
from mooncake.engine import TransferEngine

engines, arrays = [TransferEngine(), TransferEngine()], [np.zeros(4096, np.uint8), np.ones(4096, np.uint8)]
for engine, array in zip(engines, arrays):
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    assert engine.register_memory(array.ctypes.data, 4096) == 0

def both_ways():
    return [
        one.transfer_sync_write(f"127.0.0.1:{other.get_rpc_port()}", a.ctypes.data, b.ctypes.data, 4096)
        for one, other, a, b in ((*engines, *arrays), (*engines[::-1], *arrays[::-1]))
    ]

assert both_ways() == [0, 0]
child = os.fork()
if child == 0:
    sys.exit(0)  # runs what is registered for the end of a process
os.waitpid(child, 0)
assert both_ways() == [0, 0]
"""


def test_a_forked_child_does_not_end_its_parents_engine() -> None:
    environ = os.environ | {"MC_FORCE_TCP": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", FORKING], env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
