"""Host link, the host's side: a ZMQ ROUTER on an ipc socket, to which the connector halves inside vLLM connect.

Knows: which half said hello, prefill legs that wait for their events, counters, trace events, what each half was told of
the store's masters. Does not know: HTTP, the Conductor, vLLM. Everything kept is bounded; what does not fit is dropped and counted.
"""

from __future__ import annotations

import asyncio
import collections
import logging
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from mooncake.vllm.host_link import (
    Counters,
    LoadSample,
    PrefillFinished,
    PrefillStarted,
    Release,
    SchedulerHello,
    StoreMasters,
    ToConnector,
    ToHost,
    TraceEvents,
    WorkerHello,
    decode_to_host,
    encode,
)

_log = logging.getLogger(__name__)
_MAX_HALVES = 256
_MAX_COUNTERS = 2000
_MAX_EVENTS_A_TRANSFER = 20_000


class LegEvents:
    """What the connector says of one prefill leg, each at most once."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.started: asyncio.Future[PrefillStarted] = loop.create_future()
        self.finished: asyncio.Future[PrefillFinished] = loop.create_future()


class HostLinkServer:
    """Binds in `start`; `run` reads until cancelled. `on_prefill_finished` is called for every finished prefill, `on_load`
    for every load from the store."""

    def __init__(
        self,
        endpoint: str,
        name: str,
        *,
        traces_kept: int = 512,
        on_prefill_finished: Callable[[PrefillFinished], None] = lambda _: None,
        on_load: Callable[[LoadSample], None] = lambda _: None,
    ) -> None:
        self.endpoint = endpoint
        self.worker_hello: asyncio.Future[WorkerHello] = asyncio.get_running_loop().create_future()
        self.scheduler_hello: asyncio.Future[SchedulerHello] = asyncio.get_running_loop().create_future()
        self.counters: dict[str, dict[str, float]] = {}
        self.dropped = 0
        """Messages that could not be read, kept or sent."""
        self._name = name
        self._traces_kept = traces_kept
        self._on_prefill_finished = on_prefill_finished
        self._on_load = on_load
        self._worker_halves: dict[bytes, None] = {}
        self._store_masters: tuple[str, ...] = ()
        self._told: dict[bytes, tuple[str, ...]] = {}
        """The store masters that each half was told last."""
        self._legs: dict[str, LegEvents] = {}
        self._traces: collections.OrderedDict[str, list[dict[str, Any]]] = collections.OrderedDict()
        self._context = zmq.asyncio.Context()
        self._router: zmq.asyncio.Socket | None = None

    # --- life ---

    def start(self) -> None:
        """Binds, so that the halves find us when they come up."""
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._router.setsockopt(zmq.LINGER, 200)
        self._router.setsockopt(zmq.MAXMSGSIZE, 16 << 20)
        self._router.bind(self.endpoint)

    def close(self) -> None:
        if self._router is not None:
            self._router.close()
        self._context.term()

    async def run(self) -> None:
        """Reads messages; ends by cancellation only."""
        assert self._router is not None
        while True:
            frames = await self._router.recv_multipart()
            try:
                message = decode_to_host(frames[-1])
            except msgspec.DecodeError as error:
                self.dropped += 1
                _log.warning("unreadable message on the host link", extra={"fields": {"error": str(error)}})
                continue
            self.handle(frames[0], message)
            await self._tell_masters(frames[0])

    # --- what halves say ---

    def handle(self, sender: bytes, message: ToHost) -> None:
        """One message of the half `sender`."""
        match message:
            case WorkerHello():
                if len(self._worker_halves) < _MAX_HALVES:
                    self._worker_halves[sender] = None
                self._met(sender)
                if not self.worker_hello.done():
                    self.worker_hello.set_result(message)
            case SchedulerHello():
                self._met(sender)
                if not self.scheduler_hello.done():
                    self.scheduler_hello.set_result(message)
            case PrefillStarted():
                leg = self._legs.get(message.transfer_id)
                if leg is not None and not leg.started.done():
                    leg.started.set_result(message)
            case PrefillFinished():
                leg = self._legs.get(message.transfer_id)
                if leg is not None and not leg.finished.done():
                    leg.finished.set_result(message)
                self._on_prefill_finished(message)
            case LoadSample():
                self._on_load(message)
            case TraceEvents():
                self._keep_trace(message)
            case Counters():
                self._keep_counters(message)

    def _met(self, half: bytes) -> None:
        """A half begins; it was told nothing yet, also when it has a name that we know."""
        self._told.pop(half, None)
        if len(self._told) < _MAX_HALVES:
            self._told[half] = ()

    def _keep_trace(self, message: TraceEvents) -> None:
        events = self._traces.setdefault(message.transfer_id, [])
        self._traces.move_to_end(message.transfer_id)
        room = max(0, _MAX_EVENTS_A_TRANSFER - len(events))
        self.dropped += max(0, len(message.events) - room)
        events += [{"who": self._name} | event for event in message.events[:room]]
        while len(self._traces) > self._traces_kept:
            self._traces.popitem(last=False)

    def _keep_counters(self, message: Counters) -> None:
        if message.half not in self.counters and len(self.counters) >= _MAX_HALVES:
            self.dropped += 1
            return
        if len(message.values) > _MAX_COUNTERS:
            self.dropped += len(message.values) - _MAX_COUNTERS
        self.counters[message.half] = dict(list(message.values.items())[:_MAX_COUNTERS])

    # --- what the host asks ---

    def expect(self, transfer_id: str) -> LegEvents:
        """From now on the events of this leg are kept; `forget` it in the end. A second leg of one id shares them."""
        return self._legs.setdefault(transfer_id, LegEvents())

    def forget(self, transfer_id: str) -> None:
        self._legs.pop(transfer_id, None)

    @property
    def legs(self) -> int:
        """Prefill legs that are waited for."""
        return len(self._legs)

    def trace(self, transfer_id: str) -> list[dict[str, Any]] | None:
        """Trace events in time order; None for an unknown transfer."""
        events = self._traces.get(transfer_id)
        return None if events is None else sorted(events, key=lambda event: event.get("t", 0.0))

    async def release(self, transfer_id: str) -> None:
        """Tells every worker half that the decoding leg will not come. Never waits for a half that does not read."""
        for identity in list(self._worker_halves):
            await self._send(identity, Release(transfer_id))

    async def set_store_masters(self, addresses: Sequence[str]) -> None:
        """Tells every half, now or when it says hello. A half that could not be told is told with its next message."""
        self._store_masters = tuple(addresses)
        for half in list(self._told):
            await self._tell_masters(half)

    async def _tell_masters(self, half: bytes) -> None:
        masters = self._store_masters
        if masters and self._told.get(half, masters) != masters and await self._send(half, StoreMasters(list(masters))):
            self._told[half] = masters

    async def _send(self, half: bytes, message: ToConnector) -> bool:
        assert self._router is not None
        try:
            await self._router.send_multipart([half, encode(message)], flags=zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self.dropped += 1
            _log.warning(
                "message not delivered to the connector", extra={"fields": {"what": message, "why": str(error)}}
            )
            return False
        return True
