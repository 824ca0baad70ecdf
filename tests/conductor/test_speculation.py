"""Blocks that will be there soon: siblings find each other, entries end, bounds hold."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from conductor.speculation import Speculation
from mooncake.common.ids import BlockKey, InstanceId, RequestId
from tests.conductor.helpers import keys

A, B = InstanceId("a"), InstanceId("b")


def chain(path: list[int]) -> list[BlockKey]:
    """Keys that name their whole prefix, like real ones."""
    return [BlockKey(bytes(path[: i + 1]).rjust(16, b"\xff")) for i in range(len(path))]


paths = st.lists(st.integers(0, 1), max_size=6).map(lambda tail: chain([0, *tail]))


@given(st.lists(st.tuples(st.sampled_from([A, B]), paths), max_size=12), paths)
def test_match_is_the_longest_common_prefix_of_any_entry(
    entries: list[tuple[InstanceId, list[BlockKey]]], asked: list[BlockKey]
) -> None:
    speculation, expected = Speculation(), {}
    for n, (instance, held) in enumerate(entries):
        speculation.add(RequestId(str(n)), instance, held, 10.0)
        common = next(
            (i for i, (x, y) in enumerate(zip(held, asked, strict=False)) if x != y), min(len(held), len(asked))
        )
        expected[instance] = max(expected.get(instance, 0), common)
    assert speculation.match(asked, 1.0) == expected


def test_entries_end_by_time_by_request_and_by_instance() -> None:
    speculation, prompt = Speculation(), keys(5)
    for name, instance, until_s in (("x", A, 1.0), ("y", B, 5.0), ("z", B, 5.0)):
        speculation.add(RequestId(name), instance, prompt, until_s)
    assert speculation.match(prompt, 0.5) == {A: 5, B: 5}
    assert speculation.match(prompt, 1.0) == {B: 5}
    speculation.expire(1.0)
    assert len(speculation) == 2
    speculation.settle(RequestId("y"), 2.0)
    speculation.forget(RequestId("z"))
    assert speculation.match(prompt, 3.0) == {}
    speculation.drop(B)
    assert len(speculation) == 0


def test_bounds_make_the_oldest_give_way() -> None:
    speculation = Speculation(max_keys=10, max_siblings=2)
    for n in range(4):
        speculation.add(RequestId(str(n)), InstanceId(str(n)), keys(3), 9.0)
    assert sorted(speculation.match(keys(3), 0.0)) == ["2", "3"]
    speculation.add(RequestId("large"), A, keys(9, salt=7), 9.0)
    assert speculation.match(keys(3), 0.0) == {}
    speculation.add(RequestId("too large"), A, keys(11, salt=8), 9.0)
    assert speculation.match(keys(11, salt=8), 0.0) == {}
