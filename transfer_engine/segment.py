"""Peers: who they are, whether they live, and our session with each.

Knows: instances seen in handshakes (either direction), the links to them, the cached copy of their region table, when to
dial again and when not to. Does not know: how bytes are moved. Paper 3.2.2 (segments, endpoints).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from mooncake.common.errors import LinkLost, MooncakeError, Overloaded, PeerUnavailable, TransferTimeout
from transfer_engine import host, threads
from transfer_engine.config import EngineConfig
from transfer_engine.handshake import Identity
from transfer_engine.link import Link
from transfer_engine.memory import RegionTable
from transfer_engine.protocol import NicInfo, RegionInfo, Reply, Request

_FAIR_DIAL_S = 0.5
"""Who did not answer a dial for so long is not tried for a while; a shorter wait was the asker's own haste."""
_DIAL_EVERY_S = 0.01


class Served(Protocol):
    """An incoming data connection. `one_sided`: what it places passes our fences, so only stopping it ends it."""

    one_sided: bool

    def stop(self, timeout_s: float) -> bool:
        """Drop it; True once nothing of it is being placed."""


class PeerRecord:
    """One life of one peer, as far as its handshakes told. `granted`: it may touch our memory without our help (shm, local);
    `keyed`: it knows our remote keys, which end with its endpoints in `streams`."""

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self.same_host = bool(identity.host_key) and identity.host_key == host.host_key()
        self._watch = host.ProcessWatch(identity.pid, identity.start_ticks) if self.same_host else None
        self.links: set[Link] = set()
        self.streams: dict[str, Served] = {}
        self.granted = False
        self.keyed = False
        self.said_goodbye = False
        self.seen_at = time.monotonic()

    def process_ended(self) -> bool:
        return self._watch is not None and self._watch.ended()

    def proven_gone(self) -> bool:
        """Nothing of that engine can run any more."""
        return self.said_goodbye or (self.process_ended() and not self.links)

    def forgettable(self) -> bool:
        return not self.links and not self.streams and (not self.granted or self.proven_gone())

    def tidy(self) -> None:
        """Give up the descriptor that watches a process which is known to be gone, or need not be watched any more."""
        if self._watch is not None and not self.links and self.proven_gone():
            self._watch.close()

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()


