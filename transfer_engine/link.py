"""A control connection: requests and replies in both directions, and the news that the peer is gone.

Knows: framing, matching replies to requests, deadlines. Does not know: what a request means (the handler it was given does).
Either end may ask; one reader thread per link. A peer that does not take our bytes before the deadline loses the link.
"""

from __future__ import annotations

import itertools
import select
import socket
import struct
import threading
import time
from collections.abc import Callable

from mooncake.common.errors import (
    LinkLost,
    MooncakeError,
    Overloaded,
    PeerUnavailable,
    ProtocolViolation,
    TransferTimeout,
)
from transfer_engine import protocol, sockets, threads
from transfer_engine.protocol import Reply, Request
from transfer_engine.tls import TlsSocket

Done = Callable[[Reply | MooncakeError], None]
_MAX_PENDING = 4096
_TICK = struct.pack("ll", 0, 50_000)
_FOREVER = struct.pack("ll", 0, 0)


class Link:
    """`handle(link, message_id, request)` runs on the reader thread and must be short; it answers by `reply`, now or later.
    `on_closed(link)` runs once."""

    def __init__(
        self,
        sock: socket.socket,
        handle: Callable[[Link, int, Request], None],
        on_closed: Callable[[Link], None],
        name: str,
    ) -> None:
        self._sock = sock
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TICK)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _FOREVER)
        self._handle = handle
        self._on_closed = on_closed
        self._name = name
        self._send_lock = threading.Lock()
        self._lock = threading.Lock()
        self._ids = itertools.count(1)
        self._pending: dict[int, tuple[float, Done]] = {}
        self.alive = True
        self.context: object = None
        self.opened: set[str] = set()
        """Stream ids of the endpoints that the peer opened over it; they end with it."""
        self.thread: threading.Thread | None = None

    def start(self) -> None:
        """Read on a thread of its own (the dialling side). Raises Overloaded: the link is closed then."""
        try:
            self.thread = threads.start(self._name, self.run)
        except Overloaded:
            self._end()
            raise

    def run(self) -> None:
        """Read until the link ends (the accepting side lends its thread)."""
        try:
            while self.alive:
                length, kind, message_id = protocol.decode_control_header(self._read(protocol.CONTROL.size))
                body = self._read(length)
                if kind == protocol.REPLY:
                    self._answered(message_id, protocol.decode_reply(body))
                else:
                    self._handle(self, message_id, protocol.decode_request(body))
        except (OSError, ProtocolViolation):
            pass
        finally:
            self._end()

    def _end(self) -> None:
        self.close()
        sockets.close(self._sock)
        self._on_closed(self)

    def _read(self, count: int) -> bytearray:
        got = bytearray(count)
        view, at = memoryview(got), 0
        while at < count:
            part = self._sock.recv_into(view[at:])
            if not part:
                raise ConnectionResetError("closed")
            at += part
        return got

    def request(self, message: Request, deadline: float) -> Reply:
        """Ask and wait. Raises PeerUnavailable (LinkLost when the connection broke), TransferTimeout, or the error that the peer answered."""
        waiter = threading.Lock()
        waiter.acquire()
        answer: list[Reply | MooncakeError] = []

        def done(what: Reply | MooncakeError) -> None:
            answer.append(what)
            waiter.release()

        message_id = self.ask(message, deadline, done)
        if not waiter.acquire(timeout=max(0.0, deadline - time.monotonic())):
            with self._lock:
                self._pending.pop(message_id, None)
            raise TransferTimeout(f"{self._name}: no answer to {type(message).__name__} in time")
        return unwrap(answer[0])

    def ask(self, message: Request, deadline: float, done: Done) -> int:
        """Ask; `done` is called once with the reply or an error, on any thread. The engine's sweep ends what is overdue."""
        message_id = next(self._ids)
        if len(self._pending) > _MAX_PENDING // 2:
            self.expire(time.monotonic())
        with self._lock:
            if self.alive and len(self._pending) < _MAX_PENDING:
                self._pending[message_id] = (deadline, done)
                problem = None
            else:
                full = PeerUnavailable(f"{self._name}: too many open requests")
                problem = full if self.alive else LinkLost(f"{self._name}: connection is closed")
        if problem is not None:
            done(problem)
            return message_id
        try:
            self._send(protocol.encode_control(protocol.REQUEST, message_id, message), deadline)
        except (PeerUnavailable, TransferTimeout, ProtocolViolation) as error:
            self._finish(message_id, error)
        return message_id

    def reply(self, message_id: int, reply: Reply) -> None:
        """Answer a request; a link that died meanwhile is no error."""
        try:
            self._send(protocol.encode_control(protocol.REPLY, message_id, reply), time.monotonic() + 2.0)
        except (PeerUnavailable, TransferTimeout):
            self.close()

    def _send(self, data: bytes, deadline: float) -> None:
        if not self._send_lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise TransferTimeout(f"{self._name}: connection is congested")
        try:
            view = memoryview(data)
            while view:
                try:
                    view = view[self._sock.send(view, socket.MSG_NOSIGNAL) :]
                except BlockingIOError:
                    if time.monotonic() >= deadline or not self.alive:
                        if len(view) < len(data) or (isinstance(self._sock, TlsSocket) and self._sock.half_sent):
                            self.close()  # a frame was cut in half: the stream is of no use any more
                        raise TransferTimeout(f"{self._name}: the peer does not read") from None
        except OSError as error:
            self.close()
            raise LinkLost(f"{self._name}: {error}") from error
        finally:
            self._send_lock.release()

    def _answered(self, message_id: int, reply: Reply) -> None:
        self._finish(message_id, reply)

    def _finish(self, message_id: int, what: Reply | MooncakeError) -> None:
        with self._lock:
            entry = self._pending.pop(message_id, None)
        if entry is not None:
            entry[1](what)

    def writable(self) -> bool:
        """Whether a send would most likely not block."""
        try:
            poll = select.poll()
            poll.register(self._sock, select.POLLOUT)
            return not self._send_lock.locked() and bool(poll.poll(0))
        except (OSError, ValueError):
            return False

    @property
    def broken(self) -> bool:
        """Whether it has ended, even if the reader has not seen that yet: the peer hangs up before it ends what it served."""
        if not self.alive:
            return True
        try:
            poll = select.poll()
            poll.register(self._sock, select.POLLRDHUP)
            return bool(poll.poll(0))
        except (OSError, ValueError):
            return True

    def expire(self, now: float) -> None:
        """End requests whose deadline is over."""
        if not self._pending:
            return
        with self._lock:
            late = [message_id for message_id, (deadline, _) in self._pending.items() if deadline <= now]
        for message_id in late:
            self._finish(message_id, TransferTimeout(f"{self._name}: no answer in time"))

    def close(self) -> None:
        """Wake the reader, which closes the socket. Open requests end with PeerUnavailable."""
        with self._lock:
            if not self.alive:
                return
            self.alive = False
            pending, self._pending = list(self._pending.values()), {}
        sockets.shut(self._sock)
        for _, done in pending:
            done(LinkLost(f"{self._name}: connection lost"))


def unwrap(answer: Reply | MooncakeError) -> Reply:
    """The reply, or raise what it stands for."""
    if isinstance(answer, MooncakeError):
        raise answer
    if answer.code:
        raise protocol.error_from(answer.code, answer.text)
    return answer
