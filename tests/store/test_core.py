"""The master's core by events: leases, puts, eviction, dead nodes, reports."""

from __future__ import annotations

import pytest

from mooncake.common.errors import BadRequest, Overloaded
from store import codes
from store.extents import GRANULE_BYTES as G
from store.extents import Extent, total_bytes
from store.master import messages as m
from store.master.core import MasterCore
from store.master.drop_log import DropLog

SETTINGS = m.Settings(max_leases=8, max_puts=8)
A, B, C, D = (bytes([n]) * 16 for n in range(1, 5))
BASE = 1 << 40


def master(*sizes: int, epoch: int = 7, settings: m.Settings = SETTINGS) -> MasterCore:
    core = MasterCore(settings, epoch)
    for at, granules in enumerate(sizes):
        mount(core, 0.0, f"s{at}", granules)
    return core


def mount(
    core: MasterCore, now: float, name: str, granules: int, life: str = "", number: int = 1, **more: object
) -> bool:
    return core.mount(now, m.Report(name, life or f"{name}-life", number, BASE, granules * G, **more))  # type: ignore[arg-type]


def beat(core: MasterCore, now: float, *names: str) -> None:
    for name in names:
        assert not core.heartbeat(now, name, f"{name}-life", 1).remount


def put(core: MasterCore, now: float, key: bytes, granules: int = 1, **more: object) -> m.Slot:
    granted = core.put_start(now, [key], [granules * G], writer="w", **more)  # type: ignore[arg-type]
    if granted.put_id:
        assert core.put_end(now, granted.put_id, [True], quiesced=True) == [0]
    return granted.slots[0]


def has(core: MasterCore, now: float, *keys: bytes) -> list[bool]:
    return [found is not None for found in core.query(now, keys)]


def allocated(core: MasterCore, now: float = 0.0) -> int:
    return sum(view.allocated_bytes for view in core.status(now).segments) // G


def test_put_then_get() -> None:
    core = master(4)
    granted = core.put_start(0, [A, B], [100, 300], writer="w")
    assert [s.code for s in granted.slots] == [0, 0]
    assert has(core, 0, A, B) == [False, False], "invisible until put_end"
    assert core.put_end(0, granted.put_id, [True, True]) == [0, 0]
    got = core.get_start(0, [A, C, B], 1.0)
    assert [f.length if f else 0 for f in got.objects] == [100, 0, 300]
    assert total_bytes(got.objects[2].replicas[0].extents) == 300  # type: ignore[union-attr]
    assert allocated(core) == 3
    assert put(core, 0, A).code == codes.EXISTS


def test_lru_and_query_does_not_refresh() -> None:
    core = master(3)
    for key in (A, B, C):
        put(core, 0, key)
    lease = core.get_start(1, [A], 1.0)
    core.get_end(1, lease.lease_id)
    has(core, 2, B)
    assert put(core, 2, D).code == 0
    assert has(core, 2, A, B, C, D) == [True, False, True, True]
    assert core.pool.evictions == 1


def test_reads_and_writes_are_never_evicted() -> None:
    core = master(2)
    put(core, 0, A)
    lease = core.get_start(0, [A], 5.0)
    writing = core.put_start(0, [B], [G], writer="w", lease_s=4.0)
    assert put(core, 1, C).code == codes.NO_SPACE
    assert core.put_start(1, [B], [G], writer="x").slots[0].code == codes.NOT_READY
    core.get_end(2, lease.lease_id)
    assert put(core, 2, C).code == 0
    assert core.put_end(2, writing.put_id, [True]) == [0]
    assert has(core, 2, A, B, C) == [False, True, True]


