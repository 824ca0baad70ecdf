"""The verbs provider in memory keeps to the rules that a transport relies on; by pyverbs alone, without our transport."""

from __future__ import annotations

import mmap
import select
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.rdma.fabric import ERROR, SILENCE, Fabric
from transfer_engine.transports.rdma import verbs

pytestmark = pytest.mark.elsewhere("fake")

LENGTH, DEPTH = 1 << 16, 64


@pytest.fixture
def fabric() -> Iterator[Fabric]:
    with Fabric() as made:
        live = made.live_objects()
        yield made
        assert made.live_objects() == live


class End:
    """One NIC opened, 64 KiB registered, one queue pair."""

    def __init__(self, name: str, remote: bool = True) -> None:
        self.api = api = verbs.load()
        e = api.e
        self.context, self.events = verbs.opened(lambda: api.Context(name=name))
        self.channel, self.bell = verbs.opened(lambda: api.CompChannel(self.context))
        self.pd = api.PD(self.context)
        self.cq = api.CQ(self.context, DEPTH, None, self.channel, 0)
        self.memory = np.frombuffer(mmap.mmap(-1, LENGTH), np.uint8)
        self.at = self.memory.ctypes.data
        access = e.IBV_ACCESS_LOCAL_WRITE | (e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_REMOTE_READ) * remote
        self.mr = api.MR(self.pd, LENGTH, access, address=self.at)
        self.gid = verbs.choose_gid(self.context, 1, e.IBV_LINK_LAYER_ETHERNET)
        capacity = api.QPCap(max_send_wr=DEPTH // 2, max_recv_wr=1, max_send_sge=1, max_recv_sge=1)
        kind = api.QPInitAttr(qp_type=e.IBV_QPT_RC, scq=self.cq, rcq=self.cq, cap=capacity, sq_sig_all=0)
        self.qp = api.QP(self.pd, kind)

    def connect(self, far: End, psn: int = 7) -> None:
        api, e = self.api, self.api.e
        a = api.QPAttr(port_num=1)
        a.qp_access_flags, a.pkey_index = e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_REMOTE_READ, 0
        self.qp.to_init(a)
        route = api.GlobalRoute(dgid=api.GID(far.gid.text), sgid_index=self.gid.index, hop_limit=64)
        a.ah_attr = api.AHAttr(gr=route, is_global=1, port_num=1)
        a.dest_qp_num, a.path_mtu, a.rq_psn, a.sq_psn = far.qp.qp_num, e.IBV_MTU_4096, 7, psn
        a.max_rd_atomic = a.max_dest_rd_atomic = 4
        a.timeout, a.retry_cnt, a.rnr_retry, a.min_rnr_timer = 14, 3, 7, 12
        self.qp.to_rtr(a)
        self.qp.to_rts(a)

    def post(
        self, opcode: int, remote: int, rkey: int, *, length: int = LENGTH, lkey: int = 0, signaled: bool = True
    ) -> None:
        api = self.api
        flags = api.e.IBV_SEND_SIGNALED if signaled else 0
        part = api.SGE(self.at, length, lkey or self.mr.lkey)
        request = api.SendWR(wr_id=5, opcode=opcode, num_sge=1, sg=[part], send_flags=flags)
        request.set_wr_rdma(rkey, remote)
        self.qp.post_send(request)

    def poll(self) -> list[str]:
        e = self.api.e
        names = {
            int(getattr(e, n)): n[7:] for n in dir(e) if n.startswith("IBV_WC_") and ("ERR" in n or "SUCCESS" in n)
        }
        return [names[int(completion.status)] for completion in self.cq.poll(DEPTH)[1]]

    @property
    def state(self) -> int:
        return int(self.qp.query(self.api.e.IBV_QP_STATE)[0].qp_state)

    def close(self) -> None:
        for part in (self.qp, self.mr, self.cq, self.channel, self.pd, self.context):
            part.close()


@pytest.fixture
def ends(fabric: Fabric) -> Iterator[tuple[End, End]]:
    near, far = End("fake0"), End("fake2")
    near.connect(far)
    far.connect(near)
    yield near, far
    near.close()
    far.close()


def _write(near: End, far: End, rkey: int | None = None, **changes: Any) -> None:
    near.post(near.api.e.IBV_WR_RDMA_WRITE, far.at, far.mr.rkey if rkey is None else rkey, **changes)


def _readable(fd: int) -> bool:
    return bool(select.select([fd], [], [], 0)[0])


def test_bytes_go_both_ways_and_are_counted(ends: tuple[End, End], fabric: Fabric) -> None:
    near, far = ends
    random, before = np.random.default_rng(1), fabric.moved_bytes(0)
    near.memory[:] = random.integers(0, 256, LENGTH)
    _write(near, far)
    assert near.poll() == ["SUCCESS"] and np.array_equal(near.memory, far.memory)
    far.memory[:] = random.integers(0, 256, LENGTH)
    near.post(near.api.e.IBV_WR_RDMA_READ, far.at, far.mr.rkey)
    assert near.poll() == ["SUCCESS"] and np.array_equal(near.memory, far.memory)
    assert fabric.moved_bytes(0) - before == 2 * LENGTH and far.poll() == []


def test_a_completion_rings_once_per_arming(ends: tuple[End, End]) -> None:
    near, far = ends
    _write(near, far)
    assert not _readable(near.bell)
    near.cq.req_notify()
    _write(near, far)
    _write(near, far)
    assert _readable(near.bell)
    near.channel.get_cq_event(near.cq)
    near.cq.ack_events(1)
    assert not _readable(near.bell) and near.poll() == ["SUCCESS"] * 3


def test_keys_have_bounds_rights_and_an_end(fabric: Fabric) -> None:
    for case in ("unknown", "beyond", "no right", "ended", "local"):
        near, far = End("fake0"), End("fake1", remote=case != "no right")
        near.connect(far)
        far.connect(near)
        changes: dict[str, Any] = {"unknown": {"rkey": 99}, "local": {"lkey": 99}}.get(case, {})
        if case == "beyond":  # ours is long enough, theirs is not
            far.mr.close()
            far.mr = far.api.MR(far.pd, LENGTH - 1, 7, address=far.at)
            changes = {"rkey": far.mr.rkey}
        if case == "ended":
            changes = {"rkey": far.mr.rkey}
            far.mr.close()
        near.memory[:], far.memory[:] = 1, 2
        for _ in range(2):
            _write(near, far, **changes)
        refused = "LOC_PROT_ERR" if case == "local" else "REM_ACCESS_ERR"
        assert near.poll() == [refused, "WR_FLUSH_ERR"], case
        assert (far.memory == 2).all() and near.state == near.api.e.IBV_QPS_ERR
        assert (far.state == far.api.e.IBV_QPS_ERR) == (case != "local")
        near.close()
        far.close()


def test_an_error_comes_once_and_then_everything_is_flushed(ends: tuple[End, End], fabric: Fabric) -> None:
    near, far = ends
    fabric.fault(0, ERROR, after=2)
    for _ in range(4):
        _write(near, far, signaled=False)
    assert near.poll() == ["RETRY_EXC_ERR", "WR_FLUSH_ERR"]  # the two before were right and unsignaled
    fabric.mend(0)
    _write(near, far)
    assert near.poll() == ["WR_FLUSH_ERR"]  # a pair stays broken


def test_what_was_lost_in_silence_goes_through_when_mended_or_is_flushed(ends: tuple[End, End], fabric: Fabric) -> None:
    near, far = ends
    near.memory[:], far.memory[:] = 1, 0
    fabric.fault(2, SILENCE)
    _write(near, far)
    assert near.poll() == [] and not far.memory.any()
    fabric.mend(2)
    assert near.poll() == ["SUCCESS"] and far.memory.all()
    fabric.fault(0, SILENCE)
    far.memory[:] = 0
    _write(near, far)
    near.qp.modify(near.api.QPAttr(qp_state=near.api.e.IBV_QPS_ERR), near.api.e.IBV_QP_STATE)
    assert near.poll() == ["WR_FLUSH_ERR"]
    fabric.mend(0)
    assert not far.memory.any()


def test_a_port_that_goes_down_and_up_tells(ends: tuple[End, End], fabric: Fabric) -> None:
    near, far = ends
    e = near.api.e
    fabric.port(0, False)
    assert near.context.query_port(1).state == e.IBV_PORT_DOWN
    fabric.port(0, True)
    assert near.context.query_port(1).state == e.IBV_PORT_ACTIVE
    seen = []
    while _readable(near.events):
        event = near.context.get_async_event()
        seen.append(event.event_type)
        event.ack()
    assert seen == [e.IBV_EVENT_PORT_ERR, e.IBV_EVENT_PORT_ACTIVE] and not _readable(far.events)
    fabric.port(2, False)
    _write(near, far)
    assert near.poll() == ["RETRY_EXC_ERR"]


def test_a_pair_that_is_not_answered_fails(fabric: Fabric) -> None:
    near, far, other = End("fake0"), End("fake1"), End("fake1")
    near.connect(far, psn=8)  # not what the far end expects
    far.connect(near)
    _write(near, far)
    assert near.poll() == ["RETRY_EXC_ERR"]
    other.connect(near)  # near is connected with far
    _write(other, near)
    assert other.poll() == ["RETRY_EXC_ERR"]
    for end in (near, far, other):
        end.close()


def test_a_full_send_queue_is_refused_until_completions_are_taken(ends: tuple[End, End]) -> None:
    near, far = ends
    for _ in range(DEPTH // 2):
        _write(near, far, length=1)
    with pytest.raises(near.api.Error):
        _write(near, far, length=1)
    assert len(near.poll()) == DEPTH // 2
    _write(near, far, length=1)
    assert near.poll() == ["SUCCESS"]


def test_memory_that_is_not_mapped_cannot_be_registered(ends: tuple[End, End]) -> None:
    near, _ = ends
    with pytest.raises(near.api.Error):
        near.api.MR(near.pd, 4096, 7, address=4096)


def test_wrong_steps_are_refused(fabric: Fabric) -> None:
    near, far = End("fake0"), End("fake1")
    with pytest.raises(near.api.Error):
        near.qp.modify(near.api.QPAttr(qp_state=near.api.e.IBV_QPS_RTS), near.api.e.IBV_QP_STATE)
    with pytest.raises(near.api.Error):
        _write(near, far)
    near.close()
    far.close()
