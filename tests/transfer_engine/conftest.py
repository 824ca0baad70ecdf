"""Pairs of engines: an initiator here, a target wherever the transport needs it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.transfer_engine.certs import member
from tests.transfer_engine.fake import ENGINES, FakeTransport
from tests.transfer_engine.peer import Peer, _Main
from transfer_engine import EngineConfig, Opcode, SegmentHandle, TransferEngine, TransferRequest

TOKEN = b"a test's token"
TARGET_BYTES = 96 << 20
NICS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "rdma-fake": (("fake0", "fake1"), ("fake2", "fake3")),
    "rdma-vm": (("rxe_a0", "rxe_a1"), ("rxe_b0", "rxe_b1")),
}
"""Our NICs and the target's, where there are any (tests/rdma/places.py)."""


class InProcess:
    """A target in this process, with the same face as `Peer`."""

    def __init__(self, config: EngineConfig, engine: TransferEngine | None = None) -> None:
        self._main = _Main.__new__(_Main)
        if engine is None:
            self._main.__init__(config)  # type: ignore[misc]
        self.address, self.instance_id = self._main.who()

    def call(self, method: str, *args: Any) -> Any:
        return getattr(self._main, method)(*args)

    def close(self) -> None:
        self._main.close()


class Pair:
    """`engine` initiates; `target` owns `TARGET_BYTES` at `base`, open as `segment`."""

    def __init__(self, way: str) -> None:
        self.way = way
        self.patience_s = 5.0 if way == "rdma-vm" else 1.0  # an emulated machine takes its time
        transport = way.split("-")[0]
        ours, theirs = (member("initiator"), member("target")) if way == "tcp-tls" else ({}, {})
        mine, yours = NICS.get(way, ((), ()))
        config = EngineConfig(
            transports=(transport,), cluster_token=TOKEN, shm_mapping=way != "shm-cma", nics=mine, **ours
        )
        target = EngineConfig(cluster_token=TOKEN, transports=("local", "shm", "rdma", "tcp"), nics=yours, **theirs)
        self.target: Any = InProcess(target) if way in ("local", "fake", "rdma-fake") else Peer(target)
        if transport == "fake":
            ENGINES[self.target.instance_id] = self.target._main.engine
        self.engine = TransferEngine(config, transports={"fake": FakeTransport})
        self.base: int = self.target.call("allocate", TARGET_BYTES, way == "shm-mapped")
        self.segment: SegmentHandle = self.engine.open_segment(self.target.address, instance_id=self.target.instance_id)
        self.local = np.zeros(TARGET_BYTES, np.uint8)
        self.at = self.engine.register_buffer(self.local)

    def request(self, opcode: Opcode, source: int, offset: int, length: int) -> TransferRequest:
        return TransferRequest(opcode, self.at + source, self.segment, self.base + offset, length)

    def close(self) -> None:
        self.engine.close()
        self.target.close()


WAYS = [
    "fake",
    "local",
    "shm-mapped",
    "shm-cma",
    "tcp",
    "tcp-tls",
    pytest.param("rdma-fake", marks=pytest.mark.elsewhere("fake")),
    pytest.param("rdma-vm", marks=[pytest.mark.slow, pytest.mark.elsewhere("vm")]),
]


@pytest.fixture(scope="module", params=WAYS)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair(request.param)
    yield made
    made.close()


@pytest.fixture
def engine() -> Iterator[TransferEngine]:
    with TransferEngine(EngineConfig(cluster_token=TOKEN)) as made:
        yield made
