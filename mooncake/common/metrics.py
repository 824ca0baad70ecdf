"""Prometheus registry of a role, and the small HTTP server of roles that speak gRPC: /health, /ready, /metrics.

Does not know: what a role measures. The gateway and the worker host have HTTP servers of their own and use only
`new_registry`, `start_loop_lag` and `render`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

from aiohttp import web
from prometheus_client import CollectorRegistry, GCCollector, Histogram, PlatformCollector, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from mooncake.common.errors import MooncakeError
from mooncake.common.net import format_address

_LAG_PERIOD_S = 0.5
_LAG_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


def new_registry() -> CollectorRegistry:
    """A registry with process, platform and garbage collector metrics (not the library's global one: tests start many
    roles).
    """
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return registry


def start_loop_lag(registry: CollectorRegistry) -> asyncio.Task[None]:
    """Measures how late this event loop wakes up. Cancel the task to end it."""
    lag = Histogram(
        "mooncake_event_loop_lag_seconds", "How late the event loop woke up", buckets=_LAG_BUCKETS_S, registry=registry
    )

    async def measure() -> None:
        while True:
            start = time.monotonic()
            await asyncio.sleep(_LAG_PERIOD_S)
            lag.observe(max(0.0, time.monotonic() - start - _LAG_PERIOD_S))

    return asyncio.create_task(measure(), name="loop-lag")


def render(registry: CollectorRegistry) -> tuple[bytes, str]:
    """Body and content type of `/metrics`."""
    return generate_latest(registry), CONTENT_TYPE_LATEST


class ServedUrl(str):
    """Base URL of a running side server (`http://host:port`), which can be closed."""

    _runner: web.AppRunner
    _lag: asyncio.Task[None]

    async def close(self) -> None:
        self._lag.cancel()
        await self._runner.cleanup()


async def serve_http(
    host: str,
    port: int,
    registry: CollectorRegistry,
    *,
    ready: Callable[[], bool],
    routes: Iterable[web.RouteDef] = (),
    instance_id: str = "",
) -> ServedUrl:
    """Starts the side server (port 0: a free one). `/health` answers while the loop runs, `/ready` 200 or 503 by
    `ready()`.

    `instance_id`, when given, is part of `/health`, so that a prober can tell a restart on the same port. Raises
    MooncakeError when the port is taken.
    """

    async def health(_request: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "instance_id": instance_id} if instance_id else {"status": "ok"})

    async def is_ready(_request: web.Request) -> web.Response:
        ok = ready()
        return web.json_response({"ready": ok}, status=200 if ok else 503)

    async def metrics(_request: web.Request) -> web.Response:
        body, content_type = render(registry)
        return web.Response(body=body, headers={"Content-Type": content_type})

    app = web.Application()
    app.add_routes([web.get("/health", health), web.get("/ready", is_ready), web.get("/metrics", metrics), *routes])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=2.0)
    await runner.setup()
    site = web.TCPSite(runner, host, port)
    try:
        await site.start()
    except OSError as error:
        await runner.cleanup()
        raise MooncakeError(f"cannot listen on {format_address(host, port)}: {error.strerror or error}") from error
    bound = runner.addresses[0][1]
    url = ServedUrl(f"http://{format_address(host, bound)}")
    url._runner = runner
    url._lag = start_loop_lag(registry)
    return url
