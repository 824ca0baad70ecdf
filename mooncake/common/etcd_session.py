"""A session with etcd: one lease, one watch below a prefix, re-established for as long as it is not closed.

Each (re)connection lists the whole prefix and hands it over as a snapshot, so that nothing depends on events that an
outage, a compaction or an emptied etcd swallowed; the list is repeated now and then for the same reason. Writes are
best effort: what a write loses, the next snapshot repairs (registry.py, election.py).
Knows: etcd3aio. Does not know: what the keys mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import grpc.aio
from etcd3aio import Etcd3Client, EtcdError, prefix_range_end
from etcd3aio.kv import KVService

from mooncake.common.errors import ConfigError
from mooncake.common.net import format_address, parse_address

_log = logging.getLogger(__name__)
_FAILURES = (EtcdError, grpc.aio.AioRpcError, TimeoutError, OSError)
_BACKOFF_MAX_S = 2.0
_RESYNC_EVERY_S = 15.0


class KeyValue(NamedTuple):
    """What etcd holds under one key."""

    value: bytes
    lease: int
    create_revision: int


class SessionLost(Exception):
    """This connection is over; the next one starts with a snapshot."""


class EtcdSession:
    """See the module's text. `on_event(key, held | None)` is called for each change, `on_snapshot` with everything."""

    def __init__(
        self,
        endpoints: Sequence[str],
        prefix: str,
        *,
        ttl_s: int,
        on_snapshot: Callable[[dict[str, KeyValue]], Awaitable[None]],
        on_event: Callable[[str, KeyValue | None], None],
    ) -> None:
        if not endpoints:
            raise ConfigError("etcd: at least one endpoint is needed, e.g. 127.0.0.1:2379")
        self._endpoints = [parse_address(e.removeprefix("http://").rstrip("/")) for e in endpoints]
        self._prefix = prefix
        self._ttl_s = ttl_s
        self._timeout_s = min(3.0, max(1.0, ttl_s / 3))
        self._on_snapshot = on_snapshot
        self._on_event = on_event
        self._connected = asyncio.Event()
        self._resync = asyncio.Event()
        self._client: Any = None  # Etcd3Client: its services are Optional until connected
        self._task: asyncio.Task[None] | None = None
        self._listed = 0  # revision of the last snapshot
        self._watched = 0  # revision of the last event
        self.lease_id = 0
        self.generation = asyncio.Condition()  # notified after each snapshot and event: campaigns wait here

    # --- life ---

    @property
    def connected(self) -> bool:
        return self._connected.is_set()

    def start(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="etcd-session")

    async def wait_connected(self, timeout_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._connected.wait()
        return self.connected

    async def close(self) -> None:
        """Revokes the lease (which deletes every key under it) and ends."""
        if self._task is None:
            return
        if self.connected:
            with contextlib.suppress(*_FAILURES):
                await self._client.lease.revoke(self.lease_id, timeout=1.0, max_attempts=1)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._task = None

    def request_resync(self) -> None:
        """Asks for a snapshot soon."""
        self._resync.set()

    # --- writing ---

    async def put(self, key: str, value: bytes, *, claimed: set[str] | None = None) -> bool:
        """Writes under the session's lease; false when that failed (the next snapshot will repair it)."""
        if not self.lease_id or self._client is None:
            return False
        try:
            await self._client.kv.put(key, value, lease=self.lease_id, timeout=self._timeout_s)
        except _FAILURES as error:
            _log.info("etcd put failed", extra={"fields": {"key": key, "error": _text(error)}})
            self.request_resync()
            return False
        if claimed is not None:
            claimed.add(key)
        return True

    async def retire(self, key: str, value: bytes, last_value: bytes) -> None:
        """Deletes the key if it still holds `value`; watchers see `last_value` just before."""
        if not self.connected:
            return
        if await self.transact(
            [KVService.txn_compare_value(key, value)], [KVService.txn_op_put(key, last_value, lease=self.lease_id)]
        ):
            await self.transact([KVService.txn_compare_value(key, last_value)], [KVService.txn_op_delete(key)])

    async def transact(self, compare: list[Any], success: list[Any]) -> bool | None:
        """Whether the comparison held and `success` was applied; None when etcd did not answer (the outcome is
        unknown).
        """
        if not self.lease_id or self._client is None:
            return None
        try:
            answer = await self._client.kv.txn(compare, success, timeout=self._timeout_s, max_attempts=1)
        except _FAILURES as error:
            _log.info("etcd transaction failed", extra={"fields": {"error": _text(error)}})
            self.request_resync()
            return None
        return bool(answer.succeeded)

    async def read(self, key: str) -> tuple[bytes | None, int] | None:
        """Value (None: absent) and etcd's present revision; None when etcd did not answer."""
        if self._client is None:
            return None
        try:
            answer = await self._client.kv.get(key, timeout=self._timeout_s, max_attempts=1)
        except _FAILURES:
            self.request_resync()
            return None
        return (answer.kvs[0].value if answer.kvs else None), answer.header.revision

    # --- the loop ---

    async def _run(self) -> None:
        backoff_s = 0.1
        while True:
            try:
                await self._connect()
                backoff_s = 0.1
                await self._hold()
            except (*_FAILURES, SessionLost) as error:
                if self.connected:
                    _log.warning("etcd lost, keeping the last known picture", extra={"fields": {"error": _text(error)}})
            finally:
                self._connected.clear()
                client, self._client = self._client, None
                if client is not None:
                    await client.close()
            await asyncio.sleep(backoff_s * random.uniform(0.8, 1.2))
            backoff_s = min(backoff_s * 2, _BACKOFF_MAX_S)

    async def _connect(self) -> None:
        client: Any = Etcd3Client(await self._resolved(), rpc_max_attempts=1)
        await client.connect()
        self._client = client
        self._listed = self._watched = 0
        if not self.lease_id or not await self._keep_alive():
            granted = await client.lease.grant(ttl=self._ttl_s, timeout=self._timeout_s)
            self.lease_id = granted.ID
        await self._list()
        self._connected.set()
        _log.info("etcd connected", extra={"fields": {"lease": f"{self.lease_id:x}", "revision": self._listed}})

    async def _resolved(self) -> list[str]:
        """etcd3aio takes IPv4 addresses only, so names are resolved here, anew for each connection."""
        loop, found = asyncio.get_running_loop(), []
        for host, port in self._endpoints:
            with contextlib.suppress(OSError):
                infos = await loop.getaddrinfo(host, port, family=socket.AF_INET, type=socket.SOCK_STREAM)
                found += [format_address(str(info[4][0]), port) for info in infos]
        if not found:
            raise OSError("no etcd endpoint can be resolved")
        return list(dict.fromkeys(found))

    async def _hold(self) -> None:
        """Runs until the connection, the lease or the watch is lost; then raises what ended it."""
        tasks = [asyncio.create_task(part) for part in (self._watch(), self._keep_lease(), self._list_again())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            done.pop().result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep_lease(self) -> None:
        while True:
            await asyncio.sleep(self._ttl_s / 4)
            if not await self._keep_alive():
                raise SessionLost("lease expired")

    async def _keep_alive(self) -> bool:
        """Prolongs the lease; false when etcd does not know it any more."""
        call = self._client.lease.keep_alive(self.lease_id)
        try:
            async with asyncio.timeout(self._timeout_s):
                async for answer in call:
                    return bool(answer.TTL > 0)
        finally:
            call.cancel()
        raise SessionLost("keep-alive got no answer")

    async def _list_again(self) -> None:
        while True:
            # Not wait_for: before Python 3.12 it loses a cancellation that comes together with what it waits for, and
            # `close` would wait for ever.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_RESYNC_EVERY_S):
                    await self._resync.wait()
                await asyncio.sleep(0.1)  # a burst of requests is one list
            self._resync.clear()
            await self._list()

    async def _list(self) -> None:
        """Hands over everything. Repeated when the watch overtook it; later events that it covers are dropped."""
        while True:
            seen = self._watched
            answer = await self._client.kv.get(
                self._prefix, range_end=prefix_range_end(self._prefix), timeout=self._timeout_s, max_attempts=1
            )
            if answer.header.revision < seen:
                raise SessionLost("etcd's revision went back: its data are new")
            if answer.header.revision >= self._watched:
                break
        self._listed = answer.header.revision
        found = {kv.key.decode(): KeyValue(kv.value, kv.lease, kv.create_revision) for kv in answer.kvs}
        await self._on_snapshot(found)
        await self._notify()

    async def _watch(self) -> None:
        async for response in self._client.watch.watch(
            self._prefix, range_end=prefix_range_end(self._prefix), start_revision=self._listed + 1
        ):
            if response.canceled or response.compact_revision:
                raise SessionLost(f"watch cancelled: {response.cancel_reason or 'compacted'}")
            for event in response.events:
                if event.kv.mod_revision <= self._listed:
                    continue
                deleted = event.type == event.DELETE
                held = None if deleted else KeyValue(event.kv.value, event.kv.lease, event.kv.create_revision)
                self._watched = event.kv.mod_revision
                self._on_event(event.kv.key.decode(), held)
            await self._notify()
        raise SessionLost("watch ended")

    async def _notify(self) -> None:
        async with self.generation:
            self.generation.notify_all()


def _text(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__
