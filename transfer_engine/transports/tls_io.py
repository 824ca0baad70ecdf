"""The data path of a connection: by system calls on raw addresses (sysio), or through TLS.

Knows: how to send and fill an iovec array through a TlsSocket with the same signatures as sysio's calls, so that tcp_stream
and tcp_server do not care. Does not know: frames, certificates. OpenSSL encrypts straight from registered memory and
decrypts straight into it; only short neighbours are gathered first, because each write becomes a TLS record.
"""

from __future__ import annotations

import ctypes
import functools
import select
import socket
import ssl
from collections.abc import Callable, Iterator
from typing import NamedTuple

from transfer_engine.tls import TICK_S, TlsSocket
from transfer_engine.transports import sysio
from transfer_engine.transports.sysio import Vector

_WRITE_BYTES = 64 << 10
"""Handed to OpenSSL at a time: it goes on with the same bytes until all are sent, so this is the grain of progress."""
_SHORT_BYTES = 4 << 10

Check = Callable[[], None]
Call = Callable[[Vector, Check], None]
Some = Callable[[Vector, Check], int]


class DataPath(NamedTuple):
    """`send`, `receive`, `some` and `soon` (`receive_some`, `receive_soon`) as in sysio, on one socket. `idle()` returns when there
    is something to receive."""

    send: Call
    receive: Call
    some: Some
    soon: Callable[[Vector], int]
    idle: Callable[[], None]


def data_path(sock: socket.socket) -> DataPath:
    poll = select.poll()
    poll.register(sock.fileno(), select.POLLIN)
    fd, call = sock.fileno(), functools.partial
    if isinstance(sock, TlsSocket):
        some = call(_some, sock)
        return DataPath(call(_send, sock), call(_receive, sock), some, lambda _: 0, call(_idle, sock, poll))
    some, soon = call(sysio.receive_some, fd), call(sysio.receive_soon, fd)
    return DataPath(call(sysio.send, fd), call(sysio.receive, fd), some, soon, call(_wait, poll))


def _wait(poll: select.poll) -> None:
    poll.poll()


def _idle(sock: TlsSocket, poll: select.poll) -> None:
    if not sock.pending():  # else it lies decrypted already, and the kernel has nothing
        poll.poll()


def _send(sock: TlsSocket, vector: Vector, check: Check) -> None:
    for piece in _pieces(vector):
        view = piece
        while view:
            sent = sock.attempt(ssl.SSLSocket.send, view, TICK_S)
            if sent:
                vector.left -= sent
                view = view[sent:]
                if not vector.left:
                    return
            check()


def _receive(sock: TlsSocket, vector: Vector, check: Check) -> None:
    for address, count in _rows(vector):
        view = _view(address, count)
        while view:
            got = sock.attempt(ssl.SSLSocket.recv_into, view, TICK_S)
            if got == 0:
                raise ConnectionResetError("the peer closed the connection")
            if got:
                vector.left -= got
                view = view[got:]
                if not vector.left:
                    return
            check()


def _some(sock: TlsSocket, vector: Vector, check: Check) -> int:
    view = _view(*_rows(vector)[0])
    while not (got := sock.attempt(ssl.SSLSocket.recv_into, view, TICK_S)):
        if got == 0:
            raise ConnectionResetError("the peer closed the connection")
        check()
    return got


def _rows(vector: Vector) -> list[list[int]]:
    """What is left of a vector."""
    rows: list[list[int]] = vector.iov[vector.row :].tolist()
    return rows


def _pieces(vector: Vector) -> Iterator[memoryview]:
    """What to write, in order: long ranges where they lie, short neighbours together."""
    short = bytearray()
    for address, count in _rows(vector):
        if count <= _SHORT_BYTES:
            short += _view(address, count)
            if len(short) < _WRITE_BYTES:
                continue
        if short:
            yield memoryview(short)
            short = bytearray()
        if count > _SHORT_BYTES:
            whole = _view(address, count)
            yield from (whole[at : at + _WRITE_BYTES] for at in range(0, count, _WRITE_BYTES))
    if short:
        yield memoryview(short)


def _view(address: int, count: int) -> memoryview:
    return memoryview((ctypes.c_char * count).from_address(address)).cast("B")