def test_lease_ends_by_itself_and_can_be_renewed() -> None:
    core = master(1)
    put(core, 0, A)
    lease = core.get_start(0, [A], 2.0)
    assert core.renew(1.5, lease.lease_id, 2.0) == pytest.approx(2.0)
    beat(core, 3, "s0")
    assert put(core, 3.4, B).code == codes.NO_SPACE
    assert put(core, 3.6, B).code == 0
    assert core.renew(3.6, lease.lease_id, 2.0) == 0
    core.get_end(3.6, lease.lease_id)
    assert core.counters.expired_leases == 1


def test_leases_are_clamped() -> None:
    core = master(1)
    put(core, 0, A)
    assert core.get_start(0, [A], 1e9).lease_s == SETTINGS.max_read_lease_s
    assert core.put_start(0, [B], [G], writer="w", lease_s=1e9).put_id == 0


def test_unfinished_put_waits_for_lease_and_grace() -> None:
    core = master(1)
    granted = core.put_start(0, [A], [G], writer="w", lease_s=2.0)
    beat(core, 4, "s0")
    assert core.put_end(2.1, granted.put_id, [True]) == [codes.LEASE_EXPIRED], "too late"
    assert put(core, 6.9, A).code == codes.NO_SPACE, "the writer may still write"
    assert put(core, 7.1, A).code == 0


@pytest.mark.parametrize("quiesced", [True, False])
def test_revoked_put(quiesced: bool) -> None:
    core = master(1)
    granted = core.put_start(0, [A], [G], writer="w", lease_s=2.0)
    assert core.put_end(0, granted.put_id, [False], quiesced=quiesced) == [0]
    assert put(core, 1, A).code == (0 if quiesced else codes.NO_SPACE)


def test_larger_than_the_largest_hole() -> None:
    core = master(4)
    for key in (A, B, C, D):
        put(core, 0, key)
    core.remove(0, [A, C])
    slot = put(core, 0, b"x" * 16, 2)
    assert slot.code == 0 and len(slot.replicas[0].extents) == 2
    assert has(core, 0, B, D) == [True, True], "nothing was evicted for it"


def test_a_hopeless_put_evicts_nothing() -> None:
    core = master(4, 4)
    for key in (A, B, C):
        put(core, 0, key)
    assert put(core, 0, D, 5).code == codes.NO_SPACE
    assert has(core, 0, A, B, C) == [True] * 3


def test_preferred_segment_then_a_fixed_order() -> None:
    core = master(2, 2, 2)
    where = [put(core, 0, bytes([n]) * 16, preferred="s1").replicas[0].segment.name for n in range(6)]
    assert where[:2] == ["s1", "s1"] and where[2] == where[3] != "s1" and where[4] == where[5]
    assert core.pool.evictions == 0, "the pool is full only now"


def test_replicas_on_distinct_segments() -> None:
    core = master(2, 2)
    slot = put(core, 0, A, replicas=3)
    assert sorted(r.segment.name for r in slot.replicas) == ["s0", "s1"]
    core.get_end(0, 0, [slot.replicas[0].segment.instance_id])
    left = core.get_start(0, [A], 1.0).objects[0]
    assert left is not None and [r.segment for r in left.replicas] == [slot.replicas[1].segment]


def test_a_failed_replica_is_left_out() -> None:
    core = master(2, 2)
    granted = core.put_start(0, [A], [G], writer="w", replicas=2)
    assert core.put_end(0, granted.put_id, [True], failed_segments=["s0"]) == [0]
    found = core.query(0, [A])[0]
    assert found is not None and [r.segment.name for r in found.replicas] == ["s1"]
    granted = core.put_start(0, [B], [G], writer="w", preferred="s0")
    assert core.put_end(0, granted.put_id, [True], failed_segments=["s0"]) == [codes.REPLICA_GONE]


def test_a_dead_node_is_skipped_until_it_is_heard_again() -> None:
    core = master(2, 2)
    put(core, 0, A, preferred="s0")
    core.get_end(1, 0, ["s0-life"])
    assert has(core, 1, A) == [False]
    assert put(core, 1, B, preferred="s0").replicas[0].segment.name == "s1"
    beat(core, 1.5, "s0", "s1")
    assert has(core, 1.5, A) == [False], "it may have been sent before"
    beat(core, 3.1, "s0", "s1")
    assert has(core, 3.1, A) == [True]