class Directory:
    """Bounded memory of peer records. A record that a proof may still need is never dropped."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._lock = threading.Lock()
        self._records: dict[str, PeerRecord] = {}

    def meet(self, identity: Identity) -> PeerRecord:
        """The record of an instance, new if need be. Raises Overloaded."""
        with self._lock:
            record = self._records.pop(identity.instance_id, None)
            if record is None:
                for other in self._records.values():
                    other.tidy()
                self._make_room()
                record = PeerRecord(identity)
            record.seen_at = time.monotonic()
            self._records[identity.instance_id] = record
            return record

    def _make_room(self) -> None:
        if len(self._records) < self._capacity:
            return
        for instance_id, record in self._records.items():
            if record.forgettable():
                del self._records[instance_id]
                record.close()
                return
        raise Overloaded(f"{self._capacity} peers are known and alive")

    def get(self, instance_id: str) -> PeerRecord | None:
        return self._records.get(instance_id)

    def at_address(self, address: str) -> list[PeerRecord]:
        """Records with that listening address, latest seen first."""
        with self._lock:
            found = [record for record in self._records.values() if record.identity.address == address]
        return sorted(found, key=lambda r: r.seen_at, reverse=True)

    def all(self) -> list[PeerRecord]:
        with self._lock:
            return list(self._records.values())

    def close(self) -> None:
        for record in self.all():
            record.close()


class Session:
    """Our side of one peer instance: link on demand, rest after failures, and its regions if it grants direct access."""

    def __init__(
        self, record: PeerRecord, address: str, config: EngineConfig, dial: Callable[[Session, float], Link]
    ) -> None:
        self.record = record
        self.address = address
        self.instance_id = record.identity.instance_id
        self.regions = RegionTable(1 << 20)
        self.regions_known = False
        self.nics: list[NicInfo] = []
        self.cross_copy_ok: bool | None = None
        self.short_way: tuple[object] | None = None
        """What `Router.short_way` said, once it was asked."""
        self.handles = 0
        self._config = config
        self._dial = dial
        self._lock = threading.Lock()
        self.link: Link | None = None
        self._rest_until = 0.0
        self._down: MooncakeError | None = None
        self._dialled_at = 0.0
        self._table = threading.Lock()
        self._cuts = 0

    @property
    def cuts(self) -> int:
        """How often the copy of its region table became void with the link. The same number before and after says that what
        was found in between is not of a cut."""
        with self._table:
            return self._cuts

    def void_regions(self) -> None:
        """The link is lost, and revocations would have come over it: what we know of the regions is worth nothing now."""
        with self._table:
            self._cuts += 1
            self.regions_known = False
            self.regions.revoke(0, 0, 0.0)

    @property
    def lists_regions(self) -> bool:
        """Whether the copy of its region table is kept up to date: revocations come over the link."""
        return self.regions_known and self.link is not None and self.link.alive

    @property
    def down(self) -> MooncakeError | None:
        """Why transfers to it fail at once, if they do."""
        if self.record.said_goodbye:
            return PeerUnavailable(f"{self.address}: instance {self.instance_id} has closed")
        if self._down is not None and time.monotonic() < self._rest_until:
            return self._down
        if self.link is not None and not self.link.alive and self.record.process_ended():
            return PeerUnavailable(f"{self.address}: the process of instance {self.instance_id} has ended")
        return None

    def rest(self, error: MooncakeError) -> None:
        """The peer did not answer: fail fast for a while."""
        self._down, self._rest_until = error, time.monotonic() + self._config.peer_rest_s

    def ensure_link(self, deadline: float) -> Link:
        """The live link, dialling if need be. Raises PeerUnavailable, TransferTimeout and what the handshake raises."""
        link = self.link
        if link is not None and link.alive:
            return link
        if not self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise PeerUnavailable(f"{self.address}: another thread is still dialling")
        try:
            if self.link is not None and self.link.alive:
                return self.link
            problem = self.down
            if problem is not None:
                raise problem
            if self.link is not None:
                self.void_regions()
            self.link = self._dial_once(deadline)
            self._down = None
            return self.link
        finally:
            self._lock.release()

    def _dial_once(self, deadline: float) -> Link:
        """A peer that hangs up on every link is not dialled in a tight loop."""
        now = time.monotonic()
        pause_s = min(self._dialled_at + _DIAL_EVERY_S, deadline) - now
        if pause_s > 0:
            time.sleep(pause_s)
        self._dialled_at = began = time.monotonic()
        try:
            return self._dial(self, min(deadline, began + self._config.connect_timeout_s))
        except MooncakeError as error:
            if not isinstance(error, TransferTimeout) or time.monotonic() - began >= _FAIR_DIAL_S:
                self.rest(error)
            raise


def ask_soon(
    session: Session,
    message: Request,
    deadline: float,
    answered: Callable[[Reply | MooncakeError], None],
    using: Callable[[Link], None] = lambda _: None,
) -> None:
    """Ask a peer without blocking this thread: at once when the link is up and takes it, else from a short-lived thread.
    `using` is told the link before it is asked."""

    def send() -> None:
        try:
            link = session.ensure_link(deadline)
        except MooncakeError as error:
            return answered(error)
        using(link)
        link.ask(message, deadline, answered)

    link = session.link
    if link is not None and link.alive and link.writable():
        send()
        return
    try:
        threads.start("te-ask", send)
    except Overloaded as error:
        answered(error)


def ask_until_told(
    session: Session, message: Request, deadline: float, answered: Callable[[Reply | MooncakeError], None]
) -> None:
    """`ask_soon` for a question that may be asked twice: when the link breaks under it, the peer is dialled and asked again."""

    def told(what: Reply | MooncakeError) -> None:
        if isinstance(what, LinkLost) and session.down is None and time.monotonic() < deadline:
            return ask_soon(session, message, deadline, told)
        answered(what)

    ask_soon(session, message, deadline, told)


def describe(regions: RegionTable, *, mappable: bool) -> list[RegionInfo]:
    """The table as peers see it; `mappable`: also where a peer on this host finds shared buffers."""
    infos = []
    for region in regions.regions():
        if region.remote_access and not region.closing:
            backing = region.backing if mappable and isinstance(region.backing, RegionInfo) else RegionInfo(0, 0)
            where = (backing.fd, backing.inode, backing.file_offset)
            infos.append(
                RegionInfo(region.address, region.length, *where, region.keys, region.location, region.nic_shift)
            )
    return infos


def parse_address(address: str) -> tuple[str, int]:
    """`host:port` or `[v6]:port`. Raises ValueError."""
    head, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"not an address of the form host:port: {address!r}")
    if head.startswith("[") and head.endswith("]"):
        head = head[1:-1]
    elif ":" in head:
        raise ValueError(f"an IPv6 host needs brackets: {address!r}")
    if not head:
        raise ValueError(f"no host in {address!r}")
    return head, int(port)


def format_address(hostname: str, port: int) -> str:
    return f"[{hostname}]:{port}" if ":" in hostname else f"{hostname}:{port}"
