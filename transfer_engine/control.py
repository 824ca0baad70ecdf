"""What control requests mean: regions, notifications, fences, revocations.

Knows: both halves of every control exchange between two engines. Does not know: how bytes move. Everything here is served by
engine threads, so it works while the application's threads are busy.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Protocol, assert_never

from mooncake.common.errors import MooncakeError, Overloaded, TransferCancelled, TransferError, TransferTimeout
from transfer_engine import protocol, threads
from transfer_engine.batch import Submission
from transfer_engine.config import EngineConfig
from transfer_engine.fence import FenceTable
from transfer_engine.handshake import Identity
from transfer_engine.link import Link, unwrap
from transfer_engine.memory import Region, RegionTable
from transfer_engine.notify import Dispatcher
from transfer_engine.protocol import (
    CancelGroup,
    ConnectEndpoint,
    EndpointOffer,
    GetFirstRegion,
    GetRegions,
    Goodbye,
    NicInfo,
    Notify,
    Ping,
    RegionInfo,
    Reply,
    Request,
    Revoke,
    StreamClose,
)
from transfer_engine.segment import Directory, PeerRecord, Session, describe
from transfer_engine.shared_buffer import Mapping
from transfer_engine.types import TransferState

_CANCEL_GRACE_S = 0.2
_MAX_WAITERS = 32
_KEYED_WAIT_S = 0.5

NotifyHandler = Callable[[str, str, bytes], None]


class Engine(Protocol):
    """What control needs of the engine."""

    config: EngineConfig
    identity: Identity
    memory: RegionTable
    incoming: FenceTable
    outgoing: FenceTable
    peers: Directory
    notifications: Dispatcher
    notify_handler: NotifyHandler | None

    def session_of(self, instance_id: str) -> Session | None: ...
    def submissions_of(self, instance_id: str, group: int) -> list[Submission]: ...
    def link_to(self, record: PeerRecord, deadline: float) -> Link: ...
    def nics(self) -> list[NicInfo]: ...
    def accept_endpoint(self, record: PeerRecord, offer: EndpointOffer) -> EndpointOffer: ...


class Control:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._grants = threading.Lock()
        self._waiters = threading.BoundedSemaphore(_MAX_WAITERS)

    # --- answering --------------------------------------------------------------------------------------------------

    def handle(self, link: Link, message_id: int, request: Request) -> None:
        """On the link's reader thread."""
        record = link.context
        assert isinstance(record, PeerRecord)
        match request:
            case Ping():
                link.reply(message_id, Reply())
            case GetRegions():
                self._grant(link, message_id, record)
            case GetFirstRegion():
                link.reply(message_id, Reply(regions=describe(self._engine.memory, mappable=False)[:1]))
            case Notify(payload):
                link.reply(message_id, self._deliver(record, payload))
            case CancelGroup(group, _):
                try:
                    self.stop_group(record.identity.instance_id, group, lambda: link.reply(message_id, Reply()))
                except Overloaded as error:
                    link.reply(message_id, Reply(code=protocol.error_code(error), text=str(error)))
            case Revoke(address, length, version, timeout_s):
                session = self._engine.session_of(record.identity.instance_id)
                self._later(
                    link,
                    message_id,
                    timeout_s,
                    lambda t: session is None or session.regions.revoke(address, length, t, version),
                )
            case StreamClose(stream_id, timeout_s):
                stream = record.streams.get(stream_id)
                link.opened.discard(stream_id)
                self._later(link, message_id, timeout_s, lambda t: stream is None or stream.stop(t))
            case ConnectEndpoint(offer):
                link.reply(message_id, self._connect(link, record, offer))
            case Goodbye():
                record.said_goodbye = True
                link.reply(message_id, Reply())
            case _:
                assert_never(request)

    def _grant(self, link: Link, message_id: int, record: PeerRecord) -> None:
        direct, keyed = ways_past_us(record, self._engine.identity)
        if not direct and not keyed:
            link.reply(message_id, Reply(code=7, text="no direct access"))
            return
        with self._grants:  # a revocation that follows is sent after this reply
            record.granted |= direct
            record.keyed |= keyed
            link.reply(
                message_id,
                Reply(
                    regions=describe(self._engine.memory, mappable=direct),
                    version=self._engine.memory.version,
                    fenced=self._engine.incoming.groups_of(record.identity.instance_id),
                    nics=self._engine.nics() if keyed else [],
                ),
            )

    def _connect(self, link: Link, record: PeerRecord, offer: EndpointOffer) -> Reply:
        try:
            mine = self._engine.accept_endpoint(record, offer)
        except MooncakeError as error:
            return Reply(code=protocol.error_code(error), text=str(error))
        link.opened.add(offer.stream_id)
        return Reply(endpoint=mine, fenced=self._engine.incoming.groups_of(record.identity.instance_id))

    def _deliver(self, record: PeerRecord, payload: bytes) -> Reply:
        handler = self._engine.notify_handler
        if handler is None:
            return Reply(code=protocol.error_code(TransferError()), text="no notification handler")
        identity = record.identity
        if self._engine.notifications.put(lambda: handler(identity.instance_id, identity.address, payload)):
            return Reply()
        return Reply(code=protocol.error_code(Overloaded("")), text="the notification queue is full")

    def _later(self, link: Link, message_id: int, timeout_s: float, done: Callable[[float], bool]) -> None:
        """Answer when `done`: at once if it is, else from a short-lived thread."""
        if done(0.0):
            link.reply(message_id, Reply())
            return
        if not self._waiters.acquire(blocking=False):
            link.reply(message_id, Reply(code=protocol.error_code(Overloaded("")), text="too many waiters"))
            return

        def wait() -> None:
            try:
                within = min(timeout_s, 10.0) if timeout_s > 0 else 0.0  # NaN is none
                code = 0 if done(within) else protocol.error_code(TransferTimeout())
            finally:
                self._waiters.release()
            link.reply(message_id, Reply(code=code, text="still in use" if code else ""))

        try:
            threads.start("te-wait", wait)
        except Overloaded as error:
            self._waiters.release()
            link.reply(message_id, Reply(code=protocol.error_code(error), text=str(error)))

    def stop_group(self, instance_id: str, group: int, stopped: Callable[[], None]) -> None:
        """Initiator side of the fence: no submission of the group towards that target runs or starts once `stopped` is called.
        Raises Overloaded when it cannot be remembered."""
        running = []
        if group:
            self._engine.outgoing.add((instance_id, group))
            running = self._engine.submissions_of(instance_id, group)
        lock, count = threading.Lock(), [len(running) + 1]

        def one() -> None:
            with lock:
                count[0] -= 1
                last = count[0] == 0
            if last:
                stopped()

        for submission in running:
            error = TransferCancelled(f"group {group:#x} was cancelled by the target")
            submission.abort(TransferState.CANCELLED, error, time.monotonic() + _CANCEL_GRACE_S)
            submission.when_settled(one)
        one()

    # --- asking -----------------------------------------------------------------------------------------------------

    def refresh(
        self, session: Session, link: Link, deadline: float, done: Callable[[MooncakeError | None], None]
    ) -> None:
        """Fetch the peer's region table. The answer is applied on the reader thread, in order with revocations."""

        def answered(what: Reply | MooncakeError) -> None:
            try:
                if not self._apply(session, unwrap(what)):
                    link.ask(GetRegions(), deadline, answered)
                    return None
            except MooncakeError as error:
                return done(error)
            done(None)

        link.ask(GetRegions(), deadline, answered)

    def _apply(self, session: Session, reply: Reply) -> bool:
        self.learn_fences(session, reply)
        if reply.version < session.regions.version:
            return False  # something was revoked meanwhile
        known = {region.address: region for region in session.regions.regions()}
        fresh = []
        for info in reply.regions:
            region = known.get(info.address)
            fresh.append(region if region is not None and region.owner == info else self._mapped(session, info))
        session.regions.replace(fresh, reply.version, lambda old, new: old is new)
        session.nics = reply.nics
        session.regions_known = True
        return True

    def learn_fences(self, session: Session, reply: Reply) -> None:
        """Stop the groups that a target says are cancelled, before anything is done with the rest of its reply."""
        for group in reply.fenced:
            self.stop_group(session.instance_id, group, lambda: None)

    def _mapped(self, session: Session, info: RegionInfo) -> Region:
        region = Region(info.address, info.length, location=info.location, owner=info, keys=info.keys)
        region.nic_shift = info.nic_shift % (1 << 64)
        config, identity = self._engine.config, session.record.identity
        foreign = session.record.same_host and "shm" in identity.transports and "shm" in config.transports
        if foreign and config.shm_mapping and info.fd >= 0:
            with contextlib.suppress(OSError):
                region.backing = Mapping(identity.pid, info)
        return region

    def revoke(self, address: int, length: int, timeout_s: float) -> None:
        """Make every peer with direct access or keys let go of a range that is closing. Raises TransferTimeout; not for a peer
        that has only keys: voiding them is enough, it was asked so that its endpoints do not break on them."""
        with self._grants:
            granted = [r for r in self._engine.peers.all() if (r.granted or r.keyed) and not r.proven_gone()]
        deadline = time.monotonic() + timeout_s
        asked: list[tuple[PeerRecord, list[_Waiter]]] = []
        for record in granted:
            waiters = []
            for link in self._links_of(record, deadline):
                waiters.append(_Waiter())
                link.ask(Revoke(address, length, self._engine.memory.version, timeout_s), deadline, waiters[-1])
            asked.append((record, waiters))
        for record, waiters in asked:
            limit = deadline if record.granted else min(deadline, time.monotonic() + _KEYED_WAIT_S)
            let_go = any(waiter.ok(limit) for waiter in waiters)
            if record.granted and not let_go and not self._harmless(record, deadline):
                raise TransferTimeout(
                    f"{record.identity.address} did not let go of memory at {address:#x} in {timeout_s} s"
                )

    def _links_of(self, record: PeerRecord, deadline: float) -> list[Link]:
        """All links; a peer without one is dialled. One answer is enough: the version voids what is under way on others."""
        links = list(record.links)
        if not links:
            with contextlib.suppress(MooncakeError):
                links.append(self._engine.link_to(record, deadline))
        return links

    def _harmless(self, record: PeerRecord, deadline: float) -> bool:
        """A peer that did not answer because it is going away."""
        while not record.proven_gone():
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.01)
        return True

    def fence(self, record: PeerRecord | None, instance_id: str, group: int, timeout_s: float) -> bool:
        """Target side of the fence; see TransferEngine.cancel_incoming."""
        deadline = time.monotonic() + timeout_s
        key = (instance_id, group)
        self._engine.incoming.add(key)
        asked = self._ask_to_stop(record, group, deadline)
        placed = self._engine.incoming.wait_clear(key, max(0.0, deadline - time.monotonic()))
        stopped = True
        if not asked and record is not None:  # what it sent before it fell silent, and what it sends past our fences
            for stream in list(record.streams.values()):
                within = max(0.1, deadline - time.monotonic()) if stream.one_sided else 0.0
                stopped &= stream.stop(within) or not stream.one_sided
        if not stopped or (
            not placed and not self._engine.incoming.wait_clear(key, max(0.1, deadline - time.monotonic()))
        ):
            return False
        if asked or record is None or not record.granted or record.proven_gone():
            return True
        # The link broke under the question: the process may be about to be gone.
        while time.monotonic() < deadline and not any(link.alive for link in record.links):
            if record.proven_gone():
                return True
            time.sleep(0.01)
        return record.proven_gone()

    def _ask_to_stop(self, record: PeerRecord | None, group: int, deadline: float) -> bool:
        if record is None or record.proven_gone():
            return False
        try:
            link = self._engine.link_to(record, deadline)
            link.request(CancelGroup(group, max(0.0, deadline - time.monotonic())), deadline)
        except MooncakeError:
            return False
        return True


def ways_past_us(record: PeerRecord, mine: Identity) -> tuple[bool, bool]:
    """(direct, keyed): whether that peer and we have a transport in common by which one touches the other's memory without its
    help: directly on this host (local, shm), or by remote keys (rdma)."""
    common = set(record.identity.transports) & set(mine.transports)
    return record.same_host and bool({"local", "shm"} & common), "rdma" in common


class _Waiter:
    """Collects one asynchronous answer."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._answer: Reply | MooncakeError | None = None

    def __call__(self, answer: Reply | MooncakeError) -> None:
        self._answer = answer
        self._event.set()

    def ok(self, deadline: float) -> bool:
        self._event.wait(max(0.0, deadline - time.monotonic()))
        return isinstance(self._answer, Reply) and self._answer.code == 0
