"""From `initialize`'s four strings and the environment to an engine's settings.

Knows: protocols, NIC lists, host names, MC_* variables. Does not know: sockets, metadata servers. What a variable means is
said in docs/drop_in.md.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from mooncake.common.errors import ConfigError

WAYS: dict[str, tuple[str, ...]] = {
    "": ("local", "shm", "rdma", "tcp"),
    "rdma": ("local", "shm", "rdma", "tcp"),
    "tcp": ("local", "shm", "tcp"),
    "shm": ("local", "shm"),
}
"""What a protocol allows, in order of preference. It names the network between hosts: peers on one host take the shorter way."""

DEFAULT_TIMEOUT_S = 30.0
_SLOWEST_BYTES_PER_S = 50e6
_LONGEST_S = 600.0


class Place(NamedTuple):
    """Where an engine listens and what peers dial. `port` 0: any."""

    bind: str
    advertise: str
    port: int


def ways(protocol: str, environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Transports of a protocol. Raises ConfigError for an unknown one."""
    name = protocol.strip().lower()
    if name not in WAYS:
        known = ", ".join(repr(p) for p in WAYS)
        raise ConfigError(f"unknown protocol {protocol!r}; choose one of {known}")
    return ("tcp",) if is_set(environ, "MC_FORCE_TCP") else WAYS[name]


def is_set(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "").strip().lower() not in ("", "0", "false", "off", "no")


def nics(device_name: str) -> tuple[str, ...]:
    """Device names of a comma list, or all that a JSON text (list, or matrix by memory location) names. Raises ConfigError."""
    listed = device_name.strip()
    if not listed.startswith(("{", "[")):
        return tuple(dict.fromkeys(filter(None, (name.strip() for name in listed.split(",")))))
    try:
        found = list(_names(msgspec.json.decode(listed)))
    except msgspec.DecodeError as error:
        raise ConfigError(f"device_name is neither a comma list nor JSON: {error}") from error
    return tuple(dict.fromkeys(found))


def _names(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield from nics(value)
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _names(inner)


def split(hostname: str) -> tuple[str, int]:
    """(host, port or 0) of `host`, `host:port`, `v6`, `[v6]` or `[v6]:port`. Raises ConfigError."""
    text = hostname.strip()
    host, port = text, ""
    if text.startswith("["):
        host, closed, port = text[1:].partition("]")
        if not closed or (port and not port.startswith(":")):
            raise ConfigError(f"not a host or host:port: {hostname!r}")
        port = port[1:]
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
    if port and not (port.isascii() and port.isdigit() and int(port) < 65536):
        raise ConfigError(f"not a port in {hostname!r}")
    return host or "127.0.0.1", int(port or 0)


def place(hostname: str, environ: Mapping[str, str] = os.environ) -> Place:
    """Bind exactly what the caller named: peers are told to dial it. A name of this host that leads to loopback only
    (Debian's /etc/hosts), or cannot be resolved yet, stands for every interface. Raises ConfigError."""
    host, port = split(hostname)
    address = environ.get("MC_TCP_BIND_ADDRESS", "").strip() or _resolve(host)
    if address is None or (_is_loopback(address) and not _means_loopback(host)):
        return Place("0.0.0.0", host, port)
    return Place(address, host, port)


def everywhere(there: Place) -> Place:
    """The same for an address that this host does not have itself: it is behind a NAT, a proxy or a virtual address."""
    return there._replace(bind="::" if ":" in there.bind else "0.0.0.0")


def is_reachable_from_outside(bind: str) -> bool:
    return not _is_loopback(bind)


def _resolve(host: str) -> str | None:
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return None


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _means_loopback(host: str) -> bool:
    try:
        return _is_loopback(host)
    except ValueError:
        return host.lower() == "localhost" or host.lower().endswith(".localhost")


def deadline_s(total_bytes: int, environ: Mapping[str, str] = os.environ) -> float:
    """Time that a transfer gets: MC_TRANSFER_TIMEOUT seconds (30), and more for what no slow network moves in that time."""
    try:
        base = max(1.0, float(environ.get("MC_TRANSFER_TIMEOUT", "") or DEFAULT_TIMEOUT_S))
    except ValueError:
        base = DEFAULT_TIMEOUT_S
    return min(_LONGEST_S, base + total_bytes / _SLOWEST_BYTES_PER_S)
