"""What every role's process shares: signals, registry, instance id, side server, record, and the line that says
"ready".

Use:
    async with Role(cluster, "conductor", name) as role:
        server, address = make_server(format_address(cluster.host, port or 0), token=cluster.cluster_token)
        ...
        await role.serve_http(ready=lambda: role.registry.connected)
        await role.register(address=address, info={...})
        await role.wait_for_stop()
Does not know: what the role does. Leaving the block deregisters and closes everything that was opened here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import sys
from collections.abc import Callable, Iterable
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry, Gauge

from mooncake.common.config import ClusterConfig
from mooncake.common.ids import new_id
from mooncake.common.log import setup_logging
from mooncake.common.metrics import ServedUrl, new_registry, serve_http
from mooncake.common.registry import InstanceRecord, Registry

READY_PREFIX = "MOONCAKE_READY "
_log = logging.getLogger(__name__)


class Role:
    """One process of the cluster. `role` is what the command line calls it; `registry_role` where it registers."""

    def __init__(self, cluster: ClusterConfig, role: str, name: str, *, registry_role: str = "") -> None:
        self.cluster = cluster
        self.role = role
        self.name = name
        self.registry_role = registry_role or ("worker" if role in ("prefill", "decode") else role)
        self.instance_id = new_id(name)
        self.metrics: CollectorRegistry = new_registry()
        self.registry = Registry(cluster.etcd, cluster.cluster, lease_ttl_s=cluster.lease_ttl_s)
        self.stop = asyncio.Event()
        self.http_url = ""
        self._served: ServedUrl | None = None
        self._registered = False
        connected = Gauge("mooncake_etcd_connected", "1 while etcd answers", registry=self.metrics)
        connected.set_function(lambda: float(self.registry.connected))

    async def __aenter__(self) -> Role:
        setup_logging(self.role, self.name, self.cluster.log_level)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):  # not in a main thread (tests)
                loop.add_signal_handler(number, self.stop.set)
        await self.registry.start()
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.registry.close()
        if self._served is not None:
            await self._served.close()
        _log.info("stopped")

    async def serve_http(self, *, ready: Callable[[], bool], routes: Iterable[web.RouteDef] = (), port: int = 0) -> str:
        """Starts the side server with this role's metrics; returns (and keeps) its URL."""
        self._served = await serve_http(
            self.cluster.host, port, self.metrics, ready=ready, routes=routes, instance_id=self.instance_id
        )
        self.http_url = str(self._served)
        return self.http_url

    async def register(self, *, address: str = "", http_url: str = "", info: dict[str, Any] | None = None) -> None:
        """Tells the cluster, and at the first time prints the ready line that `mooncake up` waits for.

        Call it when the role can serve; call it again when `info` changes.
        """
        record = InstanceRecord(
            self.name, self.instance_id, self.registry_role, address, http_url or self.http_url, info or {}
        )
        await self.registry.register(record)
        if not self._registered:
            self._registered = True
            print_ready(self.role, self.name, address, record.http_url)
            _log.info("ready", extra={"fields": {"address": address, "http_url": record.http_url}})

    async def publish_topology(self, record: bytes) -> None:
        """Shows the cluster what this role's transfer engine sees of its machine: an encoded TopologyRecord."""
        await self.registry.topologies.publish(self.instance_id, record)

    async def wait_for_stop(self, *failures: asyncio.Task[Any]) -> None:
        """Returns at SIGTERM or SIGINT. Ends early with the exception of a task that failed, or when one returned."""
        stop = asyncio.create_task(self.stop.wait(), name="stop")
        try:
            done, _ = await asyncio.wait({stop, *failures}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            stop.cancel()


def print_ready(role: str, name: str, address: str, http_url: str) -> None:
    """The line on stdout that tells a supervisor that the role serves."""
    line = {"role": role, "name": name, "address": address, "http_url": http_url}
    sys.stdout.write(READY_PREFIX + json.dumps(line) + "\n")
    sys.stdout.flush()


def parse_ready(line: str) -> dict[str, str] | None:
    """The object of a ready line, None for any other line."""
    if not line.startswith(READY_PREFIX):
        return None
    try:
        parsed = json.loads(line[len(READY_PREFIX) :])
    except ValueError:
        return None
    return parsed if isinstance(parsed, dict) else None
