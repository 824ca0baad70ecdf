"""The rdma transport on NICs in memory: two engines of one process, fake0 and fake1 against fake2 and fake3 (two rails)."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from mooncake.common.errors import ConfigError
from tests.rdma.fabric import ERROR, SILENCE, Fabric
from transfer_engine import (
    BatchId,
    EngineConfig,
    NotRegistered,
    Opcode,
    PeerUnavailable,
    TransferEngine,
    TransferRequest,
    TransferState,
)
from transfer_engine.memory import Region
from transfer_engine.segment import PeerRecord
from transfer_engine.transports.rdma import verbs

pytestmark = pytest.mark.elsewhere("fake")

MIB = 1 << 20
LENGTH = 8 * MIB
BOTH = [Opcode.WRITE, Opcode.READ]
SWIFT = {"rdma_stall_timeout_s": 0.3, "rdma_rest_s": 0.05, "peer_rest_s": 0.2, "rdma_slice_bytes": MIB // 4}


@pytest.fixture
def fabric() -> Iterator[Fabric]:
    with Fabric() as made:
        live = made.live_objects()
        yield made
        assert made.live_objects() == live, "verbs objects were left behind"


class Sides:
    """`near` initiates; `far` is the target. `mine` and `theirs` are registered, `at` and `base` their addresses."""

    def __init__(self, near: TransferEngine, far: TransferEngine) -> None:
        self.near, self.far = near, far
        self.mine, self.theirs = np.zeros(LENGTH, np.uint8), np.zeros(LENGTH, np.uint8)
        self.at, self.base = near.register_buffer(self.mine), far.register_buffer(self.theirs)
        self.segment = near.open_segment(far.address)
        self.random = np.random.default_rng(5)
        self.randomize()

    def randomize(self) -> None:
        for side in (self.mine, self.theirs):
            side[:] = np.frombuffer(self.random.bytes(LENGTH), np.uint8)

    def request(self, opcode: Opcode, offset: int = 0, length: int = LENGTH) -> TransferRequest:
        return TransferRequest(opcode, self.at + offset, self.segment, self.base + offset, length)

    def move(self, opcode: Opcode, length: int = LENGTH, deadline_s: float = 10.0, **terms: object) -> None:
        """Move from the start, and check the bytes."""
        self.randomize()
        self.near.transfer_sync([self.request(opcode, 0, length)], deadline_s, **terms)  # type: ignore[arg-type]
        assert np.array_equal(self.mine[:length], self.theirs[:length])

    def start(self, requests: list[TransferRequest], **terms: object) -> BatchId:
        batch = self.near.allocate_batch_id(len(requests))
        self.near.submit_transfer(batch, requests, **{"deadline_s": 10.0} | terms)  # type: ignore[arg-type]
        return batch

    def count(self, name: str) -> float:
        return self.near.stats().get(f"rdma_{name}", 0)


def _engine(*nics: str, transports: tuple[str, ...] = ("rdma",), **settings: object) -> TransferEngine:
    return TransferEngine(EngineConfig(transports=transports, nics=nics, **SWIFT | settings))  # type: ignore[arg-type]


@pytest.fixture
def sides(fabric: Fabric) -> Iterator[Sides]:
    with _engine("fake2", "fake3") as far, _engine("fake0", "fake1") as near:
        yield Sides(near, far)


def _until(condition: Callable[[], object], what: str, timeout_s: float = 10.0) -> None:
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, f"never happened: {what}"
        time.sleep(0.01)


def _used_again(sides: Sides, nic: str) -> None:
    before = sides.count(f"{nic}_write_bytes")

    def used() -> bool:
        sides.move(Opcode.WRITE, LENGTH // 2)
        return sides.count(f"{nic}_write_bytes") > before

    _until(used, f"{nic} carries slices again")


# --- paths ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("opcode", BOTH)
def test_both_nics_carry_a_transfer(sides: Sides, fabric: Fabric, opcode: Opcode) -> None:
    for _ in range(3):  # the first may be over before the second NIC is connected
        sides.move(opcode)
    shares = [sides.count(f"{nic}_{opcode.name.lower()}_bytes") for nic in ("fake0", "fake1")]
    assert sum(shares) == 3 * LENGTH and min(shares) > LENGTH / 2
    assert min(fabric.moved_bytes(0), fabric.moved_bytes(1)) > 0


def test_engines_with_nics_of_their_own_stay_apart(fabric: Fabric) -> None:
    with _engine("fake2") as far, _engine("fake3") as other_far, _engine("fake0") as near, _engine("fake1") as other:
        before = [fabric.moved_bytes(nic) for nic in range(4)]
        Sides(near, far).move(Opcode.WRITE)
        assert [fabric.moved_bytes(nic) - before[nic] for nic in range(4)] == [LENGTH, 0, 0, 0]
        Sides(other, other_far).move(Opcode.WRITE)
        assert [fabric.moved_bytes(nic) - before[nic] for nic in range(4)] == [LENGTH, LENGTH, 0, 0]


def test_a_hinted_nic_carries_all_of_it_while_it_works(sides: Sides, fabric: Fabric) -> None:
    sides.move(Opcode.WRITE, nic="fake1")
    assert sides.count("fake0_write_bytes") == 0
    fabric.port(1, False)
    sides.move(Opcode.WRITE, nic="fake1")
    assert sides.count("fake0_write_bytes") == LENGTH


def test_ranges_may_span_regions_that_touch(sides: Sides) -> None:
    for engine, at in ((sides.near, sides.at), (sides.far, sides.base)):
        engine.unregister_local_memory(at)
        for start, length in ((0, 5000), (5000, MIB), (5000 + MIB, LENGTH - MIB - 5000)):
            engine.register_local_memory(at + start, length)
    sides.move(Opcode.WRITE)
    sides.move(Opcode.READ)


def test_an_urgent_transfer_overtakes_a_background_one(sides: Sides, fabric: Fabric) -> None:
    sides.move(Opcode.WRITE)
    for nic in (0, 1):
        fabric.fault(nic, SILENCE)
    background = sides.start([sides.request(Opcode.WRITE)] * 8, priority=-1)
    urgent = sides.start([sides.request(Opcode.WRITE, 0, MIB)], priority=1)
    seen: list[int] = []
    told = threading.Event()
    sides.near.add_done_callback(
        urgent, lambda _: (seen.append(sides.near.get_batch_status(background).transferred_bytes), told.set())
    )
    for nic in (0, 1):
        fabric.mend(nic)
    assert told.wait(10) and sides.near.wait(background, 10).ok
    assert seen[0] < 4 * LENGTH


# --- faults ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [ERROR, SILENCE], ids=["error", "silence"])
@pytest.mark.parametrize("nic", [0, 2], ids=["near", "far"])
@pytest.mark.parametrize("opcode", BOTH)
def test_a_nic_that_fails_in_the_middle(sides: Sides, fabric: Fabric, opcode: Opcode, nic: int, kind: int) -> None:
    sides.move(Opcode.WRITE)
    fabric.fault(nic, kind, after=5)
    sides.move(opcode)
    assert sides.count("failovers") > 0 and sides.count("fake0_errors") > 0
    before = sides.count("fake0_write_bytes")
    sides.move(Opcode.WRITE)
    assert nic != 0 or sides.count("fake0_write_bytes") == before, "it rests"
    fabric.mend(nic)
    _used_again(sides, "fake0")


def test_a_port_that_goes_down_is_left_at_once_and_used_again_when_it_is_up(sides: Sides, fabric: Fabric) -> None:
    sides.move(Opcode.WRITE)
    fabric.fault(0, SILENCE)
    batch = sides.start([sides.request(Opcode.WRITE)])
    fabric.port(0, False)
    began = time.monotonic()
    assert sides.near.wait(batch, 10).ok and time.monotonic() - began < 5
    assert np.array_equal(sides.mine, sides.theirs) and sides.count("fake0_port_down") == 1
    fabric.mend(0)
    fabric.port(0, True)
    _used_again(sides, "fake0")


def test_a_submission_may_ask_for_no_second_try(sides: Sides, fabric: Fabric) -> None:
    sides.move(Opcode.WRITE)
    fabric.fault(0, ERROR, after=3)
    fabric.fault(1, ERROR, after=3)
    with pytest.raises(PeerUnavailable, match="RETRY_EXC_ERR"):
        sides.move(Opcode.WRITE, max_retries=0)
    assert sides.count("retries") == 0


def test_a_bug_in_a_nics_thread_costs_that_nic(sides: Sides, fabric: Fabric, caplog: pytest.LogCaptureFixture) -> None:
    sides.move(Opcode.WRITE)
    fabric.fault(0, SILENCE)
    batch = sides.start([sides.request(Opcode.WRITE)])
    transport = next(t for t in sides.near._transports if t.name == "rdma")
    transport._nics[0].call(lambda: 1 // 0)  # type: ignore[attr-defined]
    assert sides.near.wait(batch, 10).ok and np.array_equal(sides.mine, sides.theirs)
    assert "ZeroDivisionError" in caplog.text
    fabric.mend(0)
    sides.move(Opcode.READ)


def test_no_way_left_is_a_clean_error_for_all_and_then_at_once(sides: Sides, fabric: Fabric) -> None:
    sides.move(Opcode.WRITE)
    for nic in (0, 1):
        fabric.fault(nic, ERROR, after=3)
    with pytest.raises(PeerUnavailable):
        sides.move(Opcode.WRITE)
    began = time.monotonic()
    for _ in range(20):
        with pytest.raises(PeerUnavailable):
            sides.near.transfer_sync([sides.request(Opcode.WRITE, 0, MIB)], 10.0)
    assert time.monotonic() - began < 10, "one deadline for a dead peer, not one a request"
    for nic in (0, 1):
        fabric.mend(nic)
    _until(lambda: sides.near.send_probe(sides.far.address), "the peer answers")
    time.sleep(0.3)  # peer_rest_s
    _until(lambda: _moves(sides), "transfers work again")


def _moves(sides: Sides) -> bool:
    try:
        sides.move(Opcode.WRITE, MIB)
    except PeerUnavailable:
        return False
    return True


def test_tcp_takes_over_where_it_may(fabric: Fabric) -> None:
    ways = ("rdma", "tcp")
    with _engine("fake2", transports=ways) as far, _engine("fake0", transports=ways) as near:
        sides = Sides(near, far)
        sides.move(Opcode.WRITE)
        assert near.stats().get("tcp_write_bytes", 0) == 0
        fabric.fault(0, ERROR, after=3)
        for opcode in BOTH:
            sides.move(opcode)
        assert near.stats()["tcp_write_bytes"] > 0 and sides.count("reroutes") > 0
        fabric.mend(0)
        _used_again(sides, "fake0")


def test_a_deadline_ends_what_a_silent_nic_holds(sides: Sides, fabric: Fabric) -> None:
    sides.move(Opcode.WRITE)
    for nic in (0, 1):
        fabric.fault(nic, SILENCE)
    began = time.monotonic()
    batch = sides.start([sides.request(Opcode.READ)], deadline_s=0.1)
    status = sides.near.wait(batch, 10)
    assert status.state is TransferState.TIMED_OUT and time.monotonic() - began < 3
    sides.mine[:] = 7
    for nic in (0, 1):
        fabric.mend(nic)
    time.sleep(0.1)
    assert (sides.mine == 7).all(), "local memory is quiet once a transfer is over"


def test_a_write_that_was_given_up_never_lands(sides: Sides, fabric: Fabric) -> None:
    sides.move(Opcode.WRITE)
    for nic in (0, 1):
        fabric.fault(nic, SILENCE)
    batch = sides.start([sides.request(Opcode.WRITE)])
    sides.near.cancel(batch)
    status = sides.near.wait(batch, 10)
    assert status.state is TransferState.CANCELLED and status.quiesced
    sides.theirs[:] = 7
    for nic in (0, 1):
        fabric.mend(nic)
    time.sleep(0.1)
    assert (sides.theirs == 7).all()


def test_a_peer_that_restarted_is_another_peer(fabric: Fabric) -> None:
    with _engine("fake0", "fake1") as near:
        far = _engine("fake2", "fake3")
        port = int(far.address.rpartition(":")[2])
        sides = Sides(near, far)
        sides.move(Opcode.WRITE)
        far.close()
        with _engine("fake2", "fake3", port=port) as reborn:
            with pytest.raises(PeerUnavailable):
                sides.move(Opcode.WRITE, MIB, deadline_s=5.0)
            base = reborn.register_buffer(sides.theirs)
            segment = near.open_segment(reborn.address)
            near.transfer_sync([TransferRequest(Opcode.WRITE, sides.at, segment, base, MIB)], 5.0)
            _until(lambda: near.stats()["open_endpoints"] <= 2, "the dead instance's endpoints are gone")


def _both_connected(sides: Sides) -> PeerRecord:
    """What the target knows of the initiator, once both rails have their queue pairs."""
    record = sides.far.peers.get(sides.near.instance_id)
    assert record is not None
    _until(lambda: len(record.streams) == 2, "both NICs are connected")
    return record


def test_a_lost_control_connection_costs_a_retry(sides: Sides) -> None:
    sides.move(Opcode.WRITE)
    record = _both_connected(sides)
    for _ in range(30):
        batch = sides.start([sides.request(Opcode.WRITE)])
        for link in list(record.links):
            link.close()
        assert sides.near.wait(batch, 10).ok
        assert np.array_equal(sides.mine, sides.theirs)


@pytest.mark.parametrize("opcode", BOTH)
def test_control_connections_that_break_again_and_again_cost_retries(sides: Sides, opcode: Opcode) -> None:
    sides.move(Opcode.WRITE)
    cutting = threading.Event()

    def cut() -> None:
        side = 0
        while not cutting.wait(0.02):
            engine, other = ((sides.far, sides.near), (sides.near, sides.far))[side]
            side = 1 - side
            record = engine.peers.get(other.instance_id)
            for link in list(record.links) if record is not None else []:
                link.close()

    cutter = threading.Thread(target=cut)
    cutter.start()
    try:
        for _ in range(30):
            sides.move(opcode)
    finally:
        cutting.set()
        cutter.join()


# --- bounds ---------------------------------------------------------------------------------------------------------


def test_idle_endpoints_make_room_and_busy_ones_do_not(fabric: Fabric) -> None:
    with _engine("fake0", rdma_max_endpoints=2) as near:
        fars = [_engine("fake2") for _ in range(5)]
        all_sides = [Sides(near, far) for far in fars]
        for _ in range(3):
            for sides in all_sides:
                sides.move(Opcode.WRITE, MIB)
                assert near.stats()["open_endpoints"] <= 3
        assert all_sides[0].count("evictions") >= 10
        batches = [sides.start([sides.request(Opcode.WRITE)] * 3) for sides in all_sides]
        for sides, batch in zip(all_sides, batches, strict=True):
            assert near_ok(near, batch) and np.array_equal(sides.mine, sides.theirs)
        _until(lambda: near.stats()["open_endpoints"] <= 2, "back to the bound")
        for far in fars:
            far.close()


def near_ok(near: TransferEngine, batch: BatchId) -> bool:
    return near.wait(batch, 10).ok


def test_a_full_target_refuses_and_says_why(fabric: Fabric) -> None:
    with _engine("fake2", rdma_max_endpoints=1) as far:
        nears = [_engine("fake0") for _ in range(5)]
        outcomes = []
        for near in nears:
            try:
                Sides(near, far).move(Opcode.WRITE, MIB)
                outcomes.append("")
            except PeerUnavailable as error:
                outcomes.append(str(error))
        assert outcomes[:4] == [""] * 4 and "rdma_max_endpoints" in outcomes[4]
        nears[0].close()
        time.sleep(0.3)
        assert _moves(Sides(nears[4], far))
        for near in nears:
            near.close()


def test_idle_endpoints_are_closed_on_both_sides(fabric: Fabric) -> None:
    with _engine("fake2") as far, _engine("fake0", idle_timeout_s=0.3) as near:
        sides = Sides(near, far)
        sides.move(Opcode.WRITE)
        _until(lambda: near.stats()["open_endpoints"] == 0 == far.stats()["open_endpoints"], "idle ones are closed")
        sides.move(Opcode.READ)


def test_ten_thousand_small_transfers_leave_nothing_behind(sides: Sides, fabric: Fabric) -> None:
    requests = [sides.request(Opcode.WRITE, 4096 * i, 4096) for i in range(500)]
    sides.near.transfer_sync(requests, 10.0)
    _both_connected(sides)
    live, before = fabric.live_objects(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(20):
        sides.near.transfer_sync(requests, 10.0)
    assert fabric.live_objects() == live
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 2048, f"{grown} KiB more for 10,000 requests: work requests are never freed, they must be reused"


def test_eight_engines_share_few_endpoints(fabric: Fabric) -> None:
    """10,000 small transfers, everybody to everybody, with room for half of the peers each."""
    engines = [_engine(f"fake{i % 4}", rdma_max_endpoints=4) for i in range(8)]
    memory = [np.full(MIB, i, np.uint8) for i in range(8)]
    bases = [engine.register_buffer(block) for engine, block in zip(engines, memory, strict=True)]
    problems: list[str] = []

    def work(me: int) -> None:
        random, engine = np.random.default_rng(me), engines[me]
        local = np.zeros(25 * 4096, np.uint8)
        at = engine.register_buffer(local)
        segments = [engine.open_segment(other.address) for other in engines]
        for _ in range(50):
            peer = int(random.integers(0, 8))
            requests = [
                TransferRequest(Opcode.READ, at + 4096 * i, segments[peer], bases[peer] + 4096 * i, 4096)
                for i in range(25)
            ]
            engine.transfer_sync(requests, 30.0)
            if set(local.tolist()) != {peer}:
                problems.append(f"{me} from {peer}: wrong bytes")

    threads = [threading.Thread(target=work, args=(me,)) for me in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not problems and not any(thread.is_alive() for thread in threads)
    assert sum(engine.stats()["rdma_read_slices"] for engine in engines) >= 400
    _until(lambda: sum(e.stats()["open_endpoints"] for e in engines) <= 2 * 4 * 8, "bounded on both sides")
    for engine in engines:
        engine.close()


# --- keys and fences ------------------------------------------------------------------------------------------------


def _with_keys(sides: Sides, address: int, length: int, keys: tuple[int, ...]) -> None:
    """Have the initiator believe that the target has such a region."""
    session = sides.near.session_of(sides.far.instance_id)
    assert session is not None
    session.regions.add(Region(address, length, keys=keys))


def test_a_wrong_key_is_refused_by_the_nic_and_hurts_nobody_else(sides: Sides) -> None:
    sides.move(Opcode.WRITE)
    secret = np.full(MIB, 9, np.uint8)
    _with_keys(sides, secret.ctypes.data, MIB, (12345, 12345))
    innocent = sides.start([sides.request(Opcode.WRITE)] * 2)
    forged = TransferRequest(Opcode.WRITE, sides.at, sides.segment, secret.ctypes.data, MIB)
    with pytest.raises(NotRegistered):
        sides.near.transfer_sync([forged], 5.0)
    with pytest.raises(NotRegistered):
        sides.near.transfer_sync([forged._replace(opcode=Opcode.READ)], 5.0)
    assert (secret == 9).all()
    assert sides.near.wait(innocent, 10).ok and np.array_equal(sides.mine, sides.theirs)
    sides.move(Opcode.WRITE)


def test_keys_are_void_once_memory_is_unregistered(sides: Sides) -> None:
    extra = np.full(MIB, 9, np.uint8)
    at = sides.far.register_buffer(extra)
    sides.near.transfer_sync([TransferRequest(Opcode.READ, sides.at, sides.segment, at, MIB)], 5.0)
    keys = next(r.keys for r in sides.far.memory.regions() if r.address == at)
    sides.far.unregister_local_memory(at)
    request = TransferRequest(Opcode.WRITE, sides.at, sides.segment, at, MIB)
    with pytest.raises(NotRegistered):
        sides.near.transfer_sync([request], 5.0)
    _with_keys(sides, at, MIB, keys)  # a peer that does not let go
    with pytest.raises(NotRegistered):
        sides.near.transfer_sync([request], 5.0)
    assert (extra == 9).all()


def test_memory_without_remote_access_has_no_remote_rights(sides: Sides) -> None:
    private = np.full(MIB, 9, np.uint8)
    at = sides.far.register_buffer(private, remote_access=False)
    keys = next(r.keys for r in sides.far.memory.regions() if r.address == at)
    _with_keys(sides, at, MIB, keys)
    for opcode in BOTH:
        with pytest.raises(NotRegistered):
            sides.near.transfer_sync([TransferRequest(opcode, sides.at, sides.segment, at, MIB)], 5.0)
    assert (private == 9).all()
    sides.near.register_buffer(private[:4096], remote_access=False)  # as a source it may be used


def test_a_fence_stops_queue_pairs_of_a_peer_that_does_not_answer(sides: Sides, fabric: Fabric) -> None:
    sides.move(Opcode.WRITE)
    record = sides.far.peers.get(sides.near.instance_id)
    assert record is not None
    _until(lambda: len(record.streams) == 2, "both NICs are connected")
    for nic in (0, 1):
        fabric.fault(nic, SILENCE)
    batch = sides.start([sides.request(Opcode.WRITE)], group=77)
    for stream in list(record.streams.values()):  # what the fence does where asking fails
        assert stream.one_sided and stream.stop(1.0)
    assert not record.streams
    sides.theirs[:] = 7
    assert sides.far.cancel_incoming(77, sides.near.address, instance_id=sides.near.instance_id, timeout_s=2.0)
    for nic in (0, 1):
        fabric.mend(nic)
    status = sides.near.wait(batch, 10)
    assert status.state is TransferState.CANCELLED
    time.sleep(0.1)
    assert (sides.theirs == 7).all()


def test_a_fenced_group_stays_out_and_others_pass(sides: Sides) -> None:
    batch = sides.start([sides.request(Opcode.WRITE)] * 20, group=5)
    assert sides.far.cancel_incoming(5, sides.near.address, instance_id=sides.near.instance_id)
    sides.theirs[:] = 7
    assert sides.near.wait(batch, 10).state in (TransferState.CANCELLED, TransferState.COMPLETED)
    time.sleep(0.05)
    assert (sides.theirs == 7).all()
    sides.move(Opcode.WRITE, group=6)


# --- configuration --------------------------------------------------------------------------------------------------


def test_an_unknown_nic_is_a_configuration_error(fabric: Fabric) -> None:
    with pytest.raises(ConfigError, match="fake9"):
        _engine("fake9")


def test_what_the_nic_refuses_is_not_registered(sides: Sides) -> None:
    before = len(sides.near.memory.regions())
    with pytest.raises(ValueError, match="not mapped"):
        sides.near.register_local_memory(4096, 4096)
    assert len(sides.near.memory.regions()) == before


def test_the_gid_is_the_routable_one() -> None:
    context = verbs.load().Context(name="fake3")
    assert verbs.choose_gid(context, 1, context.query_port(1).link_layer).text.endswith("ffff:0a4e:0104")
    context.close()
