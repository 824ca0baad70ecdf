"""The host's HTTP surface against a stand-in engine, with a real host link between host and a stand-in connector half."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import zmq
import zmq.asyncio
from aiohttp import web

from mooncake.common.metrics import new_registry
from mooncake.vllm import host_link
from mooncake.vllm.host_config import WorkerConfig
from mooncake.vllm.host_http import HostHttp
from mooncake.vllm.host_link_server import HostLinkServer

TOKEN, ENGINE_KEY = "cluster-token", "engine-key"
USAGE = {"prompt_tokens": 5, "total_tokens": 6, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 2}}
METRICS = "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 1.0\n"


class StandInEngine:
    """Answers like vLLM; `answer` decides how, `arrived` and `aborted` tell what happened."""

    def __init__(self) -> None:
        self.arrived = asyncio.Event()
        self.aborted = asyncio.Event()
        self.go_on = asyncio.Event()
        self.bodies: list[Any] = []
        self.answer: Callable[[], web.Response] = lambda: web.json_response({"choices": [], "usage": USAGE})

    async def completions(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {ENGINE_KEY}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        self.bodies.append(await request.json())
        self.arrived.set()
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.aborted.set()
            raise
        return self.answer()

    async def metrics(self, _request: web.Request) -> web.Response:
        return web.Response(text=METRICS)

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator[str]:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/v1/completions", self.completions)
        app.router.add_get("/metrics", self.metrics)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


class Bench:
    """Host, engine and the connector's worker half."""

    def __init__(self, http: HostHttp, link: HostLinkServer, engine: StandInEngine, half: zmq.asyncio.Socket) -> None:
        self.http, self.link, self.engine, self.half = http, link, engine, half
        self.session = aiohttp.ClientSession(http.url, headers={"Authorization": f"Bearer {TOKEN}"})

    async def say(self, message: host_link.ToHost) -> None:
        await self.half.send(host_link.encode(message))

    async def released(self) -> str:
        async with asyncio.timeout(5):
            message = host_link.decode_to_connector(await self.half.recv())
        assert isinstance(message, host_link.Release)
        return message.transfer_id

    def prefill(self, transfer_id: str = "x1", deadline_s: float = 20.0, **request: Any) -> Any:
        params = {"mooncake": {"leg": "prefill", "transfer_id": transfer_id, "deadline_s": deadline_s}}
        body = {"request": {"model": "m", "prompt": [1, 2], "max_tokens": 1, "kv_transfer_params": params} | request}
        return self.session.post("/v1/prefill", json=body)


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    link = HostLinkServer(f"ipc://{tmp_path}/link", "prefill-0", traces_kept=2)
    link.start()
    reading = asyncio.create_task(link.run())
    config = WorkerConfig(device="cpu", max_prefill_legs=3, max_body_bytes=100_000)
    http = HostHttp(
        config,
        link,
        new_registry(),
        token=TOKEN,
        engine_key=ENGINE_KEY,
        instance_id="i-1",
        ready=lambda: bool(http.engine_url),
        status=lambda: {"name": "prefill-0"},
    )
    engine = StandInEngine()
    context = zmq.asyncio.Context()
    half = context.socket(zmq.DEALER)
    half.setsockopt(zmq.IDENTITY, b"worker")
    half.connect(link.endpoint)
    async with engine.serve() as url:
        await http.start("127.0.0.1", 0)
        bench = Bench(http, link, engine, half)
        await bench.say(host_link.WorkerHello("127.0.0.1:1", "t", "fp", 4, 100, 32, 1024))
        await asyncio.wait_for(asyncio.shield(link.worker_hello), 5)
        http.engine_url = url
        yield bench
        await bench.session.close()
        await http.close()
    half.close()
    context.term()
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    link.close()


async def next_event(response: aiohttp.ClientResponse) -> dict[str, Any]:
    async with asyncio.timeout(5):
        line = await response.content.readline()
    event: dict[str, Any] = msgspec.json.decode(line)
    return event


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_leg_tells_each_event_at_once(bench: Bench) -> None:
    async with bench.prefill() as response:
        assert response.content_type == "application/x-ndjson"
        assert await next_event(response) == {"event": "accepted"}
        await bench.engine.arrived.wait()
        await bench.say(host_link.PrefillStarted("x1", 2, 5, 0.0))
        assert await next_event(response) == {"event": "started", "computed_tokens": 2}
        await bench.say(host_link.PrefillFinished("x1", 5, 2, 0.25))
        bench.engine.go_on.set()
        assert await next_event(response) == {"event": "finished", "usage": USAGE, "compute_s": 0.25}
        assert await response.content.read() == b""
    assert bench.engine.bodies[0]["kv_transfer_params"]["mooncake"]["transfer_id"] == "x1"
    assert (bench.http.legs, bench.link.legs) == (0, 0)


async def test_a_connector_that_says_nothing(bench: Bench) -> None:
    bench.engine.go_on.set()
    async with bench.prefill() as response:
        assert [(await next_event(response))["event"] for _ in range(2)] == ["accepted", "finished"]


async def test_errors_of_the_engine_pass(bench: Bench) -> None:
    body = {"error": {"message": "too long", "type": "BadRequestError", "param": "prompt", "code": 400}}
    bench.engine.answer = lambda: web.json_response(body, status=400)
    bench.engine.go_on.set()
    async with bench.prefill() as response:
        await next_event(response)
        assert await next_event(response) == {"event": "error", "status": 400, "body": body}
    assert await bench.released() == "x1"


