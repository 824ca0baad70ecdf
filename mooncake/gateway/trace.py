"""Where a request went, kept for a while: which transfers on which workers, and what the gateway did when.

`/debug/trace/{id}` joins it with what the workers' connectors recorded of the same transfers. Found by our request id, by the
client's own, or by the answer's id. Bounded. Knows: ids, workers, times. Does not know: how a request lives.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from mooncake.gateway.directory import Worker
from mooncake.gateway.legs import read_limited

_log = logging.getLogger(__name__)
_ANSWER_PREFIXES = ("chatcmpl-", "cmpl-")
EVENTS_KEPT = 200
TRACE_TIMEOUT_S = 3.0


@dataclass
class Try:
    transfer_id: str
    prefill: Worker | None
    decode: Worker


@dataclass
class RequestTrace:
    request_id: str
    client_id: str
    who: str
    tries: list[Try] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)

    def note(self, event: str, **more: Any) -> None:
        if len(self.events) < EVENTS_KEPT:
            self.events.append({"t": time.time(), "who": self.who, "event": event, **more})


class TraceBook:
    """The last `limit` requests."""

    def __init__(self, limit: int, who: str) -> None:
        self._limit = limit
        self._who = who
        self._by_id: OrderedDict[str, RequestTrace] = OrderedDict()
        self._by_client_id: dict[str, str] = {}

    def open(self, request_id: str, client_id: str) -> RequestTrace:
        trace = RequestTrace(request_id, client_id, self._who)
        self._by_id[request_id] = trace
        if client_id:
            self._by_client_id[client_id] = request_id  # the latest request of that id
        while len(self._by_id) > self._limit:
            old_id, old = self._by_id.popitem(last=False)
            if self._by_client_id.get(old.client_id) == old_id:
                del self._by_client_id[old.client_id]
        return trace

    def find(self, any_id: str) -> RequestTrace | None:
        for prefix in _ANSWER_PREFIXES:
            any_id = any_id.removeprefix(prefix)
        found = self._by_id.get(any_id)
        return found if found is not None else self._by_id.get(self._by_client_id.get(any_id, ""))


async def joined(trace: RequestTrace, session: aiohttp.ClientSession, headers: dict[str, str]) -> dict[str, Any]:
    """The trace with the workers' events, all in time order."""
    wanted = {
        (w.http_url, each.transfer_id): w.name
        for each in trace.tries
        if each.transfer_id
        for w in (each.prefill, each.decode)
        if w is not None
    }
    answers = await asyncio.gather(*(_fetch(session, headers, *key) for key in wanted))
    events = [*trace.events, *(event for answer in answers if answer is not None for event in answer)]
    return {
        "request_id": trace.request_id,
        "client_request_id": trace.client_id,
        "tries": [
            {"transfer_id": t.transfer_id, "prefill": t.prefill.name if t.prefill else None, "decode": t.decode.name}
            for t in trace.tries
        ],
        "unreachable": sorted({name for name, answer in zip(wanted.values(), answers, strict=True) if answer is None}),
        "events": sorted(events, key=lambda event: event.get("t", 0.0)),
    }


async def _fetch(
    session: aiohttp.ClientSession, headers: dict[str, str], http_url: str, transfer_id: str
) -> list[dict[str, Any]] | None:
    try:
        async with (
            asyncio.timeout(TRACE_TIMEOUT_S),
            session.get(f"{http_url}/v1/traces/{transfer_id}", headers=headers) as response,
        ):
            if response.status != 200:
                return [] if response.status == 404 else None
            found = msgspec.json.decode(await read_limited(response, 32 << 20))
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
        _log.warning("no trace from a worker", extra={"fields": {"url": http_url, "error": repr(error)}})
        return None
    return [event for event in found if isinstance(event, dict)] if isinstance(found, list) else None
