"""Which path carries what, and how a failed one comes back: pure, with a clock of the test's own."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from transfer_engine.slices import Columns, split_at
from transfer_engine.transports.rdma.path import Path, PathState, PathTable, rank, same_subnet


def _gid(subnet: int, host: int) -> str:
    return f"0000:0000:0000:0000:0000:ffff:0a4d:{subnet:02x}{host:02x}"


RAILS = [_gid(0, 1), _gid(1, 1)], [_gid(0, 2), _gid(1, 2)]
BOTH = [[0, 1]]


def _table(local: list[str] = RAILS[0], remote: list[str] = RAILS[1]) -> PathTable:
    return PathTable(local, remote, rest_s=0.5, rest_max_s=4.0)


def _open(table: PathTable, now: float = 0.0) -> list[Path]:
    opened = table.plan(BOTH, now).open
    for path in opened:
        table.opening(path)
        table.ready(path)
    return opened


def _pairs(paths: list[Path]) -> list[tuple[int, int]]:
    return [(path.local, path.remote) for path in paths]


def test_rails_are_subnets_whatever_the_order_of_the_lists() -> None:
    assert _pairs(_open(_table())) == [(0, 0), (1, 1)]
    assert _pairs(_open(_table(remote=[_gid(1, 2), _gid(0, 2)]))) == [(0, 1), (1, 0)]


def test_on_one_subnet_the_places_in_the_lists_pair_up_and_wrap_around() -> None:
    gids = [_gid(0, host) for host in range(4)]
    assert [rank(local, gids[local], [_gid(0, 9), _gid(0, 10)])[0] for local in range(4)] == [0, 1, 0, 1]


def test_subnets() -> None:
    assert same_subnet(_gid(3, 1), _gid(3, 200)) and not same_subnet(_gid(3, 1), _gid(4, 1))
    v6 = "2001:0db8:0000:0001:0000:0000:0000:0001"
    assert same_subnet(v6, v6[:-1] + "7") and not same_subnet(v6, v6.replace("0001:0000", "0002:0000", 1))
    assert not same_subnet(v6, _gid(3, 1))


def test_only_preferred_nics_carry_while_they_can() -> None:
    table = _table()
    first = table.plan([[1], [0]], 0.0)
    assert _pairs(first.open) == [(1, 1)] and first.hope
    table.opening(first.open[0])
    assert not table.plan([[1], [0]], 0.0).open, "on its way: wait for it"
    table.failed(first.open[0], 0.0)
    second = table.plan([[1], [0]], 0.1)
    assert _pairs(second.open) == [(1, 0)], "the preferred NIC's other path before the secondary NIC"
    table.opening(second.open[0])
    table.failed(second.open[0], 0.1)
    assert _pairs(table.plan([[1], [0]], 0.2).open) == [(0, 0)]


def test_a_path_that_carried_and_broke_is_probed_at_once_and_rests_when_that_fails_too() -> None:
    table = _table()
    straight, _ = _open(table)
    table.carried(straight)
    table.failed(straight, 10.0)
    plan = table.plan(BOTH, 10.0)
    assert straight in plan.open and _pairs(plan.ready) == [(1, 1)], "its slices need not wait for the probe"
    table.opening(straight)
    table.failed(straight, 10.4)
    assert straight not in table.plan(BOTH, 11.3).open
    assert straight in table.plan(BOTH, 11.4).open


def test_a_path_that_lets_probes_through_but_no_slices_rests_longer_and_longer() -> None:
    table, now, rests = _table([RAILS[0][0]], [RAILS[1][0]]), 0.0, []
    for _ in range(6):
        (path,) = table.plan([[0]], now).open
        table.opening(path)
        table.ready(path)
        table.failed(path, now)
        assert table.plan([[0]], now).hopeless
        rests.append(path.rest_until - now)
        now = path.rest_until
    assert rests == [0.5, 1.0, 2.0, 4.0, 4.0, 4.0]
    table.opening(path)
    table.ready(path)
    table.carried(path)
    assert path.strikes == 0


def test_a_port_takes_its_paths_with_it_and_brings_them_back_rested() -> None:
    table = _table()
    straight, other = _open(table)
    table.port(0, False)
    table.failed(straight, 0.0)
    assert table.plan(BOTH, 100.0).ready == [other] and not table.plan(BOTH, 100.0).open
    table.port(0, True)
    assert straight in table.plan(BOTH, 0.0).open


def test_an_evicted_endpoint_leaves_its_path_as_good_as_new() -> None:
    table = _table()
    straight, _ = _open(table)
    table.dropped(straight)
    assert straight.state is PathState.IDLE and straight in table.plan(BOTH, 0.0).open


def test_all_paths_down_is_hopeless_until_somebody_wakes_them() -> None:
    table = _table()
    for path in table.all():
        table.opening(path)
        table.failed(path, 0.0)
    assert table.plan(BOTH, 0.1).hopeless
    assert min(path.rest_until for path in table.all() if path.state is PathState.RESTING) == 0.5
    table.wake()
    assert _pairs(table.plan(BOTH, 0.1).open) == [(0, 0), (0, 1), (1, 1), (1, 0)]


@given(
    st.lists(st.tuples(st.sampled_from("fod"), st.integers(0, 3)), max_size=60),
    st.floats(0.01, 1.0),
)
def test_no_order_of_events_leaves_a_nic_without_a_future(events: list[tuple[str, int]], step_s: float) -> None:
    table, now = _table(), 0.0
    paths = list(table.all())
    for what, which in events:
        path, now = paths[which], now + step_s
        for due in table.plan(BOTH, now).open:
            table.opening(due)
        if what == "f" and path.state in (PathState.OPENING, PathState.READY):
            table.failed(path, now)
        elif what == "o" and path.state is PathState.OPENING:
            table.ready(path)
            table.carried(path)
        elif what == "d" and path.state is PathState.READY:
            table.dropped(path)
        ready = table.plan(BOTH, now).ready
        assert len({p.local for p in ready}) == len(ready), "one path a NIC at a time"
    assert not table.plan(BOTH, now + 5.0).hopeless


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.lists(st.integers(0, 130), max_size=5, unique=True))
def test_pieces_are_cut_at_borders_and_lose_no_byte(lengths: list[int], borders: list[int]) -> None:
    length = np.array(lengths, np.uint64)
    local = np.cumsum(length) - length
    columns = Columns(local, local + np.uint64(1000), length, np.arange(len(lengths)))
    edges = np.array(sorted(borders), np.uint64)
    cut = split_at(columns, edges)
    rows = list(zip(cut.local.tolist(), cut.remote.tolist(), cut.length.tolist(), cut.index.tolist(), strict=True))
    assert [(at, row) for at, _, n, row in rows for at in range(at, at + n)] == [
        (at, row)
        for row, (start, n) in enumerate(zip(local.tolist(), lengths, strict=True))
        for at in range(start, start + n)
    ]
    assert all(remote == at + 1000 for at, remote, _, _ in rows)
    assert not any(at < border < at + n for at, _, n, _ in rows for border in borders)
