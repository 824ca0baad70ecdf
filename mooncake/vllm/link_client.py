"""Host link, the connector's side: a ZMQ DEALER on the worker host's ipc socket (messages: host_link.py).

Knows: how to send without ever waiting, how to hand Release messages on, the store masters that were told last. Does not
know: what the messages mean. Works without a host: what nobody takes is dropped, counters and traces first.
"""

from __future__ import annotations

import collections
import logging
import os
import threading
import time
from collections.abc import Callable

import msgspec
import zmq

from mooncake.vllm.counters import CounterSet
from mooncake.vllm.host_link import (
    Counters,
    LoadSample,
    Release,
    StoreMasters,
    ToHost,
    TraceEvents,
    decode_to_connector,
    encode,
)

_log = logging.getLogger(__name__)
_QUEUE = 2000
_DROP_FIRST_AT = 1500
_COUNTERS_EVERY_S = 1.0


class HostLinkClient:
    """One thread; `send` is callable from any."""

    def __init__(
        self, endpoint: str, half: str, counters: CounterSet, on_release: Callable[[str], None] | None = None
    ) -> None:
        self._endpoint, self._half, self._counters = endpoint, half, counters
        self._on_release = on_release
        self._store_masters: tuple[str, ...] = ()
        self._outbox: collections.deque[bytes] = collections.deque(maxlen=_QUEUE)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = False
        self._thread: threading.Thread | None = None
        if endpoint:
            self._thread = threading.Thread(target=self._run, name=f"mooncake-link-{half}", daemon=True)
            self._thread.start()

    def send(self, message: ToHost) -> None:
        """Queues a message; never waits."""
        if self._thread is None or self._closing:
            return
        if len(self._outbox) >= _DROP_FIRST_AT and isinstance(message, TraceEvents | LoadSample | Counters):
            self._counters.add("host_link_dropped_total")
            return
        self._outbox.append(encode(message))
        os.eventfd_write(self._wake, 1)

    def store_masters(self) -> tuple[str, ...]:
        """What the host told last; empty until it knows one. For `StoreClient(masters=...)`, callable from any thread."""
        return self._store_masters

    def close(self) -> None:
        """Sends what is queued for at most a moment and ends the thread."""
        self._closing = True
        if self._thread is not None:
            os.eventfd_write(self._wake, 1)
            self._thread.join(2.0)

    def _run(self) -> None:
        context = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, self._half.encode())
        socket.setsockopt(zmq.LINGER, 200)
        socket.setsockopt(zmq.SNDHWM, _QUEUE)
        socket.setsockopt(zmq.RECONNECT_IVL, 200)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 5000)
        socket.setsockopt(zmq.MAXMSGSIZE, 1 << 20)
        socket.connect(self._endpoint)
        try:
            self._loop(socket)
        except Exception:
            _log.exception("host link thread ended")
        finally:
            socket.close()
            context.term()

    def _loop(self, socket: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        counters_at = 0.0
        while True:
            ready = dict(poller.poll(int(_COUNTERS_EVERY_S * 1000)))
            if self._wake in ready:
                os.eventfd_read(self._wake)
            if socket in ready:
                self._receive(socket)
            now = time.monotonic()
            if now - counters_at >= _COUNTERS_EVERY_S or self._closing:
                counters_at = now
                if (values := self._counters.take_changes()) is not None:
                    self._outbox.append(encode(Counters(half=self._half, values=values)))
            self._flush(socket)
            if self._closing:
                return

    def _flush(self, socket: zmq.Socket[bytes]) -> None:
        while self._outbox:
            try:
                socket.send(self._outbox[0], zmq.NOBLOCK)
            except zmq.Again:
                return  # nobody reads: the deque drops the oldest
            self._outbox.popleft()

    def _receive(self, socket: zmq.Socket[bytes]) -> None:
        frames = socket.recv_multipart(zmq.NOBLOCK)
        try:
            message = decode_to_connector(frames[-1])
        except msgspec.DecodeError as error:
            _log.warning("unreadable message on the host link: %s", error)
            return
        match message:
            case Release():
                if self._on_release is not None:
                    self._on_release(message.transfer_id)
            case StoreMasters():
                self._store_masters = tuple(message.addresses)
