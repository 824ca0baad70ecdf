"""Processes that freeze or die under the rdma transport, on soft-RoCE NICs: the NIC goes on without its process (paper 3.2.2).

Runs in the virtual machine (tests/rdma), whose processors are slow: deadlines are generous, speed is never asserted.
"""

from __future__ import annotations

import hashlib
import signal
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from tests.rdma import cables
from tests.rdma.cables import A_NICS, B_NICS
from tests.transfer_engine.peer import Peer
from transfer_engine import (
    BatchId,
    EngineConfig,
    Opcode,
    PeerUnavailable,
    TransferEngine,
    TransferError,
    TransferRequest,
    TransferState,
)

pytestmark = [pytest.mark.slow, pytest.mark.elsewhere("vm")]

LENGTH = 8 << 20
DEADLINE_S = 30.0


def _config(nics: tuple[str, ...]) -> EngineConfig:
    return EngineConfig(transports=("rdma",), nics=nics, peer_rest_s=0.2)


def _until(condition: Callable[[], bool], what: str, timeout_s: float = 40.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"never happened: {what}"
        time.sleep(0.05)


class Sides:
    """`near` is here, `far` another process that can be frozen; each has `LENGTH` bytes."""

    def __init__(self) -> None:
        self.far = Peer(_config(B_NICS))
        self.near = TransferEngine(_config(A_NICS))
        self.memory = np.zeros(LENGTH, np.uint8)
        self.at = self.near.register_buffer(self.memory)
        self.base = self.far.call("allocate", LENGTH, False)
        self.segment = self.near.open_segment(self.far.address, timeout_s=30.0)

    def request(self, opcode: Opcode) -> TransferRequest:
        return TransferRequest(opcode, self.at, self.segment, self.base, LENGTH)

    def move(self, opcode: Opcode) -> None:
        self.near.transfer_sync([self.request(opcode)], DEADLINE_S)

    def start(self, request: TransferRequest, times: int) -> BatchId:
        batch = self.near.allocate_batch_id(times)
        self.near.submit_transfer(batch, [request] * times, deadline_s=DEADLINE_S)
        _until(lambda: self.near.get_batch_status(batch).transferred_bytes > 0, "bytes move")
        return batch

    def works(self) -> bool:
        try:
            self.move(Opcode.WRITE)
        except TransferError:
            return False
        return True


@pytest.fixture(scope="module")
def sides() -> Iterator[Sides]:
    made = Sides()
    yield made
    made.near.close()
    made.far.close()


def test_a_frozen_target_still_serves(sides: Sides) -> None:
    sides.move(Opcode.READ)
    sides.memory[:] = np.frombuffer(np.random.default_rng(4).bytes(LENGTH), np.uint8)
    sides.far.signal(signal.SIGSTOP)
    try:
        sides.move(Opcode.WRITE)
    finally:
        sides.far.signal(signal.SIGCONT)
    assert sides.far.call("digest", sides.base, LENGTH) == hashlib.sha256(sides.memory).hexdigest()


def test_a_write_lost_towards_a_frozen_target_is_not_called_quiet(sides: Sides) -> None:
    """Its queue pair cannot be asked to go, so late bytes may still land: that is said, and nothing is repeated."""
    batch = sides.start(sides.request(Opcode.WRITE), 8)
    sides.far.signal(signal.SIGSTOP)
    try:
        for cable in (0, 1):
            cables.swallow(cable)
        status = sides.near.wait(batch, DEADLINE_S + 5)
        assert status.state in (TransferState.FAILED, TransferState.TIMED_OUT) and not status.quiesced, status
    finally:
        sides.far.signal(signal.SIGCONT)
        for cable in (0, 1):
            cables.mend(cable)
    sides.near.free_batch_id(batch)
    _until(sides.works, "transfers work again")


def test_a_fence_holds_against_a_frozen_initiator(sides: Sides) -> None:
    """The target ends the queue pairs by itself, so the answer is certain although nobody could be asked."""
    sides.far.call("start_writing", sides.near.address, sides.at, LENGTH, 99, 64 << 10)
    sides.memory[:] = 0
    _until(lambda: bool(sides.memory.any()), "bytes arrive")
    sides.far.signal(signal.SIGSTOP)
    try:
        assert sides.near.cancel_incoming(99, sides.far.address, instance_id=sides.far.instance_id, timeout_s=5.0)
        sides.memory[:] = 0
        time.sleep(0.5)
        assert not sides.memory.any()
    finally:
        sides.far.signal(signal.SIGCONT)
    time.sleep(1.0)
    assert not sides.memory.any(), "awake again, it must learn of the fence before it writes"
    assert set(sides.far.call("end_writing")) <= {"TransferCancelled", "TransferTimeout"}
    _until(sides.works, "transfers work again")


def test_a_target_that_is_killed_is_a_clean_error(sides: Sides) -> None:
    with Peer(_config(B_NICS)) as doomed:
        base = doomed.call("allocate", LENGTH, False)
        segment = sides.near.open_segment(doomed.address, timeout_s=30.0)
        batch = sides.start(TransferRequest(Opcode.WRITE, sides.at, segment, base, LENGTH), 8)
        doomed.signal(signal.SIGKILL)
        status = sides.near.wait(batch, DEADLINE_S + 5)
        assert status.state is TransferState.FAILED and isinstance(status.error, PeerUnavailable), status
        assert status.quiesced, "a process that has ended places nothing"
    sides.near.free_batch_id(batch)
    sides.move(Opcode.READ)
    assert sides.far.call("digest", sides.base, LENGTH) == hashlib.sha256(sides.memory).hexdigest()
