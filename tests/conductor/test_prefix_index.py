"""The prefix index against a model that is too simple to be wrong: a set of keys an instance."""

from __future__ import annotations

import time

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from conductor.prefix_index import PrefixIndex
from mooncake.common.ids import BlockKey, InstanceId
from tests.conductor.helpers import keys

INSTANCES = [InstanceId(f"i{n}") for n in range(4)]
instances = st.sampled_from(INSTANCES)
key_lists = st.lists(st.integers(0, 400).map(lambda n: BlockKey(n.to_bytes(16, "big"))), max_size=300)


class AgainstNaive(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.naive: dict[InstanceId, set[BlockKey]] = {}

    @rule(instance=instances, some=key_lists)
    def store(self, instance: InstanceId, some: list[BlockKey]) -> None:
        self.index.store(instance, some)
        self.naive.setdefault(instance, set()).update(some)

    @rule(instance=instances, some=key_lists)
    def remove(self, instance: InstanceId, some: list[BlockKey]) -> None:
        self.index.remove(instance, some)
        self.naive.get(instance, set()).difference_update(some)

    @rule(instance=instances, some=key_lists)
    def replace(self, instance: InstanceId, some: list[BlockKey]) -> None:
        self.index.replace(instance, some)
        self.naive[instance] = set(some)

    @rule(instance=instances)
    def drop(self, instance: InstanceId) -> None:
        self.index.drop(instance)
        self.naive.pop(instance, None)

    @rule(some=key_lists, among=st.lists(instances, unique=True))
    def match(self, some: list[BlockKey], among: list[InstanceId]) -> None:
        expected = {}
        for instance in among:
            held = self.naive.get(instance, set())
            expected[instance] = next((i for i, key in enumerate(some) if key not in held), len(some))
        assert self.index.match(some, among) == expected

    @rule(length=st.integers(0, 400), among=st.lists(instances, unique=True))
    def match_in_order(self, length: int, among: list[InstanceId]) -> None:
        self.match([BlockKey(n.to_bytes(16, "big")) for n in range(length)], among)

    @invariant()
    def sizes_agree(self) -> None:
        assert len(self.index) == len(set().union(*self.naive.values()))
        assert all(self.index.held(i) == len(self.naive.get(i, ())) for i in INSTANCES)


AgainstNaive.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestAgainstNaive = AgainstNaive.TestCase


def test_long_prompts_are_matched_over_chunk_borders() -> None:
    index, prompt = PrefixIndex(), keys(1000)
    index.store(INSTANCES[0], prompt)
    index.store(INSTANCES[1], prompt[:128])
    index.store(INSTANCES[2], prompt[:500] + prompt[501:])
    lengths = index.match(prompt, INSTANCES)
    assert [lengths[i] for i in INSTANCES] == [1000, 128, 500, 0]


def test_removing_at_one_instance_leaves_the_others_alone() -> None:
    index, prompt = PrefixIndex(), keys(10)
    for instance in INSTANCES[:2]:
        index.store(instance, prompt)
    index.remove(INSTANCES[0], prompt)
    assert index.match(prompt, INSTANCES[:2]) == {INSTANCES[0]: 0, INSTANCES[1]: 10}
    index.drop(INSTANCES[1])
    assert len(index) == 0


def test_a_full_instance_drops_and_counts() -> None:
    index, prompt = PrefixIndex(max_keys_per_instance=5), keys(8)
    index.store(INSTANCES[0], prompt)
    assert index.held(INSTANCES[0]) == 5
    assert index.dropped_keys == 3
    index.remove(INSTANCES[0], prompt[:2])
    index.store(INSTANCES[0], prompt[:1])
    assert index.held(INSTANCES[0]) == 4


def test_a_long_prompt_costs_little_however_many_instances_hold_it() -> None:
    index, prompt = PrefixIndex(), keys(4000)
    many = [InstanceId(f"i{n}") for n in range(16)]
    for instance in many:
        index.store(instance, prompt)
    best_s = float("inf")
    for _ in range(20):
        start_s = time.perf_counter()
        index.match(prompt, many)
        best_s = min(best_s, time.perf_counter() - start_s)
    assert best_s < 0.01, f"{best_s * 1e3:.2f} ms"  # about 0.4 ms on a quiet core