def test_a_silent_node_is_dropped() -> None:
    core = master(2, 2)
    put(core, 0, A, preferred="s0")
    for now in range(1, 12):
        beat(core, now, "s1")
    assert has(core, 11, A) == [False]
    assert [view.name for view in core.status(11).segments] == ["s1"]
    assert core.heartbeat(12, "s0", "s0-life", 1).remount


def test_restart_under_the_same_name_replaces() -> None:
    core = master(2)
    put(core, 0, A)
    lease = core.get_start(0, [A], 5.0)
    open_put = core.put_start(0, [B], [G], writer="w")
    mount(core, 1, "s0", 2, life="second")
    assert has(core, 1, A) == [False]
    assert core.heartbeat(1, "s0", "s0-life", 1).remount, "the old life is not taken for the new one"
    assert core.put_end(1, open_put.put_id, [True]) == [codes.REPLICA_GONE]
    core.get_end(1, lease.lease_id)
    assert allocated(core, 1) == 0


def held(key: bytes, version: int, *extents: tuple[int, int]) -> m.Held:
    placed = tuple(Extent(BASE + at * G, n * G) for at, n in extents)
    return m.Held(key, version, total_bytes(placed), placed)


def test_a_new_master_learns_and_holds() -> None:
    core = master()
    assert put(core, 0, C).code == codes.NO_SPACE, "no report, no memory"
    writes = [m.OpenWrite((Extent(BASE + 3 * G, G),), 2.0)]
    mount(core, 0, "s0", 4, held=[held(A, 5, (0, 1), (2, 1))], open=writes)
    assert has(core, 0, A) == [True]
    slot = put(core, 0, B)
    assert slot.code == 0 and slot.replicas[0].extents[0].address == BASE + G
    assert put(core, 1, C, 2).code == codes.NO_SPACE, "a reader of the former master may still read"
    assert core.remove(1, [A]) == [0], "which is no reason to keep its name"
    for now in range(2, 16):
        beat(core, now, "s0")
    assert put(core, 8, C).code == 0, "lease and grace of the open write are over, and B is old"
    assert put(core, 15.5, D, 2).code == 0


def test_a_report_in_parts() -> None:
    core = master()
    assert mount(core, 0, "s0", 4, held=[held(A, 5, (0, 1))], more=True)
    assert has(core, 0, A) == [False] and put(core, 0, D).code == codes.NO_SPACE
    assert mount(core, 0, "s0", 4, held=[held(B, 6, (1, 1))], continued=True)
    assert has(core, 0, A, B) == [True, True]
    assert not mount(core, 0, "s0", 4, number=2, continued=True), "a part of another report"


@pytest.mark.parametrize(
    "bad",
    [held(B, 6, (0, 1)), held(B, 6, (4, 1)), m.Held(B, 6, 2 * G, (Extent(BASE + G, G),)), m.Held(B, 6, 0, ())],
)
def test_a_broken_report_line_is_refused(bad: m.Held) -> None:
    core = master()
    mount(core, 0, "s0", 4, held=[held(A, 5, (0, 1)), bad])
    assert has(core, 0, A, B) == [True, False]
    assert core.counters.refused_reports == 1 and allocated(core) == 1


def test_the_later_of_two_reported_versions_wins() -> None:
    for first, second in ((5, 9), (9, 5)):
        core = master()
        mount(core, 0, "s0", 4, held=[held(A, first, (0, 1))])
        mount(core, 0, "s1", 4, held=[held(A, second, (0, 2))])
        found = core.query(0, [A])[0]
        assert found is not None and found.length == (2 * G if second == 9 else G)
        loser = "s0" if second == 9 else "s1"
        assert not core.heartbeat(0, loser, f"{loser}-life", 1).dropped, "somebody may still read it"
        for now in range(1, 17):
            beat(core, now, "s0", "s1")
        assert list(core.heartbeat(17, loser, f"{loser}-life", 1).dropped) == [5]


