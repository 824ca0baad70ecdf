"""A gateway behind a real uvicorn socket, two prefill and two decoding stand-ins, and a stand-in Conductor."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
import pytest_asyncio
from prometheus_client import CollectorRegistry

from mooncake.common.election import LeaderRecord
from mooncake.gateway.config import GatewayConfig
from mooncake.gateway.gateway import Gateway
from mooncake.gateway.main import _server
from mooncake.gateway.tokenizer_pool import TokenizerPool, _Slot
from tests.gateway.fakes import FakeConductor, FakeWorker

T = TypeVar("T")
TOKEN = "cluster-token"


class InlinePool(TokenizerPool):
    """The real jobs, in a thread (one at a time, as in a process): a process a test would cost seconds."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._one = asyncio.Lock()

    async def _run(
        self, slot: _Slot, function: Callable[..., T], arguments: tuple[Any, ...], size: int, model_path: str
    ) -> T:
        async with self._one:
            return await asyncio.to_thread(function, *arguments)


async def eventually(what: str, probe: Callable[[], object], timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not probe():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        await asyncio.sleep(0.005)


@dataclass
class Bed:
    """Everything a test needs, in one event loop."""

    gateway: Gateway
    conductor: FakeConductor
    prefills: list[FakeWorker]
    decodes: list[FakeWorker]
    url: str
    http: httpx.AsyncClient

    def value(self, name: str, **labels: str) -> float:
        return self.gateway.metrics.registry.get_sample_value("mooncake_gateway_" + name, labels) or 0.0

    @property
    def workers(self) -> list[FakeWorker]:
        return [*self.prefills, *self.decodes]

    def idle(self) -> bool:
        """Nothing is held anywhere."""
        stages = [s.value for m in self.gateway.metrics.stage.collect() for s in m.samples]
        return (
            self.value("active_requests") == 0
            and not any(stages)
            and not self.gateway.directory.in_flight
            and not any(any(w.running.values()) for w in self.workers)
        )

    async def completion(
        self, *, stream: bool = False, headers: dict[str, str] | None = None, **more: Any
    ) -> httpx.Response:
        body = {"model": "tiny", "prompt": list(range(100)), "max_tokens": 8, "stream": stream} | more
        return await self.http.post("/v1/completions", json=body, headers=headers)


@contextlib.asynccontextmanager
async def make_bed(pool_type: Any = InlinePool, **config: Any) -> AsyncIterator[Bed]:
    settings = GatewayConfig(
        **({"request_deadline_s": 20.0, "stream_idle_timeout_s": 1.0, "circuit_failures": 100} | config)
    )
    async with contextlib.AsyncExitStack() as stack:
        prefills = [await stack.enter_async_context(FakeWorker(f"prefill-{i}", ("prefill",))) for i in range(2)]
        decodes = [await stack.enter_async_context(FakeWorker(f"decode-{i}", ("decode",))) for i in range(2)]
        conductor = FakeConductor([*prefills, *decodes])
        await conductor.start(TOKEN)
        stack.push_async_callback(conductor.stop)
        gateway = Gateway(settings, CollectorRegistry(), name="gateway-0", cluster_token=TOKEN, pool_type=pool_type)
        stack.push_async_callback(gateway.close)
        for worker in (*prefills, *decodes):
            gateway.directory.on_record("up", worker.record)
        gateway.placer.on_leader(LeaderRecord("conductor-0", "c", conductor.address, 1))
        listener = socket.create_server(("127.0.0.1", 0))
        server = _server(gateway)
        # `serve()` without its loop, which looks only ten times a second whether it should end.
        server.config.load()
        server.lifespan = server.config.lifespan_class(server.config)
        await server.startup([listener])
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        client = await stack.enter_async_context(
            httpx.AsyncClient(base_url=url, timeout=30, limits=httpx.Limits(max_connections=None))
        )
        try:
            yield Bed(gateway, conductor, prefills, decodes, url, client)
        finally:
            for worker in (*prefills, *decodes):
                worker.resume.set()
            await server.shutdown([listener])


@pytest_asyncio.fixture
async def bed() -> AsyncIterator[Bed]:
    async with make_bed() as made:
        yield made
