"""SIEVE against a naive model, and by hand on the walk that its paper describes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer_engine.sieve import SievePool


class Naive:
    """SIEVE over a plain list (oldest first) with an index for the hand: slow and obvious."""

    def __init__(self, capacity: int, busy: set[int]) -> None:
        self.capacity, self.busy = capacity, busy
        self.rows: list[list[int]] = []  # [key, value, visited]
        self.hand = 0

    def find(self, key: int) -> int | None:
        return next((at for at, row in enumerate(self.rows) if row[0] == key), None)

    def get(self, key: int) -> int | None:
        at = self.find(key)
        if at is None:
            return None
        self.rows[at][2] = 1
        return self.rows[at][1]

    def remove(self, at: int) -> int:
        value = self.rows.pop(at)[1]
        if self.hand > at:
            self.hand -= 1
        return value

    def put(self, key: int, value: int) -> list[int]:
        at = self.find(key)
        if at is not None:
            old, self.rows[at][1], self.rows[at][2] = self.rows[at][1], value, 1
            return [old]
        gone = []
        while len(self.rows) >= self.capacity and not all(row[1] in self.busy for row in self.rows):
            while True:
                self.hand %= len(self.rows)
                row = self.rows[self.hand]
                if row[1] not in self.busy:
                    if not row[2]:
                        break
                    row[2] = 0
                self.hand += 1
            gone.append(self.remove(self.hand))
            # Behind the newest value the hand starts again at the oldest, whatever is inserted meanwhile.
            if self.hand == len(self.rows):
                self.hand = 0
        self.rows.append([key, value, 0])
        return gone

    def discard(self, key: int) -> int | None:
        at = self.find(key)
        if at is None:
            return None
        value = self.remove(at)
        if self.hand == len(self.rows):
            self.hand = 0
        return value


KEYS = st.integers(0, 9)
STEPS = st.lists(st.tuples(st.sampled_from(["put", "put", "get", "discard", "busy", "idle"]), KEYS), max_size=120)


@given(capacity=st.integers(1, 6), steps=STEPS)
def test_does_what_the_naive_model_does(capacity: int, steps: list[tuple[str, int]]) -> None:
    busy: set[int] = set()
    pool, naive = SievePool[int, int](capacity, busy.__contains__), Naive(capacity, busy)
    for count, (what, key) in enumerate(steps):
        held = naive.find(key)
        match what:
            case "put":
                # All busy: the walk ends where it began, so both hands agree on where to go on.
                value = 100 * count + key
                assert pool.put(key, value) == naive.put(key, value)
            case "get":
                assert pool.get(key) == naive.get(key)
            case "discard":
                assert pool.discard(key) == naive.discard(key)
            case "busy" if held is not None:
                busy.add(naive.rows[held][1])
            case "idle" if held is not None:
                busy.discard(naive.rows[held][1])
        assert pool.values() == [row[1] for row in reversed(naive.rows)]
        assert len(pool) == len(naive.rows)


@given(capacity=st.integers(1, 5), steps=STEPS)
def test_only_busy_values_exceed_the_capacity_and_none_is_evicted(capacity: int, steps: list[tuple[str, int]]) -> None:
    busy: set[int] = set()
    pool = SievePool[int, int](capacity, busy.__contains__)
    for what, key in steps:
        match what:
            case "put":
                known = key in pool
                assert not busy & set(pool.put(key, key))
                others = set(pool.values()) - {key}
                assert known or len(pool) <= capacity or others <= busy
            case "busy":
                busy.add(key)
            case "idle":
                busy.discard(key)


def test_the_walk_of_the_paper() -> None:
    """Figure 1 of the SIEVE paper in spirit: visited ones are spared once and stay where they are, the hand goes on."""
    pool = SievePool[str, str](4, lambda _: False)
    for key in "ABCD":
        pool.put(key, key)
    pool.get("A")
    pool.get("B")
    assert pool.put("E", "E") == ["C"]  # A and B were spared
    assert pool.values() == ["E", "D", "B", "A"]  # and did not move
    assert pool.put("F", "F") == ["D"]  # the hand went on from C
    pool.get("E")
    pool.get("F")
    assert pool.put("G", "G") == ["A"]  # E and F spared, round the corner, A's bit is off by now
    assert pool.values() == ["G", "F", "E", "B"]


def test_a_pool_of_busy_values_grows_and_shrinks_back() -> None:
    busy = {0, 1, 2, 3}
    pool = SievePool[int, int](2, busy.__contains__)
    for key in range(4):
        assert pool.put(key, key) == []
    assert len(pool) == 4
    busy.clear()
    assert pool.put(9, 9) == [0, 1, 2]
    assert pool.values() == [9, 3]


def test_replacing_gives_the_old_value_back_even_a_busy_one() -> None:
    pool = SievePool[str, list[int]](2, lambda _: True)
    first, second = [1], [2]
    assert pool.put("a", first) == []
    assert pool.put("a", second) == [first]
    assert pool.put("a", second) == []
    assert "a" in pool and pool.get("a") is second
    assert pool.discard("a") is second and pool.discard("a") is None and pool.get("a") is None


def test_refuses_a_capacity_below_one() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        SievePool[int, int](0, lambda _: False)
