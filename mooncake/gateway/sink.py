"""The client's side of one answer: ASGI messages, and what has been promised already.

Knows: status, headers, whether bytes have left. Does not know: where an answer comes from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.types import Send

from mooncake.common.errors import MooncakeError, Overloaded
from mooncake.gateway.openai import error_of
from mooncake.gateway.placement import Rejected
from mooncake.gateway.usage import DONE

JSON = "application/json"


class Sink:
    """Exactly one of `whole` or `start`, `write`…, `end`."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 0
        """What the client was told; 0 as long as it was told nothing."""
        self.complete = False

    async def whole(self, status: int, body: bytes, headers: Mapping[str, str], content_type: str = JSON) -> None:
        await self._begin(status, content_type, {**headers, "content-length": str(len(body))})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})
        self.complete = True

    async def start(self, content_type: str, headers: Mapping[str, str]) -> None:
        # Proxies between us and the client must not hold chunks back.
        await self._begin(200, content_type, {**headers, "cache-control": "no-cache", "x-accel-buffering": "no"})

    async def _begin(self, status: int, content_type: str, headers: Mapping[str, str]) -> None:
        self.status = status
        pairs = [(b"content-type", content_type.encode("latin-1"))]
        pairs += [
            (name.lower().encode("latin-1"), value.encode("latin-1", "replace")) for name, value in headers.items()
        ]
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})

    async def write(self, chunk: bytes) -> None:
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
        self.complete = True

    async def error(self, error: MooncakeError) -> None:
        """The error as an answer, or, in a stream that has begun, as its last event: never a silent end."""
        if not self.status:
            await self.whole(error.http_status, msgspec.json.encode(error_of(error)), error_headers(error))
        elif not self.complete:
            body: dict[str, Any] = error_of(error)
            body["error"]["code"] = body["error"]["code"] or error.http_status
            await self.write(b"data: " + msgspec.json.encode(body) + b"\n\n" + DONE)
            await self.end()


def error_headers(error: MooncakeError) -> dict[str, str]:
    """When to come again, and why a request was dropped (docs/protocol.md §8)."""
    retry_after_s = error.retry_after_s if isinstance(error, Overloaded | Rejected) else 0.0
    headers = {"retry-after": str(max(1, round(retry_after_s + 0.499)))} if error.http_status in (429, 503) else {}
    if isinstance(error, Rejected):
        headers["x-mooncake-dropped-reason"] = error.reason
    elif error.http_status == 429:
        headers["x-mooncake-dropped-reason"] = "rejected-saturated"
    return headers
