"""Transport `tcp`, initiator side: what one thread does with one connection.

Knows: sending slices several frames ahead and taking their answers; dialling; what a lost connection means for the slices on
it. Does not know: queues and who works on them (tcp), frame layout (tcp_stream). A WRITE that lost its connection is repeated
only after the target confirmed that nothing of the old connection will be placed any more; otherwise late bytes could hit reused
memory.
"""

from __future__ import annotations

import time
import uuid
from typing import Protocol

from mooncake.common.errors import (
    MooncakeError,
    PeerUnavailable,
    ProtocolViolation,
    TransferCancelled,
    TransferError,
    TransferTimeout,
)
from transfer_engine import handshake, sockets, tls
from transfer_engine.lanes import Job, Lane, Slice
from transfer_engine.protocol import Ping, StreamClose
from transfer_engine.segment import Session, parse_address
from transfer_engine.transports.base import Host, counted
from transfer_engine.transports.tcp_stream import GiveUp, Outstanding, Stalled, TcpStream
from transfer_engine.types import Opcode, TransferState, TransferStatus

WINDOW = 3
_CONFIRM_S = 0.25
_PING_S = 0.5
_COUNTED = counted("tcp")


class Owner(Protocol):
    """The transport, as its workers see it."""

    engine: Host

    def opened(self, stream: TcpStream) -> None: ...
    def dropped(self, stream: TcpStream) -> None: ...
    def peer_down(self, session: Session, error: MooncakeError) -> None: ...


class Worker:
    """A thread's work: one stream, as many frames ahead as the window allows, one direction at a time."""

    def __init__(self, transport: Owner, session: Session, lane: Lane) -> None:
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

    def exchange(self, opcode: Opcode, local: int, remote: int, length: int, deadline: float) -> TransferStatus | None:
        """See TcpTransport.exchange."""
        stream, began = self.stream, time.perf_counter()
        if stream is None:
            return None
        try:
            refusal = stream.exchange(opcode, local, remote, length, deadline)
        except (GiveUp, Stalled, ProtocolViolation, OSError) as error:
            self._broken(stream, opcode, error)
            return None
        except BaseException:  # KeyboardInterrupt, above all
            self.drop()
            raise
        if refusal is not None:
            raise refusal
        self.engine.counters.exchanged(_COUNTED[opcode], length, time.perf_counter() - began)
        return TransferStatus(TransferState.COMPLETED, length)

    def _broken(self, stream: TcpStream, opcode: Opcode, error: Exception) -> None:
        """An exchange lost its connection. Returns when it may be tried again; raises otherwise."""
        closed = stream.closing
        self.drop()
        quiet = opcode is Opcode.READ or self._confirm(stream.stream_id)
        if isinstance(error, ProtocolViolation):
            raise error
        if isinstance(error, GiveUp):
            raise (
                TransferCancelled("the transfer engine is closed")
                if closed
                else TransferTimeout("the transfer's deadline passed")
            )
        if isinstance(error, Stalled):
            down = PeerUnavailable(f"{self.session.address}: no byte moved for {self.engine.config.stall_timeout_s} s")
            self.session.rest(down)
            self.transport.peer_down(self.session, down)
            raise down
        if not quiet:
            raise PeerUnavailable(f"{self.session.address}: connection lost: {error}")
        self.engine.counters.add(tcp_retries=1)

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
