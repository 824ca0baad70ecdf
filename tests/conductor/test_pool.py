"""The store look-up against a real gRPC server that answers, dawdles, or is gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc.aio
import pytest_asyncio

from conductor.config import ConductorConfig
from conductor.pool import Breaker, StorePool
from mooncake.common.block_key import store_keys, unpack_keys
from mooncake.common.clock import MonotonicClock, VirtualClock
from mooncake.common.ids import BlockKey
from mooncake.common.proto import store_pb2, store_pb2_grpc
from mooncake.common.rpc import make_server
from tests.conductor.helpers import keys


class Store(store_pb2_grpc.StoreMasterServicer):
    """Holds `held`; each answer takes `delay_s`."""

    def __init__(self) -> None:
        self.held: set[BlockKey] = set()
        self.delay_s = 0.0
        self.asked = 0
        self.address = ""

    async def Query(
        self, request: store_pb2.QueryRequest, context: grpc.aio.ServicerContext
    ) -> store_pb2.QueryResponse:
        self.asked += 1
        await asyncio.sleep(self.delay_s)
        names = unpack_keys(request.keys)
        prefix = next((i for i, name in enumerate(names) if name not in self.held), len(names))
        return store_pb2.QueryResponse(lengths=[int(name in self.held) for name in names], prefix=prefix)


@pytest_asyncio.fixture
async def store() -> AsyncIterator[Store]:
    service = Store()
    server, service.address = make_server("127.0.0.1:0", token="secret")
    store_pb2_grpc.add_StoreMasterServicer_to_server(service, server)
    await server.start()
    yield service
    await server.stop(grace=None)


def pool_of(store: Store, **fields: float) -> StorePool:
    fields.setdefault("pool_lookup_deadline_s", 0.5)
    config = ConductorConfig(pool_breaker_failures=2, pool_breaker_open_s=60, **fields)  # type: ignore[arg-type]
    return StorePool(config, MonotonicClock(), lambda: store.address, token="secret")


async def test_the_prefix_in_store_blocks(store: Store) -> None:
    pool, prompt = pool_of(store), keys(100)
    objects = store_keys(prompt, 16)  # 256 tokens of 16-token engine blocks
    store.held = set(objects[:4])
    assert await pool.prefix_tokens(prompt, 16) == 4 * 256
    store.held = set(objects[1:])
    assert await pool.prefix_tokens(prompt, 16) == 0
    await pool.close()


async def test_nothing_is_asked_for_short_prompts_or_blocks_that_do_not_fit(store: Store) -> None:
    pool = pool_of(store)
    assert await pool.prefix_tokens(keys(15), 16) == 0
    assert await pool.prefix_tokens(keys(100), 48) == 0
    assert await pool.prefix_tokens([], 0) == 0
    assert store.asked == 0
    await pool.close()


async def test_a_slow_store_costs_a_deadline_and_soon_nothing(store: Store) -> None:
    pool, prompt = pool_of(store, pool_lookup_deadline_s=0.02), keys(100)
    store.delay_s = 5.0
    loop = asyncio.get_running_loop()
    start_s = loop.time()
    for _ in range(20):
        assert await pool.prefix_tokens(prompt, 16) == 0
    assert loop.time() - start_s < 1.0
    assert pool.failures == 2
    assert pool.breaker.is_open
    assert store.asked <= 2
    await pool.close()


async def test_no_master_and_a_new_master(store: Store) -> None:
    address, store.address = store.address, ""
    pool, prompt = pool_of(store), keys(32)
    store.held = set(store_keys(prompt, 16))
    assert await pool.prefix_tokens(prompt, 16) == 0
    store.address = address
    assert await pool.prefix_tokens(prompt, 16) == 512
    await pool.close()


def test_breaker_lets_one_try_through_now_and_then() -> None:
    clock, breaker = VirtualClock(), Breaker(failures=3, open_s=2.0)
    for _ in range(3):
        assert breaker.allows(clock.now())
        breaker.failed(clock.now())
    assert not breaker.allows(1.9)
    assert breaker.allows(2.0)
    assert not breaker.allows(2.1)  # the try is under way
    breaker.failed(2.1)
    assert not breaker.allows(3.9)
    assert breaker.allows(4.1)
    breaker.succeeded()
    assert breaker.allows(4.2)
