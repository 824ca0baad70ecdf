"""Stand-ins that speak docs/protocol.md: a worker (host and engine in one server) with scripted faults, and a Conductor over real gRPC."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
from aiohttp import web

from mooncake.common.ids import new_id
from mooncake.common.proto import conductor_pb2 as pb
from mooncake.common.proto import conductor_pb2_grpc
from mooncake.common.registry import InstanceRecord
from mooncake.common.rpc import make_server

WORDS = ["Hel", "lo ", "你", "好", "🦀", '"usage":{', "!"]


class FakeWorker:
    """`prefill_fault`, `decode_fault`: what goes wrong next (popped from the front; empty: nothing)."""

    def __init__(
        self, name: str, roles: tuple[str, ...] = ("prefill", "decode"), model: str = "tiny", **info: Any
    ) -> None:
        self.name = name
        self.instance_id = new_id(name)
        self.roles = roles
        self.model = model
        self.info = info
        self.prefill_faults: list[str] = []
        self.decode_faults: list[str] = []
        self.tokenize: Callable[[dict[str, Any]], list[int]] = lambda body: [1, 2, 3]
        self.prefill_s = 0.0
        self.token_s = 0.0
        self.words = WORDS
        self.cached = 32
        self.running: Counter[str] = Counter()
        self.prefills: list[dict[str, Any]] = []
        self.decodes: list[dict[str, Any]] = []
        self.headers: list[Mapping[str, str]] = []
        self.released: list[str] = []
        self.aborted: Counter[str] = Counter()
        self.resume = asyncio.Event()
        self.url = ""
        self._runner: web.AppRunner | None = None

    @property
    def record(self) -> InstanceRecord:
        info = {
            "roles": list(self.roles),
            "model": self.model,
            "model_path": "",
            "engine_url": self.url,
            "transfer_address": f"127.0.0.1:{9000 + len(self.name)}",
            "transfer_instance_id": "te-" + self.name,
            "fingerprint": "fp",
            "block_size": 32,
            "max_model_len": 4096,
        }
        return InstanceRecord(self.name, self.instance_id, "worker", "", self.url, info | self.info)

    async def __aenter__(self) -> FakeWorker:
        app = web.Application(client_max_size=1 << 30)
        app.add_routes(
            [
                web.post("/v1/prefill", self._prefill),
                web.post("/v1/transfers/{id}/release", self._release),
                web.get("/v1/traces/{id}", self._trace),
                web.post("/v1/completions", self._decode),
                web.post("/v1/chat/completions", self._decode),
                web.post("/tokenize", self._tokenize),
                web.post("/detokenize", self._tokenize),
            ]
        )
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_exc: object) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    # --- host ---

    async def _prefill(self, request: web.Request) -> web.StreamResponse:
        body = (await request.json())["request"]
        self.prefills.append(body)
        self.headers.append(request.headers)
        fault = self.prefill_faults.pop(0) if self.prefill_faults else ""
        if fault.startswith("status"):
            return web.json_response(
                {"error": {"message": "no", "type": "x", "param": None, "code": 1}}, status=int(fault[6:])
            )
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        self.running["prefill"] += 1
        try:
            await response.prepare(request)
            await say(response, {"event": "accepted"})
            if fault == "die before start":
                return abort(request, response)
            if fault == "end early":
                return response
            if fault.startswith("error"):
                error = {"error": {"message": "bad prompt", "type": "BadRequestError", "param": None, "code": 400}}
                await say(response, {"event": "error", "status": int(fault[5:]), "body": error})
                return response
            if fault == "queued":
                await self.resume.wait()
            await say(response, {"event": "started", "computed_tokens": self.cached})
            if fault == "die after start":
                await asyncio.sleep(0.02)
                return abort(request, response)
            if fault == "prefilling":
                await self.resume.wait()
            await asyncio.sleep(self.prefill_s)
            usage = {
                "prompt_tokens": 100,
                "completion_tokens": 1,
                "prompt_tokens_details": {"cached_tokens": self.cached},
            }
            await say(response, {"event": "finished", "usage": usage, "compute_s": 0.01})
            return response
        except (asyncio.CancelledError, ConnectionError):
            self.aborted["prefill"] += 1
            raise
        finally:
            self.running["prefill"] -= 1

    async def _release(self, request: web.Request) -> web.Response:
        self.released.append(request.match_info["id"])
        return web.Response(status=204)

    async def _trace(self, request: web.Request) -> web.Response:
        return web.json_response(
            [{"t": 1.0, "who": self.name, "event": "layer_computed", "layer": 0, "of": request.match_info["id"]}]
        )

    # --- engine ---

    async def _tokenize(self, request: web.Request) -> web.Response:
        return web.json_response({"tokens": self.tokenize(await request.json()), "count": 3, "max_model_len": 4096})

    async def _decode(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.decodes.append(body)
        self.headers.append(request.headers)
        fault = self.decode_faults.pop(0) if self.decode_faults else ""
        self.running["decode"] += 1
        try:
            if fault.startswith("status"):
                status = int(fault[6:])
                return web.json_response(
                    {"error": {"message": "engine says no", "type": "E", "param": "p", "code": status}}, status=status
                )
            if fault == "die before":
                return abort(request, web.Response())
            if fault == "silent":
                await self.resume.wait()
            if body.get("stream"):
                return await self._stream(request, body, fault)
            await asyncio.sleep(self.token_s * len(self.words))
            if fault == "wait":
                await self.resume.wait()
            return web.json_response(self._answer(request, body))
        except (asyncio.CancelledError, ConnectionError):
            self.aborted["decode"] += 1
            raise
        finally:
            self.running["decode"] -= 1

    def _usage(self, done: int) -> dict[str, Any]:
        return {
            "prompt_tokens": 100,
            "completion_tokens": done,
            "total_tokens": 100 + done,
            "prompt_tokens_details": {"cached_tokens": 99},
        }

    def _answer(self, request: web.Request, body: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": "cmpl-" + request.headers["X-Request-Id"],
            "object": "text_completion",
            "model": body.get("model"),
            "choices": [{"index": 0, "text": "".join(self.words), "finish_reason": "stop"}],
            "usage": self._usage(len(self.words)),
            "kv_transfer_params": {"secret": 1},
        }

    async def _stream(self, request: web.Request, body: dict[str, Any], fault: str) -> web.StreamResponse:
        options = body.get("stream_options") or {}
        answer_id = "cmpl-" + request.headers["X-Request-Id"]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        if fault.startswith("error event"):
            await sse(response, {"error": {"message": "broken", "type": "E", "param": None, "code": int(fault[11:])}})
            return response
        size = 1 if fault == "bytes" else 0
        for done, word in enumerate(self.words, 1):
            chunk: dict[str, Any] = {"id": answer_id, "choices": [{"index": 0, "text": word}]}
            if options.get("continuous_usage_stats"):
                chunk["usage"] = {k: v for k, v in self._usage(done).items() if k != "prompt_tokens_details"}
            await sse(response, chunk, size)
            if fault == "die mid" and done == 3:
                await response.write(b'data: {"half":')
                await asyncio.sleep(0.02)
                return abort(request, response)
            if fault == "stall" and done == 3:
                await self.resume.wait()
            if fault == "end mid" and done == 3:
                return response
            await asyncio.sleep(self.token_s)
        if options.get("include_usage"):
            await sse(response, {"id": answer_id, "choices": [], "usage": self._usage(len(self.words))}, size)
        if fault != "no done":
            await response.write(b"data: [DONE]\n\n")
        return response


async def say(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(json.dumps(event).encode() + b"\n")


async def sse(response: web.StreamResponse, chunk: dict[str, Any], size: int = 0) -> None:
    raw = b"data: " + json.dumps(chunk, ensure_ascii=False).encode() + b"\n\n"
    for start in range(0, len(raw), size or len(raw)):
        await response.write(raw[start : start + (size or len(raw))])
        if size:
            await asyncio.sleep(0)


def abort(request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return response


@dataclass
class FakeConductor(conductor_pb2_grpc.ConductorServicer):
    """Places on `prefill` and `decode` (first not excluded), or answers `rejection`."""

    workers: list[FakeWorker] = field(default_factory=list)
    rejection: pb.Rejection | None = None
    delay_s: float = 0.0
    without_prefill: bool = False
    asked: list[pb.PlaceRequest] = field(default_factory=list)
    events: list[pb.RequestEvent] = field(default_factory=list)
    address: str = ""
    _server: grpc.aio.Server | None = None

    async def start(self, token: str = "", address: str = "127.0.0.1:0") -> None:
        self._server, self.address = make_server(address, token=token)
        conductor_pb2_grpc.add_ConductorServicer_to_server(self, self._server)
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0)
            self._server = None

    async def Place(self, request: pb.PlaceRequest, _context: Any) -> pb.PlaceResponse:
        self.asked.append(request)
        await asyncio.sleep(self.delay_s)
        if self.rejection is not None:
            return pb.PlaceResponse(rejection=self.rejection)
        free = [w for w in self.workers if w.instance_id not in request.exclude_instances and w.model == request.model]
        decode = pick(free, "decode", request.pin_decode)
        prefill = None if request.single_worker or self.without_prefill else pick(free, "prefill", request.pin_prefill)
        if decode is None:
            return pb.PlaceResponse(
                rejection=pb.Rejection(status=503, reason="rejected-no-endpoints", message="none", retry_after_s=3)
            )
        placement = pb.Placement(decode=instance(decode), pool_prefix_tokens=64)
        if prefill is not None:
            placement.prefill.CopyFrom(instance(prefill))
        return pb.PlaceResponse(placement=placement)

    async def Report(self, request: pb.ReportRequest, _context: Any) -> pb.ReportResponse:
        self.events.extend(request.events)
        return pb.ReportResponse()

    def kinds(self, request_id: str) -> list[int]:
        return [e.kind for e in self.events if e.request_id == request_id]


def pick(workers: list[FakeWorker], role: str, pin: str) -> FakeWorker | None:
    fitting = [w for w in workers if role in w.roles]
    return next((w for w in fitting if w.name == pin), fitting[0] if fitting else None)


def instance(worker: FakeWorker) -> pb.Instance:
    return pb.Instance(name=worker.name, instance_id=worker.instance_id, http_url=worker.url)
