"""Which slice goes next, and on which endpoint.

Knows: priorities, windows, balance between NICs, keys of both sides, what a completion says. Does not know: how endpoints
come and go (lifecycle). Slices wait here, not on a NIC: only a window's worth is posted, so an urgent job overtakes
(paper 3.2.2: a slice is the unit of path choice and retry).
"""

from __future__ import annotations

import itertools
import time
from typing import Protocol

from mooncake.common.errors import MooncakeError, NotRegistered, PeerUnavailable, TransferError
from transfer_engine.batch import Submission
from transfer_engine.lanes import Job, Slice
from transfer_engine.segment import Session
from transfer_engine.transports.base import Host
from transfer_engine.transports.rdma import counters, verbs
from transfer_engine.transports.rdma.chain import TAIL
from transfer_engine.transports.rdma.endpoint import Endpoint, EndpointState, Posted
from transfer_engine.transports.rdma.guard import Guard
from transfer_engine.transports.rdma.keys import keyed
from transfer_engine.transports.rdma.lifecycle import Lifecycle
from transfer_engine.transports.rdma.nic import Nic
from transfer_engine.transports.rdma.path import PathTable, Plan, Tiers
from transfer_engine.transports.rdma.peer import Peer, Waiting
from transfer_engine.types import TransferState

HELP_S = 100e-6


class Elsewhere(Protocol):
    """Where jobs go for which no path is left."""

    def elsewhere(self, job: Job, session: Session) -> bool:
        """Hand it to another transport, without the lock held; False when there is none."""


