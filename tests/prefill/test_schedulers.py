"""The scheduler halves of prefill, prefix loading and store writing, on stand-ins of vLLM's requests and outputs."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from mooncake.common.block_key import block_keys, root_key, store_keys
from mooncake.common.errors import StoreUnavailable
from mooncake.vllm.connector_config import StoreConfig
from mooncake.vllm.counters import CounterSet
from mooncake.vllm.host_link import PrefillStarted
from mooncake.vllm.leg import Leg
from mooncake.vllm.request_keys import KeySpace, RequestKeys
from mooncake.vllm.step_plan import StepPlan
from prefill.prefix_loading import PrefixLoader
from prefill.producer import ProducerScheduler, Scheduled, scheduled_requests
from prefill.store_writing import StoreWriter

BLOCK, OBJECT = 4, 8
SPACE = KeySpace(model="m", fingerprint="f", block_size=BLOCK, block_tokens=OBJECT)


def request(tokens: int, req_id: str = "r") -> Any:
    ids = list(range(tokens))
    return SimpleNamespace(
        request_id=req_id, prompt_token_ids=ids, all_token_ids=ids, num_prompt_tokens=tokens, num_tokens=tokens,
        mm_features=[], lora_request=None, cache_salt=None, prompt_embeds=None,
    )  # fmt: skip


def output(new: Sequence[Any] = (), cached: Sequence[Any] = (), preempted: Sequence[str] = ()) -> Any:
    """`new`: (id, blocks, computed, tokens); `cached`: the same and whether it resumes."""
    return SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=i, block_ids=(b,), num_computed_tokens=c) for i, b, c, _ in new],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[i for i, *_ in cached],
            new_block_ids=[None if b is None else (b,) for _, b, *_ in cached],
            num_computed_tokens=[c for _, _, c, *_ in cached],
            resumed_req_ids={i for i, _, _, _, resumed in cached if resumed},
        ),
        num_scheduled_tokens={i: t for i, _, _, t in new} | {i: t for i, _, _, t, _ in cached},
        preempted_req_ids=set(preempted),
    )


def step(producer: ProducerScheduler, out: Any) -> StepPlan:
    plan = StepPlan()
    producer.plan(out, list(scheduled_requests(out)), plan)
    return plan


def test_only_complete_blocks_before_the_last_chunk_and_the_tail_with_it() -> None:
    told: list[PrefillStarted] = []
    producer = ProducerScheduler(BLOCK, told.append)
    producer.add(request(10), Leg("prefill", "t", fan_out=2), deadline=99.0)
    first = step(producer, output(new=[("r", [5, 6], 0, 7)])).chunks[0]
    assert (first.ready_blocks, first.last, first.block_ids) == (1, False, [5, 6])
    assert first.start is not None and first.start.fan_out == 2
    last = step(producer, output(cached=[("r", [7], 7, 3, False)])).chunks[0]
    assert (last.ready_blocks, last.last, last.block_ids, last.start) == (3, True, [7], None)
    assert [(m.transfer_id, m.computed_tokens, m.prompt_tokens) for m in told] == [("t", 0, 10)]
    assert step(producer, output(cached=[("r", None, 10, 1, False)])).chunks == []  # it generates
    assert producer.finished("r", aborted=False)
    assert [(end.transfer_id, end.complete) for end in step(producer, output()).ended] == [("t", True)]


def test_a_preempted_prefill_starts_its_table_again() -> None:
    producer = ProducerScheduler(BLOCK, lambda _: None)
    producer.add(request(10), Leg("prefill", "t"), deadline=99.0)
    step(producer, output(new=[("r", [5, 6], 0, 7)]))
    assert step(producer, output(preempted=["r"])).preempted_transfers == ["t"]
    chunk = step(producer, output(cached=[("r", [1, 2, 3], 4, 6, True)])).chunks[0]
    assert (chunk.restart, chunk.block_ids, chunk.ready_blocks, chunk.last) == (True, [1, 2, 3], 3, True)


def test_an_abort_in_the_queue_holds_nothing_but_is_told() -> None:
    producer = ProducerScheduler(BLOCK, lambda _: None)
    producer.add(request(10), Leg("prefill", "t"), deadline=99.0)
    assert not producer.finished("r", aborted=True)
    assert [end.complete for end in step(producer, output()).ended] == [False]


# --- keys ---


def test_request_keys_are_the_common_block_keys() -> None:
    asked = request(21)
    root = root_key(model="m", fingerprint="f", block_size=BLOCK)
    keys = RequestKeys(SPACE, asked)
    wanted = store_keys(block_keys(root, range(21), BLOCK), OBJECT // BLOCK)
    assert keys.upto(7) == []
    assert keys.upto(20) == wanted
    asked.all_token_ids.extend([1, 2, 3])
    assert len(keys.upto(24)) == 3


# --- loading ---


class Lookup:
    """`prefix_len` that waits until told."""

    def __init__(self, found: int | Exception) -> None:
        self.found, self.asked = found, 0
        self.go = threading.Event()

    def __call__(self, keys: Sequence[bytes], deadline_s: float) -> int:
        self.asked += 1
        assert self.go.wait(5)
        if isinstance(self.found, Exception):
            raise self.found
        return min(self.found, len(keys))


def loader(lookup: Lookup, **config: Any) -> tuple[PrefixLoader, threading.Event]:
    woken = threading.Event()
    made = PrefixLoader(SPACE, StoreConfig(masters=[], **config), lookup, CounterSet(), woken.set)
    return made, woken


def test_the_scheduler_is_told_to_ask_again_and_then_what_is_there() -> None:
    lookup = Lookup(found=2)
    load, woken = loader(lookup)
    asked = request(25)
    load.add(asked, RequestKeys(SPACE, asked))
    assert load.matched("r", 0) is None
    lookup.go.set()
    assert woken.wait(5)
    assert load.matched("r", 0) == 16
    assert load.matched("r", 4) == 12  # asked again with a longer local prefix
    load.allocated("r", [10, 11, 12, 13, 14, 15, 16], external_tokens=12)
    plan = StepPlan()
    load.plan(plan)
    (one,) = plan.store_loads
    assert (one.block_ids, one.skip_blocks, len(one.keys)) == ([11, 12, 13], 1, 2)
    assert load.loading("r")
    assert load.matched("r", 0) == 0  # once
    load.finished("r")
    load.plan(plan)
    assert plan.aborted_loads == ["r"]


def test_at_least_one_token_is_left_to_compute_and_small_gains_are_not_worth_it() -> None:
    lookup = Lookup(found=9)
    lookup.go.set()
    load, woken = loader(lookup)
    exact = request(16)
    load.add(exact, RequestKeys(SPACE, exact))
    assert load.matched("r", 0) is None and woken.wait(5)
    assert load.matched("r", 0) == 8
    small = request(8, "small")
    load.add(small, RequestKeys(SPACE, small))
    assert load.matched("small", 0) == 0
    assert lookup.asked == 1


@pytest.mark.parametrize("found", [0, StoreUnavailable("down")])
def test_a_miss_or_a_store_that_is_down_means_computing(found: int | Exception) -> None:
    lookup = Lookup(found)
    lookup.go.set()
    load, woken = loader(lookup)
    asked = request(25)
    load.add(asked, RequestKeys(SPACE, asked))
    assert load.matched("r", 0) is None and woken.wait(5)
    assert load.matched("r", 0) == 0


def test_a_look_up_beyond_its_deadline_is_not_waited_for() -> None:
    lookup = Lookup(found=2)
    load, _ = loader(lookup, lookup_deadline_s=0.01)
    asked = request(25)
    load.add(asked, RequestKeys(SPACE, asked))
    assert load.matched("r", 0) is None
    deadline = time.monotonic() + 5
    while (found := load.matched("r", 0)) is None:
        assert time.monotonic() < deadline
    assert found == 0
    lookup.go.set()


# --- writing ---


def saves(writer: StoreWriter, out: Any) -> list[list[int]]:
    plan = StepPlan()
    writer.plan(list(scheduled_requests(out)), plan)
    return [save.block_ids for save in plan.saves]


def test_store_blocks_are_saved_when_a_step_completes_them_prompt_and_output_alike() -> None:
    asked = request(14)
    writer = StoreWriter(SPACE)
    writer.add(asked, RequestKeys(SPACE, asked))
    assert saves(writer, output(new=[("r", [1, 2, 3], 0, 12)])) == [[1, 2]]
    assert saves(writer, output(cached=[("r", [4], 12, 2, False)])) == []
    asked.all_token_ids.append(7)
    asked.num_tokens = 15
    assert saves(writer, output(cached=[("r", None, 14, 1, False)])) == []
    asked.all_token_ids.append(8)
    asked.num_tokens = 16
    assert saves(writer, output(cached=[("r", None, 15, 1, False)])) == [[3, 4]]
    assert writer.finished("r")


def test_what_was_found_is_not_saved_again() -> None:
    asked = request(24)
    writer = StoreWriter(SPACE)
    writer.add(asked, RequestKeys(SPACE, asked))
    assert saves(writer, output(new=[("r", [1, 2, 3, 4, 5, 6], 16, 8)])) == [[5, 6]]
    assert not StoreWriter(SPACE).finished("r")


def test_draft_tokens_are_not_saved() -> None:
    asked = request(14)
    writer = StoreWriter(SPACE)
    writer.add(asked, RequestKeys(SPACE, asked))
    assert saves(writer, output(new=[("r", [1, 2, 3, 4], 0, 16)])) == [[1, 2]]


def test_scheduled_is_what_a_step_says_of_a_request() -> None:
    out = output(new=[("n", [1], 0, 4)], cached=[("c", None, 4, 1, False)])
    assert list(scheduled_requests(out)) == [Scheduled("n", [1], True, 0, 4), Scheduled("c", [], False, 4, 1)]
