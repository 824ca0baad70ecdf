"""Who is there: mutual proof of the cluster token, and identities, at the start of every connection.

Knows: the four messages and their HMACs, inside TLS where that is set. Does not know: what the connection is used for
afterwards, certificates (tls). Both sides prove the token over both nonces, the whole transcript and the TLS session, so
neither a replay nor a reflection nor a relay works. Without TLS the wire after it is not encrypted. A connection that has
not finished within its deadline is dropped.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import ssl
import struct
import time
from typing import TypeVar

import msgspec

from mooncake.common.errors import AuthenticationFailed, PeerUnavailable, ProtocolViolation, TransferTimeout
from transfer_engine import sockets, tls
from transfer_engine.tls import Tls, TlsSocket

_PREFIX = struct.Struct("<4sH")
_MAGIC = b"MCT1"
_TLS_HELLO = b"\x16\x03"
_TLS_ONLY = b"tls"
"""Said to a plain dialler instead of a Welcome by a target that has TLS. Not proven: it can only end the attempt."""
_MAX_BYTES = 4096
M = TypeVar("M", "Hello", "Welcome")


class Identity(msgspec.Struct, frozen=True, array_like=True):
    """What a peer says of itself. `host_key` names boot, pid namespace and user: equal on both sides means same host, same user.
    `start_ticks` makes `pid` unambiguous. `probe_address` holds the 32 characters of `instance_id` in the peer's memory."""

    instance_id: str
    name: str
    address: str
    host_key: str
    pid: int
    start_ticks: int
    probe_address: int
    transports: tuple[str, ...]


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """`want` is the instance that the dialler means ("" for any); `stream_id` is empty for a control connection."""

    identity: Identity
    want: str
    stream_id: str
    nonce: bytes


class Welcome(msgspec.Struct, frozen=True, array_like=True):
    identity: Identity
    nonce: bytes
    mac: bytes
    refusal: str = ""


def _mac(token: bytes, label: bytes, *parts: bytes) -> bytes:
    digest = hmac.new(token, label, hashlib.sha256)
    for part in parts:
        digest.update(len(part).to_bytes(4, "little") + part)
    return digest.digest()


def dial(
    address: tuple[str, int],
    mine: Identity,
    token: bytes,
    *,
    want: str,
    stream_id: str,
    deadline: float,
    security: Tls | None = None,
) -> tuple[socket.socket, Identity]:
    """Connect and prove. The socket returned is blocking, or a TlsSocket. Raises PeerUnavailable (also when another instance
    answers), AuthenticationFailed (also for a certificate, or when only one side has TLS), ProtocolViolation, TransferTimeout."""
    try:
        sock = socket.create_connection(address, timeout=_left(deadline))
    except TimeoutError as error:
        raise TransferTimeout(f"{address[0]}:{address[1]} did not accept in time") from error
    except OSError as error:
        raise PeerUnavailable(f"cannot connect to {address[0]}:{address[1]}: {error}") from error
    try:
        if security is not None:
            sock = security.wrap(sock, target=False)
            tls.shake_hands(sock, deadline)
        bound = tls.binding(sock)
        hello = msgspec.msgpack.encode(Hello(mine, want, stream_id, os.urandom(32)))
        _send(sock, hello, deadline)
        answer = _receive(sock, deadline)
        if answer == _TLS_ONLY and not bound:
            raise tls.wanted(f"{address[0]}:{address[1]}")
        welcome = _decode(answer, Welcome)
        unsigned = msgspec.msgpack.encode(Welcome(welcome.identity, welcome.nonce, b"", welcome.refusal))
        if not hmac.compare_digest(welcome.mac, _mac(token, b"target", hello, unsigned, *bound)):
            raise AuthenticationFailed(f"{address[0]}:{address[1]} does not hold our cluster token")
        if want and welcome.identity.instance_id != want:
            raise PeerUnavailable(
                f"{address[0]}:{address[1]} is now instance {welcome.identity.instance_id}, not {want}"
            )
        if welcome.refusal:
            raise PeerUnavailable(f"{address[0]}:{address[1]} refused: {welcome.refusal}")
        _send(sock, _mac(token, b"initiator", hello, answer, *bound), deadline)
        if _receive(sock, deadline) != b"ok":
            raise AuthenticationFailed(f"{address[0]}:{address[1]} did not accept our cluster token")
        _prepare(sock)
    except BaseException as error:
        sockets.close(sock)
        if isinstance(error, TimeoutError):
            raise TransferTimeout(f"{address[0]}:{address[1]} did not finish the handshake in time") from error
        if isinstance(error, EOFError):
            raise PeerUnavailable(f"{address[0]}:{address[1]} hung up during the handshake") from error
        if isinstance(error, ssl.SSLError):
            raise tls.explain(f"{address[0]}:{address[1]}", error) from error
        if isinstance(error, OSError):
            raise PeerUnavailable(f"{address[0]}:{address[1]}: {error}") from error
        raise
    return sock, welcome.identity


