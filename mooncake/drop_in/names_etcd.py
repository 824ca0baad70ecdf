"""Engines' names in etcd, under leases: a killed engine's name vanishes, a restarted one takes its own over.

Knows: the registry, run on a thread of its own. Does not know: the engine. One record `/mooncake/<cluster>/instances/engine/<name>` each.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from mooncake.common.errors import ConfigError, PeerUnavailable, RegistryUnavailable
from mooncake.common.registry import InstanceRecord, Registry

ROLE = "engine"
_CONNECT_S = 3.0
_LOOKUP_S = 2.0
_CLOSE_S = 2.5
T = TypeVar("T")


class EtcdNames:
    """Raises ConfigError without an endpoint, RegistryUnavailable when etcd does not answer within about 5 s."""

    def __init__(self, endpoints: list[str]) -> None:
        if not endpoints:
            raise ConfigError("etcd:// needs an endpoint, e.g. etcd://127.0.0.1:2379")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="te-names", daemon=True)
        self._registry = Registry(endpoints, os.environ.get("MC_METADATA_CLUSTER_ID", "").strip("/") or "mooncake")
        self._thread.start()
        if not self._run(self._connect(), _CONNECT_S + 3.0):
            self.close()
            raise RegistryUnavailable(f"etcd at {', '.join(endpoints)} does not answer: is it running?")

    async def _connect(self) -> bool:
        await self._registry.start()
        return await self._registry.wait_connected(_CONNECT_S)

    async def _find(self, name: str) -> InstanceRecord | None:
        return self._registry.instances(ROLE).get(name)

    def _run(self, step: Coroutine[Any, Any, T], timeout_s: float) -> T:
        return asyncio.run_coroutine_threadsafe(step, self._loop).result(timeout_s)

    def publish(self, name: str, address: str, instance_id: str) -> None:
        record = InstanceRecord(name=name, instance_id=instance_id, role=ROLE, address=address)
        self._run(self._registry.register(record), _CONNECT_S)

    def address_of(self, target: str) -> str:
        """From the last known picture; a name that is not there yet gets 2 s to appear."""
        deadline = time.monotonic() + _LOOKUP_S
        while True:
            record = self._run(self._find(target), _LOOKUP_S)
            if record is not None:
                return record.address
            if time.monotonic() >= deadline:
                raise PeerUnavailable(f"etcd knows no engine {target!r}: has it been initialized with that name?")
            time.sleep(0.02)

    def close(self) -> None:
        if not self._loop.is_running():
            return
        with contextlib.suppress(TimeoutError):  # etcd is away: the lease ends by itself
            self._run(self._registry.close(), _CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(0.5)
