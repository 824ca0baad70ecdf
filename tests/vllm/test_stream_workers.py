"""Producer and consumer threads on two real transfer engines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from mooncake.vllm.step_plan import StepPlan, StreamCancel, TransferEnd
from tests.vllm.half_engines import HalfEngine, chunk, until

TARGET, SOURCE = [9, 3, 4], [5, 6, 1]


WAYS = [
    "tcp",
    "local",
    pytest.param("rdma-fake", marks=pytest.mark.elsewhere("fake")),
    pytest.param("rdma-vm", marks=[pytest.mark.slow, pytest.mark.elsewhere("vm")]),
]
NICS = {
    "rdma-fake": (("fake0", "fake1"), ("fake2", "fake3")),
    "rdma-vm": (("rxe_a0", "rxe_a1"), ("rxe_b0", "rxe_b1")),
}


@pytest.fixture(params=WAYS)
def pair(request: Any) -> Iterator[tuple[HalfEngine, HalfEngine]]:
    transports = (request.param.split("-")[0],)
    ours, theirs = ({"transports": transports, "nics": nics} for nics in NICS.get(request.param, ((), ())))
    producer = HalfEngine("p", seed=1, transfer=ours, reserve_every_s=0.2)
    consumer = HalfEngine("d", seed=2, transfer=theirs, reserve_every_s=0.2)
    yield producer, consumer
    consumer.close()
    producer.close()


def same(producer: HalfEngine, consumer: HalfEngine, target: list[int], source: list[int]) -> bool:
    return all(np.array_equal(d[target], p[source]) for d, p in zip(consumer.kv, producer.kv, strict=True))


def end(producer: HalfEngine, transfer_id: str, *, complete: bool = True) -> None:
    """The engine finishes the prefill leg and holds its blocks."""
    req_id = f"req-{transfer_id}"
    producer.producer.begin_step(StepPlan(ended=[TransferEnd(transfer_id, req_id, complete)]))
    producer.rt.reports.finished(req_id)


def test_chunks_arrive_whole_and_both_sides_are_told_once(pair: tuple[HalfEngine, HalfEngine]) -> None:
    producer, consumer = pair
    before = [array.copy() for array in consumer.kv]
    consumer.load(producer, "t", "r", TARGET)
    producer.compute(StepPlan(chunks=[chunk("t", SOURCE[:2], 1, last=False, begins=True)]))
    producer.compute(StepPlan(chunks=[chunk("t", SOURCE[2:], 3, last=True, begins=False)]))
    end(producer, "t")
    until(lambda: consumer.reports().received and producer.reports().sent)
    assert same(producer, consumer, TARGET, SOURCE)
    others = [i for i in range(16) if i not in TARGET]
    assert all(np.array_equal(now[others], old[others]) for now, old in zip(consumer.kv, before, strict=True))
    assert (consumer.seen.received, consumer.seen.failed, producer.seen.sent) == ({"r"}, set(), {"req-t"})
    assert consumer.rt.counters.get("loads_total", source="stream", result="ok") == 1
    assert producer.rt.counters.get("layers_sent_bytes_total") == 3 * 3 * 256


def test_a_prefill_that_is_over_serves_late_consumers_and_only_those_it_was_promised(
    pair: tuple[HalfEngine, HalfEngine],
) -> None:
    producer, consumer = pair
    producer.compute(StepPlan(chunks=[chunk("t", SOURCE, 3, last=True, begins=True, fan_out=2)]))
    end(producer, "t")
    consumer.load(producer, "t", "r1", TARGET)
    until(lambda: "r1" in consumer.reports().received)
    assert not producer.reports().sent
    consumer.load(producer, "t", "r2", [0, 1], first_block=1)
    until(lambda: "r2" in consumer.reports().received and producer.reports().sent)
    assert same(producer, consumer, [0, 1], SOURCE[1:])
    consumer.load(producer, "t", "r3", [10, 11, 12])
    until(lambda: "r3" in consumer.reports().failed)


def test_one_worker_can_be_both() -> None:
    worker = HalfEngine("b", seed=1)
    worker.load(worker, "t", "r", TARGET)
    worker.compute(StepPlan(chunks=[chunk("t", SOURCE, 3, last=True, begins=True)]))
    end(worker, "t")
    until(lambda: worker.reports().received and worker.reports().sent)
    assert same(worker, worker, TARGET, SOURCE)
    worker.close()


def test_another_prompt_is_refused_and_recomputed(pair: tuple[HalfEngine, HalfEngine]) -> None:
    producer, consumer = pair
    before = [array.copy() for array in consumer.kv]
    consumer.load(producer, "t", "r", TARGET, digest=b"other")
    producer.compute(StepPlan(chunks=[chunk("t", SOURCE, 3, last=True, begins=True)]))
    end(producer, "t")
    until(lambda: consumer.reports().failed and producer.reports().sent)
    assert all(np.array_equal(now, old) for now, old in zip(consumer.kv, before, strict=True))
    assert consumer.rt.counters.get("recomputed_tokens_total", reason="prompt_mismatch") == 10


def test_an_aborted_prefill_fails_its_consumer(pair: tuple[HalfEngine, HalfEngine]) -> None:
    producer, consumer = pair
    consumer.load(producer, "t", "r", TARGET)
    producer.compute(StepPlan(chunks=[chunk("t", SOURCE[:2], 1, last=False, begins=True)]))
    end(producer, "t", complete=False)
    until(lambda: consumer.reports().failed and producer.reports().sent)
    assert consumer.rt.counters.get("recomputed_tokens_total", reason="prefill_aborted") == 10


def test_an_aborted_decode_frees_both_sides(pair: tuple[HalfEngine, HalfEngine]) -> None:
    producer, consumer = pair
    consumer.load(producer, "t", "r", TARGET)
    producer.compute(StepPlan(chunks=[chunk("t", SOURCE[:2], 1, last=False, begins=True)]))
    consumer.consumer.begin_step(StepPlan(aborted_loads=["r"]))
    until(lambda: consumer.reports().received)
    assert not consumer.seen.failed
    fenced = [array.copy() for array in consumer.kv]
    producer.compute(StepPlan(chunks=[chunk("t", SOURCE[2:], 3, last=True, begins=False)]))
    end(producer, "t")
    until(lambda: producer.reports().sent)
    assert all(np.array_equal(now, old) for now, old in zip(consumer.kv, fenced, strict=True))


def test_a_decode_that_never_reserves_frees_the_producer(pair: tuple[HalfEngine, HalfEngine]) -> None:
    producer, consumer = pair
    producer.compute(StepPlan(chunks=[chunk("t", SOURCE, 3, last=True, begins=True)]))
    end(producer, "t")
    engine = producer.rt.engine
    cancel = StreamCancel("r", "t", engine.address, engine.instance_id)
    consumer.consumer.begin_step(StepPlan(cancels=[cancel]))
    until(lambda: producer.reports().sent)


def test_a_released_transfer_frees_the_producer(pair: tuple[HalfEngine, HalfEngine]) -> None:
    producer, _ = pair
    producer.compute(StepPlan(chunks=[chunk("t", SOURCE, 3, last=True, begins=True)]))
    end(producer, "t")
    producer.producer.released("t")
    until(lambda: producer.reports().sent)


def test_a_producer_that_dies_is_noticed_by_the_repeated_reserve(pair: tuple[HalfEngine, HalfEngine]) -> None:
    producer, consumer = pair
    consumer.load(producer, "t", "r", TARGET)
    producer.compute(StepPlan(chunks=[chunk("t", SOURCE[:2], 1, last=False, begins=True)]))
    producer.rt.engine.close()
    until(lambda: consumer.reports().failed)
    assert consumer.rt.counters.get("recomputed_tokens_total", reason="peer_unavailable") == 10


def test_a_preempted_prefill_reads_its_old_blocks_no_more_and_sends_all_again(
    pair: tuple[HalfEngine, HalfEngine],
) -> None:
    producer, consumer = pair
    consumer.load(producer, "t", "r", TARGET)
    producer.compute(StepPlan(chunks=[chunk("t", SOURCE[:2], 1, last=False, begins=True)]))
    producer.producer.preempt(["t"])
    for array in producer.kv:
        array[SOURCE[:2]] = 0
    resumed = chunk("t", [11, 12, 13], 3, last=True, begins=False)
    producer.compute(StepPlan(chunks=[type(resumed)(**(vars(resumed) | {"restart": True}))]))
    end(producer, "t")
    until(lambda: consumer.reports().received and producer.reports().sent)
    assert same(producer, consumer, TARGET, [11, 12, 13])
    assert not consumer.seen.failed
