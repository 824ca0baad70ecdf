"""HTTP surface of the worker host (docs/protocol.md §4): prefill legs, releases, traces, health, metrics, status.

Knows: aiohttp, who may call what. Does not know: how a leg runs (prefill_leg.py) or what ready means (host.py). A
client that closes its connection cancels its handler, and with it the leg.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

import aiohttp
import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from mooncake.common.auth import bearer, check_bearer
from mooncake.common.errors import BodyTooLarge, MooncakeError, NoCapacity, Overloaded, Unauthorized
from mooncake.common.metrics import render
from mooncake.common.net import format_address
from mooncake.vllm import engine_metrics, prefill_leg
from mooncake.vllm.host_config import WorkerConfig
from mooncake.vllm.host_link_server import HostLinkServer

_OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})
_MAX_CONNECTIONS_TO_ENGINE = 100_000
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_encode = msgspec.json.Encoder().encode


class HostHttp:
    """`start` binds; the engine may come later (`engine_url` is set when it serves)."""

    def __init__(
        self,
        config: WorkerConfig,
        link: HostLinkServer,
        metrics: CollectorRegistry,
        *,
        token: str,
        engine_key: str,
        instance_id: str,
        ready: Callable[[], bool],
        status: Callable[[], dict[str, Any]],
    ) -> None:
        self.engine_url = ""
        self.url = ""
        self.legs = 0
        self._config = config
        self._link = link
        self._metrics = metrics
        self._token = token
        self._engine_headers = bearer(engine_key)
        self._instance_id = instance_id
        self._ready = ready
        self._status = status
        self._runner: web.AppRunner | None = None
        self._http: aiohttp.ClientSession | None = None
        self._legs_total = Counter(
            "mooncake_worker_prefill_legs", "Prefill legs by how they ended", ["result"], registry=metrics
        )
        self._leg_seconds = Histogram(
            "mooncake_worker_prefill_leg_seconds", "Finished prefill legs", buckets=_SECONDS, registry=metrics
        )
        self._releases_total = Counter("mooncake_worker_releases", "Releases asked for", registry=metrics)
        Gauge("mooncake_worker_prefill_legs_active", "Prefill legs now", registry=metrics).set_function(
            lambda: float(self.legs)
        )

    # --- life ---

    async def start(self, host: str, port: int) -> str:
        """Listens (port 0: a free one) and returns the base URL. Raises MooncakeError when the port is taken."""
        self._http = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0),
            connector=aiohttp.TCPConnector(limit=_MAX_CONNECTIONS_TO_ENGINE, keepalive_timeout=2.0),
        )
        app = web.Application(client_max_size=self._config.max_body_bytes, middlewares=[self._guard()])
        app.add_routes(
            [
                web.post("/v1/prefill", self._prefill),
                web.post("/v1/transfers/{transfer_id}/release", self._release),
                web.get("/v1/traces/{transfer_id}", self._trace),
                web.get("/v1/status", self._status_page),
                web.get("/health", self._health),
                web.get("/ready", self._is_ready),
                web.get("/metrics", self._metrics_page),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=2.0)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port, backlog=1024).start()
        except OSError as error:
            await self.close()
            raise MooncakeError(f"cannot listen on {format_address(host, port)}: {error.strerror or error}") from error
        self.url = f"http://{format_address(host, self._runner.addresses[0][1])}"
        return self.url

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        if self._http is not None:
            await self._http.close()

    async def engine_get(self, path: str, timeout_s: float) -> str:
        """Text of a GET to vLLM. Raises MooncakeError when it does not answer 200 in time."""
        return await self._engine("GET", path, None, timeout_s)

    async def engine_post(self, path: str, body: bytes, timeout_s: float) -> str:
        """Text of a POST to vLLM. Raises MooncakeError when it does not answer 200 in time."""
        return await self._engine("POST", path, body, timeout_s)

    async def _engine(self, method: str, path: str, body: bytes | None, timeout_s: float) -> str:
        assert self._http is not None
        url = self.engine_url + path
        headers = self._engine_headers | ({"Content-Type": "application/json"} if body is not None else {})
        limit = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._http.request(method, url, data=body, timeout=limit, headers=headers) as answer:
                if answer.status != 200:
                    raise MooncakeError(f"{url} answered {answer.status}")
                return await answer.text()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise MooncakeError(f"{url}: {error!r}") from error

    # --- every call ---

    def _guard(self) -> Middleware:
        """The token, and errors in OpenAI's shape."""

        @web.middleware
        async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
            header = request.headers.get("Authorization")
            try:
                if request.path not in _OPEN_PATHS and not check_bearer(header, self._token):
                    raise Unauthorized("missing or wrong cluster token")
                return await handler(request)
            except web.HTTPRequestEntityTooLarge as error:
                return _error(BodyTooLarge(str(error.text)))
            except MooncakeError as error:
                return _error(error)

        return guarded

    # --- prefill ---

    async def _prefill(self, request: web.Request) -> web.StreamResponse:
        call = prefill_leg.parse(await request.read(), max_leg_s=self._config.max_leg_s)
        if not self.engine_url:
            raise NoCapacity("the engine is not up")
        if self.legs >= self._config.max_prefill_legs:
            raise Overloaded(f"{self.legs} prefill legs run here already")
        assert self._http is not None
        leg = prefill_leg.PrefillLeg(call, self._link, self._http, self.engine_url, self._engine_headers)
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson", "Cache-Control": "no-store"})
        self.legs += 1
        result, begun_s = "abandoned", time.monotonic()
        try:
            await response.prepare(request)
            async with contextlib.aclosing(leg.run()) as events:
                async for event in events:
                    if event["event"] in ("finished", "error"):
                        result = event["event"]  # before the write: a reader may be gone as soon as it has this line
                    await response.write(_encode(event) + b"\n")
            await response.write_eof()
        except (ConnectionError, aiohttp.ClientConnectionError):
            pass  # the reader is gone; `result` says how far it got
        finally:
            self.legs -= 1
            self._legs_total.labels(result).inc()
            if result == "finished":
                self._leg_seconds.observe(time.monotonic() - begun_s)
            else:
                await asyncio.shield(self._link.release(call.transfer_id))
        return response

    # --- the rest ---

    async def _release(self, request: web.Request) -> web.StreamResponse:
        self._releases_total.inc()
        await self._link.release(request.match_info["transfer_id"])
        return web.Response(status=204)

    async def _trace(self, request: web.Request) -> web.StreamResponse:
        events = self._link.trace(request.match_info["transfer_id"])
        if events is None:
            raise _UnknownTransfer("nothing is known of that transfer (any more)")
        return web.Response(body=_encode(events), content_type="application/json")

    async def _status_page(self, _request: web.Request) -> web.StreamResponse:
        return web.Response(body=_encode(self._status()), content_type="application/json")

    async def _health(self, _request: web.Request) -> web.StreamResponse:
        return web.json_response({"status": "ok", "instance_id": self._instance_id})

    async def _is_ready(self, _request: web.Request) -> web.StreamResponse:
        ok = self._ready()
        return web.json_response({"ready": ok}, status=200 if ok else 503)

    async def _metrics_page(self, _request: web.Request) -> web.StreamResponse:
        own, content_type = render(self._metrics)
        text = ""
        if self.engine_url:
            with contextlib.suppress(MooncakeError):
                text = await self.engine_get("/metrics", 5.0)
        body = engine_metrics.merge(own, self._link.counters.values(), text)
        return web.Response(body=body, headers={"Content-Type": content_type})


class _UnknownTransfer(MooncakeError):
    http_status = 404
    error_type = "not_found_error"


def _error(error: MooncakeError) -> web.Response:
    headers = {"Retry-After": "1"} if error.http_status in (429, 503) else {}
    return web.Response(
        body=_encode(prefill_leg.error_body(error)),
        status=error.http_status,
        content_type="application/json",
        headers=headers,
    )
