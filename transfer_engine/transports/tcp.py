"""Transport `tcp`, initiator side: a few persistent connections per peer, each with a thread.

Knows: which slice goes on which stream, several frames ahead; what a lost connection means for the slices on it. Does not
know: frame layout (tcp_stream), the target side (tcp_server). A WRITE that lost its connection is repeated only after the
target confirmed that nothing of the old connection will be placed any more; otherwise late bytes could hit reused memory.
"""

from __future__ import annotations

import threading
import time
import uuid

from mooncake.common.errors import MooncakeError, PeerUnavailable, ProtocolViolation, TransferError, TransferTimeout
from transfer_engine import handshake, sockets, tls
from transfer_engine.lanes import Job, Lane, Slice
from transfer_engine.protocol import Ping, StreamClose
from transfer_engine.segment import Session, parse_address
from transfer_engine.slices import slice_size
from transfer_engine.transports.base import Host
from transfer_engine.transports.tcp_stream import GiveUp, Outstanding, Stalled, TcpStream
from transfer_engine.types import Opcode, TransferState

WINDOW = 3
INLINE_BYTES = 512 << 10
"""A job up to this size is moved by the submitting thread if that is going to wait for it: two thread switches less."""
MAX_PIECES = 1000
_CONFIRM_S = 0.25
_PING_S = 0.5


class TcpTransport:
    """One lane per peer."""

    name = "tcp"

    def __init__(self, engine: Host) -> None:
        self.engine = engine
        self._lock = threading.Lock()
        self._lanes: dict[Session, Lane] = {}
        self._streams: set[TcpStream] = set()
        self._inline: dict[Session, _Worker] = {}
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
        worker = worker or _Worker(self, session, lane)
        try:
            worker.one(job)
        finally:
            with self._lock:
                self._inline_busy.discard(session)
                if worker.stream is not None and not self._closed and self._lanes.get(session) is lane:
                    self._inline[session] = worker
                    worker = None
            if worker is not None:
                worker.drop()
        return True

    def _lane(self, session: Session) -> Lane:
        with self._lock:
            lane = self._lanes.get(session)
            if lane is None:
                name = f"te-tcp-{session.address}"
                lane = Lane(name, self.engine.config.streams_per_peer, lambda lane: _Worker(self, session, lane).run())
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