@pytest.mark.parametrize("answer", [web.Response(text="oops", status=200), web.Response(text="<html>", status=500)])
async def test_nonsense_of_the_engine_is_an_upstream_error(bench: Bench, answer: web.Response) -> None:
    bench.engine.answer = lambda: answer
    bench.engine.go_on.set()
    async with bench.prefill() as response:
        await next_event(response)
        event = await next_event(response)
    assert (event["event"], event["status"], event["body"]["error"]["type"]) == ("error", 502, "upstream_error")


async def test_an_engine_that_is_gone(bench: Bench) -> None:
    bench.http.engine_url = "http://127.0.0.1:9"
    async with bench.prefill() as response:
        await next_event(response)
        assert (await next_event(response))["status"] == 502


@pytest.mark.parametrize("started", [False, True])
async def test_a_deadline_ends_the_leg_and_the_engines_request(bench: Bench, started: bool) -> None:
    async with bench.prefill(deadline_s=0.3) as response:
        await next_event(response)
        if started:
            await bench.say(host_link.PrefillStarted("x1", 0, 5, 0.0))
            await next_event(response)
        assert (await next_event(response))["status"] == 504
    await asyncio.wait_for(bench.engine.aborted.wait(), 5)
    assert await bench.released() == "x1"


@pytest.mark.parametrize("started", [False, True])
async def test_closing_the_connection_aborts_the_leg(bench: Bench, started: bool) -> None:
    response = await bench.prefill()
    await next_event(response)
    await bench.engine.arrived.wait()
    if started:
        await bench.say(host_link.PrefillStarted("x1", 0, 5, 0.0))
        await next_event(response)
    response.close()
    await asyncio.wait_for(bench.engine.aborted.wait(), 2)
    assert await bench.released() == "x1"
    await until(lambda: bench.http.legs == 0 and bench.link.legs == 0)


async def test_a_finished_leg_is_not_released(bench: Bench) -> None:
    bench.engine.go_on.set()
    response = await bench.prefill()
    assert [(await next_event(response))["event"] for _ in range(2)] == ["accepted", "finished"]
    response.close()
    async with bench.session.post("/v1/transfers/other/release") as answer:
        assert answer.status == 204
    assert await bench.released() == "other"


async def test_more_legs_than_allowed(bench: Bench) -> None:
    held = [await bench.prefill(f"x{i}") for i in range(3)]
    async with bench.prefill("x3") as response:
        assert response.status == 429
        assert response.headers["Retry-After"] == "1"
        assert (await response.json())["error"]["type"] == "rate_limit_error"
    for response in held:
        response.close()
    await until(lambda: bench.http.legs == 0)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"[]", 400),
        (b'{"request": {}}', 400),
        (b'{"request": {"kv_transfer_params": {"mooncake": {"transfer_id": 5}}}}', 400),
        (b'{"request": {"kv_transfer_params": {"mooncake": {"transfer_id": ""}}}}', 400),
        (b'{"request": {"stream": true, "kv_transfer_params": {"mooncake": {"transfer_id": "x"}}}}', 400),
        (b" " * 200_000, 413),
    ],
)
async def test_bad_bodies(bench: Bench, body: bytes, status: int) -> None:
    async with bench.session.post("/v1/prefill", data=body) as response:
        assert response.status == status
        assert (await response.json())["error"]["type"] == "invalid_request_error"


async def test_the_token_guards_everything_but_probes_and_metrics(bench: Bench) -> None:
    async with aiohttp.ClientSession(bench.http.url) as stranger:
        calls: list[Callable[[], Awaitable[aiohttp.ClientResponse]]] = [
            lambda: stranger.post("/v1/prefill", data=b"{}"),
            lambda: stranger.post("/v1/transfers/x/release"),
            lambda: stranger.get("/v1/traces/x"),
            lambda: stranger.get("/v1/status", headers={"Authorization": "Bearer wrong"}),
        ]
        assert [(await call()).status for call in calls] == [401] * 4
        for path in ("/health", "/ready", "/metrics"):
            assert (await stranger.get(path)).status == 200


async def test_probes_metrics_and_status(bench: Bench) -> None:
    async with bench.session.get("/health") as response:
        assert await response.json() == {"status": "ok", "instance_id": "i-1"}
    async with bench.session.get("/v1/status") as response:
        assert await response.json() == {"name": "prefill-0"}
    await bench.say(host_link.Counters("worker", {"mooncake_connector_loads_total": 4.0}))
    await until(lambda: bool(bench.link.counters))
    async with bench.session.get("/metrics") as response:
        text = await response.text()
    assert "vllm:num_requests_running 1.0" in text
    assert "mooncake_connector_loads_total 4.0" in text
    assert "mooncake_worker_prefill_legs_active 0.0" in text
    bench.http.engine_url = ""
    async with bench.session.get("/ready") as response:
        assert response.status == 503
    async with bench.prefill() as response:
        assert response.status == 503
    async with bench.session.get("/nothing") as response:
        assert response.status == 404


async def test_traces_are_kept_for_the_latest_transfers(bench: Bench) -> None:
    for i in range(3):
        await bench.say(host_link.TraceEvents(f"x{i}", [{"t": 2.0, "event": "layer_sent", "layer": 0}]))
        await bench.say(host_link.TraceEvents(f"x{i}", [{"t": 1.0, "event": "layer_computed", "layer": 0}]))
    await until(lambda: len(bench.link.trace("x2") or []) == 2)
    async with bench.session.get("/v1/traces/x2") as response:
        assert await response.json() == [
            {"who": "prefill-0", "t": 1.0, "event": "layer_computed", "layer": 0},
            {"who": "prefill-0", "t": 2.0, "event": "layer_sent", "layer": 0},
        ]
    async with bench.session.get("/v1/traces/x0") as response:
        assert response.status == 404


async def test_garbage_on_the_host_link_is_dropped(bench: Bench) -> None:
    await bench.half.send(b"\xc1")
    await until(lambda: bench.link.dropped == 1)
