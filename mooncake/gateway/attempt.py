"""One try to serve a request: a prefill and a decoding leg that share a transfer id, or one leg on one worker.

`open()` returns when the first bytes of the answer are here; `close()` ends whatever is left and frees what the workers hold.
Knows: the order of the legs, the release of a transfer. Does not know: retries, placement, the client's connection.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from mooncake.common.ids import new_id
from mooncake.gateway.decode_leg import DecodeLeg
from mooncake.gateway.directory import Directory, Model, Worker
from mooncake.gateway.legs import LegFailed, engine_headers, host_headers
from mooncake.gateway.openai import Call
from mooncake.gateway.placement import Placed
from mooncake.gateway.prefill_leg import PrefillLeg, prefill_body
from mooncake.gateway.render import Rendered

_log = logging.getLogger(__name__)
RELEASE_TIMEOUT_S = 2.0
RELEASE_TRIES = 3


@dataclass(frozen=True)
class Wires:
    """How an attempt reaches workers."""

    session: aiohttp.ClientSession
    directory: Directory
    cluster_token: str
    idle_timeout_s: float
    background: Callable[[Any], None]
    """Runs a coroutine that may outlive the request."""


class Attempt:
    """Counts as in flight at its workers from construction to `close()`."""

    def __init__(
        self,
        wires: Wires,
        call: Call,
        model: Model,
        prompt: Rendered | None,
        placed: Placed,
        request_id: str,
        left_s: float,
    ) -> None:
        self.placed = placed
        self.decode_worker = placed.decode
        self.prefill_worker = placed.prefill if prompt is not None else None
        self.transfer_id = new_id("xfer") if self.prefill_worker is not None else ""
        self.on_prefill_started: Callable[[], None] = lambda: None
        self.on_prefill_finished: Callable[[], None] = lambda: None
        self.prefill: PrefillLeg | None = None
        self.decode: DecodeLeg | None = None
        self._wires = wires
        self._call = call
        self._request_id = request_id
        self._deadline_s = time.monotonic() + left_s
        self._closed = False
        self.workers = [self.decode_worker, *([self.prefill_worker] if self.prefill_worker else [])]
        self._forget: list[Callable[[], None]] = []
        for worker in self.workers:
            wires.directory.sent(worker)
        if self.prefill_worker is not None:
            assert prompt is not None
            self._params: dict[str, Any] | None = self._transfer_params(prompt)
            body = prefill_body(
                call, model.lora or model.name, prompt, {"mooncake": {"leg": "prefill", **self._params}}
            )
            self.prefill = PrefillLeg(wires.session, self.prefill_worker, host_headers(wires.cluster_token), body)
        else:
            self._params = None

    def _transfer_params(self, prompt: Rendered) -> dict[str, Any]:
        return {
            "transfer_id": self.transfer_id,
            "request_id": self._request_id,
            "fan_out": self._call.n,
            "deadline_s": self._left_s(),
            "digest": prompt.digest,
            "prompt_tokens": prompt.prompt_tokens,
            "pool_prefix_tokens": self.placed.pool_prefix_tokens,
        }

    def _left_s(self) -> float:
        """Of the request's deadline, for a leg that is sent now; never 0, which would mean the engine's default."""
        return max(0.001, round(self._deadline_s - time.monotonic(), 3))

    async def open(self) -> DecodeLeg:
        """Raises LegFailed, EngineRejected."""
        if self.prefill is not None:
            await self._start_prefill(self.prefill)
        self.decode = self._decode_leg()
        opening = asyncio.create_task(self.decode.open(), name="decoding leg")
        self._forget.append(self._wires.directory.when_down(self.decode_worker, lambda: self._decode_gone(opening)))
        try:
            await self._opened(opening)
        finally:
            opening.cancel()
        return self.decode

    async def _start_prefill(self, leg: PrefillLeg) -> None:
        self._forget.append(self._wires.directory.when_down(leg.worker, lambda: leg.fail("its worker is gone")))
        leg.start()
        assert leg.task is not None
        leg.task.add_done_callback(lambda task: self._prefill_ended(leg, task))
        await leg.started()
        self.on_prefill_started()

    def _prefill_ended(self, leg: PrefillLeg, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            task.exception()  # looked at here so that asyncio does not complain; whoever waits gets it from `result()`
        if leg.finished:
            self.on_prefill_finished()

    def _decode_leg(self) -> DecodeLeg:
        body = self._call.body
        if self._params is not None:
            assert self.prefill_worker is not None
            now = {
                "deadline_s": self._left_s(),  # the prefill leg may have queued for long
                "peer_address": self.prefill_worker.transfer_address,
                "peer_instance_id": self.prefill_worker.transfer_instance_id,
            }
            body = body | {"kv_transfer_params": {"mooncake": {"leg": "decode", **self._params, **now}}}
        headers = engine_headers(self._wires.cluster_token) | {"X-Request-Id": self._request_id}
        return DecodeLeg(
            self._wires.session,
            self.decode_worker,
            self._call.route,
            headers,
            msgspec.json.encode(body),
            stream=self._call.stream,
            idle_timeout_s=self._wires.idle_timeout_s,
        )

    def _decode_gone(self, opening: asyncio.Task[None]) -> None:
        if opening.done() and self.decode is not None:
            self.decode.fail("its worker is gone")
        opening.cancel()

    async def _opened(self, opening: asyncio.Task[None]) -> None:
        if self.prefill is not None:
            assert self.prefill.task is not None
            await asyncio.wait({opening, self.prefill.task}, return_when=asyncio.FIRST_COMPLETED)
            if not opening.done():
                # A prefill that failed is no loss once the decoding side produces: it has computed the prompt itself.
                self.prefill.result()
        await asyncio.wait({opening})
        if opening.cancelled():
            raise LegFailed("decode", self.decode_worker, "its worker is gone")
        opening.result()

    # --- what usage says ---

    @property
    def cached_tokens(self) -> int | None:
        """The prefill side's number; None when the decoding side's own is the right one."""
        return self.prefill.cached_tokens if self.prefill is not None and not self._prefill_failed() else None

    def _prefill_failed(self) -> bool:
        assert self.prefill is not None
        task = self.prefill.task
        return task is not None and task.done() and not self.prefill.finished

    async def settle(self, timeout_s: float) -> None:
        """Waits shortly for the end of the prefill leg, whose number is the exact one."""
        if self.prefill is not None and self.prefill.task is not None and not self.prefill.task.done():
            await asyncio.wait({self.prefill.task}, timeout=timeout_s)

    # --- the end ---

    def close(self) -> None:
        """Idempotent, and without waiting: it must run to its end also when the request is cancelled."""
        if self._closed:
            return
        self._closed = True
        for forget in self._forget:
            forget()
        answered = self.decode is not None and self.decode.answered
        if self.decode is not None:
            self.decode.close()
        if self.prefill is not None:
            self.prefill.close()
            if not answered:
                self._wires.background(self._release(self.prefill.worker))
        for worker in self.workers:
            self._wires.directory.ended(worker)

    async def _release(self, worker: Worker) -> None:
        url = f"{worker.http_url}/v1/transfers/{self.transfer_id}/release"
        error: object = None
        for attempt in range(RELEASE_TRIES):
            try:
                async with (
                    asyncio.timeout(RELEASE_TIMEOUT_S),
                    self._wires.session.post(url, headers=host_headers(self._wires.cluster_token)) as response,
                ):
                    if response.status < 500:
                        return
                    error = response.status
            except (aiohttp.ClientError, OSError, TimeoutError) as failure:
                error = repr(failure)
            if self._wires.directory.by_instance_id(worker.name, worker.instance_id) is None:
                return
            await asyncio.sleep(0.2 * (attempt + 1))
        _log.warning(
            "a transfer could not be released",
            extra={"fields": {"transfer_id": self.transfer_id, "name": worker.name, "error": error}},
        )
