"""The HTTP surface: routes and error shapes (OpenAI's, always).

Knows: FastAPI. Does not know: how a request is admitted (admission.py) or lives (request.py).
"""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from mooncake.common.errors import BadRequest, ModelNotFound, MooncakeError, UpstreamFailed
from mooncake.common.metrics import render
from mooncake.gateway.admission import admit, find_model, read_body
from mooncake.gateway.front import Front
from mooncake.gateway.gateway import Gateway
from mooncake.gateway.legs import read_limited
from mooncake.gateway.openai import Route, error_body, error_object
from mooncake.gateway.sink import error_headers
from mooncake.gateway.trace import joined

RELAY_TIMEOUT_S = 30.0


def make_app(gateway: Gateway) -> ASGIApp:
    """The ASGI application of a gateway."""
    app = FastAPI(title="Mooncake gateway", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.add_exception_handler(MooncakeError, _on_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(RequestValidationError, _on_http_error)
    _serving_routes(app, gateway)
    _model_routes(app, gateway)
    _operating_routes(app, gateway)
    return Front(app, gateway.keys)


# --- serving ---------------------------------------------------------------------------------------------------------


def _serving_routes(app: FastAPI, gateway: Gateway) -> None:
    for route in Route:

        async def serve(request: Request, route: Route = route) -> Response:
            try:
                return await admit(gateway, request, route)
            except MooncakeError as error:
                gateway.metrics.requests.labels("other", str(route), str(error.http_status)).inc()
                raise

        app.add_api_route(str(route), serve, methods=["POST"])


# --- models and tokens -----------------------------------------------------------------------------------------------


def _model_routes(app: FastAPI, gateway: Gateway) -> None:
    def card(name: str) -> dict[str, Any]:
        model = gateway.directory.model(name)
        assert model is not None
        parent = model.name if model.lora else None
        limit = model.max_model_len
        return {
            "id": name,
            "object": "model",
            "created": gateway.started_at,
            "owned_by": "mooncake",
            "root": name,
            "parent": parent,
            "max_model_len": limit,
        }

    @app.get("/v1/models")
    async def models() -> Response:
        return _json({"object": "list", "data": [card(name) for name in gateway.directory.names()]})

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        if gateway.directory.model(name) is None:
            raise ModelNotFound(f"The model `{name}` does not exist.", param="model", error_code="model_not_found")
        return _json(card(name))

    async def relay(request: Request) -> Response:
        body = await read_body(request, gateway.config.max_body_bytes)
        try:
            asked = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadRequest(f"The request body is not valid JSON: {error}", error_code="invalid_json") from None
        if not isinstance(asked, dict) or not isinstance(asked.get("model"), str | None):
            raise BadRequest("The request body must be a JSON object whose `model` is a string.", param="model")
        model = find_model(gateway, asked.get("model"))
        worker = min(model.workers, key=lambda each: gateway.directory.in_flight[each.instance_id])
        headers = gateway.engine_headers | {
            "Content-Type": "application/json",
            "X-Request-Id": request.state.request_id,
        }
        try:
            async with (
                asyncio.timeout(RELAY_TIMEOUT_S),
                gateway.session.post(worker.engine_url + request.url.path, data=body, headers=headers) as answer,
            ):
                return Response(await read_limited(answer, 64 << 20), answer.status, media_type="application/json")
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
            raise UpstreamFailed("The worker does not answer.") from None

    app.add_api_route("/tokenize", relay, methods=["POST"])
    app.add_api_route("/detokenize", relay, methods=["POST"])


# --- operating -------------------------------------------------------------------------------------------------------


def _operating_routes(app: FastAPI, gateway: Gateway) -> None:
    @app.get("/health")
    @app.get("/live")
    async def health() -> Response:
        return _json({"status": "ok", "instance_id": gateway.instance_id})

    @app.get("/ready")
    async def ready() -> Response:
        models: dict[str, dict[str, int]] = {}
        for worker in gateway.directory.workers.values():
            counts = models.setdefault(worker.model, {"prefill": 0, "decode": 0})
            for role in worker.roles & counts.keys():
                counts[role] += 1
        ok = gateway.ready()
        return _json({"ready": ok, "models": models}, 200 if ok else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        body, content_type = render(gateway.metrics.registry)
        return Response(body, headers={"content-type": content_type})

    @app.get("/debug/trace/{any_id}")
    async def trace(any_id: str) -> Response:
        found = gateway.traces.find(any_id)
        if found is None:
            raise HTTPException(404, f"No request `{any_id}` is remembered.")
        return _json(await joined(found, gateway.session, gateway.host_headers))


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


async def _on_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, MooncakeError)
    return Response(error_body(error), error.http_status, error_headers(error), "application/json")


async def _on_http_error(_request: Request, error: Exception) -> Response:
    status, text, headers = 400, "The request is malformed.", None
    if isinstance(error, HTTPException):
        status, text, headers = error.status_code, str(error.detail), error.headers
    kind = {404: "not_found_error", 405: "method_not_allowed_error"}.get(status, "invalid_request_error")
    return Response(msgspec.json.encode(error_object(text, kind)), status, dict(headers or {}), "application/json")
