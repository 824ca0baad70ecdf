"""How engines find one another: by address (P2PHANDSHAKE), or by name through a metadata server.

Knows: what a caller's target means, and how a name is published over HTTP. Does not know: etcd (names_etcd), connections.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from typing import Any, Protocol

from mooncake.common.errors import ConfigError, PeerUnavailable, RegistryUnavailable
from mooncake.common.net import format_address
from mooncake.drop_in.settings import split

P2P = "P2PHANDSHAKE"
_HTTP_TIMEOUT_S = 3.0


class Names(Protocol):
    """One engine's view. `publish` and `address_of` raise MooncakeError or ValueError."""

    def publish(self, name: str, address: str, instance_id: str) -> None:
        """Let others find `address` under `name`; an old registration of that name is replaced."""

    def address_of(self, target: str) -> str:
        """`host:port` of a target as the application names it."""

    def close(self) -> None:
        """Take the name back."""


class Addresses:
    """P2PHANDSHAKE: a target is `host:port`, also with an IPv6 host without brackets, as callers that paste the two write it."""

    def publish(self, name: str, address: str, instance_id: str) -> None:
        pass

    def address_of(self, target: str) -> str:
        head, _, port = target.rpartition(":")
        if not target.startswith("[") and head.count(":") > 1:
            target = f"[{head}]:{port}"
        host, number = split(target)
        if not number or not head:
            raise ValueError(f"target {target!r} is not host:port with the peer's get_rpc_port()")
        return format_address(host, number)

    def close(self) -> None:
        pass


class HttpNames:
    """Names on an HTTP metadata server (`GET|PUT|DELETE URL?key=K`); the value is JSON with host and port."""

    def __init__(self, url: str, is_alive: Callable[[str], bool]) -> None:
        self._url = url
        self._is_alive = is_alive
        self._own: str | None = None

    def publish(self, name: str, address: str, instance_id: str) -> None:
        old = self._get(name)
        if old is not None and old != address:
            if self._is_alive(old):
                raise ConfigError(f"another living engine at {old} is called {name!r}: give each engine its own name")
            self._call("DELETE", name)  # our old self: servers refuse to overwrite a name
        host, port = split(address)
        self._call("PUT", name, json.dumps({"ip_or_host_name": host, "rpc_port": port, "instance_id": instance_id}))
        self._own = name

    def address_of(self, target: str) -> str:
        address = self._get(target)
        if address is None:
            raise PeerUnavailable(f"{self._url} knows no engine {target!r}: has it been initialized with that name?")
        return address

    def close(self) -> None:
        if self._own is not None:
            self._call("DELETE", self._own)
            self._own = None

    def _get(self, name: str) -> str | None:
        found = self._call("GET", name)
        if found is None:
            return None
        try:
            value = json.loads(found)
            return format_address(str(value["ip_or_host_name"]), int(value["rpc_port"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{self._url}: the entry of {name!r} is not one of an engine: {found[:80]!r}") from error

    def _call(self, method: str, name: str, body: str | None = None) -> bytes | None:
        """The body of the answer; None when the key is not there."""
        query = urllib.parse.urlencode({"key": f"mooncake/rpc_meta/{name}"})
        data = None if body is None else body.encode()
        request = urllib.request.Request(f"{self._url}?{query}", data=data, method=method)
        try:
            with urllib.request.urlopen(request, timeout=_HTTP_TIMEOUT_S) as answer:
                return bytes(answer.read(1 << 20))
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise RegistryUnavailable(f"{self._url}: {method} answered {error.code} {error.reason}") from error
        except OSError as error:
            raise RegistryUnavailable(f"the metadata server {self._url} does not answer: {error}") from error


def names_for(metadata_server: str, is_alive: Callable[[str], bool]) -> Names:
    """Raises ConfigError for a kind that is not known; `is_alive(address)` tells whether an engine answers there."""
    scheme, found, rest = metadata_server.strip().partition("://")
    kinds: dict[str, Callable[[], Any]] = {
        "http": lambda: HttpNames(metadata_server.strip(), is_alive),
        "https": lambda: HttpNames(metadata_server.strip(), is_alive),
        "etcd": lambda: _etcd(rest),
    }
    if not found and scheme.upper() == P2P:
        return Addresses()
    if not found or scheme.lower() not in kinds:
        raise ConfigError(
            f"metadata server {metadata_server!r} is not supported; use {P2P}, etcd://HOST:PORT or http://HOST:PORT/metadata"
        )
    made: Names = kinds[scheme.lower()]()
    return made


def _etcd(endpoints: str) -> Names:
    from mooncake.drop_in.names_etcd import EtcdNames  # pulls in grpc

    return EtcdNames([part.strip() for part in endpoints.replace(",", ";").split(";") if part.strip()])
