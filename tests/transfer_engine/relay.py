"""A man in the middle: passes TCP connections on and may watch, cut or count them.

`Relay(address)` listens at `relay.address` and connects each caller to `address`.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

from transfer_engine.segment import parse_address


class Relay:
    """`seen` collects all bytes, both ways, when `watch`. `wrap(socket, accepted)` may put TLS on either half."""

    def __init__(
        self, address: str, *, watch: bool = False, wrap: Callable[[socket.socket, bool], socket.socket] | None = None
    ) -> None:
        self._far = parse_address(address)
        self._wrap = wrap or (lambda sock, _: sock)
        self._watch = watch
        self.seen = bytearray()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                threading.Thread(target=self._join, args=(near,), daemon=True).start()

    def _join(self, near: socket.socket) -> None:
        with contextlib.suppress(OSError):
            far = self._wrap(socket.create_connection(self._far, timeout=5.0), False)
            near = self._wrap(near, True)
            near.settimeout(None)
            far.settimeout(None)
            self._open += [near, far]
            threading.Thread(target=self._pass, args=(near, far), daemon=True).start()
            self._pass(far, near)

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if self._watch:
                    self.seen += data
                sink.sendall(data)
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        """Break all connections that pass now."""
        for sock in self._open:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for sock in self._open:
            sock.close()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