def accept(sock: socket.socket, mine: Identity, token: bytes, *, refusal: str, deadline: float) -> Hello:
    """The other side of `dial`; a TlsSocket shakes its hands first. Returns what the dialler said, proven. Raises
    AuthenticationFailed, ProtocolViolation, PeerUnavailable, TransferTimeout; the caller closes the socket then."""
    try:
        if isinstance(sock, TlsSocket):
            _expect_tls(sock, deadline)
        bound = tls.binding(sock)
        raw = _receive(sock, deadline)
        hello = _decode(raw, Hello)
        if len(hello.nonce) != 32:
            raise ProtocolViolation("handshake nonce of a wrong length")
        unsigned = Welcome(mine, os.urandom(32), b"", refusal)
        mac = _mac(token, b"target", raw, msgspec.msgpack.encode(unsigned), *bound)
        answer = msgspec.msgpack.encode(Welcome(mine, unsigned.nonce, mac, refusal))
        _send(sock, answer, deadline)
        if not hmac.compare_digest(_receive(sock, deadline), _mac(token, b"initiator", raw, answer, *bound)):
            _send(sock, b"no", deadline)
            raise AuthenticationFailed("a dialler does not hold our cluster token")
        if refusal or (hello.want and hello.want != mine.instance_id):
            raise PeerUnavailable(refusal or "the dialler means another instance")
        _send(sock, b"ok", deadline)
        _prepare(sock)
    except TimeoutError as error:
        raise TransferTimeout("handshake not finished in time") from error
    except ssl.SSLError as error:
        tls.linger(sock)
        raise tls.explain("a dialler", error) from error
    except (OSError, EOFError) as error:
        raise PeerUnavailable(f"dialler hung up: {error}") from error
    return hello


def _expect_tls(sock: TlsSocket, deadline: float) -> None:
    sock.settimeout(_left(deadline))
    if socket.socket.recv(sock, 1, socket.MSG_PEEK) == _MAGIC[:1]:
        socket.socket.send(sock, _PREFIX.pack(_MAGIC, len(_TLS_ONLY)) + _TLS_ONLY)
        tls.linger(sock)
        raise AuthenticationFailed("a dialler came without TLS")
    tls.shake_hands(sock, deadline)


def _prepare(sock: socket.socket) -> None:
    sock.settimeout(0 if isinstance(sock, TlsSocket) else None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _decode(raw: bytes, kind: type[M]) -> M:
    try:
        return msgspec.msgpack.decode(raw, type=kind)
    except msgspec.MsgspecError as error:
        raise ProtocolViolation(f"malformed handshake: {error}") from error


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("handshake deadline passed")
    return left


def _send(sock: socket.socket, body: bytes, deadline: float) -> None:
    sock.settimeout(_left(deadline))
    sock.sendall(_PREFIX.pack(_MAGIC, len(body)) + body)


def _receive(sock: socket.socket, deadline: float) -> bytes:
    prefix = _exactly(sock, _PREFIX.size, deadline)
    magic, length = _PREFIX.unpack(prefix)
    if prefix.startswith(_TLS_HELLO):
        sock.sendall(b"this engine has no TLS")  # no TLS record: ends the dialler's handshake at once
        tls.linger(sock)
        raise AuthenticationFailed("a dialler came with TLS, which is not set up here")
    if magic != _MAGIC or length > _MAX_BYTES:
        raise ProtocolViolation(f"not a Mooncake handshake: {magic!r}")
    return _exactly(sock, length, deadline)


def _exactly(sock: socket.socket, count: int, deadline: float) -> bytes:
    got = bytearray()
    while len(got) < count:
        sock.settimeout(_left(deadline))
        part = sock.recv(count - len(got))
        if not part:
            raise EOFError("connection closed")
        got += part
    return bytes(got)
