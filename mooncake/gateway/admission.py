"""From an HTTP request to a request's life: limits, body, model, headers; and the race between the life and its client leaving.

Knows: Starlette's requests. Does not know: routes, or what happens in a life (request.py).
"""

from __future__ import annotations

import asyncio
import math

from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from mooncake.common.errors import BadRequest, BodyTooLarge, ModelNotFound, MooncakeError, NoCapacity
from mooncake.gateway.directory import Model
from mooncake.gateway.gateway import Gateway
from mooncake.gateway.openai import Route, parse_call
from mooncake.gateway.placement import Rejected
from mooncake.gateway.request import Asked, RequestLife
from mooncake.gateway.sink import Sink

BODY_TIMEOUT_S = 60.0
CANCEL_AGAIN_S = 1.0


class BodyTimeout(MooncakeError):
    """The client did not send its request within reasonable time."""

    http_status = 408
    error_type = "timeout_error"


async def admit(gateway: Gateway, request: Request, route: Route) -> Response:
    if gateway.stopping:
        raise Rejected(503, "rejected-shutting-down", "This gateway is shutting down.", 1.0)
    if gateway.metrics.active._value.get() >= gateway.config.max_concurrent_requests:
        raise Rejected(429, "rejected-saturated", "This gateway serves as many requests as it may.", 1.0)
    call = parse_call(route, await read_body(request, gateway.config.max_body_bytes))
    for field in call.stripped:
        gateway.metrics.stripped.labels(field).inc()
    model = find_model(gateway, call.model)
    trace = gateway.traces.open(request.state.request_id, request.state.client_id)
    trace.note("received", route=str(route), model=model.lora or model.name, stream=call.stream)
    return Living(RequestLife(gateway.parts, call, model, _asked(gateway, request), trace))


class Living(Response):
    """Runs a request's life as the answer itself, so that it races with the client's leaving from its first moment to its last byte."""

    def __init__(self, life: RequestLife) -> None:
        super().__init__()
        self._life = life

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self._life.run(Sink(send)), name="request")
        gone = asyncio.create_task(_disconnected(receive), name="disconnect")
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            while (
                not work.done()
            ):  # again: a library that swallowed the first one must not keep a request without a client
                work.cancel()
                await asyncio.wait({work}, timeout=CANCEL_AGAIN_S)
        if not work.cancelled():
            work.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def read_body(request: Request, limit: int) -> bytes:
    """Raises BodyTooLarge as soon as the length is known to be too large, however the body is framed."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise BodyTooLarge(f"The request body is larger than {limit} bytes.", error_code="request_too_large")
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    raise BodyTooLarge(
                        f"The request body is larger than {limit} bytes.", error_code="request_too_large"
                    )
                parts.append(part)
    except TimeoutError:
        raise BodyTimeout(f"The request body did not arrive within {BODY_TIMEOUT_S:g} s.") from None
    return b"".join(parts)


def find_model(gateway: Gateway, name: str | None) -> Model:
    """The model of that name; the only one when there is no name. Raises ModelNotFound, NoCapacity."""
    names = gateway.directory.names()
    if not names:
        raise NoCapacity("No worker has registered yet.")
    if name is None and len(names) == 1:
        name = names[0]
    model = gateway.directory.model(name) if name is not None else None
    if model is None:
        text = f"The model `{name}` does not exist." if name else "`model` is required."
        raise ModelNotFound(text, param="model", error_code="model_not_found")
    return model


def _asked(gateway: Gateway, request: Request) -> Asked:
    headers = request.headers
    pins = gateway.config.allow_pinning
    return Asked(
        pin_prefill=headers.get("x-mooncake-prefill-instance", "") if pins else "",
        pin_decode=headers.get("x-mooncake-decode-instance", "") if pins else "",
        ttft_slo_s=_milliseconds(headers.get("x-mooncake-ttft-slo-ms"), "x-mooncake-ttft-slo-ms") / 1e3,
        tbt_slo_s=_milliseconds(headers.get("x-mooncake-tbt-slo-ms"), "x-mooncake-tbt-slo-ms") / 1e3,
    )


def _milliseconds(text: str | None, name: str) -> float:
    if text is None:
        return 0.0
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise BadRequest(f"The header {name} must be a number of milliseconds.", param=name)
    return value
