"""Reports, waker, host link, counters, configuration, store I/O: the small shared parts of the connector."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake.common.errors import ConfigError, StoreUnavailable
from mooncake.vllm.connector_config import StoreConfig, parse
from mooncake.vllm.counters import CounterSet
from mooncake.vllm.host_link import Counters, LoadSample, PrefillStarted, SchedulerHello, WorkerHello
from mooncake.vllm.leg import leg_digest, parse_leg
from mooncake.vllm.link_client import HostLinkClient
from mooncake.vllm.reports import Reports
from mooncake.vllm.step_plan import StoreLoad, StoreSave
from mooncake.vllm.store_io import StoreIO, object_ranges
from mooncake.vllm.traces import TraceBook
from mooncake.vllm.waker import Pinger, Waker
from store.client import GetItem, PutItem
from tests.vllm.half_engines import BLOCK_SIZE, LAYERS, HalfEngine, until
from tests.vllm.host_stand_in import HostStandIn

# --- reports ---

actions = st.lists(st.tuples(st.sampled_from(["hold", "unhold", "finish", "take"]), st.sampled_from("ab")), max_size=40)


@given(actions)
def test_a_finished_request_is_reported_once_and_only_when_nothing_holds_it(steps: list[tuple[str, str]]) -> None:
    reports, holds, finished, sent = Reports(), {"a": 0, "b": 0}, set(), []
    for what, req in steps:
        if what == "hold" and req not in finished:
            holds[req] += 1
            reports.hold(req)
        elif what == "unhold" and holds[req]:
            holds[req] -= 1
            reports.unhold(req)
        elif what == "finish" and req not in finished:
            finished.add(req)
            reports.finished(req)
        new = reports.take().sent
        assert all(req in finished and not holds[req] for req in new)
        sent += sorted(new)
    assert len(sent) == len(set(sent))
    assert set(sent) == {req for req in finished if not holds[req]}


def test_a_load_is_reported_once_and_only_when_awaited() -> None:
    woken: list[int] = []
    reports = Reports(lambda: woken.append(1))
    assert not reports.load_ended("r")
    reports.load_began("r")
    assert reports.loading("r")
    assert reports.load_ended("r", bad_blocks=[3])
    assert not reports.load_ended("r", failed=True)
    batch = reports.take()
    assert (batch.received, batch.failed, batch.bad_blocks, woken) == ({"r"}, set(), {3}, [1])


# --- waiting ---


def test_a_ping_ends_the_wait_even_when_it_came_before() -> None:
    waker, pinger = Waker("engine-a"), Pinger("engine-a")
    pinger.ping()
    time.sleep(0.05)
    began = time.monotonic()
    waker.wait()
    assert time.monotonic() - began < 0.03
    waker.close()
    pinger.ping()  # nobody listens
    pinger.close()


class EngineLoop:
    """Shaped as vLLM's: a queue called `input_queue` on the stack above the connector."""

    def __init__(self, waker: Waker) -> None:
        self.input_queue: queue.Queue[int] = queue.Queue()
        self.waker = waker

    def step(self) -> float:
        began = time.monotonic()
        self.waker.wait()
        return time.monotonic() - began


def test_a_client_request_ends_the_wait() -> None:
    waker = Waker("engine-b")
    loop = EngineLoop(waker)
    assert loop.step() >= 0.04  # nothing to do: a bounded time
    threading.Timer(0.005, lambda: loop.input_queue.put(1)).start()
    assert loop.step() < 0.04
    assert loop.step() < 0.01  # it is still there
    waker.close()


# --- host link ---


def test_messages_reach_the_host_and_releases_come_back(tmp_path: Path) -> None:
    released: list[str] = []
    counters = CounterSet()
    host = HostStandIn(tmp_path, "h")
    link = HostLinkClient(host.endpoint, "half", counters, released.append)
    link.send(WorkerHello("a:1", "i", "f", 1, 2, 3, 4))
    link.send(PrefillStarted("t", 1, 2, 3.0))
    counters.add("loads_total", source="stream", result="ok")
    assert host.peer() == {"peer_address": "a:1", "peer_instance_id": "i"}
    assert host.wait_for(PrefillStarted).transfer_id == "t"
    host.release("t")
    until(lambda: released == ["t"])
    assert link.store_masters() == ()
    host.store_masters("m:1", "m:2")
    until(lambda: link.store_masters() == ("m:1", "m:2"))
    host.store_masters("m:3")
    until(lambda: link.store_masters() == ("m:3",))
    until(lambda: host.counters() == {'mooncake_connector_loads_total{result="ok",source="stream"}': 1.0})
    link.close()
    host.close()


