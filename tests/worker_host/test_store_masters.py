"""Where store masters are, from the registry's leader to the store clients inside vLLM: over a real host link, without restarts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, cast

import pytest

from mooncake.common.election import LeaderRecord
from mooncake.common.errors import StoreUnavailable
from mooncake.common.proto import store_pb2, store_pb2_grpc
from mooncake.common.rpc import make_server
from mooncake.vllm.counters import CounterSet
from mooncake.vllm.engine_start import follow_store_masters
from mooncake.vllm.host_link import LoadSample, SchedulerHello, WorkerHello
from mooncake.vllm.host_link_server import HostLinkServer
from mooncake.vllm.link_client import HostLinkClient
from store.client import StoreClient
from tests.worker_host.test_conductor_link import until

HELLO = WorkerHello("127.0.0.1:1", "t", "fp", 4, 100, 32, 1024)


class FixedLeader:
    """What is asked of a registry."""

    def __init__(self) -> None:
        self.record: LeaderRecord | None = None
        self.callbacks: list[Callable[[LeaderRecord | None], None]] = []

    def leader(self, election: str) -> LeaderRecord | None:
        assert election == "store-master"
        return self.record

    def watch_leader(self, election: str, callback: Callable[[LeaderRecord | None], None]) -> Callable[[], None]:
        self.callbacks.append(callback)
        callback(self.record)
        return lambda: self.callbacks.remove(callback)

    def set(self, address: str) -> None:
        self.record = LeaderRecord("m", "i", address, 1) if address else None
        for callback in self.callbacks:
            callback(self.record)


class StandInMaster(store_pb2_grpc.StoreMasterServicer):
    """Holds one leading key of any."""

    async def Query(self, request: Any, context: Any) -> Any:
        return store_pb2.QueryResponse(prefix=1, lengths=[1])


class Bench:
    def __init__(self, folder: Path) -> None:
        self.registry = FixedLeader()
        self.samples: list[LoadSample] = []
        self.server = HostLinkServer(f"ipc://{folder}/link", "prefill-0", on_load=self.samples.append)
        self.server.start()
        following = follow_store_masters(cast(Any, self.registry), self.server.set_store_masters)
        self.tasks = [asyncio.create_task(self.server.run()), asyncio.create_task(following)]
        self.clients: list[HostLinkClient] = []

    def half(self, name: str) -> HostLinkClient:
        client = HostLinkClient(self.server.endpoint, name, CounterSet())
        self.clients.append(client)
        client.send(HELLO if name == "worker" else SchedulerHello(32, 4096))
        return client

    async def close(self) -> None:
        for client in self.clients:
            await asyncio.to_thread(client.close)
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.server.close()


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    await bench.close()
    assert bench.registry.callbacks == []


async def test_both_halves_are_told_at_their_hello_and_at_each_change(bench: Bench) -> None:
    worker = bench.half("worker")
    await asyncio.wait_for(asyncio.shield(bench.server.worker_hello), 5)
    assert worker.store_masters() == ()
    bench.registry.set("m:1")
    await until(lambda: worker.store_masters() == ("m:1",))
    scheduler = bench.half("scheduler")
    await until(lambda: scheduler.store_masters() == ("m:1",))
    bench.registry.set("")  # nobody leads: the last one may come back
    bench.registry.set("m:2")
    await until(lambda: worker.store_masters() == scheduler.store_masters() == ("m:2",))


async def test_a_half_that_begins_anew_under_its_name_is_told_again(bench: Bench) -> None:
    bench.registry.set("m:1")
    first = bench.half("worker")
    await until(lambda: first.store_masters() == ("m:1",))
    await asyncio.to_thread(first.close)
    second = bench.half("worker")
    await until(lambda: second.store_masters() == ("m:1",))


async def test_a_client_gets_the_pool_when_a_master_comes_later_and_follows_the_next(bench: Bench) -> None:
    half = bench.half("scheduler")
    client = StoreClient(cast(Any, None), half.store_masters, name="prefill-0-scheduler", breaker_open_s=0.05)

    def looked_up() -> bool:
        try:
            return client.prefix_len([b"k" * 16], 1.0) == 1
        except StoreUnavailable:
            return False

    assert not await asyncio.to_thread(looked_up)
    for _ in range(2):
        server, address = make_server("127.0.0.1:0", token="")
        store_pb2_grpc.add_StoreMasterServicer_to_server(StandInMaster(), server)
        await server.start()
        bench.registry.set(address)
        deadline = time.monotonic() + 10
        while not await asyncio.to_thread(looked_up):
            assert time.monotonic() < deadline
        await server.stop(None)
    await asyncio.to_thread(client.close)


async def test_loads_reach_the_host(bench: Bench) -> None:
    bench.half("worker").send(LoadSample(512, 0.25))
    await until(lambda: bench.samples == [LoadSample(512, 0.25)])
