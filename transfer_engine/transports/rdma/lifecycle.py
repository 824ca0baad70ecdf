"""Endpoints from the first try to the grave: opening, proving, breaking, burying, and what becomes of the slices on them.

Knows: the pool of endpoints (SIEVE, paper 3.2.2), the control messages that make and end the other side, and the rule that a
WRITE's slice is repeated or reported over only when the dead endpoint's queue pair on the target is known gone: late bytes
must not hit reused memory. Does not know: which slice goes next.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Protocol

from mooncake.common.errors import (
    LinkLost,
    MooncakeError,
    NotRegistered,
    PeerUnavailable,
    ProtocolViolation,
    TransferError,
)
from transfer_engine.link import Link, unwrap
from transfer_engine.protocol import ConnectEndpoint, EndpointOffer, Reply, StreamClose
from transfer_engine.segment import ask_soon, ask_until_told
from transfer_engine.sieve import SievePool
from transfer_engine.transports.base import Host
from transfer_engine.transports.rdma.endpoint import Endpoint, EndpointState, Posted
from transfer_engine.transports.rdma.guard import Guard
from transfer_engine.transports.rdma.nic import Nic
from transfer_engine.transports.rdma.path import Path
from transfer_engine.transports.rdma.peer import Peer

CONFIRM_S, CONFIRM_MAX_S = 0.3, 2.0
"""How long a target may take to say that its queue pair is gone: the shorter for a submission that must end now."""
FLUSH_S = 0.3
GRACE_S = 0.05
"""How long a slice that is on the NIC may run on after its submission must stop: ending it costs the queue pair."""
_BUSY_TICK_S, _IDLE_TICK_S, _EMPTY_TICK_S = 0.05, 0.1, 1.0
_LATELY_S = 1.0
_OPENING = (EndpointState.CONNECTING, EndpointState.PROBING)


class Fate(Protocol):
    """Whoever owns the slices."""

    def lost(self, endpoint: Endpoint, posted: Posted, quiet: bool) -> None:
        """A slice came back undone, without the lock held; `quiet`: nothing of it will be placed any more."""


class Lifecycle:
    """Methods are called under the lock unless they say otherwise."""

    def __init__(self, engine: Host, guard: Guard, nics: list[Nic], fate: Fate) -> None:
        self._engine, self._guard, self._nics, self._fate = engine, guard, nics, fate
        self._depth = min([engine.config.rdma_queue_depth, *(nic.device.max_requests for nic in nics)])
        self._pool: SievePool[tuple[str, int, int], Endpoint] = SievePool(
            engine.config.rdma_max_endpoints, lambda endpoint: endpoint.busy
        )
        self._peers: dict[Endpoint, Peer] = {}
        self._confirming: dict[Endpoint, tuple[float, Callable[[bool], None]]] = {}

    @property
    def endpoints(self) -> list[Endpoint]:
        """All that are not gone."""
        return list(self._peers)

    @property
    def settled(self) -> bool:
        """Nothing lives and nothing waits for a target's word."""
        return not self._peers and not self._confirming

    def get(self, peer: Peer, path: Path) -> Endpoint | None:
        """The ready endpoint of a path, with room for a slice."""
        found = self._pool.get((peer.session.instance_id, path.local, path.remote))
        if found is None or found.state is not EndpointState.READY:
            return None
        return found if found.room(self._engine.config, self._depth) else None

    # --- opening ----------------------------------------------------------------------------------------------------

    def open(self, peer: Peer, path: Path, now: float) -> None:
        nic = self._nics[path.local]
        endpoint = Endpoint(nic, peer.session, path, uuid.uuid4().hex, now + self._engine.config.connect_timeout_s)
        peer.paths.opening(path)
        self._peers[endpoint] = peer
        for evicted in self._pool.put(endpoint.key, endpoint):
            self._engine.counters.add(rdma_evictions=1)
            self.retire(evicted)
        nic.call(lambda: self._create(endpoint))

    def _create(self, endpoint: Endpoint) -> None:
        """On the NIC's thread, without the lock."""
        with self._guard.lock:
            if endpoint.state is not EndpointState.CONNECTING:
                return
            try:
                offer = endpoint.create(self._engine.config, self._depth)
            except TransferError as error:
                return self.broke(endpoint, error)
        self._engine.counters.add(rdma_connects=1)

        def using(link: Link) -> None:
            endpoint.link = link

        message = ConnectEndpoint(offer)
        ask_soon(endpoint.session, message, endpoint.due, lambda what: self._answered(endpoint, what), using)

    def _answered(self, endpoint: Endpoint, what: Reply | MooncakeError) -> None:
        """On any thread, without the lock."""
        try:
            reply = unwrap(what)
            self._engine.learn_fences(endpoint.session, reply)
            if reply.endpoint is None:
                raise ProtocolViolation("no endpoint in the answer")
        except MooncakeError as error:
            cut_off = isinstance(error, LinkLost) and endpoint.session.down is None
            with self._guard.lock:
                return self.broke(endpoint, error, blame=not cut_off)
        offer = reply.endpoint
        endpoint.nic.call(lambda: self._connect(endpoint, offer))

    def _connect(self, endpoint: Endpoint, offer: EndpointOffer) -> None:
        """On the NIC's thread, without the lock."""
        with self._guard.lock:
            if endpoint.state is not EndpointState.CONNECTING or endpoint.pair is None:
                return
            try:
                endpoint.pair.connect(offer)
                endpoint.send_probe()
            except TransferError as error:
                self.broke(endpoint, error)

    def proved(self, endpoint: Endpoint) -> None:
        """Its probe came through."""
        if endpoint.state is EndpointState.PROBING:
            endpoint.state = EndpointState.READY
            self._peers[endpoint].paths.ready(endpoint.path)

    # --- ending -----------------------------------------------------------------------------------------------------

    def retire(self, endpoint: Endpoint) -> None:
        """End an endpoint that nobody needs or that is in the way; its path is as good as before."""
        self.broke(endpoint, TransferError("closed"), blame=False)

    def broke(self, endpoint: Endpoint, error: MooncakeError, *, blame: bool = True) -> None:
        """End an endpoint. `blame`: its path has failed, and the slices on it pay an attempt; not so if it was cut off."""
        if endpoint.state in (EndpointState.DYING, EndpointState.GONE):
            return
        now, peer = time.monotonic(), self._peers[endpoint]
        blame = blame and not endpoint.cut_off
        if blame:
            peer.paths.failed(endpoint.path, now)
            peer.last_error = f"{endpoint.nic.name}: {error}"
            self._engine.counters.add(**{f"rdma_{endpoint.nic.name}_errors": 1})
        else:
            peer.paths.dropped(endpoint.path)
        endpoint.state, endpoint.due = EndpointState.DYING, now + FLUSH_S
        endpoint.error, endpoint.innocent = error, not blame
        if self._pool.get(endpoint.key) is endpoint:
            self._pool.discard(endpoint.key)
        if endpoint.pair is not None:
            endpoint.pair.stop()
        if not endpoint.out:
            self.bury(endpoint)
        endpoint.nic.wake()

    def bury(self, endpoint: Endpoint) -> None:
        """Destroy our queue pair: from here on nothing of ours is read or written through it. Then see to the other side."""
        if endpoint.state is EndpointState.GONE:
            return
        endpoint.state = EndpointState.GONE
        wrote = endpoint.wrote()
        lost = endpoint.lost()
        if endpoint.pair is not None:
            endpoint.pair.close()
        del self._peers[endpoint]
        self._guard.later(lambda: self._after(endpoint, lost, wrote))

    def _after(self, endpoint: Endpoint, lost: list[Posted], wrote: bool) -> None:
        """Without the lock."""

        def settle(quiet: bool) -> None:
            for posted in lost:
                self._fate.lost(endpoint, posted, quiet)

        if not wrote:
            settle(True)
        if endpoint.pair is not None:
            self._confirm(endpoint, _patience(lost), settle if wrote else lambda _: None)

    def _confirm(self, endpoint: Endpoint, patience_s: float, done: Callable[[bool], None]) -> None:
        """Ask the target to end its queue pair; `done(whether it is known gone)` follows in time. Without the lock."""
        session = endpoint.session
        if session.record.process_ended():
            return done(True)
        deadline = time.monotonic() + patience_s
        with self._guard.lock:
            self._confirming[endpoint] = deadline, done

        def answered(what: Reply | MooncakeError) -> None:
            self._confirmed(endpoint, not isinstance(what, MooncakeError) and what.code == 0)

        ask_until_told(session, StreamClose(endpoint.stream_id, patience_s), deadline, answered)

    def _confirmed(self, endpoint: Endpoint, gone: bool) -> None:
        """Without the lock."""
        with self._guard.lock:
            _, done = self._confirming.pop(endpoint, (0.0, None))
        if done is not None:
            done(gone or endpoint.session.record.process_ended())

    # --- time -------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> float:
        """See to what is overdue; returns seconds until the next look."""
        lately = any(now - endpoint.moved_at < _LATELY_S for endpoint in self._peers)
        wait_s = _IDLE_TICK_S if lately else _EMPTY_TICK_S  # whoever posts on a NIC that dozes wakes it
        for endpoint in self.endpoints:
            self._look_at(endpoint, now)
            if endpoint.out or endpoint.state in _OPENING:
                wait_s = _BUSY_TICK_S
        for endpoint, (deadline, _) in list(self._confirming.items()):
            if deadline <= now:
                self._guard.later(lambda endpoint=endpoint: self._confirmed(endpoint, False))  # type: ignore[misc]
            wait_s = _BUSY_TICK_S
        return wait_s

    def _look_at(self, endpoint: Endpoint, now: float) -> None:
        config = self._engine.config
        if endpoint.state is EndpointState.DYING:
            if endpoint.flushed or now >= endpoint.due:
                self.bury(endpoint)
            return
        overdue = endpoint.overdue(now, config.rdma_stall_timeout_s, GRACE_S)
        if overdue is not None:
            return self.broke(endpoint, overdue[0], blame=overdue[1])
        if endpoint.link is not None and not endpoint.link.alive:
            # The target ends its side with the last control connection: do not wait for the NIC to notice.
            return self.broke(endpoint, TransferError("the control connection is lost"), blame=False)
        idle_since = now - endpoint.moved_at if endpoint.state is EndpointState.READY and not endpoint.out else 0.0
        over_full = not endpoint.busy and len(self._pool) > self._pool.capacity
        if over_full or idle_since > config.idle_timeout_s or (idle_since and self._peers[endpoint].forgotten):
            self.retire(endpoint)

    def error_of(self, posted: Posted, endpoint: Endpoint) -> MooncakeError:
        if posted is endpoint.culprit:
            return NotRegistered(f"{endpoint.session.address}: the NIC refused the range: {endpoint.error}")
        kind = TransferError if endpoint.innocent else PeerUnavailable
        return kind(f"{endpoint.session.address}, by {endpoint.nic.name}: {endpoint.error}")


def _patience(lost: list[Posted]) -> float:
    submissions = [posted.piece.job.submission for posted in lost if posted.piece is not None]
    ends = min((0.0 if s.doomed else s.deadline for s in submissions), default=0.0)
    return max(CONFIRM_S, min(CONFIRM_MAX_S, ends - time.monotonic()))
