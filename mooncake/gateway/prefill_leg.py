"""The prefill leg: the prompt as token ids, one token wanted, sent through the worker host, which tells when the engine starts.

Knows: `POST /v1/prefill` and its events (docs/protocol.md §4). Does not know: the decoding leg, retries, clients.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import aiohttp
import msgspec

from mooncake.gateway.directory import Worker
from mooncake.gateway.legs import EngineRejected, LegFailed, is_client_error, read_limited
from mooncake.gateway.openai import Call
from mooncake.gateway.render import Rendered

EVENT_LIMIT_BYTES = 4 << 20


def prefill_body(call: Call, model: str, prompt: Rendered, transfer_params: dict[str, Any]) -> bytes:
    """Nothing of the client's stop conditions: a prefill that ends by "stop" hands nothing over (facts, §B5)."""
    request: dict[str, Any] = {
        "model": model,
        "prompt": msgspec.Raw(prompt.token_json),
        "max_tokens": 1,
        "temperature": 0,
        "n": 1,
        "stream": False,
        "ignore_eos": True,
        "kv_transfer_params": transfer_params,
    }
    for name in ("cache_salt", "priority"):
        if call.body.get(name) is not None:
            request[name] = call.body[name]
    return msgspec.json.encode({"request": request})


class PrefillLeg:
    """One prefill leg. `start()` once; then wait for `started()`, watch `task`; `close()` always, at any time."""

    def __init__(self, session: aiohttp.ClientSession, worker: Worker, headers: dict[str, str], body: bytes) -> None:
        self.worker = worker
        self.finished = False
        self.computed_tokens: int | None = None
        self.cached_tokens: int | None = None
        """The number for `usage`: the engine's at the end, what it found at the start until then."""
        self.started_at: float | None = None
        self.finished_at: float | None = None
        self._session = session
        self._headers = headers | {"Content-Type": "application/json"}
        self._body = body
        self._begun = asyncio.Event()
        self._failure = ""
        self.task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self.task = asyncio.create_task(self._run(), name="prefill leg")

    async def started(self) -> None:
        """Returns when the engine has scheduled the first chunk. Raises LegFailed, EngineRejected."""
        assert self.task is not None
        begun = asyncio.ensure_future(self._begun.wait())
        try:
            await asyncio.wait({begun, self.task}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            begun.cancel()
        if not self._begun.is_set():
            self.result()

    def result(self) -> None:
        """Raises what ended the leg, if anything did."""
        assert self.task is not None
        if self.task.cancelled():
            raise LegFailed("prefill", self.worker, self._failure or "closed")
        if self.task.done():
            self.task.result()

    def fail(self, reason: str) -> None:
        """Ends the leg because its worker is known to be gone."""
        self._failure = reason
        self.close()

    def close(self) -> None:
        """Closes the connection, which aborts the leg on the worker."""
        if self.task is not None:
            self.task.cancel()

    async def _run(self) -> None:
        try:
            async with self._session.post(
                self.worker.http_url + "/v1/prefill", data=self._body, headers=self._headers
            ) as response:
                try:
                    await self._read(response)
                finally:
                    if not self.finished:
                        response.close()
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise LegFailed("prefill", self.worker, f"{type(error).__name__}: {error}") from None
        if not self.finished:
            raise LegFailed("prefill", self.worker, "the stream of events ended early")

    async def _read(self, response: aiohttp.ClientResponse) -> None:
        if response.status != 200:
            body = await read_limited(response, EVENT_LIMIT_BYTES)
            self._refused(response.status, body)
        pending = b""
        async for chunk in response.content.iter_any():
            *lines, pending = (pending + chunk).split(b"\n")
            for line in filter(bytes.strip, lines):
                self._event(msgspec.json.decode(line))
                if self.finished:
                    return
            if len(pending) > EVENT_LIMIT_BYTES:
                raise ValueError("event too long")

    def _refused(self, status: int, body: bytes) -> None:
        if is_client_error(status):
            raise EngineRejected(status, body)
        raise LegFailed("prefill", self.worker, f"status {status}", counts=status != 500)

    def _event(self, event: Any) -> None:
        match event:
            case {"event": "started"}:
                self.computed_tokens = int(event.get("computed_tokens") or 0)
                self.cached_tokens = self.computed_tokens
                self.started_at = time.time()
                self._begun.set()
            case {"event": "finished"}:
                details = (event.get("usage") or {}).get("prompt_tokens_details") or {}
                if details.get("cached_tokens") is not None:
                    self.cached_tokens = int(details["cached_tokens"])
                self.cached_tokens = self.cached_tokens or 0
                self.finished_at = time.time()
                self.started_at = self.started_at or self.finished_at
                self.finished = True
                self._begun.set()
            case {"event": "error"}:
                status = int(event.get("status") or 500)
                self._refused(status, msgspec.json.encode(event.get("body")))
            case _:
                pass  # accepted, and what later versions may tell
