"""The stream to the Conductor, against stand-in Conductors over real gRPC."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio
import pytest

from mooncake.common.block_key import block_keys, root_key, unpack_keys
from mooncake.common.election import LeaderRecord
from mooncake.common.proto import conductor_pb2, conductor_pb2_grpc
from mooncake.common.rpc import make_server
from mooncake.vllm.conductor_link import ConductorLink, WorkerIdentity
from mooncake.vllm.engine_load import DecodeInterval, EngineLoad
from mooncake.vllm.host_link import LoadSample, PrefillFinished
from mooncake.vllm.kv_events import HeldBlocks

WHO = WorkerIdentity("prefill-0", "i-1", "m", ("prefill",), 4, 400, "http://w")
ROOT = root_key(model="m", fingerprint="fp", block_size=4)


class StandInConductor(conductor_pb2_grpc.ConductorServicer):
    def __init__(self) -> None:
        self.reports: list[Any] = []
        self.streams = 0
        self.want_snapshot = False
        self.server: grpc.aio.Server
        self.address = ""

    async def Attach(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        self.streams += 1
        async for report in request_iterator:
            self.reports.append(report)
            yield conductor_pb2.WorkerAck(sequence=report.sequence, want_snapshot=self.want_snapshot)
            self.want_snapshot = False

    async def start(self, address: str = "127.0.0.1:0", token: str = "t") -> StandInConductor:
        self.server, self.address = make_server(address, token=token)
        conductor_pb2_grpc.add_ConductorServicer_to_server(self, self.server)
        await self.server.start()
        return self

    async def stop(self) -> None:
        await self.server.stop(None)

    async def __aenter__(self) -> StandInConductor:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.stop()


class FixedLeader:
    """What the link asks of a registry."""

    def __init__(self) -> None:
        self.record: LeaderRecord | None = None
        self.callbacks: list[Callable[[LeaderRecord | None], None]] = []

    def leader(self, election: str) -> LeaderRecord | None:
        assert election == "conductor"
        return self.record

    def watch_leader(self, election: str, callback: Callable[[LeaderRecord | None], None]) -> Callable[[], None]:
        self.callbacks.append(callback)
        callback(self.record)
        return lambda: self.callbacks.remove(callback)

    def set(self, conductor: StandInConductor | None) -> None:
        self.record = conductor and LeaderRecord("c", conductor.address, conductor.address, 1)
        for callback in self.callbacks:
            callback(self.record)


class Bench:
    def __init__(self) -> None:
        self.leader = FixedLeader()
        self.held = HeldBlocks(model="m", fingerprint="fp", block_size=4)
        self.link = ConductorLink(self.leader, "t", WHO, self.held, flush_s=0.02)  # type: ignore[arg-type]
        self.task = asyncio.create_task(self.link.run())

    def store(self, engine_hash: int, token: int) -> bytes:
        event = {"block_hashes": [engine_hash], "token_ids": [token] * 4, "block_size": 4}
        list(self.held.apply("BlockStored", event))
        self.link.kv_changed()
        return block_keys(ROOT, [token] * 4, 4)[0]

    def remove(self, engine_hash: int) -> None:
        list(self.held.apply("BlockRemoved", {"block_hashes": [engine_hash]}))
        self.link.kv_changed()


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    bench.task.cancel()
    await asyncio.gather(bench.task, return_exceptions=True)
    assert bench.leader.callbacks == []


@pytest.fixture
async def conductor() -> AsyncIterator[StandInConductor]:
    async with await StandInConductor().start() as conductor:
        yield conductor


async def until(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_snapshot_then_deltas(bench: Bench, conductor: StandInConductor) -> None:
    first = bench.store(1, 11)
    bench.leader.set(conductor)
    await until(lambda: bench.link.attached)
    report = conductor.reports[0]
    assert report.snapshot
    assert unpack_keys(report.stored) == [first]
    assert (report.name, report.instance_id, report.model, list(report.roles)) == ("prefill-0", "i-1", "m", ["prefill"])
    assert (report.block_size, report.kv_capacity_tokens, report.http_url) == (4, 400, "http://w")
    second = bench.store(2, 22)
    bench.remove(1)
    await until(lambda: len(conductor.reports) == 2)
    report = conductor.reports[1]
    assert not report.snapshot
    assert (unpack_keys(report.stored), unpack_keys(report.removed)) == ([second], [first])
    assert [r.sequence for r in conductor.reports] == [1, 2]


async def test_loads_and_samples(bench: Bench, conductor: StandInConductor) -> None:
    bench.leader.set(conductor)
    await until(lambda: bench.link.attached)
    bench.link.prefill_finished(PrefillFinished("x", 100, 32, 0.5))
    bench.link.decoded(DecodeInterval(batch=2.0, kv_tokens=50.0, tbt_s=0.01))
    bench.link.loaded(LoadSample(tokens=256, load_s=0.125))
    bench.link.set_load(EngineLoad(running=2, waiting=1, kv_usage=0.5))
    await until(lambda: conductor.reports[-1].running)
    report = conductor.reports[-1]
    assert (report.running, report.waiting, report.kv_usage) == (2, 1, 0.5)
    samples = [s for r in conductor.reports for s in r.prefill_samples]
    assert [(s.prompt_tokens, s.cached_tokens, s.compute_s) for s in samples] == [(100, 32, 0.5)]
    assert [(s.batch, s.kv_tokens, s.tbt_s) for r in conductor.reports for s in r.decode_samples] == [(2.0, 50.0, 0.01)]
    assert [(s.tokens, s.load_s) for r in conductor.reports for s in r.load_samples] == [(256, 0.125)]


async def test_many_changes_make_few_messages(bench: Bench, conductor: StandInConductor) -> None:
    bench.leader.set(conductor)
    await until(lambda: bench.link.attached)
    for i in range(500):
        bench.store(i, i)
        await asyncio.sleep(0)
    await until(lambda: sum(len(unpack_keys(r.stored)) for r in conductor.reports) == 500)
    assert len(conductor.reports) < 100


async def test_a_wanted_snapshot_comes(bench: Bench, conductor: StandInConductor) -> None:
    key = bench.store(1, 1)
    bench.leader.set(conductor)
    await until(lambda: bench.link.attached)
    conductor.want_snapshot = True
    bench.link.set_load(EngineLoad(running=1))
    await until(lambda: sum(r.snapshot for r in conductor.reports) == 2)
    assert unpack_keys(conductor.reports[-1].stored) == [key]


async def test_a_restarted_conductor_gets_everything(bench: Bench) -> None:
    async with await StandInConductor().start() as conductor:
        bench.leader.set(conductor)
        await until(lambda: bench.link.attached)
    await until(lambda: not bench.link.attached)
    key = bench.store(5, 5)
    async with await StandInConductor().start(conductor.address) as again:
        await until(lambda: again.reports)
        assert again.reports[0].snapshot
        assert unpack_keys(again.reports[0].stored) == [key]


async def test_a_new_leader_is_followed(bench: Bench, conductor: StandInConductor) -> None:
    bench.leader.set(conductor)
    await until(lambda: bench.link.attached)
    async with await StandInConductor().start() as other:
        bench.leader.set(other)
        await until(lambda: other.reports)
        assert other.reports[0].snapshot
        await until(lambda: bench.link.attached)
        bench.leader.set(None)
        await until(lambda: not bench.link.attached)


async def test_a_wrong_token_is_retried_slowly(bench: Bench) -> None:
    async with await StandInConductor().start(token="another") as conductor:
        bench.leader.set(conductor)
        await until(lambda: bench.link.streams >= 2)
        begun_s, before = time.monotonic(), bench.link.streams
        await until(lambda: bench.link.streams >= before + 3)
        assert time.monotonic() - begun_s > 0.3, "each try waits longer"
        assert not bench.link.attached
        assert not bench.task.done()


async def test_drain_is_told_before_it_returns(bench: Bench, conductor: StandInConductor) -> None:
    bench.leader.set(conductor)
    await until(lambda: bench.link.attached)
    await bench.link.drain(5.0)
    await until(lambda: conductor.reports[-1].draining)


async def test_drain_without_conductor_returns_at_once(bench: Bench) -> None:
    await asyncio.wait_for(bench.link.drain(5.0), 0.5)
