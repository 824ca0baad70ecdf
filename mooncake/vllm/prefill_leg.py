"""One prefill leg on the worker host: the request goes to vLLM, its events go to the gateway (docs/protocol.md §4).

Knows: vLLM's `/v1/completions`, and the connector's PrefillStarted and PrefillFinished. Does not know: HTTP of the host
(host_http.py). Cancelling the iteration closes vLLM's connection, which aborts the request there, also while it queues.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from typing import Any

import aiohttp
import msgspec

from mooncake.common.errors import BadRequest, DeadlineExceeded, MooncakeError, UpstreamFailed
from mooncake.vllm.host_link_server import HostLinkServer, LegEvents

_MAX_ANSWER_BYTES = 16 << 20
_MAX_ID_CHARS = 256
_LATE_EVENT_S = 0.05


class _Mooncake(msgspec.Struct):
    transfer_id: str
    deadline_s: float = 0.0


class _TransferParams(msgspec.Struct):
    mooncake: _Mooncake


class _Request(msgspec.Struct):
    kv_transfer_params: _TransferParams
    stream: bool | None = False


class _Body(msgspec.Struct):
    request: msgspec.Raw


_decode_body = msgspec.json.Decoder(_Body).decode
_decode_request = msgspec.json.Decoder(_Request).decode


class PrefillCall(msgspec.Struct, frozen=True):
    """What was asked: the completions body as it came, and what the host must know of it."""

    payload: bytes
    transfer_id: str
    deadline_s: float


def parse(body: bytes, *, max_leg_s: float) -> PrefillCall:
    """The call in a body of `POST /v1/prefill`. Token ids are not looked at. Raises BadRequest."""
    try:
        raw = bytes(_decode_body(body).request)
        request = _decode_request(raw)
    except msgspec.DecodeError as error:
        raise BadRequest(f"body of /v1/prefill: {error}") from error
    mooncake = request.kv_transfer_params.mooncake
    if request.stream:
        raise BadRequest("a prefill leg cannot stream", param="stream")
    if not 0 < len(mooncake.transfer_id) <= _MAX_ID_CHARS:
        raise BadRequest("transfer_id is empty or too long", param="kv_transfer_params")
    deadline_s = mooncake.deadline_s if mooncake.deadline_s > 0 else max_leg_s
    return PrefillCall(raw, mooncake.transfer_id, min(deadline_s, max_leg_s))


def error_body(error: MooncakeError) -> dict[str, Any]:
    """OpenAI's error shape."""
    inner = {
        "message": str(error),
        "type": error.error_type,
        "param": getattr(error, "param", None),
        "code": getattr(error, "error_code", None) or error.http_status,
    }
    return {"error": inner}


def _error_event(error: MooncakeError) -> dict[str, Any]:
    return {"event": "error", "status": error.http_status, "body": error_body(error)}


class PrefillLeg:
    """`async for event in leg.run()`; the last event is `finished` or `error`."""

    def __init__(
        self, call: PrefillCall, link: HostLinkServer, http: aiohttp.ClientSession, engine_url: str, key: dict[str, str]
    ) -> None:
        self._call = call
        self._link = link
        self._http = http
        self._url = engine_url + "/v1/completions"
        self._headers = key | {"Content-Type": "application/json"}
        self._started_at_s: float | None = None

    async def run(self) -> AsyncGenerator[dict[str, Any], None]:
        """Events in order. Raises nothing but cancellation."""
        deadline_s = time.monotonic() + self._call.deadline_s
        events = self._link.expect(self._call.transfer_id)
        answer = asyncio.create_task(self._ask(), name="prefill-leg")
        try:
            yield {"event": "accepted"}
            await self._first_of(answer, events, deadline_s)
            if events.started.done():
                self._started_at_s = time.monotonic()
                yield {"event": "started", "computed_tokens": events.started.result().computed_tokens}
            yield await self._result(answer, events, deadline_s)
        except MooncakeError as error:
            yield _error_event(error)
        finally:
            self._link.forget(self._call.transfer_id)
            answer.cancel()
            with contextlib.suppress(asyncio.CancelledError, MooncakeError):
                await answer

    async def _first_of(self, answer: asyncio.Task[tuple[int, bytes]], events: LegEvents, deadline_s: float) -> None:
        """Until the engine has started or answered. Raises DeadlineExceeded."""
        either: set[asyncio.Future[Any]] = {answer, events.started}
        await asyncio.wait(
            either,
            timeout=max(0.0, deadline_s - time.monotonic()),
            return_when=asyncio.FIRST_COMPLETED,
        )
        if not answer.done() and not events.started.done():
            raise DeadlineExceeded("the prefill did not start within the request's deadline")

    async def _result(
        self, answer: asyncio.Task[tuple[int, bytes]], events: LegEvents, deadline_s: float
    ) -> dict[str, Any]:
        done, _ = await asyncio.wait({answer}, timeout=max(0.0, deadline_s - time.monotonic()))
        if not done:
            raise DeadlineExceeded("the prefill did not end within the request's deadline")
        status, raw = answer.result()
        try:
            body = msgspec.json.decode(raw)
        except msgspec.DecodeError:
            body = None
        if status != 200 or not isinstance(body, dict):
            if not (isinstance(body, dict) and isinstance(body.get("error"), dict)):
                raise UpstreamFailed(f"the engine answered {status}: {raw[:200].decode(errors='replace')}")
            return {"event": "error", "status": status, "body": body}
        return {"event": "finished", "usage": body.get("usage") or {}, "compute_s": await self._compute_s(events)}

    async def _compute_s(self, events: LegEvents) -> float:
        """As the connector measured it; by this host's clock when it did not say."""
        if events.started.done() and not events.finished.done():
            await asyncio.wait({events.finished}, timeout=_LATE_EVENT_S)
        if events.finished.done():
            return events.finished.result().compute_s
        return time.monotonic() - self._started_at_s if self._started_at_s is not None else 0.0

    async def _ask(self) -> tuple[int, bytes]:
        """Status and body of vLLM's answer. Raises UpstreamFailed."""
        try:
            async with self._http.post(self._url, data=self._call.payload, headers=self._headers) as response:
                raw = await response.content.read(_MAX_ANSWER_BYTES)
                while len(raw) < _MAX_ANSWER_BYTES and (more := await response.content.read(_MAX_ANSWER_BYTES)):
                    raw += more
                return response.status, raw
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise UpstreamFailed(f"the engine did not answer: {error!r}") from error