def test_without_a_host_nothing_waits_and_nothing_piles_up(tmp_path: Path) -> None:
    counters = CounterSet()
    link = HostLinkClient(f"ipc://{tmp_path}/nobody", "half", counters)
    for _ in range(10_000):
        link.send(SchedulerHello(32, 100))
        link.send(Counters("half", {}))
    began = time.monotonic()
    link.close()
    assert time.monotonic() - began < 3
    HostLinkClient("", "half", counters).send(SchedulerHello(32, 100))


def test_traces_are_bounded_ordered_and_sent_once() -> None:
    sent: list[Any] = []
    book = TraceBook(sent.append)
    book.add("t", "late", 2.0)
    book.add("t", "early", 1.0, layer=3)
    book.finish("t")
    book.finish("t")
    assert [event["event"] for event in sent[0].events] == ["early", "late"]
    book.add("t", "after the end")
    assert len(sent) == 2
    for i in range(5000):
        book.add(f"u{i}", "never finished")
    assert len(book._open) <= 1024


# --- configuration and legs ---


def test_unknown_configuration_keys_are_errors() -> None:
    assert parse({"store": {"masters": ["a:1"]}}).store == StoreConfig(masters=["a:1"])
    with pytest.raises(ConfigError, match=r"store\.save_deadline_s"):
        parse({"store": {"save_deadline_s": 600}})
    with pytest.raises(ConfigError, match="typo"):
        parse({"typo": 1})
    with pytest.raises(ConfigError, match=r"store\.block_tokens"):
        parse({"store": {"masters": [], "block_tokens": 0}})


def test_legs_are_validated() -> None:
    assert parse_leg(None) is None
    assert parse_leg({"do_remote_prefill": True}) is None
    leg = parse_leg({"mooncake": {"leg": "decode", "transfer_id": "t", "unknown": 1}})
    assert leg is not None and leg.fan_out == 1
    for bad in ({}, {"leg": "other", "transfer_id": "t"}, {"leg": "decode", "transfer_id": "t", "fan_out": 10**9}, 7):
        with pytest.raises(msgspec.ValidationError):
            parse_leg({"mooncake": bad})


def test_the_digest_covers_what_the_kv_depends_on() -> None:
    def digest(tokens: list[int], lora: str | None = None, images: Sequence[str] = ()) -> bytes:
        return leg_digest(
            SimpleNamespace(
                prompt_token_ids=tokens,
                mm_features=[SimpleNamespace(identifier=image) for image in images],
                lora_request=SimpleNamespace(lora_name=lora) if lora else None,
            )
        )

    assert digest([1, 2]) == digest([1, 2])
    assert len({digest([1, 2]), digest([1, 3]), digest([1, 2], "l"), digest([1, 2], None, ["i"])}) == 4


# --- store I/O ---

EACH = 2


class FakeStore:
    """Bytes by key, in this process' memory."""

    def __init__(self) -> None:
        self.objects: dict[bytes, bytes] = {}
        self.error: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()

    def batch_put(self, items: Sequence[PutItem], deadline_s: float) -> list[int]:
        import ctypes

        assert self.gate.wait(5)
        if self.error:
            raise self.error
        for item in items:
            self.objects[item.key] = b"".join(ctypes.string_at(a, n) for a, n in item.ranges)
        return [0] * len(items)

    def batch_get(self, items: Sequence[GetItem], deadline_s: float) -> list[int]:
        import ctypes

        if self.error:
            raise self.error
        return [self._get(item, ctypes.memmove) for item in items]

    def _get(self, item: GetItem, memmove: Any) -> int:
        if item.key not in self.objects:
            return -704
        raw, at = self.objects[item.key], 0
        for address, length in item.ranges:
            memmove(address, raw[at : at + length], length)
            at += length
        return at

    def close(self) -> None:
        return


@pytest.fixture
def store() -> Any:
    engine = HalfEngine("s", seed=3, transfer={"transports": ("local",)})
    client = FakeStore()
    io = StoreIO(engine.rt, StoreConfig(masters=[], block_tokens=EACH * BLOCK_SIZE, max_pending_saves=3), client)
    yield engine, client, io
    client.gate.set()
    io.close()
    engine.close()


def now() -> None:
    return


def test_saved_blocks_come_back_in_other_places(store: Any) -> None:
    engine, client, io = store
    before = [array.copy() for array in engine.kv]
    io.save([StoreSave("r", b"k1", [5, 2]), StoreSave("r", b"k2", [7, 8])], now)
    engine.rt.reports.finished("r")
    until(lambda: engine.reports().sent)
    assert set(client.objects) == {b"k1", b"k2"}
    io.load(StoreLoad("q", [b"k1", b"k2"], [10, 11, 12], 1, time.monotonic() + 5))
    until(lambda: engine.reports().received)
    for array, old in zip(engine.kv, before, strict=True):
        assert (array[[10, 11, 12]] == old[[2, 7, 8]]).all()
        assert (array[:10] == old[:10]).all()
    assert not engine.seen.bad_blocks
    assert engine.rt.counters.get("loads_total", source="store", result="ok") == 1


