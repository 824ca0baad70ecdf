"""Transport `tcp`, target side: one incoming data connection.

Knows: how to place WRITE payload straight into registered memory and to answer READ from it, after checking every range
against the region table and the group against the fences. Does not know: who else is connected. What it refuses it drains,
so that the connection stays usable; what it cannot parse ends the connection, never the engine.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import Protocol

import numpy as np

from mooncake.common.errors import MooncakeError, ProtocolViolation, TransferCancelled, TransferError
from transfer_engine import protocol, sockets
from transfer_engine.config import EngineConfig
from transfer_engine.device.staging import DeviceMemory
from transfer_engine.fence import FenceTable, Key
from transfer_engine.memory import RegionTable
from transfer_engine.protocol import FrameHeader
from transfer_engine.slices import U64
from transfer_engine.transports import sysio, tls_io
from transfer_engine.transports.base import Stats
from transfer_engine.transports.read_ahead import ReadAhead

_SCRATCH_BYTES = 1 << 20
_SMALL_BYTES = 64 << 10


class Target(Protocol):
    """What serving needs of the engine."""

    config: EngineConfig
    memory: RegionTable
    devices: DeviceMemory
    incoming: FenceTable
    counters: Stats


class _Fenced(Exception):
    pass


class ServedStream:
    """`run` serves until the connection ends; `stop` ends it from another thread."""

    one_sided = False

    def __init__(self, sock: socket.socket, peer: str, engine: Target) -> None:
        sysio.tune(sock, engine.config.socket_buffer_bytes)
        self._sock = sock
        self._path = tls_io.data_path(sock)
        self._ahead = ReadAhead(self._path)
        self._reply = bytearray(protocol.HEADER_BYTES)
        self._whole_reply, self._framed_reply = sysio.Vector.of(self._reply), sysio.Vector.framed(self._reply)
        self._peer = peer
        self._regions = engine.memory
        self._devices = engine.devices
        self._fences = engine.incoming
        self._counters = engine.counters
        self._stall_timeout_s = engine.config.stall_timeout_s
        self._ended = threading.Event()
        self._stopping = False
        self._key: Key = (peer, 0)
        self._vector: sysio.Vector | None = None
        self._left = 0
        self._unplaced = 0
        self._moved_at = 0.0

    def stop(self, timeout_s: float) -> bool:
        self._stopping = True
        sockets.shut(self._sock)
        return self._ended.wait(timeout_s)

    def run(self) -> None:
        try:
            while not self._stopping:
                if self._ahead.empty:
                    self._path.idle()
                if self._small():
                    if self._ahead.empty:
                        self._ahead.fetch_soon()
                    continue
                header = protocol.decode_header(self._need(protocol.HEADER_BYTES))
                if header.kind not in (protocol.WRITE, protocol.READ):
                    raise ProtocolViolation("an initiator sent an answer frame")
                table = self._table(header)
                if header.kind == protocol.WRITE:
                    self._place(header, table)
                else:
                    self._answer_read(header, table)
        except ProtocolViolation:
            self._counters.add(protocol_violations=1)
        except OSError:
            pass
        finally:
            self._ended.set()
            sockets.close(self._sock)

    def _table(self, header: FrameHeader) -> U64:
        table = protocol.as_table(self._need(16 * header.count)).copy()
        protocol.check_table(table, header.total)
        return table

    def _small(self) -> bool:
        """Serve a frame of one small range that no fence can concern and that lies in the buffer whole, without arrays. False:
        it is something else, nothing was done."""
        ahead = self._ahead
        if ahead.empty:
            self._more(1)
        if self._devices.active or ahead.buffered < protocol.SMALL.size:
            return False
        magic, kind, status, zero, count, pad, frame_id, group, total, address, length = ahead.peek(protocol.SMALL)
        write = kind == protocol.WRITE
        size = protocol.SMALL.size + (length if write else 0)
        odd = magic != protocol.DATA_MAGIC or status or zero or pad or group or kind > protocol.READ
        if odd or count != 1 or total != length or not 0 < length <= _SMALL_BYTES or ahead.buffered < size:
            return False
        region = self._regions.hold_one(address, length, remote=True)
        if region is None:
            return False
        try:
            ahead.drop(protocol.SMALL.size)
            if write:
                ahead.give_one(address, length)
            answer = protocol.ACK if write else protocol.DATA
            protocol.HEADER.pack_into(
                self._reply, 0, protocol.DATA_MAGIC, answer, 0, 0, 0, 0, frame_id, 0, 0 if write else length
            )
            self._run(
                self._whole_reply.again() if write else self._framed_reply.carry(address, length), self._path.send
            )
        finally:
            self._regions.release_one(region)
        self._counters.count("served_write_bytes" if write else "served_read_bytes", length)
        return True

    def _place(self, header: FrameHeader, table: U64) -> None:
        self._unplaced = header.total
        status, key = 0, (self._peer, header.group)
        try:
            hold = self._regions.hold(table[:, 0], table[:, 1], remote=True)
        except MooncakeError as error:
            status = protocol.error_code(error)
        else:
            try:
                status = self._place_fenced(table, key)
            finally:
                self._regions.release(hold)
        if status:
            self._discard(self._unplaced)
        self._answer(FrameHeader(protocol.ACK, status, 0, header.frame_id, header.group, 0))
        if not status:
            self._counters.add(served_write_bytes=header.total)

    def _place_fenced(self, table: U64, key: Key) -> int:
        cancelled = protocol.error_code(TransferCancelled())
        if not self._fences.enter(key):
            return cancelled
        self._key = key
        try:
            self._place_table(table[:, 0], table[:, 1])
        except _Fenced:
            return cancelled
        except TransferError as error:
            self._counters.add(device_errors=1)
            return protocol.error_code(error)
        finally:
            self._key = (self._peer, 0)
            self._fences.leave(key)
        return 0

    def _place_table(self, address: U64, length: U64) -> None:
        if not self._devices.active:
            return self._receive(address, length)
        with contextlib.closing(self._devices.incoming(address, length, self._go_on)) as parts:
            for part in parts:
                self._receive(part.address, part.length)

    def _receive(self, address: U64, length: U64) -> None:
        vector = sysio.Vector(address, length)
        if given := self._ahead.give(address, length):
            vector.advance(given)
            self._unplaced -= given
        before = vector.left
        try:
            self._run(vector, self._path.receive)
        finally:
            self._unplaced -= before - vector.left

    def _answer_read(self, header: FrameHeader, table: U64) -> None:
        try:
            hold = self._regions.hold(table[:, 0], table[:, 1], remote=True)
        except MooncakeError as error:
            return self._answer(
                FrameHeader(protocol.DATA, protocol.error_code(error), 0, header.frame_id, header.group, 0)
            )
        try:
            head = bytearray(FrameHeader(protocol.DATA, 0, 0, header.frame_id, header.group, header.total).encode())
            if self._devices.active:
                return self._send_staged(head, header, table)
            self._run(sysio.Vector.behind(head, (table[:, 0], table[:, 1])), self._path.send)
        finally:
            self._regions.release(hold)
        self._counters.add(served_read_bytes=header.total)

    def _send_staged(self, head: bytearray, header: FrameHeader, table: U64) -> None:
        begun = False
        try:
            with contextlib.closing(self._devices.outgoing(table[:, 0], table[:, 1], self._go_on)) as parts:
                for part in parts:
                    vector = sysio.Vector(part.address, part.length)
                    if not begun:
                        vector = sysio.Vector.behind(head, (part.address, part.length))
                    begun = True
                    self._run(vector, self._path.send)
        except TransferError as error:
            self._counters.add(device_errors=1)
            if begun:
                raise ConnectionAbortedError("a frame could not be finished") from error
            code = protocol.error_code(error)
            return self._answer(FrameHeader(protocol.DATA, code, 0, header.frame_id, header.group, 0))
        self._counters.add(served_read_bytes=header.total)

    def _answer(self, header: FrameHeader) -> None:
        self._reply[:] = header.encode()
        self._run(self._whole_reply.again(), self._path.send)

    def _discard(self, count: int) -> None:
        count -= self._ahead.drop(count)
        scratch = np.empty(min(count, _SCRATCH_BYTES), np.uint8)
        while count:
            part = min(count, len(scratch))
            self._run(sysio.Vector.of(scratch, part), self._path.receive)
            count -= part

    def _need(self, count: int) -> memoryview:
        """The next bytes of the connection, valid until more are asked for."""
        if self._ahead.buffered < count:
            self._more(count)
        return self._ahead.take(count)

    def _more(self, count: int) -> None:
        self._vector, self._moved_at = None, time.monotonic()
        self._ahead.fetch(count, self._check)

    def _run(self, vector: sysio.Vector, call: tls_io.Call) -> None:
        self._vector, self._left, self._moved_at = vector, vector.left, time.monotonic()
        call(vector, self._check)

    def _check(self) -> None:
        now = time.monotonic()
        if self._vector is not None and self._vector.left != self._left:
            self._left, self._moved_at = self._vector.left, now
        self._go_on()
        if now - self._moved_at > self._stall_timeout_s:
            raise ConnectionAbortedError("the peer stopped in the middle of a frame")

    def _go_on(self) -> None:
        if self._stopping:
            raise ConnectionAbortedError("stopped")
        if self._key[1] and self._key in self._fences:
            raise _Fenced
