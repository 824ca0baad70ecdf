"""Who leads: one key an election, under the leader's lease, and a last epoch that outlives leases.

A leader leads on while etcd is unreachable (nobody can win then either). When etcd is back it takes its key again with
the same epoch, provided that nobody led in between (`epochs/<election>` still is ours or etcd was emptied); else it
steps down. Epochs grow: `max(last epoch + 1, etcd's next revision)`, also when etcd comes back empty.
Knows: keys and transactions. Does not know: what a leader does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Literal, TypeAlias

import msgspec
from etcd3aio.kv import KVService

from mooncake.common.etcd_session import EtcdSession, KeyValue
from mooncake.common.probe import Prober

_log = logging.getLogger(__name__)
_RETRY_S = 1.0

ElectionName: TypeAlias = Literal["conductor", "store-master"]


class LeaderRecord(msgspec.Struct, frozen=True):
    """Value of a leader key."""

    name: str
    instance_id: str
    address: str
    epoch: int


class Leadership:
    """Held until `lost` is set or `resign` is called."""

    def __init__(self, elections: Elections, election: ElectionName, record: LeaderRecord) -> None:
        self.election = election
        self.record = record
        self.lost = asyncio.Event()
        self._elections = elections

    @property
    def epoch(self) -> int:
        """Grows from leader to leader of one election."""
        return self.record.epoch

    async def resign(self) -> None:
        """Gives the leadership up, so that the next candidate wins at once. Sets `lost`."""
        await self._elections._resign(self)


class Elections:
    """All elections of one cluster as one process sees them."""

    def __init__(self, session: EtcdSession, leaders_prefix: str, epochs_prefix: str, prober: Prober) -> None:
        self._session = session
        self._leaders_prefix = leaders_prefix
        self._epochs_prefix = epochs_prefix
        self._prober = prober
        self._known: dict[str, LeaderRecord] = {}
        self._in_etcd: dict[str, bytes] = {}
        self._held: dict[str, Leadership] = {}
        self._watchers: dict[str, list[Callable[[LeaderRecord | None], None]]] = {}
        self._max_epoch: dict[str, int] = {}

    def leader(self, election: ElectionName) -> LeaderRecord | None:
        return self._known.get(election)

    def watch(self, election: ElectionName, callback: Callable[[LeaderRecord | None], None]) -> Callable[[], None]:
        callbacks = self._watchers.setdefault(election, [])
        callbacks.append(callback)
        callback(self._known.get(election))
        return lambda: callbacks.remove(callback) if callback in callbacks else None

    async def close(self) -> None:
        for leadership in list(self._held.values()):
            await self._resign(leadership)

    # --- winning and losing ---

    async def campaign(self, election: ElectionName, name: str, instance_id: str, address: str) -> Leadership:
        while True:
            present = self._in_etcd.get(election)
            free = present is None or _decode(present).name == name
            if self._session.connected and free:
                record = await self._take(election, name, instance_id, address, present)
                if record is not None:
                    leadership = Leadership(self, election, record)
                    self._held[election] = leadership
                    self._in_etcd[election] = msgspec.json.encode(record)
                    self._learn(election, record)
                    _log.info("leading", extra={"fields": {"election": election, "epoch": record.epoch}})
                    return leadership
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_RETRY_S), self._session.generation:
                    await self._session.generation.wait()

    async def _take(
        self, election: ElectionName, name: str, instance_id: str, address: str, present: bytes | None
    ) -> LeaderRecord | None:
        """One try for the key: it must still be absent, or still be our old self's."""
        answer = await self._session.read(self._epochs_prefix + election)
        if answer is None:
            return None
        stored, revision = answer
        last = max(int(stored or 0), self._max_epoch.get(election, 0))
        record = LeaderRecord(name, instance_id, address, max(last, revision) + 1)
        key = self._leaders_prefix + election
        if present is None:
            same_leader = KVService.txn_compare_version(key, 0)
        else:
            same_leader = KVService.txn_compare_value(key, present)
        won = await self._session.transact(
            [same_leader, self._compare_epoch(election, stored)], self._writes(election, record)
        )
        return record if won else None

    def _compare_epoch(self, election: str, stored: bytes | None) -> object:
        key = self._epochs_prefix + election
        return KVService.txn_compare_version(key, 0) if stored is None else KVService.txn_compare_value(key, stored)

    def _writes(self, election: str, record: LeaderRecord) -> list[object]:
        return [
            KVService.txn_op_put(
                self._leaders_prefix + election, msgspec.json.encode(record), lease=self._session.lease_id
            ),
            KVService.txn_op_put(self._epochs_prefix + election, str(record.epoch)),
        ]

    async def _take_again(self, leadership: Leadership) -> None:
        """Our key is gone: put it back if nobody led since."""
        election = leadership.election
        answer = await self._session.read(self._epochs_prefix + election)
        if answer is None:
            return
        stored, _ = answer
        if stored is not None and int(stored) != leadership.epoch:
            self._lose(leadership, "another leader was elected meanwhile")
            return
        absent = KVService.txn_compare_version(self._leaders_prefix + election, 0)
        if await self._session.transact(
            [absent, self._compare_epoch(election, stored)], self._writes(election, leadership.record)
        ):
            _log.info("leadership written again", extra={"fields": {"election": election, "epoch": leadership.epoch}})

    def _lose(self, leadership: Leadership, why: str) -> None:
        if self._held.get(leadership.election) is leadership:
            del self._held[leadership.election]
        if not leadership.lost.is_set():
            _log.warning("leadership lost", extra={"fields": {"election": leadership.election, "why": why}})
            leadership.lost.set()

    async def _resign(self, leadership: Leadership) -> None:
        if self._held.get(leadership.election) is not leadership:
            return
        del self._held[leadership.election]
        leadership.lost.set()
        key = self._leaders_prefix + leadership.election
        mine = KVService.txn_compare_value(key, msgspec.json.encode(leadership.record))
        await self._session.transact([mine], [KVService.txn_op_delete(key)])

    # --- what etcd says ---

    def snapshot(self, found: dict[str, KeyValue]) -> None:
        """Learns everything that etcd holds below our prefixes."""
        elections = {k.removeprefix(self._leaders_prefix) for k in found if k.startswith(self._leaders_prefix)}
        for election in sorted(elections | set(self._known) | set(self._held)):
            self.event(self._leaders_prefix + election, found.get(self._leaders_prefix + election))

    async def repair(self, found: dict[str, KeyValue]) -> None:
        """Puts back the keys of leaderships that we hold. `found` may be slightly old: each write is conditional."""
        for election, leadership in list(self._held.items()):
            key = self._leaders_prefix + election
            held = found.get(key)
            mine = msgspec.json.encode(leadership.record)
            if held is None:
                await self._take_again(leadership)
            elif held.value == mine and held.lease != self._session.lease_id:  # a lease that nobody keeps alive
                await self._session.transact(
                    [KVService.txn_compare_value(key, mine)],
                    [KVService.txn_op_put(key, mine, lease=self._session.lease_id)],
                )

    def event(self, key: str, held: KeyValue | None) -> None:
        if not key.startswith(self._leaders_prefix):
            return
        election = key.removeprefix(self._leaders_prefix)
        leadership = self._held.get(election)
        if held is None:
            self._in_etcd.pop(election, None)
            if leadership is not None:
                self._session.request_resync()
            elif (known := self._known.get(election)) is not None:
                self._prober.watch(key, "", known.address, known.instance_id, lambda: self._learn(election, None))
            return
        try:
            record = _decode(held.value)
        except msgspec.DecodeError as error:
            _log.warning("unreadable leader key", extra={"fields": {"key": key, "error": str(error)}})
            return
        self._prober.forget(key)
        self._in_etcd[election] = held.value
        if leadership is not None and record.instance_id != leadership.record.instance_id:
            self._lose(leadership, f"{record.name} leads with epoch {record.epoch}")
        self._learn(election, record)

    def _learn(self, election: str, record: LeaderRecord | None) -> None:
        if record is not None:
            self._max_epoch[election] = max(record.epoch, self._max_epoch.get(election, 0))
        if self._known.get(election) == record:
            return
        if record is None:
            self._known.pop(election, None)
        else:
            self._known[election] = record
        for callback in list(self._watchers.get(election, ())):
            callback(record)


_decode = msgspec.json.Decoder(LeaderRecord).decode
