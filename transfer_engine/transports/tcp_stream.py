"""One outgoing data connection: sends WRITE and READ frames, reads their answers.

Knows: frames with several outstanding, when to give up. Does not know: retries, queues. Used by one thread at a time.
Payload goes from and to registered memory directly: one gathering sendmsg per frame, one scattering recvmsg per answer.
What lies on a GPU goes through pinned memory, part after part.
"""

from __future__ import annotations

import contextlib
import math
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from mooncake.common.errors import MooncakeError, ProtocolViolation, TransferError
from transfer_engine import protocol, sockets
from transfer_engine.device.staging import DeviceMemory
from transfer_engine.lanes import Slice
from transfer_engine.protocol import FrameHeader
from transfer_engine.slices import U64, coalesce_one
from transfer_engine.transports import sysio, tls_io
from transfer_engine.types import Opcode

PATIENCE = 4
"""So many times in a row a peer that moves nothing, but answers on its control connection, is taken for slow, not down."""


class GiveUp(Exception):
    """A submission in the window must stop now (deadline, cancel, closing)."""


class Stalled(Exception):
    """The peer moved no byte for too long."""


class Outstanding(NamedTuple):
    frame_id: int
    piece: Slice
    began: float


class TcpStream:
    """`window` holds the frames without an answer yet, oldest first."""

    def __init__(
        self,
        sock: socket.socket,
        stream_id: str,
        buffer_bytes: int,
        stall_timeout_s: float,
        still_there: Callable[[], bool],
        devices: DeviceMemory,
    ) -> None:
        sysio.tune(sock, buffer_bytes)
        self._sock = sock
        self._path = tls_io.data_path(sock)
        self.stream_id = stream_id
        self.window: deque[Outstanding] = deque()
        self.closing = False
        self._stall_timeout_s = stall_timeout_s
        self._still_there = still_there
        self._devices = devices
        self._patience = 0
        self._next_id = 1
        self._answer = bytearray(protocol.HEADER_BYTES)
        self._whole_answer = sysio.Vector.of(self._answer)
        self._request = bytearray(protocol.HEADER_BYTES + protocol.ROW.size)
        self._whole_request = sysio.Vector.of(self._request)
        self._framed_request, self._framed_answer = (
            sysio.Vector.framed(self._request),
            sysio.Vector.framed(self._answer),
        )
        self._deadline = math.inf
        self._vector: sysio.Vector | None = None
        self._left = -1
        self._moved_at = 0.0

    def send(self, piece: Slice) -> None:
        """Put a slice on the wire and into the window. Raises GiveUp, Stalled, OSError: the stream is of no use then; and
        TransferError for memory on a GPU that could not be read: it is sound if the slice is not in the window."""
        columns, write = piece.columns, piece.job.opcode is Opcode.WRITE
        address, length = coalesce_one(columns.remote, columns.length)
        header = FrameHeader(
            protocol.WRITE if write else protocol.READ,
            0,
            len(address),
            self._next_id,
            piece.job.submission.group,
            piece.n_bytes,
        )
        table = np.empty((len(address), 2), "<u8")
        table[:, 0], table[:, 1] = address, length
        head = bytearray(header.encode() + table.tobytes())
        if write and self._devices.active:
            return self._send_staged(piece, head)
        self._expect(piece)
        payload = coalesce_one(columns.local, columns.length) if write else None
        self._run(sysio.Vector.behind(head, payload), self._path.send)

    def _send_staged(self, piece: Slice, head: bytearray) -> None:
        columns = piece.columns
        stage = self._devices.outgoing(columns.local, columns.length, lambda: self._stop_if_asked(piece))
        with contextlib.closing(stage) as parts:
            try:
                part = next(parts)
            except (GiveUp, TransferError):
                raise
            except BaseException:  # KeyboardInterrupt, above all: who cleans up looks into the window
                self._expect(piece)
                raise
            self._expect(piece)
            self._run(sysio.Vector.behind(head, coalesce_one(part.address, part.length)), self._path.send)
            for part in parts:
                self._run(sysio.Vector(*coalesce_one(part.address, part.length)), self._path.send)

    def _expect(self, piece: Slice) -> None:
        self.window.append(Outstanding(self._next_id, piece, time.perf_counter()))
        self._next_id += 1

    def receive(self) -> tuple[Outstanding, MooncakeError | None]:
        """The oldest frame's answer; READ data lands in local memory. Raises like `send`, and ProtocolViolation."""
        self._run(self._whole_answer.again(), self._path.receive)
        frame = self.window[0]
        write = frame.piece.job.opcode is Opcode.WRITE
        refusal = self._checked(
            protocol.ACK if write else protocol.DATA, frame.frame_id, 0 if write else frame.piece.n_bytes
        )
        if not write and refusal is None:
            self._fill(frame.piece)
        self.window.popleft()
        return frame, refusal

    def exchange(self, opcode: Opcode, local: int, remote: int, length: int, deadline: float) -> MooncakeError | None:
        """One range at once, while the window is empty; returns the target's refusal. Raises like `send` and `receive`, and
        GiveUp at the deadline."""
        write, frame_id = opcode is Opcode.WRITE, self._next_id
        self._next_id += 1
        self._deadline = deadline
        kind = protocol.WRITE if write else protocol.READ
        protocol.HEADER.pack_into(self._request, 0, protocol.DATA_MAGIC, kind, 0, 0, 1, 0, frame_id, 0, length)
        protocol.ROW.pack_into(self._request, protocol.HEADER_BYTES, remote, length)
        try:
            request = self._framed_request.carry(local, length) if write else self._whole_request.again()
            self._run(request, self._path.send)
            answer = self._whole_answer.again() if write else self._framed_answer.carry(local, length)
            payload = 0 if write else length
            while answer.left > payload:
                answer.advance(self._path.soon(answer) or self._path.some(answer, self._check))
            refusal = self._checked(protocol.ACK if write else protocol.DATA, frame_id, payload)
            if refusal is None and answer.left:
                self._run(answer, self._path.receive)
            return refusal
        finally:
            self._deadline = math.inf

    def _checked(self, kind: int, frame_id: int, total: int) -> MooncakeError | None:
        """What the answer just received says. Raises ProtocolViolation unless it is the one expected."""
        answer = protocol.decode_header(self._answer)
        if answer.kind != kind or answer.frame_id != frame_id or answer.total != (0 if answer.status else total):
            raise ProtocolViolation("an answer does not belong to the oldest frame")
        return protocol.error_from(answer.status, "refused by the target") if answer.status else None

    def _fill(self, piece: Slice) -> None:
        address, length = piece.columns.local, piece.columns.length
        if not self._devices.active:
            return self._receive(address, length)
        with contextlib.closing(self._devices.incoming(address, length, lambda: self._stop_if_asked(piece))) as parts:
            for part in parts:
                self._receive(part.address, part.length)

    def _receive(self, address: U64, length: U64) -> None:
        self._run(sysio.Vector(*coalesce_one(address, length)), self._path.receive)

    def _run(self, vector: sysio.Vector, call: tls_io.Call) -> None:
        self._vector, self._left, self._moved_at = vector, vector.left, time.monotonic()
        self._patience = 0
        call(vector, self._check)

    def _check(self) -> None:
        now = time.monotonic()
        assert self._vector is not None
        if self._vector.left != self._left:
            self._left, self._moved_at, self._patience = self._vector.left, now, 0
        self._stop_if_asked()
        if now - self._moved_at > self._stall_timeout_s:
            self._patience += 1
            if self._patience > PATIENCE or not self._still_there():
                raise Stalled
            self._moved_at = time.monotonic()

    def _stop_if_asked(self, piece: Slice | None = None) -> None:
        """Raises GiveUp when `piece` or something in the window must stop now."""
        now = time.monotonic()
        pieces = [frame.piece for frame in self.window] + ([piece] if piece else [])
        if self.closing or now >= self._deadline or any(p.job.submission.stop_at <= now for p in pieces):
            raise GiveUp

    def stop(self) -> None:
        """From any thread: make the owner give up."""
        self.closing = True
        sockets.shut(self._sock)

    def close(self) -> None:
        """By the owner only (a closed descriptor could be reused under a running call)."""
        self.stop()
        sockets.close(self._sock)
