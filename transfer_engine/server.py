"""The listening side: accepts, shakes hands, and lends a thread to each connection.

Knows: bounds on connections, which kind a connection is. Does not know: what control requests mean or how payload is placed.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

from mooncake.common.errors import AuthenticationFailed, MooncakeError, Overloaded
from transfer_engine import handshake, sockets, threads, tls
from transfer_engine.config import EngineConfig
from transfer_engine.handshake import Hello, Identity
from transfer_engine.segment import format_address
from transfer_engine.transports.base import Stats


class Listener:
    """Binds at once (OSError when it cannot, ConfigError for bad TLS files); serves from `start` on."""

    def __init__(self, config: EngineConfig, counters: Stats) -> None:
        self._config = config
        self._counters = counters
        self._security = tls.of(config)
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        self._sock = socket.create_server((config.host, config.port), family=family, backlog=512)
        self.address = format_address(config.advertise_host or _reachable(config.host), self._sock.getsockname()[1])
        self._lock = threading.Lock()
        self._open: dict[socket.socket, threading.Thread] = {}
        self._closed = False

    def start(self, identity: Identity, serve: Callable[[socket.socket, Hello], None]) -> None:
        """`serve` gets each connection whose handshake succeeded, and closes it."""
        self._identity, self._serve = identity, serve
        self._thread = threads.start("te-accept", self._accept)

    @property
    def connections(self) -> int:
        return len(self._open)

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, _ = self._sock.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(0.05)  # out of descriptors: the kernel keeps the dialler waiting
                continue
            if not self._lend_thread(sock):
                sockets.close(sock)
                self._counters.add(refused_connections=1)

    def _lend_thread(self, sock: socket.socket) -> bool:
        with self._lock:
            if self._closed or len(self._open) >= self._config.max_connections + 64:
                return False
            try:
                self._open[sock] = threads.start("te-served", lambda: self._main(sock))
            except Overloaded:
                return False
            return True

    def _main(self, sock: socket.socket) -> None:
        try:
            with self._lock:  # whoever lent us this thread has entered it by then
                full = len(self._open) > self._config.max_connections
            if self._security is not None:
                sock = self._under_tls(sock, self._security)
            deadline = time.monotonic() + self._config.connect_timeout_s
            hello = handshake.accept(
                sock,
                self._identity,
                self._config.cluster_token,
                refusal="too many connections" if full else "",
                deadline=deadline,
            )
            self._serve(sock, hello)
        except AuthenticationFailed:
            self._counters.add(authentication_failures=1)
        except MooncakeError:
            self._counters.add(failed_handshakes=1)
        except OSError:
            pass
        finally:
            with self._lock:
                self._open.pop(sock, None)
            sockets.close(sock)

    def _under_tls(self, sock: socket.socket, security: tls.Tls) -> socket.socket:
        """The socket that takes the place of a plain one, in our table too: the old object is dead."""
        with self._lock:
            thread = self._open.pop(sock)
            made = security.wrap(sock, target=True)
            self._open[made] = thread
            return made

    def stop_accepting(self) -> None:
        with self._lock:
            self._closed = True
        sockets.shut(self._sock)
        sockets.close(self._sock)

    def close(self, deadline: float) -> None:
        """End all connections and wait for their threads."""
        self.stop_accepting()
        with self._lock:
            connections = list(self._open.items())
        for sock, _ in connections:
            sockets.shut(sock)
        for thread in [self._thread, *(thread for _, thread in connections)]:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))


def _reachable(bound: str) -> str:
    """What peers can dial when we are bound to `bound`: for a wildcard, the source address of the default route."""
    if bound not in ("", "0.0.0.0", "::"):
        return bound
    family, target = (socket.AF_INET6, "2001:db8::1") if bound == "::" else (socket.AF_INET, "192.0.2.1")
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # sends nothing
        try:
            probe.connect((target, 9))
            return str(probe.getsockname()[0])
        except OSError:
            return "::1" if bound == "::" else "127.0.0.1"
