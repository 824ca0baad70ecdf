"""Ending connections. Knows: neither a shutdown nor a close may fail whoever is just cleaning up: on Linux the descriptor is gone
whatever close says, and a shutdown fails only where there is nothing to shut any more."""

from __future__ import annotations

import contextlib
import socket


def shut(sock: socket.socket) -> None:
    """Wake whoever reads or writes it; from any thread."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def close(sock: socket.socket) -> None:
    """By the owner only: a closed descriptor may be reused under a running call."""
    with contextlib.suppress(OSError):
        sock.close()
