"""Which transport takes which part of a job, and the peer's readiness before that.

Knows: the order of preference, when a peer's region table must be fetched first, failing over to the next transport. Does
not know: what transports do. Paper 3.2.2: path choice per request. Never blocks the submitting thread: what needs the
network is answered later or runs on a short-lived thread.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol

from mooncake.common.errors import LinkLost, MooncakeError, NotRegistered, Overloaded, PeerUnavailable, TransferError
from transfer_engine import threads
from transfer_engine.batch import Submission
from transfer_engine.control import Control, ways_past_us
from transfer_engine.handshake import Identity
from transfer_engine.lanes import Job
from transfer_engine.link import Link
from transfer_engine.protocol import Notify, Reply
from transfer_engine.segment import Session, ask_soon
from transfer_engine.transports.base import Transport
from transfer_engine.transports.copying import CopyTransport
from transfer_engine.transports.tcp import TcpTransport
from transfer_engine.types import TransferState


class Engine(Protocol):
    identity: Identity


class Router:
    def __init__(self, engine: Engine, transports: list[Transport], control: Control) -> None:
        self._engine = engine
        self._transports = transports
        self._control = control

    def _is_direct(self, session: Session) -> bool:
        """Whether a transport without the target's help may reach it (and needs its region table)."""
        return any(ways_past_us(session.record, self._engine.identity))

    def short_way(self, session: Session) -> CopyTransport | TcpTransport | None:
        """The transport that would get a job to that peer first, if it is one that can move a small request on the caller's
        thread. Constant over a session's life."""
        if session.short_way is None:
            session.short_way = (next((t for t in self._transports if _may_reach(t, session)), None),)
        (way,) = session.short_way
        return way if isinstance(way, CopyTransport | TcpTransport) else None

    def prepare(self, session: Session, deadline: float) -> None:
        """Fetch the region table of a direct peer, so that the first transfer need not. Failure is left to the transfer."""
        if not self._is_direct(session) or session.regions_known:
            return
        known = threading.Event()
        self._control.refresh(session, session.ensure_link(deadline), deadline, lambda _: known.set())
        known.wait(max(0.0, deadline - time.monotonic()))

    def forget(self, session: Session) -> None:
        for transport in self._transports:
            transport.forget(session)

    def route(self, job: Job) -> None:
        """Hand the job out; every way this can end is told to its submission."""
        session = _session(job)
        problem = session.down
        if problem is not None:
            return _fail(job, problem)
        cuts = session.cuts
        if not self._is_direct(session) or self._table_covers(job, session):
            return self._offer(job, self._transports, cuts)
        link = session.link
        if link is None or not link.alive:
            return self._redial(job)
        self._ask_regions(job, link, cuts)

    def _ask_regions(self, job: Job, link: Link, cuts: int) -> None:
        session = _session(job)

        def answered(error: MooncakeError | None) -> None:
            if isinstance(error, LinkLost) and session.down is None:
                return self._redial(job)  # it broke under the question, which says nothing of the peer
            self._refreshed(job, error, cuts)

        self._control.refresh(session, link, job.submission.deadline, answered)

    def _redial(self, job: Job) -> None:
        """Dial the peer on a thread of its own, then ask for its regions."""
        session, submission = _session(job), job.submission

        def redial() -> None:
            if submission.doomed:
                return
            try:
                fresh = session.ensure_link(submission.deadline)
            except MooncakeError as error:
                return _fail(job, error)
            self._ask_regions(job, fresh, session.cuts)

        try:
            threads.start("te-redial", redial)
        except Overloaded as error:
            _fail(job, error)

    def _table_covers(self, job: Job, session: Session) -> bool:
        if not session.lists_regions:
            return False
        rows, _ = session.regions.rows(job.columns.remote, job.columns.length)
        return bool((rows >= 0).all())

    def _refreshed(self, job: Job, error: MooncakeError | None, cuts: int) -> None:
        if error is not None and isinstance(error, PeerUnavailable):
            return _fail(job, error)
        self._offer(job, self._transports, cuts)

    def reroute(self, job: Job, after: Transport) -> None:
        self._offer(job, self._transports[self._transports.index(after) + 1 :], _session(job).cuts)

    def _offer(self, job: Job, transports: list[Transport], cuts: int) -> None:
        """`cuts` of the session before its region table was looked at: what a cut left over is offered anew."""
        session, rest = _session(job), job
        for transport in transports:
            taken, left = transport.claim(rest, session)
            if taken is not None:
                transport.submit(taken)
            if left is None:
                return
            rest = left
        if session.cuts != cuts:
            return self.route(rest)
        if session.regions_known and self._is_direct(session) and not self._table_covers(rest, session):
            return _fail(rest, NotRegistered(f"{session.address}: a target range is not inside one registered region"))
        names = ", ".join(self._engine.identity.transports)
        _fail(rest, TransferError(f"{session.address}: none of the transports {names} reaches it"))

    def notify(self, submission: Submission, sessions: list[Session]) -> None:
        """Deliver a submission's notification to all its targets, then tell it."""
        message = Notify(submission.notify or b"")
        lock, left, errors = threading.Lock(), [len(sessions)], list[MooncakeError]()

        def answered(what: Reply | MooncakeError) -> None:
            with lock:
                if isinstance(what, MooncakeError):
                    errors.append(what)
                elif what.code:
                    errors.append(TransferError(f"notification refused: {what.text}"))
                left[0] -= 1
                last = left[0] == 0
            if last:
                submission.notified(errors[0] if errors else None)

        if not sessions:
            submission.notified(None if not submission.peers else PeerUnavailable("the session is closed"))
        for session in sessions:
            ask_soon(session, message, submission.deadline, answered)


def _may_reach(transport: Transport, session: Session) -> bool:
    if isinstance(transport, CopyTransport):
        return transport.reaches(session)
    return transport.name in session.record.identity.transports


def _session(job: Job) -> Session:
    assert isinstance(job.session, Session)
    return job.session


def _fail(job: Job, error: MooncakeError) -> None:
    job.submission.abort(TransferState.FAILED, error, time.monotonic())
