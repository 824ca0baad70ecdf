"""Transport `tcp`, initiator side: a few persistent connections per peer, each with a thread.

Knows: which job goes to which lane, and which may be moved by its own submitter. Does not know: what a thread does with its
connection (tcp_worker), frame layout (tcp_stream), the target side (tcp_server).
"""

from __future__ import annotations

import threading
import time

from mooncake.common.errors import (
    MooncakeError,
)
from transfer_engine.lanes import Job, Lane
from transfer_engine.segment import Session
from transfer_engine.slices import slice_size
from transfer_engine.transports.base import Host
from transfer_engine.transports.tcp_stream import TcpStream
from transfer_engine.transports.tcp_worker import Worker
from transfer_engine.types import Opcode, TransferState, TransferStatus

INLINE_BYTES = 512 << 10
"""A job up to this size is moved by the submitting thread if that is going to wait for it: two thread switches less."""
MAX_PIECES = 1000


class TcpTransport:
    """One lane per peer."""

    name = "tcp"

    def __init__(self, engine: Host) -> None:
        self.engine = engine
        self._lock = threading.Lock()
        self._lanes: dict[Session, Lane] = {}
        self._streams: set[TcpStream] = set()
        self._inline: dict[Session, Worker] = {}
        self._inline_busy: set[Session] = set()
        self._closed = False

    def claim(self, job: Job, session: Session) -> tuple[Job | None, Job | None]:
        return (job, None) if "tcp" in session.record.identity.transports else (None, job)

    def submit(self, job: Job) -> None:
        config = self.engine.config
        session = job.session
        assert isinstance(session, Session)
        lane = self._lane(session)
        waits = job.submission.inline_thread == threading.get_ident()
        if waits and job.n_bytes <= INLINE_BYTES and len(job.columns.length) <= MAX_PIECES and lane.idle:
            job.cut(INLINE_BYTES, MAX_PIECES)
            if self._move_here(job, session, lane):
                return
        size = slice_size(job.n_bytes, config.streams_per_peer, config.slice_min_bytes, config.slice_bytes)
        if not lane.push(job, job.cut(size, MAX_PIECES)):
            job.submission.abort_closed()

    def _move_here(self, job: Job, session: Session, lane: Lane) -> bool:
        """Move a job of one slice on the submitting thread, which is going to wait for it anyway. False: not now."""
        with self._lock:
            worker = self._inline.pop(session, None)
            if worker is None and session in self._inline_busy:
                return False
            self._inline_busy.add(session)
        worker = worker or Worker(self, session, lane)
        try:
            worker.one(job)
        finally:
            self._give_back(worker)
        return True

    def exchange(
        self, session: Session, opcode: Opcode, local: int, remote: int, length: int, deadline: float
    ) -> TransferStatus | None:
        """Move one small range on this thread, over a connection that is there and idle. None: nothing of it is under way (any
        more), it must be submitted. Raises what made it fail."""
        with self._lock:
            worker = self._inline.pop(session, None)
            if worker is None:
                return None
            self._inline_busy.add(session)
        try:
            return worker.exchange(opcode, local, remote, length, deadline) if worker.lane.idle else None
        finally:
            self._give_back(worker)

    def _give_back(self, worker: Worker) -> None:
        session = worker.session
        with self._lock:
            self._inline_busy.discard(session)
            if worker.stream is not None and not self._closed and self._lanes.get(session) is worker.lane:
                self._inline[session] = worker
                return
        worker.drop()

    def _lane(self, session: Session) -> Lane:
        with self._lock:
            lane = self._lanes.get(session)
            if lane is None:
                name = f"te-tcp-{session.address}"
                lane = Lane(name, self.engine.config.streams_per_peer, lambda lane: Worker(self, session, lane).run())
                self._lanes[session] = lane
                if self._closed:
                    lane.close()
            return lane

    def forget(self, session: Session) -> None:
        """The session is closed and idle: let its threads end."""
        with self._lock:
            lane = self._lanes.pop(session, None)
            worker = self._inline.pop(session, None)
        if lane is not None:
            lane.close()
        if worker is not None:
            worker.drop()

    def peer_down(self, session: Session, error: MooncakeError) -> None:
        with self._lock:
            lane = self._lanes.get(session)
        if lane is not None:
            for job in lane.drain():
                job.submission.abort(TransferState.FAILED, error, time.monotonic())

    def opened(self, stream: TcpStream) -> None:
        with self._lock:
            self._streams.add(stream)
            if self._closed:
                stream.stop()

    def dropped(self, stream: TcpStream) -> None:
        with self._lock:
            self._streams.discard(stream)

    def gauges(self) -> dict[str, float]:
        with self._lock:
            lanes = list(self._lanes.values())
        return {"open_streams": len(self._streams), "tcp_queued_slices": sum(lane.queued for lane in lanes)}

    def close(self, deadline: float) -> bool:
        with self._lock:
            self._closed = True
            lanes, streams = list(self._lanes.values()), list(self._streams)
            inline, self._inline = list(self._inline.values()), {}
        for lane in lanes:
            lane.close()
        for stream in streams:
            stream.stop()
        for worker in inline:
            worker.drop()
        quiet = True
        for lane in lanes:
            quiet &= lane.join(deadline)
        while self._inline_busy and time.monotonic() < deadline:
            time.sleep(0.005)
        return quiet and not self._inline_busy
