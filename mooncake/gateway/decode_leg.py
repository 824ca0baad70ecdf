"""The decoding leg: the client's own request, sent to the engine itself; its answer as events or as one body.

Knows: an engine's HTTP answer, its silences and its ends. Does not know: the prefill leg, retries, the client's connection.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import aiohttp

from mooncake.gateway.directory import Worker
from mooncake.gateway.legs import ANSWER_LIMIT_BYTES, EngineRejected, LegFailed, is_client_error, read_limited
from mooncake.gateway.usage import EventSplitter, data_of, error_of


class DecodeLeg:
    """One decoding leg. `open()` once, then `events()` or `body`; `close()` always, at any time."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        worker: Worker,
        path: str,
        headers: dict[str, str],
        body: bytes,
        *,
        stream: bool,
        idle_timeout_s: float,
    ) -> None:
        self.worker = worker
        self.clean = False
        """Whether the engine has ended the exchange itself: its answer is complete, or it refused the request."""
        self.answered = False
        """Whether a whole answer came: only then is the prompt's KVCache used up."""
        self.body = b""
        self.content_type = "application/json"
        self._session = session
        self._url = worker.engine_url + path
        self._headers = headers | {"Content-Type": "application/json"}
        self._request = body
        self._stream = stream
        self._idle_s = idle_timeout_s
        self._response: aiohttp.ClientResponse | None = None
        self._first: list[bytes] = []
        self._splitter = EventSplitter()

    async def open(self) -> None:
        """Returns with the first events of a stream, or the whole body: until then nothing is promised to the client.

        Raises LegFailed, EngineRejected.
        """
        try:
            self._response = await self._session.post(self._url, data=self._request, headers=self._headers)
            if self._response.status != 200:
                await self._refused(self._response)
            self.content_type = self._response.headers.get("Content-Type", "application/json")
            if self._stream and self.content_type.startswith("text/event-stream"):
                await self._pull_first(self._response)
            else:
                self._stream = False
                self.body = await read_limited(self._response)
                self.clean = self.answered = True
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise self._failed(f"{type(error).__name__}: {error}") from None

    async def _refused(self, response: aiohttp.ClientResponse) -> None:
        body = await read_limited(response, 4 << 20)
        if is_client_error(response.status):
            self.clean = True  # the engine holds nothing of a request that it refused
            raise EngineRejected(response.status, body, response.headers.get("Retry-After", ""))
        raise self._failed(f"status {response.status}", counts=response.status != 500)

    async def _pull_first(self, response: aiohttp.ClientResponse) -> None:
        while not self._first:
            chunk = await response.content.readany()
            if not chunk:
                raise self._failed("the stream ended before its first event")
            self._first = self._splitter.feed(chunk)
        # vLLM tells what goes wrong before the first token as an event of a stream that is 200 already.
        error = error_of(self._first[0])
        if error is not None:
            code = error.get("code")
            if isinstance(code, int) and is_client_error(code):
                raise EngineRejected(code, data_of(self._first[0]) or b"{}")
            raise self._failed(f"error event: {error.get('message')}", counts=False)

    @property
    def is_stream(self) -> bool:
        return self._stream

    async def events(self) -> AsyncIterator[bytes]:
        """Whole events, each with its blank line. Raises LegFailed when the stream ends without `[DONE]`, stalls or breaks."""
        assert self._response is not None
        events = self._first
        while True:
            for event in events:
                if data_of(event) == b"[DONE]":
                    self.clean = self.answered = True
                yield event
            if self.clean:
                await self._drain()
                return
            try:
                async with asyncio.timeout(self._idle_s):
                    chunk = await self._response.content.readany()
            except TimeoutError:
                raise self._failed(f"silent for {self._idle_s:g} s") from None
            except (aiohttp.ClientError, OSError) as error:
                raise self._failed(f"{type(error).__name__}: {error}") from None
            if not chunk:
                raise self._failed("the stream ended early")
            events = self._splitter.feed(chunk)
            if self._splitter.pending_bytes > ANSWER_LIMIT_BYTES:
                raise self._failed("event too long")

    async def _drain(self) -> None:
        """The end of the HTTP body follows `[DONE]` at once; having read it, the connection can be used again."""
        assert self._response is not None
        with contextlib.suppress(TimeoutError, aiohttp.ClientError, OSError):
            async with asyncio.timeout(0.2):
                while not self._response.content.at_eof():
                    await self._response.content.readany()

    def _failed(self, reason: str, *, counts: bool = True) -> LegFailed:
        return LegFailed("decode", self.worker, reason, counts=counts)

    def fail(self, reason: str) -> None:
        """Breaks a stream off because its worker is known to be gone: whoever reads it gets LegFailed now."""
        if self._response is not None and not self.clean:
            self._response.content.set_exception(aiohttp.ClientConnectionError(reason))

    def close(self) -> None:
        """Closes the connection unless the answer was read to its end; that aborts the request in the engine."""
        if self._response is None:
            return
        if self.clean and self._response.content.at_eof():
            self._response.release()
        else:
            self._response.close()
