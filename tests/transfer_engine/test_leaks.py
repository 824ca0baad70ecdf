"""Eight processes, each with every other: after 10,000 small transfers a further 100,000 (30,000 by shm) change nothing that the system counts."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.transfer_engine.chaos import config
from tests.transfer_engine.peer import _Main
from tests.transfer_engine.zygote import Victim, Zygote
from transfer_engine import EngineConfig, Opcode, SegmentHandle, TransferRequest

PROCESSES = 8
SLOT = 64 << 10
STREAMS = EngineConfig().streams_per_peer + 1
"""To one peer: streams_per_peer and the one that the submitting thread uses itself."""


class Usage(NamedTuple):
    descriptors: int
    sockets: int
    threads: int
    rss_bytes: int
    cpu_s: float
    stats: dict[str, float]


class _Member(_Main):
    """Slot i of its memory belongs to member i; everybody writes and reads its own slot everywhere."""

    def join(self, me: int, members: list[tuple[str, str, int]]) -> None:
        self.me = me
        self.peers: list[tuple[SegmentHandle, int]] = []
        self.own = np.full(SLOT, me + 1, np.uint8)
        self.back = np.zeros(SLOT, np.uint8)
        self.own_at, self.back_at = self.engine.register_buffer(self.own), self.engine.register_buffer(self.back)
        for index, (address, instance_id, base) in enumerate(members):
            if index != me:
                segment = self.engine.open_segment(address, instance_id=instance_id, timeout_s=20.0)
                self.peers.append((segment, base + me * SLOT))

    def storm(self, count: int) -> None:
        """`count` submissions, most of them one by one, some ten at a time."""
        sizes = itertools.cycle((1, 700, 4096, 16384, 60000))
        done = 0
        for segment, base in itertools.cycle(self.peers):
            requests = [
                TransferRequest(
                    opcode, self.own_at if opcode is Opcode.WRITE else self.back_at, segment, base, next(sizes)
                )
                for opcode in (Opcode.WRITE, Opcode.READ) * 5
            ]
            for request in requests * 5:
                self.engine.transfer_sync([request], 30.0)
            assert (self.back[:60000] == self.me + 1).all()
            batch = self.engine.allocate_batch_id(10)
            for request in requests:
                self.engine.submit_transfer(batch, [request], deadline_s=30.0)
            assert self.engine.wait(batch, 30.0).ok
            self.engine.free_batch_id(batch)
            done += 60
            if done >= count:
                return

    def usage(self) -> Usage:
        """Of this process."""
        names = []
        for fd in os.listdir("/proc/self/fd"):
            try:
                names.append(os.readlink(f"/proc/self/fd/{fd}"))
            except FileNotFoundError:
                continue
        status = Path("/proc/self/status").read_text()
        rss = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
        sockets = sum(name.startswith("socket:") for name in names)
        return Usage(len(names), sockets, threading.active_count(), rss << 10, time.process_time(), self.engine.stats())


class Cluster:
    def __init__(self, way: str, zygote: Zygote) -> None:
        self.members: list[Victim] = [zygote.fork(config(way, idle_timeout_s=120.0), _Member) for _ in range(PROCESSES)]
        bases = [member.call("allocate", PROCESSES * SLOT, way == "shm-mapped") for member in self.members]
        known = [(m.address, m.instance_id, base) for m, base in zip(self.members, bases, strict=True)]
        for me, member in enumerate(self.members):
            member.call("join", me, known)

    def all(self, method: str, *args: Any, timeout_s: float = 100.0) -> list[Any]:
        """Run it in all members at once."""
        for member in self.members:
            member.send(method, *args)
        return [member.receive(timeout_s) for member in self.members]

    def close(self) -> None:
        for member in self.members:
            member.kill()


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with Zygote(preload=False) as made:
        yield made


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("way", ["tcp", "shm-mapped"])
def test_many_more_transfers_leave_nothing_behind(zygote: Zygote, way: str) -> None:
    shared = set(os.listdir("/dev/shm"))
    cluster = Cluster(way, zygote)
    try:
        cluster.all("storm", 10_000 // PROCESSES)
        before: list[Usage] = cluster.all("usage")
        cluster.all("storm", 100_000 // PROCESSES, timeout_s=200.0)
        after: list[Usage] = cluster.all("usage")
        for then, now in zip(before, after, strict=True):
            print(then[:5], now[:5])
            _bounded(now, way)
            assert now.descriptors <= then.descriptors + 2
            assert now.threads <= then.threads + 2
            assert now.rss_bytes <= then.rss_bytes + (8 << 20)
            assert now.stats["live_transfers"] == 0 and now.stats["regions"] == then.stats["regions"]
        assert set(os.listdir("/dev/shm")) <= shared
    finally:
        cluster.close()
    assert set(os.listdir("/dev/shm")) <= shared


def _bounded(usage: Usage, way: str) -> None:
    peers = PROCESSES - 1
    streams = STREAMS * peers if way == "tcp" else 0
    assert usage.stats.get("open_streams", 0) <= streams
    # One control connection each way, and the streams of both directions; the listener and the test's own socket.
    assert usage.sockets <= 2 * peers + 2 * streams + 2
    assert usage.threads <= 4 * peers + 2 * streams + 12
    assert usage.stats["open_connections"] <= peers + streams
    assert all(
        value <= 16 * peers for name, value in usage.stats.items() if "endpoints" in name or "queue_pairs" in name
    )


def test_engines_that_come_and_go_leave_nothing_behind(zygote: Zygote) -> None:
    """Sessions with many short-lived peers: what is kept of each is bounded and given up."""
    target: Victim = zygote.fork(config("tcp"), _Member)
    hub: Victim = zygote.fork(config("tcp"), _Hub)
    try:
        hub.call("visit", target.address, 20)
        before, known = hub.call("visit", target.address, 20), target.call("usage")
        after, knows = hub.call("visit", target.address, 60), target.call("usage")
        assert after[0] <= before[0] + 1 and after[1] <= before[1] + 1
        assert after[2] <= before[2] + (8 << 20)
        assert knows.stats["open_connections"] <= 2
        assert (
            knows.descriptors <= known.descriptors + 4 and knows.threads <= known.threads + 4
        )  # the last ones are just ending
    finally:
        target.kill()
        hub.kill()


class _Hub:
    """Makes and closes engines in one process."""

    def __init__(self, wanted: EngineConfig) -> None:
        self.config = wanted

    def who(self) -> tuple[str, str]:
        return "", ""

    def visit(self, address: str, count: int) -> tuple[int, int, int]:
        """(descriptors, threads, resident bytes) afterwards."""
        for _ in range(count):
            member = _Main(self.config)
            segment = member.engine.open_segment(address)
            member.engine.close_segment(segment)
            member.close()
        status = Path("/proc/self/status").read_text()
        rss = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
        return len(os.listdir("/proc/self/fd")), threading.active_count(), rss << 10
