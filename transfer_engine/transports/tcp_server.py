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

_SCRATCH_BYTES = 1 << 20


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
        head = bytearray(protocol.HEADER_BYTES)
        whole_head = sysio.Vector.of(head)
        try:
            while not self._stopping:
                self._path.idle()
                self._run(whole_head.again(), self._path.receive)
                header = protocol.decode_header(head)
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
        raw = bytearray(16 * header.count)
        self._run(sysio.Vector.of(raw), self._path.receive)
        table = protocol.as_table(raw)
        protocol.check_table(table, header.total)
        return table

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
        self._run(sysio.Vector.of(bytearray(header.encode())), self._path.send)

    def _discard(self, count: int) -> None:
        scratch = np.empty(min(count, _SCRATCH_BYTES), np.uint8)
        while count:
            part = min(count, len(scratch))
            self._run(sysio.Vector.of(scratch, part), self._path.receive)
            count -= part

    def _run(self, vector: sysio.Vector, call: tls_io.Call) -> None:
        self._vector, self._left, self._moved_at = vector, vector.left, time.monotonic()
        call(vector, self._check)

    def _check(self) -> None:
        now = time.monotonic()
        assert self._vector is not None
        if self._vector.left != self._left:
            self._left, self._moved_at = self._vector.left, now
        self._go_on()
        if now - self._moved_at > self._stall_timeout_s:
            raise ConnectionAbortedError("the peer stopped in the middle of a frame")

    def _go_on(self) -> None:
        if self._stopping:
            raise ConnectionAbortedError("stopped")
        if self._key[1] and self._key in self._fences:
            raise _Fenced
