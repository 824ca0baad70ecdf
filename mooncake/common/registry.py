"""Membership and leadership of a cluster, on etcd (DESIGN.md §4 "Coordination", docs/protocol.md §2).

Knows: which instances there are, who leads, and how to keep both through an outage: the last known picture stays, and
an instance whose key vanished is probed directly before anyone is told that it is down.
Does not know: gRPC to etcd (etcd_session.py), how a leader is elected (election.py), what `info` means.
All callbacks are plain functions called on the event loop; they must not block.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from mooncake.common.election import ElectionName, Elections, LeaderRecord, Leadership
from mooncake.common.etcd_session import EtcdSession, KeyValue
from mooncake.common.probe import Prober
from mooncake.common.publications import Publications

_log = logging.getLogger(__name__)

Kind = Literal["up", "changed", "down"]


class InstanceRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One process of the cluster. `leaving` is written just before a clean deregistration, so that nobody probes."""

    name: str
    instance_id: str
    role: str
    address: str = ""
    http_url: str = ""
    info: dict[str, Any] = {}
    leaving: bool = False


WatchCallback = Callable[[Kind, InstanceRecord], None]
LeaderCallback = Callable[[LeaderRecord | None], None]
_decode = msgspec.json.Decoder(InstanceRecord).decode


class Registry:
    """This process' view of the cluster and its entries in it. One object a process; not thread-safe."""

    def __init__(
        self,
        endpoints: Sequence[str],
        cluster: str,
        *,
        lease_ttl_s: float = 10.0,
        probe_timeout_s: float = 1.0,
        probe_every_s: float = 1.0,
    ) -> None:
        self._prefix = f"/mooncake/{cluster}/"
        self._own: dict[str, bytes] = {}  # key -> value that etcd should hold under our lease
        self._claimed: set[str] = set()  # keys that we have written once: from then on another instance's value wins
        self._picture: dict[str, InstanceRecord] = {}  # key -> record
        self._watchers: dict[str, list[WatchCallback]] = {}
        self._prober = Prober(timeout_s=probe_timeout_s, every_s=probe_every_s)
        self._session = EtcdSession(
            endpoints, self._prefix, ttl_s=math.ceil(lease_ttl_s), on_snapshot=self._snapshot, on_event=self._event
        )
        self._elections = Elections(self._session, self._prefix + "leaders/", self._prefix + "epochs/", self._prober)
        self.topologies = Publications(self._session, self._prefix + "topology/")
        """What each transfer engine's machine looks like (transfer_engine/topology.py), by instance id."""

    # --- life ---

    async def start(self) -> None:
        """Connects in the background. Returns at once when etcd answers, else after a short wait, and keeps trying."""
        self._session.start()
        await self._session.wait_connected(timeout_s=2.0)

    async def close(self) -> None:
        """Leaves cleanly: own keys are deleted (best effort, about 2 s) and nobody probes for us."""
        await self._elections.close()
        for key in list(self._own):
            await self._leave(key)
        await self._prober.close()
        await self._session.close()

    @property
    def connected(self) -> bool:
        """Whether etcd answered lately. When false, everything here is the last known picture."""
        return self._session.connected

    async def wait_connected(self, timeout_s: float) -> bool:
        """Waits for etcd; returns `connected`."""
        return await self._session.wait_connected(timeout_s)

    # --- own entries ---

    async def register(self, record: InstanceRecord) -> None:
        """Writes the record and keeps it there: through lease loss, etcd restarts and an emptied etcd. Again: updates
        it.

        Replaces an entry of the same role and name that another instance (the old self) left. Does not raise when etcd
        is away.
        """
        key = self._key(record.role, record.name)
        self._own[key] = msgspec.json.encode(record)
        await self._session.put(key, self._own[key], claimed=self._claimed)

    async def deregister(self, role: str, name: str) -> None:
        """Removes an entry of ours and stops keeping it."""
        await self._leave(self._key(role, name))

    async def _leave(self, key: str) -> None:
        value = self._own.pop(key, None)
        if value is not None:  # only if it still is ours: a new self may have replaced us
            last = msgspec.json.encode(msgspec.structs.replace(_decode(value), leaving=True))
            await self._session.retire(key, value, last)

    # --- the picture ---

    def instances(self, role: str) -> dict[str, InstanceRecord]:
        """Name to record, sorted by name: the last known picture."""
        start = self._key(role, "")
        return {r.name: r for k, r in sorted(self._picture.items()) if k.startswith(start)}

    def watch(self, role: str, callback: WatchCallback) -> Callable[[], None]:
        """Calls back for every known instance now ("up") and for each change from now on. Returns how to stop."""
        callbacks = self._watchers.setdefault(role, [])
        callbacks.append(callback)
        for record in self.instances(role).values():
            callback("up", record)
        return lambda: callbacks.remove(callback) if callback in callbacks else None

    # --- leaders ---

    async def campaign(self, election: ElectionName, name: str, instance_id: str, address: str) -> Leadership:
        """Waits until this instance leads. A leader of the same name is our old self and is replaced at once."""
        return await self._elections.campaign(election, name, instance_id, address)

    def leader(self, election: ElectionName) -> LeaderRecord | None:
        """The last known leader; kept after its key vanished for as long as its address accepts connections."""
        return self._elections.leader(election)

    def watch_leader(self, election: ElectionName, callback: LeaderCallback) -> Callable[[], None]:
        """Calls back with the present leader (or None) now and at each change. Returns how to stop."""
        return self._elections.watch(election, callback)

    # --- what etcd says ---

    def _key(self, role: str, name: str) -> str:
        return f"{self._prefix}instances/{role}/{name}"

    async def _snapshot(self, found: dict[str, KeyValue]) -> None:
        """Everything below the prefix, at (re)connection and now and then: own keys are repaired, the picture is
        compared.
        """
        start = self._prefix + "instances/"
        for key, held in found.items():
            if key.startswith(start):
                self._event(key, held)
        for key in list(self._picture):
            if key not in found:
                self._event(key, None)
        self._elections.snapshot(found)
        self.topologies.snapshot(found)
        # From here on things are awaited, and `found` may be behind the events.
        for key, value in list(self._own.items()):
            if self._needs_writing(key, value, found.get(key)):
                await self._session.put(key, value, claimed=self._claimed)
        await self._elections.repair(found)
        await self.topologies.repair(found)

    def _needs_writing(self, key: str, value: bytes, held: KeyValue | None) -> bool:
        if held is None:
            return True
        if held.value == value:
            return held.lease != self._session.lease_id
        return not (key in self._claimed and self._is_other(key, held.value))

    def _is_other(self, key: str, value: bytes) -> bool:
        try:
            return _decode(value).instance_id != _decode(self._own[key]).instance_id
        except msgspec.DecodeError:
            return False

    def _event(self, key: str, held: KeyValue | None) -> None:
        """One key was put (`held`) or vanished (None)."""
        if self.topologies.event(key, held):
            return
        if not key.startswith(self._prefix + "instances/"):
            self._elections.event(key, held)
            return
        if held is None:
            self._vanished(key)
            return
        try:
            record = _decode(held.value)
        except msgspec.DecodeError as error:
            _log.warning("unreadable record in etcd", extra={"fields": {"key": key, "error": str(error)}})
            return
        self._prober.forget(key)
        if key in self._own and self._is_other(key, held.value) and key in self._claimed:
            _log.error("another process has taken our name", extra={"fields": {"key": key, "by": record.instance_id}})
        old = self._picture.get(key)
        if record.leaving:
            if old is not None and old.instance_id == record.instance_id:
                self._down(key)
        elif old is None:
            self._picture[key] = record
            self._tell("up", record)
        elif old != record:
            self._picture[key] = record
            self._tell("changed", record)

    def _vanished(self, key: str) -> None:
        if key in self._own:
            self._session.request_resync()
        record = self._picture.get(key)
        if record is None:
            return
        _log.info("key vanished, probing directly", extra={"fields": {"key": key, "url": record.http_url}})
        self._prober.watch(key, record.http_url, record.address, record.instance_id, lambda: self._down(key))

    def _down(self, key: str) -> None:
        record = self._picture.pop(key, None)
        if record is not None:
            self._tell("down", record)

    def _tell(self, kind: Kind, record: InstanceRecord) -> None:
        for callback in list(self._watchers.get(record.role, ())):
            callback(kind, record)
