"""Optional TLS on an engine's connections, control and data: certificates, sockets, and what a failed handshake means.

Knows: mutual TLS 1.3 by a certificate authority of the cluster's own, and when files changed. Does not know: the token's
handshake, which runs inside and is bound to the TLS session, so nobody can stand in the middle. Names in certificates are
not compared: who a peer is, its instance id says; that it belongs to the cluster, CA and token do.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

from mooncake.common.errors import AuthenticationFailed, ConfigError, PeerUnavailable
from transfer_engine.config import EngineConfig

TICK_S = 0.05
_LINGER_S = 0.25
_FIELDS = "tls_cert, tls_key and tls_ca"


class TlsSocket(ssl.SSLSocket):
    """A connection that one thread may read while another writes: OpenSSL is entered by one at a time and, once the connection
    is set up (timeout 0), never waits inside. A shutdown keeps the keys; the standard class would hand out ciphertext then."""

    guard: threading.Lock
    half_sent = False
    """A record is on its way in part: only the same bytes may follow, anything else would be taken for them."""

    def shutdown(self, how: int) -> None:
        socket.socket.shutdown(self, how)

    def send(self, data: Any, flags: int = 0) -> int:
        """Raises BlockingIOError after a tick without room."""
        sent = self.attempt(ssl.SSLSocket.send, data, TICK_S)
        if sent is None:
            raise BlockingIOError("the peer does not read")
        return sent

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        """Waits for data however long it takes; 0 at the end of the stream."""
        while (got := self.attempt(ssl.SSLSocket.recv_into, buffer, None)) is None:
            pass
        return got

    def attempt(self, call: Callable[[ssl.SSLSocket, Any], int], view: Any, wait_s: float | None) -> int | None:
        """One try of `send` or `recv_into`; when it cannot go on, waits until it may (at most `wait_s`) and returns None."""
        try:
            with self.guard:
                done = call(self, view)
                self.half_sent &= call is not ssl.SSLSocket.send
                return done
        except ssl.SSLWantReadError:
            event = select.POLLIN
        except ssl.SSLWantWriteError:
            event = select.POLLOUT
            self.half_sent = True
        poll = select.poll()
        poll.register(self.fileno(), event)
        poll.poll(None if wait_s is None else wait_s * 1000)
        return None


class _Contexts(NamedTuple):
    server: ssl.SSLContext
    client: ssl.SSLContext


class Tls:
    """Files of one identity. Read again when they change (renewal needs no restart); a change that cannot be read is ignored
    until it can. Raises ConfigError, naming the field, when they cannot be read at first."""

    def __init__(self, cert: str, key: str, ca: str) -> None:
        self._cert, self._key, self._ca = cert, key, ca
        self._lock = threading.Lock()
        self._seen = self._stamp()
        self._contexts = _Contexts(self._context(ssl.PROTOCOL_TLS_SERVER), self._context(ssl.PROTOCOL_TLS_CLIENT))

    def wrap(self, sock: socket.socket, *, target: bool) -> TlsSocket:
        """Take the socket over (the old object is dead). No byte is sent yet: `shake_hands` does."""
        contexts = self._current()
        context = contexts.server if target else contexts.client
        made = context.wrap_socket(sock, server_side=target, do_handshake_on_connect=False)
        assert isinstance(made, TlsSocket)
        made.guard = threading.Lock()
        return made

    def _current(self) -> _Contexts:
        with self._lock:
            try:
                stamp = self._stamp()
                if stamp != self._seen:
                    server, client = self._context(ssl.PROTOCOL_TLS_SERVER), self._context(ssl.PROTOCOL_TLS_CLIENT)
                    self._contexts, self._seen = _Contexts(server, client), stamp
            except ConfigError:
                pass
            return self._contexts

    def _stamp(self) -> tuple[tuple[int, int, int], ...]:
        stamps = []
        for field, path in (("tls_cert", self._cert), ("tls_key", self._key), ("tls_ca", self._ca)):
            try:
                stat = os.stat(path)
            except OSError as error:
                raise ConfigError(f"transfer engine: {field}: {path}: {error.strerror}") from error
            stamps.append((stat.st_mtime_ns, stat.st_ino, stat.st_size))
        return tuple(stamps)

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.sslsocket_class = TlsSocket
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        if protocol == ssl.PROTOCOL_TLS_SERVER:
            context.num_tickets = 0  # sessions are not resumed
        try:
            context.load_cert_chain(self._cert, self._key, password=_no_password)
        except (OSError, ssl.SSLError) as error:
            text = f"{self._cert}, {self._key}: not a PEM certificate and its key: {error}"
            raise ConfigError(f"transfer engine: tls_cert, tls_key: {text}") from error
        try:
            context.load_verify_locations(self._ca)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"transfer engine: tls_ca: {self._ca}: not PEM certificates: {error}") from error
        return context


def _no_password() -> str:
    raise ConfigError("transfer engine: tls_key: an encrypted key cannot be used")


@lru_cache(maxsize=64)
def _load(cert: str, key: str, ca: str) -> Tls:
    return Tls(cert, key, ca)


def of(config: EngineConfig) -> Tls | None:
    """The identity that a config names, None when it names none. Raises ConfigError."""
    return _load(config.tls_cert, config.tls_key, config.tls_ca) if config.tls_cert else None


def binding(sock: socket.socket) -> tuple[bytes, ...]:
    """What both ends of a TLS session, and nobody else, have in common; empty for a plain connection."""
    return ((sock.get_channel_binding("tls-unique") or b""),) if isinstance(sock, TlsSocket) else ()


def shake_hands(sock: TlsSocket, deadline: float) -> None:
    """Raises ssl.SSLError (see `explain`), OSError, TimeoutError."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("handshake deadline passed")
    sock.settimeout(left)
    sock.do_handshake()


def explain(who: str, error: ssl.SSLError) -> AuthenticationFailed | PeerUnavailable:
    """What an error of the TLS handshake, or of the first bytes after it, means to an operator."""
    reason = error.reason or str(error)
    if isinstance(error, ssl.SSLCertVerificationError):
        text = f"its certificate is refused ({error.verify_message}): our tls_ca must have signed it, and it must be in date"
    elif "ALERT" in reason:
        text = f"it refuses our certificate ({reason}): its tls_ca must have signed our tls_cert, which must be in date"
    elif isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return PeerUnavailable(f"{who} hung up during the TLS handshake: does it have {_FIELDS}?")
    else:
        text = f"it does not speak TLS ({reason}): set {_FIELDS} there, or leave them out here"
    return AuthenticationFailed(f"{who}: {text}")


def wanted(who: str) -> AuthenticationFailed:
    """A plain dialler met a peer that has TLS."""
    return AuthenticationFailed(f"{who} takes TLS only: set {_FIELDS} here, or leave them out there")


def linger(sock: socket.socket) -> None:
    """Before closing on bytes that we did not read: wait a moment for the other side to hang up, or the reset that such a close
    causes would overtake what we told it."""
    until = time.monotonic() + _LINGER_S
    try:
        sock.shutdown(socket.SHUT_WR)
        while (left := until - time.monotonic()) > 0:
            socket.socket.settimeout(sock, left)
            if not socket.socket.recv(sock, 1 << 16):
                return
    except OSError:
        pass
