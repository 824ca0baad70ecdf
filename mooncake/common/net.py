"""Addresses: `host:port` text with brackets around IPv6 hosts, and free ports."""

from __future__ import annotations

import socket

from mooncake.common.errors import ConfigError


def format_address(host: str, port: int) -> str:
    """`host:port`, or `[host]:port` when the host is an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_address(address: str) -> tuple[str, int]:
    """Inverse of `format_address`. Raises ConfigError naming the text that is not an address."""
    host, separator, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ConfigError(f"address {address!r}: write an IPv6 host in brackets, e.g. [::1]:8000")
    if not separator or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"address {address!r} is not host:port")
    return host, int(port)


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that was free on `host` a moment ago (another process may still take it)."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def port_is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now. SO_REUSEADDR as servers set it: TIME_WAIT does not count as taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
