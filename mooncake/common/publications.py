"""Values that each instance publishes in etcd for whoever wants to look, below one folder, under its session's lease.

Knows: own values (kept there through outages and an emptied etcd) and the last known picture of all. A key carries the
instance id, so nobody else ever writes it and there is nothing to claim. Does not know: what a value means.
"""

from __future__ import annotations

from collections.abc import Mapping

from etcd3aio.kv import KVService

from mooncake.common.etcd_session import EtcdSession, KeyValue

MAX_VALUE_BYTES = 256 << 10
"""etcd takes 1.5 MiB a request; a snapshot holds the values of all instances."""


class Publications:
    """One folder; part of a `Registry`, on whose event loop everything happens."""

    def __init__(self, session: EtcdSession, folder: str) -> None:
        self.folder = folder
        self._session = session
        self._own: dict[str, bytes] = {}
        self._picture: dict[str, bytes] = {}

    async def publish(self, instance_id: str, value: bytes) -> None:
        """Writes a value and keeps it there. Again: replaces it. Does not raise when etcd is away; ValueError when too long."""
        if len(value) > MAX_VALUE_BYTES:
            raise ValueError(f"a published value holds at most {MAX_VALUE_BYTES} bytes, not {len(value)}")
        key = self.folder + instance_id
        self._own[key] = value
        await self._session.put(key, value)

    async def withdraw(self, instance_id: str) -> None:
        """Removes a value of ours and stops keeping it."""
        if self._own.pop(self.folder + instance_id, None) is not None and self._session.connected:
            await self._session.transact([], [KVService.txn_op_delete(self.folder + instance_id)])

    def all(self) -> dict[str, bytes]:
        """Instance id to value, sorted: the last known picture."""
        return {key.removeprefix(self.folder): value for key, value in sorted(self._picture.items())}

    # --- what etcd says ---

    def snapshot(self, found: Mapping[str, KeyValue]) -> None:
        self._picture = {key: held.value for key, held in found.items() if key.startswith(self.folder)}

    def event(self, key: str, held: KeyValue | None) -> bool:
        """One key was put or vanished (None). False: it is none of ours."""
        if not key.startswith(self.folder):
            return False
        if held is not None:
            self._picture[key] = held.value
        elif self._picture.pop(key, None) is not None and key in self._own:
            self._session.request_resync()
        return True

    async def repair(self, found: Mapping[str, KeyValue]) -> None:
        """Writes what a snapshot lacks of our own values."""
        for key, value in list(self._own.items()):
            held = found.get(key)
            if held is None or held.value != value or held.lease != self._session.lease_id:
                await self._session.put(key, value)