class Scheduler:
    def __init__(self, engine: Host, elsewhere: Elsewhere) -> None:
        self._engine, self._elsewhere = engine, elsewhere
        self._guard = Guard()
        self._order = itertools.count()
        self._turn = itertools.count(1)
        self._peers: dict[Session, Peer] = {}
        self._closed = False
        e = verbs.load().e
        self._success = e.IBV_WC_SUCCESS
        self._statuses = {int(getattr(e, n)): n[7:] for n in dir(e) if n.startswith("IBV_WC_") and "ERR" in n}
        self._refusals = {e.IBV_WC_REM_ACCESS_ERR, e.IBV_WC_LOC_PROT_ERR}
        self.nics: list[Nic] = []
        self.lifecycle: Lifecycle

    def start(self, nics: list[Nic]) -> None:
        self.nics = nics
        self.lifecycle = Lifecycle(self._engine, self._guard, nics, self)
        for nic in nics:
            nic.start()

    # --- jobs -------------------------------------------------------------------------------------------------------

    def promising(self, session: Session, tiers: Tiers) -> bool:
        """Whether a path works or has not been tried; failed ones whose rest is over are probed in passing."""
        now = time.monotonic()
        with self._guard.lock:
            peer = self._peer(session)
            plan = self._plan(peer, tiers, now)
            return bool(plan.ready) or plan.hope

    def add(self, session: Session, job: Job, tiers: Tiers) -> bool:
        """Queue a job that was cut. False once closed."""
        now = time.monotonic()
        with self._guard.lock:
            if self._closed:
                return False
            peer = self._peer(session)
            peer.forgotten = False
            if peer.head() is None and self._plan(peer, tiers, now).hopeless:
                peer.paths.wake()  # everything failed before: somebody asks again, so look again
            self._push(peer, job, tiers)
            self._pump_peer(peer, now)
        self._guard.run()
        return True

    def help(self, submission: Submission) -> None:
        """On a thread that waits for the end: look for completions for a moment. Without the lock."""
        until = time.perf_counter() + HELP_S
        while submission.bytes_left and not submission.doomed and time.perf_counter() < until:
            for nic in self.nics:
                if nic.posted:
                    self.drain(nic)

    @property
    def queued(self) -> int:
        """Slices that are on no NIC yet."""
        with self._guard.lock:
            return sum(peer.queued for peer in self._peers.values())

    def _push(self, peer: Peer, job: Job, tiers: Tiers) -> None:
        peer.push(Waiting((-job.submission.priority, next(self._order)), job, tiers))

    def _peer(self, session: Session) -> Peer:
        peer = self._peers.get(session)
        if peer is None:
            config = self._engine.config
            mine, theirs = [nic.device.gid.text for nic in self.nics], [nic.gid for nic in session.nics]
            peer = Peer(session, PathTable(mine, theirs, config.rdma_rest_s, config.rdma_rest_max_s))
            for nic in self.nics:
                peer.paths.port(nic.index, nic.active)
            self._peers[session] = peer
        return peer

    def _plan(self, peer: Peer, tiers: Tiers, now: float) -> Plan:
        plan = peer.paths.plan(tiers, now)
        for path in plan.open:
            self.lifecycle.open(peer, path, now)
        return plan

    # --- posting ----------------------------------------------------------------------------------------------------

    def _pump(self, now: float) -> None:
        """Post what fits, the most urgent first."""
        waiting = [(head.rank, peer) for peer in self._peers.values() if (head := peer.head()) is not None]
        for _, peer in sorted(waiting, key=lambda entry: entry[0]):
            self._pump_peer(peer, now)

    def _pump_peer(self, peer: Peer, now: float) -> None:
        while (head := peer.head()) is not None:
            if head.job.submission.doomed or not head.job.left:
                peer.drop(head)
                continue
            plan = self._plan(peer, head.tiers, now)
            endpoint = self._choose(peer, plan)
            if endpoint is None:
                if plan.hopeless:
                    self._give_up(peer)
                return
            piece = head.job.take()
            if piece is None:
                peer.drop(head)
            else:
                self._post_or_return(endpoint, piece)

    def _post_or_return(self, endpoint: Endpoint, piece: Slice) -> None:
        """An interrupt of an application's thread must not lose a slice between the job and the endpoint."""
        try:
            self._post(endpoint, piece)
        except BaseException as error:
            problem = TransferError(f"rdma: interrupted by {error!r}")
            if not any(posted.piece is piece for posted in endpoint.out.values()):
                self._guard.later(lambda: piece.job.submission.fail_slice(problem))
            else:
                self.lifecycle.broke(endpoint, problem, blame=False)
            raise

    def _choose(self, peer: Peer, plan: Plan) -> Endpoint | None:
        """The endpoint whose NIC has least to do for its rate, in turn among equals."""
        found = [endpoint for path in plan.ready if (endpoint := self.lifecycle.get(peer, path)) is not None]
        if not found:
            return None
        best = min(found, key=lambda e: (e.nic.outstanding_bytes / e.nic.rate, e.nic.last_used))
        best.nic.last_used = next(self._turn)
        return best

    def _post(self, endpoint: Endpoint, piece: Slice) -> None:
        submission = piece.job.submission
        try:
            hold = endpoint.session.regions.hold(piece.columns.remote, piece.columns.length)
        except NotRegistered:  # they went with the control connection, or were revoked: the router finds out
            return self._guard.later(lambda: self._ask_anew(piece))
        try:
            pieces = keyed(
                piece, hold, self._engine.memory, endpoint.session.regions, endpoint.nic.device, endpoint.path.remote
            )
        except LookupError:
            gone = NotRegistered(f"{endpoint.session.address}: a range has no key for {endpoint.nic.name} any more")
            endpoint.session.regions.release(hold)
            return self._guard.later(lambda: submission.fail_slice(gone))
        try:
            endpoint.send(piece, pieces, hold)
        except TransferError as error:
            self.lifecycle.broke(endpoint, error)

    # --- completions (on a NIC's thread) ----------------------------------------------------------------------------

    def drain(self, nic: Nic) -> bool:
        """Take what has come back. By any thread: polling happens under the lock, so the order is the queue's."""
        with self._guard.lock:
            completions = nic.device.completions()
            if not completions:
                return False
            for completion in completions:
                tag, status = completion.wr_id, completion.status
                endpoint = nic.owners.get(tag >> 1)
                if endpoint is None:
                    continue  # of a queue pair that is gone
                if status == self._success:
                    self._came_through(endpoint, tag >> 1)
                else:
                    self._came_back(endpoint, tag, status)
            self._pump(time.monotonic())
        self._guard.run()
        return True

    def _came_through(self, endpoint: Endpoint, ticket: int) -> None:
        posted = endpoint.out[ticket]
        if posted.piece is not None:
            posted.finished = True
            self._guard.later(lambda: self._finish(endpoint, posted))
        endpoint.take_back(ticket)
        if posted.piece is None:
            self.lifecycle.proved(endpoint)
        elif endpoint.state is EndpointState.READY:
            self._peers[endpoint.session].paths.carried(endpoint.path)

    def _finish(self, endpoint: Endpoint, posted: Posted) -> None:
        piece = posted.piece
        assert piece is not None
        if posted.hold is not None:
            endpoint.session.regions.release(posted.hold)
        counters.moved(self._engine.counters, endpoint.nic.name, piece, time.perf_counter() - posted.began)
        piece.job.submission.finish_slice(piece.columns.index, piece.columns.length, piece.n_bytes)

    def _came_back(self, endpoint: Endpoint, tag: int, status: int) -> None:
        posted = endpoint.out[tag >> 1]
        posted.tail_seen |= bool(tag & TAIL)
        if endpoint.state is not EndpointState.DYING:
            error = TransferError(self._statuses.get(status, f"completion status {status}"))
            refused = status in self._refusals
            endpoint.culprit = posted if refused else None
            self.lifecycle.broke(endpoint, error, blame=not refused)
        if endpoint.state is EndpointState.DYING and endpoint.flushed:
            self.lifecycle.bury(endpoint)

    def port_changed(self, nic: Nic, active: bool) -> None:
        self._engine.counters.add(**{f"rdma_{nic.name}_port_{'up' if active else 'down'}": 1})
        with self._guard.lock:
            for peer in self._peers.values():
                peer.paths.port(nic.index, active)
            if not active:
                for endpoint in self.lifecycle.endpoints:
                    if endpoint.nic is nic:
                        self.lifecycle.broke(endpoint, TransferError("the port is down"))
            self._pump(time.monotonic())
        self._guard.run()

    def broken(self, nic: Nic) -> None:
        with self._guard.lock:
            nic.active = False
            for peer in self._peers.values():
                peer.paths.port(nic.index, False)
            for endpoint in self.lifecycle.endpoints:
                if endpoint.nic is nic:
                    self.lifecycle.broke(endpoint, TransferError("its thread has failed"))
                    self.lifecycle.bury(endpoint)
            self._pump(time.monotonic())
        self._guard.run()

    def tick(self, now: float) -> float:
        with self._guard.lock:
            wait_s = self.lifecycle.tick(now)
            waiting = False
            for peer in list(self._peers.values()):
                peer.prune()
                waiting |= peer.head() is not None
            self._pump(now)
            self._forget()
        self._guard.run()
        return min(wait_s, 0.05) if waiting else wait_s

    def _forget(self) -> None:
        busy = {endpoint.session for endpoint in self.lifecycle.endpoints}
        for session, peer in list(self._peers.items()):
            if peer.forgotten and session not in busy and peer.head() is None:
                del self._peers[session]

    # --- slices that came back undone -------------------------------------------------------------------------------

    def lost(self, endpoint: Endpoint, posted: Posted, quiet: bool) -> None:
        """Without the lock."""
        piece = posted.piece
        if piece is None or posted.finished:
            return
        if posted.hold is not None:
            endpoint.session.regions.release(posted.hold)
        job, submission = piece.job, piece.job.submission
        problem = endpoint.session.down
        refused = posted is endpoint.culprit
        piece.attempts += not endpoint.innocent
        if submission.doomed:
            submission.return_slice(quiesced=quiet)
        elif problem is not None or not quiet or refused or piece.attempts > submission.max_retries:
            error = problem or self.lifecycle.error_of(posted, endpoint)
            submission.fail_slice(error, quiesced=quiet)
        elif not endpoint.session.regions_known:
            self._ask_anew(piece)
        else:
            self._engine.counters.add(rdma_retries=1, rdma_failovers=not endpoint.innocent)
            job.give_back(piece)
            submission.return_slice()
            self._again(endpoint.session, job)

    def _ask_anew(self, piece: Slice) -> None:
        """The peer's region table is void: its keys must be fetched before the slice can go anywhere. Without the lock."""
        self._engine.route(piece.job.part(piece.columns))
        piece.job.submission.return_slice()

    def _again(self, session: Session, job: Job) -> None:
        with self._guard.lock:
            peer = self._peer(session)
            tiers = [range(len(self.nics))]
            closed = self._closed
            if not closed:
                self._push(peer, job, tiers)
                self._pump_peer(peer, time.monotonic())
        if closed:
            job.submission.abort_closed()
        self._guard.run()

    def _give_up(self, peer: Peer) -> None:
        """No path works: end, or send elsewhere, what waits."""
        jobs = peer.drain()
        text = f"{peer.session.address}: no RDMA path works; the last error: {peer.last_error}"
        error = peer.session.down or PeerUnavailable(text)
        self._guard.later(lambda: self._refuse(peer.session, jobs, error))

    def _refuse(self, session: Session, jobs: list[Job], error: MooncakeError) -> None:
        for job in jobs:
            if not self._elsewhere.elsewhere(job, session):
                session.rest(error)
                job.submission.abort(TransferState.FAILED, error, time.monotonic())

    # --- the end ----------------------------------------------------------------------------------------------------

    def fail_peer(self, session: Session, error: MooncakeError) -> None:
        with self._guard.lock:
            peer = self._peers.get(session)
            jobs = peer.drain() if peer is not None else []
        for job in jobs:
            job.submission.abort(TransferState.FAILED, error, time.monotonic())

    def forget(self, session: Session) -> None:
        with self._guard.lock:
            peer = self._peers.get(session)
            if peer is None:
                return
            peer.forgotten = True
            for endpoint in self.lifecycle.endpoints:
                if endpoint.session is session and not endpoint.busy:
                    self.lifecycle.retire(endpoint)

    def close(self) -> None:
        """End all endpoints; `lifecycle.settled` tells when that is done."""
        with self._guard.lock:
            self._closed = True
            jobs = [job for peer in self._peers.values() for job in peer.drain()]
            for endpoint in self.lifecycle.endpoints:
                self.lifecycle.retire(endpoint)
        self._guard.run()
        for job in jobs:
            job.submission.abort_closed()

    @property
    def quiet(self) -> bool:
        with self._guard.lock:
            return self.lifecycle.settled
