"""Single small requests: the short way must end like the long one."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from tests.transfer_engine.conftest import TOKEN, InProcess
from tests.transfer_engine.peer import Peer
from transfer_engine import (
    EngineConfig,
    NotRegistered,
    Opcode,
    SegmentHandle,
    TransferEngine,
    TransferRequest,
    TransferState,
    TransferStatus,
    TransferTimeout,
    TransferVector,
)


class _Setting:
    def __init__(self, peer: Peer | InProcess, way: str = "tcp") -> None:
        self.peer = peer
        mapping = way != "shm-cma"
        self.engine = TransferEngine(
            EngineConfig(transports=(way.split("-")[0],), cluster_token=TOKEN, shm_mapping=mapping)
        )
        self.local = np.zeros(1 << 20, np.uint8)
        self.at = self.engine.register_buffer(self.local)
        self.base: int = peer.call("allocate", 1 << 20, way == "shm-mapped")
        self.segment: SegmentHandle = self.engine.open_segment(peer.address)
        self.engine.transfer_sync([self.request(Opcode.READ, 8)], 5.0)  # dials

    def request(self, opcode: Opcode, length: int, offset: int = 0) -> TransferRequest:
        return TransferRequest(opcode, self.at + offset, self.segment, self.base + offset, length)

    def short(self, request: TransferRequest, deadline_s: float = 5.0) -> TransferStatus | None:
        return self.engine._express.move([request], time.monotonic() + deadline_s)


@pytest.fixture(params=["local", "shm-mapped", "shm-cma"])
def copying(request: pytest.FixtureRequest) -> Iterator[_Setting]:
    config = EngineConfig(cluster_token=TOKEN, transports=("local", "shm", "tcp"))
    peer = InProcess(config) if request.param == "local" else Peer(config)
    made = _Setting(peer, request.param)
    yield made
    made.engine.close()
    peer.close()


@pytest.fixture
def setting() -> Iterator[_Setting]:
    with Peer(EngineConfig(cluster_token=TOKEN)) as peer:
        made = _Setting(peer)
        yield made
        peer.signal(signal.SIGCONT)
        made.engine.close()


def _there_and_back(setting: _Setting, length: int) -> None:
    setting.local[: length + 20] = np.random.default_rng(length).integers(1, 256, length + 20, dtype=np.uint8)
    done = TransferStatus(TransferState.COMPLETED, length)
    assert setting.short(setting.request(Opcode.WRITE, length, 10)) == done
    sent = setting.local[10 : 10 + length].tobytes()
    assert setting.peer.call("read", setting.base, length + 20) == bytes(10) + sent + bytes(10)
    setting.local[:] = 0
    assert setting.short(setting.request(Opcode.READ, length, 10)) == done
    assert setting.local[: length + 20].tobytes() == bytes(10) + sent + bytes(10)


@pytest.mark.parametrize("length", [1, 4096, 8136, 8137, 65536])
def test_the_short_way_carries_the_bytes(setting: _Setting, length: int) -> None:
    _there_and_back(setting, length)
    assert setting.engine.stats()["transfer_requests"] == 3


@pytest.mark.parametrize("length", [1, 4096, 65536])
def test_copies_take_the_short_way_too(copying: _Setting, length: int) -> None:
    _there_and_back(copying, length)


def test_a_copy_outside_of_registered_memory_is_refused(copying: _Setting) -> None:
    outside = copying.request(Opcode.READ, 8)._replace(target_offset=copying.base + (1 << 20) - 4)
    assert copying.short(outside) is None
    with pytest.raises(NotRegistered):
        copying.engine.transfer_sync([outside], 5.0)
    copying.engine.unregister_local_memory(copying.at)
    assert copying.short(copying.request(Opcode.READ, 8)) is None


def test_what_is_unusual_takes_the_long_way(setting: _Setting) -> None:
    assert setting.short(setting.request(Opcode.WRITE, 65537)) is None
    assert setting.short(setting.request(Opcode.WRITE, 8, 1 << 20)) is None  # not registered here
    assert setting.short(setting.request(Opcode.WRITE, 0)) is None
    request = setting.request(Opcode.WRITE, 8)
    assert setting.engine._express.move([request, request], time.monotonic() + 1.0) is None
    column = (np.array([setting.at]), np.array([setting.base]), np.array([8.5]))
    with pytest.raises(ValueError):
        setting.engine.transfer_sync(TransferVector(Opcode.READ, setting.segment, *column), 5.0)
    with pytest.raises(ValueError):
        setting.engine.transfer_sync([request], 0.0)


def test_a_refusal_is_typed_and_keeps_the_connection(setting: _Setting) -> None:
    for opcode in Opcode:
        wrong = setting.request(opcode, 100)._replace(target_offset=setting.base + (1 << 20) - 99)
        with pytest.raises(NotRegistered):
            setting.short(wrong)
        assert setting.short(setting.request(opcode, 100)) is not None
    assert setting.engine.stats()["tcp_dials"] == 1


@pytest.mark.parametrize("opcode", list(Opcode))
def test_a_lost_connection_is_repaired(setting: _Setting, opcode: Opcode) -> None:
    setting.local[:8] = 7
    (stream,) = setting.engine._transports[0]._streams  # type: ignore[attr-defined]
    stream._sock.shutdown(2)
    assert setting.engine.transfer_sync([setting.request(opcode, 8)], 5.0).ok
    stats = setting.engine.stats()
    assert stats["tcp_retries"] == 1 and stats["tcp_dials"] == 2 and stats["open_streams"] == 1


@pytest.mark.parametrize("opcode", list(Opcode))
def test_a_frozen_peer_costs_the_deadline(setting: _Setting, opcode: Opcode) -> None:
    setting.peer.signal(signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(TransferTimeout):
        setting.engine.transfer_sync([setting.request(opcode, 8)], 0.3)
    assert time.monotonic() - began < 1.5
    setting.peer.signal(signal.SIGCONT)
    assert setting.engine.transfer_sync([setting.request(opcode, 8)], 5.0).ok


def test_memory_in_use_is_not_let_go(setting: _Setting) -> None:
    setting.peer.signal(signal.SIGSTOP)
    ended: list[BaseException] = []

    def run() -> None:
        try:
            setting.engine.transfer_sync([setting.request(Opcode.READ, 8)], 1.0)
        except TransferTimeout as error:
            ended.append(error)

    mover = threading.Thread(target=run)
    mover.start()
    region = setting.engine.memory.regions()[0]
    while not region.uses:
        time.sleep(0.001)
    with pytest.raises(TransferTimeout):
        setting.engine.unregister_local_memory(setting.at, timeout_s=0.1)
    mover.join(5)
    assert ended and not region.uses
