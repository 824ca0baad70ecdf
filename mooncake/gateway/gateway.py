"""A gateway's parts, put together, without HTTP and without a registry: tests give it workers by hand.

Knows: which part needs which, and the order in which they start and end. Does not know: what the parts do.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine
from typing import Any

import aiohttp
from prometheus_client import CollectorRegistry

from mooncake.gateway.attempt import Wires
from mooncake.gateway.auth import ApiKeys
from mooncake.gateway.circuit import Circuits
from mooncake.gateway.config import GatewayConfig
from mooncake.gateway.directory import Directory
from mooncake.gateway.legs import engine_headers, host_headers, make_session
from mooncake.gateway.metrics import GatewayMetrics
from mooncake.gateway.parity import Parity
from mooncake.gateway.placement import Placer, Rejected
from mooncake.gateway.prompt import Prompts
from mooncake.gateway.request import Parts
from mooncake.gateway.tokenizer_pool import TokenizerPool
from mooncake.gateway.trace import TraceBook

_log = logging.getLogger(__name__)
CLOSE_S = 5.0


class Gateway:
    """Make it inside of a running event loop; `close()` it there."""

    def __init__(
        self,
        config: GatewayConfig,
        registry: CollectorRegistry,
        *,
        name: str,
        instance_id: str = "",
        cluster_token: str = "",
        pool_type: type[TokenizerPool] = TokenizerPool,
    ) -> None:
        self.config = config
        self.name = name
        self.instance_id = instance_id
        self.started_at = int(time.time())
        self.stopping = False
        self.keys = ApiKeys(config.api_keys)
        self.metrics = GatewayMetrics(registry)
        self.session: aiohttp.ClientSession = make_session(config.connect_timeout_s)
        self.host_headers = host_headers(cluster_token)
        self.engine_headers = engine_headers(cluster_token)
        self.directory = Directory(
            self.metrics, Circuits(failures=config.circuit_failures, open_s=config.circuit_open_s)
        )
        self.pool = pool_type(
            self.metrics,
            processes=config.tokenizer_processes,
            max_waiting=config.tokenizer_queue,
            timeout_s=config.tokenizer_timeout_s,
        )
        self.parity = Parity(self.directory, self.pool, self.session, self.engine_headers)
        self.placer = Placer(self.directory, self.metrics, cluster_token, config.place_timeout_s)
        self.traces = TraceBook(config.trace_requests, name)
        self._tasks: set[asyncio.Task[None]] = set()
        wires = Wires(self.session, self.directory, cluster_token, config.stream_idle_timeout_s, self.background)
        prompts = Prompts(self.pool, self.parity, self.directory, config.trust_request_chat_template)
        self.parts = Parts(config, self.metrics, prompts, self.placer, wires)

    def background(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs what must happen though nobody waits for it (each bounds its own time)."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def ready(self) -> bool:
        """Whether every model that is served has somebody to decode it, and there is one."""
        models = {worker.model for worker in self.directory.workers.values()}
        decoded = {worker.model for worker in self.directory.workers.values() if "decode" in worker.roles}
        return not self.stopping and bool(models) and models == decoded

    def end_requests(self) -> None:
        """What is in flight ends now, with an error event or an error answer: never silently."""
        for life in list(self.parts.lives):
            life.end_now(Rejected(503, "rejected-shutting-down", "This gateway is shutting down.", 1.0))

    async def close(self) -> None:
        await self.parity.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_S)
        await self.placer.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self.session.close()
        await asyncio.to_thread(self.pool.close)
