"""Links that are cut in the middle of a transfer, on soft-RoCE NICs between two processes (paper 3.2.2).

Every case: the bytes are right, the end comes within the deadline, and the NIC carries data again once its link is whole.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator

import numpy as np
import pytest

from mooncake.common.errors import MooncakeError
from tests.rdma import cables
from tests.rdma.cables import A_NICS, B_NICS, FAULTS
from tests.transfer_engine.peer import Peer
from transfer_engine import EngineConfig, Opcode, SegmentHandle, TransferEngine, TransferState, TransferVector

pytestmark = [pytest.mark.slow, pytest.mark.elsewhere("vm")]

TOKEN = b"a test's token"
BLOCK, BLOCKS, ROUNDS = 64 << 10, 256, 6
LENGTH = BLOCK * BLOCKS


def _config(nics: tuple[str, ...]) -> EngineConfig:
    return EngineConfig(transports=("rdma",), nics=nics, cluster_token=TOKEN)


class End:
    """An engine of this process on some NICs, with 16 MiB here and as many at the peer."""

    def __init__(self, nics: tuple[str, ...], peer: Peer) -> None:
        self.nics, self.peer = nics, peer
        self.engine = TransferEngine(_config(nics))
        self.local = np.zeros(LENGTH, np.uint8)
        self.at = self.engine.register_buffer(self.local)
        self.base: int = peer.call("allocate", LENGTH, False)
        self.segment: SegmentHandle = self.engine.open_segment(peer.address, instance_id=peer.instance_id)

    def vector(self, opcode: Opcode, blocks: int = BLOCKS) -> TransferVector:
        """In another order on either side, so that nothing can be joined."""
        slots = np.arange(blocks, dtype=np.uint64) * np.uint64(BLOCK)
        order = np.random.default_rng(blocks).permutation(blocks)
        return TransferVector(
            opcode,
            self.segment,
            np.uint64(self.at) + slots[order],
            np.uint64(self.base) + slots,
            np.full(blocks, BLOCK),
        )

    def fill(self, opcode: Opcode) -> None:
        """New bytes at the source, zeros at the destination."""
        if opcode is Opcode.WRITE:
            self.local[:] = np.frombuffer(np.random.default_rng().bytes(LENGTH), np.uint8)
            self.peer.call("fill", self.base, 1, LENGTH)
        else:
            self.local[:] = 0
            self.peer.call("fill", self.base, 2, LENGTH)

    def check(self) -> None:
        order = np.random.default_rng(BLOCKS).permutation(BLOCKS)
        mine = hashlib.sha256(self.local.reshape(BLOCKS, BLOCK)[order].tobytes()).hexdigest()
        assert self.peer.call("digest", self.base, LENGTH) == mine, "wrong bytes"

    def moved(self) -> list[float]:
        """Bytes that each NIC has moved for us."""
        stats = self.engine.stats()
        return [stats.get(f"rdma_{nic}_write_bytes", 0) + stats.get(f"rdma_{nic}_read_bytes", 0) for nic in self.nics]

    def use_again(self, nic: int, opcode: Opcode, within_s: float = 30.0) -> None:
        """Transfers go on until that NIC carries some of their bytes."""
        before, deadline = self.moved()[nic], time.monotonic() + within_s
        while self.moved()[nic] == before:
            assert time.monotonic() < deadline, f"{self.nics[nic]} was not used again within {within_s} s"
            self.engine.transfer_sync(self.vector(opcode, 32), 20.0)

    def close(self) -> None:
        self.engine.close()
        self.peer.call("unregister", self.base)


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    with Peer(_config(B_NICS)) as made:
        yield made


@pytest.fixture(scope="module")
def end(peer: Peer) -> Iterator[End]:
    made = End(A_NICS, peer)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def whole_cables() -> Iterator[None]:
    yield
    for cable in (0, 1):
        cables.mend(cable)


@pytest.mark.parametrize("opcode", list(Opcode))
def test_slices_go_over_both_nics(end: End, opcode: Opcode) -> None:
    # A WRITE's bytes come in at b's interfaces, a READ's at a's.
    interfaces = ["b0", "b1"] if opcode is Opcode.WRITE else ["a0", "a1"]
    end.fill(opcode)
    moved, came = end.moved(), [cables.received(name) for name in interfaces]
    end.engine.transfer_sync(end.vector(opcode), 60.0)
    end.check()
    for by_engine, by_kernel in zip(
        np.subtract(end.moved(), moved), np.subtract([cables.received(name) for name in interfaces], came), strict=True
    ):
        assert LENGTH // 4 < by_engine < LENGTH * 3 // 4
        assert by_kernel > by_engine


@pytest.mark.parametrize("opcode", list(Opcode))
@pytest.mark.parametrize("fault", list(FAULTS))
def test_a_link_that_fails_in_mid_transfer(end: End, fault: str, opcode: Opcode) -> None:
    end.use_again(0, opcode)
    end.fill(opcode)
    before = end.engine.stats()
    batch = end.engine.allocate_batch_id(BLOCKS * ROUNDS)
    for _ in range(ROUNDS):
        end.engine.submit_transfer(batch, end.vector(opcode), deadline_s=60.0)
    while end.engine.get_batch_status(batch).transferred_bytes < LENGTH:
        time.sleep(0.002)
    FAULTS[fault](0)
    done = end.engine.get_batch_status(batch).transferred_bytes
    assert done < LENGTH * ROUNDS, "the fault came after the end: enlarge ROUNDS"
    status = end.engine.wait(batch, 70.0)
    assert status.state is TransferState.COMPLETED and status.transferred_bytes == LENGTH * ROUNDS, status
    end.engine.free_batch_id(batch)
    end.check()
    failovers = end.engine.stats().get("rdma_failovers", 0) - before.get("rdma_failovers", 0)
    assert failovers > 0, "no slice had to take another path"
    cables.mend(0)
    end.use_again(0, opcode)


@pytest.mark.parametrize("fault", ["own", "silence"])
def test_with_both_links_gone_the_error_is_typed_and_in_time(end: End, fault: str) -> None:
    for cable in (0, 1):
        end.use_again(cable, Opcode.WRITE)
    batch = end.engine.allocate_batch_id(BLOCKS * ROUNDS)
    for _ in range(ROUNDS):
        end.engine.submit_transfer(batch, end.vector(Opcode.WRITE), deadline_s=8.0)
    began = time.monotonic()
    while not end.engine.get_batch_status(batch).transferred_bytes:
        time.sleep(0.002)
    for cable in (0, 1):
        FAULTS[fault](cable)
    status = end.engine.wait(batch, 30.0)
    assert time.monotonic() - began < 8.0 + 2.0
    assert status.state in (TransferState.FAILED, TransferState.TIMED_OUT) and isinstance(status.error, MooncakeError)
    end.engine.free_batch_id(batch)
    with pytest.raises(MooncakeError):
        end.engine.transfer_sync(end.vector(Opcode.READ), 3.0)
    for cable in (0, 1):
        cables.mend(cable)
    _works_again(end)
    end.use_again(0, Opcode.WRITE)
    end.use_again(1, Opcode.WRITE)


def _works_again(end: End, within_s: float = 30.0) -> None:
    end.fill(Opcode.READ)
    deadline = time.monotonic() + within_s
    while True:
        try:
            end.engine.transfer_sync(end.vector(Opcode.READ), 20.0)
            return end.check()
        except MooncakeError:
            assert time.monotonic() < deadline, f"no transfer succeeded within {within_s} s"
            time.sleep(0.1)


def test_two_engines_on_disjoint_nics_do_not_share_fate(peer: Peer) -> None:
    ends = [End((nic,), peer) for nic in A_NICS]
    came = [cables.received(name) for name in ("b0", "b1")]
    for one in ends:
        one.fill(Opcode.WRITE)
        one.engine.transfer_sync(one.vector(Opcode.WRITE), 60.0)
        one.check()
    for now, before in zip((cables.received(name) for name in ("b0", "b1")), came, strict=True):
        assert LENGTH < now - before < 2 * LENGTH
    cables.cut_own(0)
    with pytest.raises(MooncakeError):
        ends[0].engine.transfer_sync(ends[0].vector(Opcode.WRITE), 5.0)
    ends[1].engine.transfer_sync(ends[1].vector(Opcode.WRITE), 60.0)
    cables.mend(0)
    _works_again(ends[0])
    for one in ends:
        one.close()