def test_reported_copies_of_one_version_are_replicas() -> None:
    core = master()
    mount(core, 0, "s0", 4, held=[held(A, 5, (0, 1))])
    mount(core, 0, "s1", 4, held=[held(A, 5, (3, 1))])
    found = core.query(0, [A])[0]
    assert found is not None and len(found.replicas) == 2


def test_the_node_hears_what_was_dropped_until_it_says_so() -> None:
    core = master(2)
    version = put(core, 0, A).version
    core.remove(0, [A])
    for _ in range(2):
        answer = core.heartbeat(0, "s0", "s0-life", 1)
        assert list(answer.dropped) == [version]
    mount(core, 0, "s0", 2, number=2, held=[held(A, version, (0, 1))])
    assert has(core, 0, A) == [False], "removed, and the node had not heard of it"
    for now in range(1, 17):
        core.heartbeat(now, "s0", "s0-life", 2)
    assert allocated(core, 17) == 0
    answer = core.heartbeat(17, "s0", "s0-life", 2)
    assert version in answer.dropped
    assert not core.heartbeat(17, "s0", "s0-life", 2, ack=answer.dropped_seq).dropped


def test_remove() -> None:
    core = master(2)
    put(core, 0, A)
    put(core, 0, B)
    lease = core.get_start(0, [A], 5.0)
    assert core.remove(0, [A, B, C]) == [codes.LEASED, 0, codes.NOT_FOUND]
    assert core.remove(0, [A], force=True) == [0]
    assert has(core, 0, A) == [False] and allocated(core) == 1, "its reader still reads right bytes"
    core.get_end(0, lease.lease_id)
    assert allocated(core) == 0
    put(core, 0, A)
    assert core.remove_all(0) == 1


def test_bounds() -> None:
    core = master(16)
    put(core, 0, A)
    for _ in range(SETTINGS.max_leases):
        core.get_start(0, [A], 1.0)
    with pytest.raises(Overloaded):
        core.get_start(0, [A], 1.0)
    for n in range(SETTINGS.max_puts):
        core.put_start(0, [bytes([100 + n]) * 16], [1], writer="w")
    with pytest.raises(Overloaded):
        core.put_start(0, [B], [1], writer="w")
    with pytest.raises(BadRequest):
        core.put_start(99, [B], [1, 2], writer="w")
    assert [s.code for s in core.put_start(99, [B], [0], writer="w").slots] == [codes.INVALID]


def test_drop_log_is_bounded() -> None:
    log = DropLog("life", 3)
    for version in range(5):
        log.add(version, dropped=version != 3)
    assert log.lost == 2 and 1 not in log and 2 in log
    told = log.next(2)
    assert (told.dropped, told.removed, told.sequence) == ([2], [3], 4)
    log.ack(told.sequence)
    log.ack(told.sequence)
    assert log.next(9).dropped == [4] and len(log) == 1


def test_what_is_removed_under_a_reader_keeps_its_place_with_a_new_master() -> None:
    core = master(1)
    version = put(core, 0, A).version
    core.get_start(0, [A], 5.0)
    assert core.remove(0, [A], force=True) == [0]
    answer = core.heartbeat(0, "s0", "s0-life", 1)
    assert (list(answer.dropped), list(answer.removed)) == ([], [version])
    new = master(epoch=8)
    mount(new, 1, "s0", 1, held=[m.Held(A, version, G, (Extent(BASE, G),), removed=True)])
    assert has(new, 1, A) == [False]
    assert put(new, 1, B).code == codes.NO_SPACE
    for now in range(2, 17):
        beat(new, now, "s0")
    assert put(new, 17, B).code == 0