def test_what_did_not_arrive_is_bad_from_there_on(store: Any) -> None:
    engine, client, io = store
    io.save([StoreSave("r", b"k1", [5, 2])], now)
    until(lambda: client.objects)
    io.load(StoreLoad("q", [b"k1", b"gone", b"k1"], [9, 10, 11, 12, 13, 14], 0, time.monotonic() + 5))
    until(lambda: engine.reports().received)
    assert engine.seen.bad_blocks == {11, 12, 13, 14}
    assert engine.rt.counters.get("recomputed_tokens_total", reason="store_load_failed") == 4 * BLOCK_SIZE


def test_the_host_is_told_of_loads_that_brought_something(store: Any, tmp_path: Path) -> None:
    engine, client, io = store
    host = HostStandIn(tmp_path, "h")
    engine.rt.link = HostLinkClient(host.endpoint, "half", engine.rt.counters)
    io.save([StoreSave("r", b"k1", [5, 2])], now)
    until(lambda: client.objects)
    io.load(StoreLoad("nothing", [b"gone"], [9, 10], 0, time.monotonic() + 5))
    io.load(StoreLoad("whole", [b"k1", b"k1"], [9, 10, 11], 1, time.monotonic() + 5))
    until(lambda: engine.reports().received == {"nothing", "whole"})
    sample = host.wait_for(LoadSample)
    assert (sample.tokens, sample.load_s > 0) == (3 * BLOCK_SIZE, True)
    assert sum(isinstance(message, LoadSample) for message in host.messages) == 1
    engine.rt.link.close()
    host.close()


def test_an_outage_of_the_store_is_logged_once(store: Any, caplog: pytest.LogCaptureFixture) -> None:
    engine, client, io = store
    client.error = StoreUnavailable("no store master is known")
    for i in range(3):
        io.save([StoreSave("r", bytes([i]), [5, 2])], now)
        dropped = i + 1
        until(lambda n=dropped: engine.rt.counters.get("store_dropped_saves_total", reason="unavailable") == n)
    assert len([r for r in caplog.records if r.levelname == "WARNING" and "not saved" in r.message]) == 1


@pytest.mark.parametrize("error", [StoreUnavailable("down"), RuntimeError("a bug")])
def test_a_store_that_fails_costs_a_recompute_and_drops_saves(store: Any, error: Exception) -> None:
    engine, client, io = store
    client.error = error
    io.load(StoreLoad("q", [b"k1"], [9, 10], 0, time.monotonic() + 5))
    io.save([StoreSave("r", b"k1", [5, 2])], now)
    engine.rt.reports.finished("r")
    until(lambda: engine.reports().received and engine.reports().sent)
    assert engine.seen.bad_blocks == {9, 10}
    client.error = None
    io.save([StoreSave("r2", b"k1", [5, 2])], now)
    until(lambda: client.objects)


def test_the_backlog_is_bounded_and_preempted_saves_are_dropped_or_awaited(store: Any) -> None:
    engine, client, io = store
    client.gate.clear()
    io.save([StoreSave("running", b"k0", [1, 2])], now)
    until(lambda: engine.rt.counters.get("pending_saves") == 1 and not io._backlog)
    io.save([StoreSave(f"r{i}", bytes([i]), [3, 4]) for i in range(5)], now)
    assert engine.rt.counters.get("store_dropped_saves_total", reason="backlog") == 2
    io.preempt(["r0", "r1"])
    assert engine.rt.counters.get("store_dropped_saves_total", reason="preempted") == 2
    waited = threading.Thread(target=io.preempt, args=(["running"],))
    waited.start()
    waited.join(0.1)
    assert waited.is_alive()
    client.gate.set()
    waited.join(5)
    assert not waited.is_alive()
    until(lambda: set(client.objects) == {b"k0", bytes([2])})


def test_object_ranges_cover_every_layer_in_order() -> None:
    engine = HalfEngine("x", transfer={"transports": ("local",)})
    layout = engine.rt.layout
    ranges = object_ranges(layout, [None, 3, 4], 1000)
    assert sum(n for _, n in ranges) == 3 * layout.bytes_per_block
    assert len(ranges) == 2 * LAYERS
    assert ranges[0] == (1000, 256)
    assert ranges[1] == (layout.layers[0].base + 3 * 256, 512)
    engine.close()