class _Worker:
    """A thread's work: one stream, as many frames ahead as the window allows, one direction at a time."""

    def __init__(self, transport: TcpTransport, session: Session, lane: Lane) -> None:
        self.transport = transport
        self.engine = transport.engine
        self.session = session
        self.lane = lane
        self.stream: TcpStream | None = None

    def one(self, job: Job) -> None:
        """Move a job of a single slice and return when it is done, failed, or given to the lane to be tried again."""
        piece = job.take()
        if piece is None:
            return
        try:
            self._step(piece)
            if self.stream is not None and self.stream.window:
                self._step(None)
        except BaseException as error:  # KeyboardInterrupt, above all
            unsettled = self.stream is None or any(frame.piece is piece for frame in self.stream.window)
            self.drop()
            if unsettled:
                job.submission.fail_slice(TransferError(f"tcp: interrupted by {error!r}"), quiesced=False)
            raise

    def run(self) -> None:
        held: Slice | None = None
        try:
            while True:
                stream = self.stream
                busy = stream is not None and len(stream.window) > 0
                piece, held = held, None
                if piece is None and not (busy and stream is not None and len(stream.window) >= WINDOW):
                    piece = self.lane.take(0 if busy else self.engine.config.idle_timeout_s)
                if piece is None and not busy:
                    return
                if (
                    piece is not None
                    and busy
                    and stream is not None
                    and stream.window[0].piece.job.opcode != piece.job.opcode
                ):
                    held, piece = piece, None
                self._step(piece)
        except BaseException as error:  # a bug must not leave submissions without an end
            for lost in ([held] if held else []) + [f.piece for f in (self.stream.window if self.stream else ())]:
                lost.job.submission.fail_slice(TransferError(f"tcp: {error!r}"), quiesced=False)
            raise
        finally:
            self.drop()

    def _step(self, piece: Slice | None) -> None:
        """Send a slice, or take the oldest answer."""
        if piece is not None and self.stream is None and not self._connect(piece):
            return
        stream = self.stream
        assert stream is not None
        try:
            if piece is not None:
                return stream.send(piece)
            frame, refusal = stream.receive()
        except GiveUp:
            return self._lost(TransferError("tcp: given up"), piece)
        except Stalled:
            error = PeerUnavailable(f"{self.session.address}: no byte moved for {self.engine.config.stall_timeout_s} s")
            self.session.rest(error)
            self._lost(error)
            return self.transport.peer_down(self.session, error)
        except ProtocolViolation as error:
            return self._lost(error)
        except TransferError as error:
            return self._unstaged(piece or stream.window[0].piece, error)
        except OSError as error:
            return self._lost(PeerUnavailable(f"{self.session.address}: connection lost: {error}"))
        submission = frame.piece.job.submission
        if refusal is not None:
            return submission.fail_slice(refusal)
        self.engine.counters.moved("tcp", frame.piece, time.perf_counter() - frame.began)
        submission.finish_slice(frame.piece.columns.index, frame.piece.columns.length, frame.piece.n_bytes)

    def _connect(self, piece: Slice) -> bool:
        """Dial for a slice; on failure the slice is dealt with."""
        submission, session, config = piece.job.submission, self.session, self.engine.config
        now = time.monotonic()
        deadline = min(submission.deadline, now + config.connect_timeout_s)
        try:
            problem = session.down
            if problem is not None:
                raise problem
            stream_id = uuid.uuid4().hex
            sock, _ = handshake.dial(
                parse_address(session.address), self.engine.identity, config.cluster_token,
                want=session.instance_id, stream_id=stream_id, deadline=deadline, security=tls.of(config),
            )  # fmt: skip
        except TransferTimeout as error:
            if deadline == submission.deadline:
                submission.abort(TransferState.TIMED_OUT, error, now)
                submission.return_slice()
                return False
            self._unreachable(piece, error)
            return False
        except MooncakeError as error:
            self._unreachable(piece, error)
            return False
        try:
            self.stream = TcpStream(
                sock, stream_id, config.socket_buffer_bytes, config.stall_timeout_s, self._answers, self.engine.devices
            )
        except OSError as error:
            sockets.close(sock)
            self._unreachable(piece, PeerUnavailable(f"{session.address}: {error}"))
            return False
        self.transport.opened(self.stream)
        self.engine.counters.add(tcp_dials=1)
        return True

    def _unreachable(self, piece: Slice, error: MooncakeError) -> None:
        self.session.rest(error)
        piece.job.submission.fail_slice(error)
        self.transport.peer_down(self.session, error)

    def _unstaged(self, piece: Slice, error: TransferError) -> None:
        """Our own memory, on a GPU, could not be read or filled. In the middle of a frame that costs the stream."""
        assert self.stream is not None
        frame = next((frame for frame in self.stream.window if frame.piece is piece), None)
        quiet = True
        if frame is not None:
            self.stream.window.remove(frame)
            quiet = piece.job.opcode is Opcode.READ or self._confirm(self.stream.stream_id)
            self._lost(TransferError("tcp: the connection was given up for another slice's sake"))
        self.engine.counters.add(device_errors=1)
        piece.job.submission.fail_slice(error, quiesced=quiet)

    def _lost(self, error: MooncakeError, unsent: Slice | None = None) -> None:
        """The stream is of no use: settle what was on it, and what was to be sent next."""
        stream = self.stream
        assert stream is not None
        frames = list(stream.window)
        if unsent is not None and not any(frame.piece is unsent for frame in frames):
            frames.append(Outstanding(0, unsent, 0.0))
        stream.window.clear()
        self.drop()
        wrote = any(frame.piece.job.opcode is Opcode.WRITE for frame in frames)
        quiet = not wrote or self._confirm(stream.stream_id)
        for frame in frames:
            self._settle(frame, error, quiet)

    def _settle(self, frame: Outstanding, error: MooncakeError, quiet: bool) -> None:
        piece = frame.piece
        job, submission = piece.job, piece.job.submission
        problem = self.session.down
        piece.attempts += 1
        if submission.doomed:
            submission.return_slice(quiesced=quiet)
        elif (
            problem is not None
            or not quiet
            or piece.attempts > submission.max_retries
            or isinstance(error, ProtocolViolation)
        ):
            submission.fail_slice(problem or error, quiesced=quiet)
        else:
            self.engine.counters.add(tcp_retries=1)
            job.give_back(piece)
            submission.return_slice()
            if not self.lane.push(job, 1):
                submission.abort_closed()

    def _answers(self) -> bool:
        """Whether the peer answers on its control connection, when its data connection is silent."""
        link = self.session.link
        try:
            if link is not None:
                link.request(Ping(), time.monotonic() + _PING_S)
        except MooncakeError:
            return False
        return link is not None

    def _confirm(self, stream_id: str) -> bool:
        """Whether the target places nothing of that stream any more."""
        if self.session.record.process_ended():
            return True
        deadline = time.monotonic() + _CONFIRM_S
        try:
            link = self.session.ensure_link(deadline)
            link.request(StreamClose(stream_id, _CONFIRM_S), deadline)
        except MooncakeError:
            return self.session.record.process_ended()
        return True

    def drop(self) -> None:
        if self.stream is not None:
            self.transport.dropped(self.stream)
            self.stream.close()
            self.stream = None
