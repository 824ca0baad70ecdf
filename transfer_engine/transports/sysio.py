"""System calls that move bytes between raw addresses, many ranges a call, without the GIL.

Knows: sendmsg, recvmsg, process_vm_readv/writev and memmove through ctypes, on iovec arrays made by numpy, so that a call
with 1024 ranges costs no Python work per range. Does not know: frames, deadlines (callers pass a check that raises).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import socket
import struct
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from transfer_engine.config import MAX_IOV
from transfer_engine.slices import U64

_libc = ctypes.CDLL(None, use_errno=True)
TICK_S = 0.05
"""Blocking data calls come back at least this often, so that deadlines, cancels and closing are seen."""

SPIN_S = 100e-6 if (os.cpu_count() or 1) > 1 else 0.0
"""So long a round trip of small frames is waited for without sleeping."""

_GATHER_BELOW_BYTES = 24 << 10


class _MsgHdr(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_void_p), ("name_length", ctypes.c_uint32), ("iov", ctypes.c_void_p), ("iov_count", ctypes.c_size_t),
        ("control", ctypes.c_void_p), ("control_length", ctypes.c_size_t), ("flags", ctypes.c_int),
    ]  # fmt: skip


def _declare(name: str, result: object, *arguments: object) -> Callable[..., int]:
    function = getattr(_libc, name)
    function.restype, function.argtypes = result, list(arguments)
    return function


_sendmsg = _declare("sendmsg", ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
_recvmsg = _declare("recvmsg", ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
_vm_args = (ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong)
_vm_readv = _declare("process_vm_readv", ctypes.c_ssize_t, *_vm_args)
_vm_writev = _declare("process_vm_writev", ctypes.c_ssize_t, *_vm_args)
_prctl = _declare("prctl", ctypes.c_int, ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong)


def allow_any_ptracer() -> None:
    """PR_SET_PTRACER_ANY; without Yama it does nothing."""
    _prctl(0x59616D61, (1 << 64) - 1, 0, 0, 0)


_NEAR_BUFFER_BYTES, _FAR_BUFFER_BYTES = 1 << 20, 4 << 20
"""To a peer on this host, what is under way should stay in the processor's cache: with more, every byte goes to main memory and
back. To others, it must fill the network's bandwidth times its delay."""


def tune(sock: socket.socket, buffer_bytes: int) -> None:
    """Make a blocking data socket tick, and give it buffers (0: what suits the distance). Raises OSError."""
    tick = struct.pack("ll", 0, int(TICK_S * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, tick)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, tick)
    near = sock.getsockname()[0] == sock.getpeername()[0]
    size = buffer_bytes or (_NEAR_BUFFER_BYTES if near else _FAR_BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)
    if near:
        with contextlib.suppress(OSError):  # nothing is lost on the way, so pacing (bbr) only costs timers
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


class Vector:
    """An iovec array and how much of it is done. `keep` keeps Python-owned bytes alive."""

    def __init__(self, address: U64, length: U64, keep: object = None) -> None:
        iov = np.empty((len(address), 2), np.uint64)
        iov[:, 0] = address
        iov[:, 1] = length
        self._start(iov, int(length.sum()) if len(length) > 1 else int(length[0]), keep)

    def _start(self, iov: npt.NDArray[np.uint64], left: int, keep: object) -> None:
        self.iov, self.left, self.row = iov, left, 0
        self._keep = keep
        self._first = (0, 0)
        self._iov_at = _address_of(iov)
        self._head = _MsgHdr(iov=self._iov_at, iov_count=min(len(iov), MAX_IOV))
        self._head_at = ctypes.addressof(self._head)

    @classmethod
    def of(cls, buffer: bytearray | np.ndarray, length: int | None = None) -> Vector:
        """One range over a writable Python buffer."""
        array = np.frombuffer(buffer, np.uint8) if not isinstance(buffer, np.ndarray) else buffer
        size = array.nbytes if length is None else length
        made = cls.__new__(cls)
        made._start(np.array([[_address_of(array), size]], np.uint64), size, array)
        made._first = (int(made.iov[0, 0]), size)
        return made

    @classmethod
    def behind(cls, head: bytearray, payload: tuple[U64, U64] | None) -> Vector:
        """Some Python-owned bytes, then ranges (address, length) of memory."""
        if payload is None:
            return cls.of(head)
        address, length = payload
        array = np.frombuffer(head, np.uint8)
        iov = np.empty((1 + len(address), 2), np.uint64)
        iov[0, 0], iov[0, 1] = _address_of(array), len(head)
        iov[1:, 0], iov[1:, 1] = address, length
        made = cls.__new__(cls)
        made._start(iov, len(head) + (int(length.sum()) if len(length) > 1 else int(length[0])), array)
        return made

    @classmethod
    def framed(cls, head: bytearray) -> Vector:
        """Some Python-owned bytes and, by `carry`, one range of memory behind them."""
        array = np.frombuffer(head, np.uint8)
        made = cls.__new__(cls)
        made._start(np.array([[_address_of(array), len(head)], [0, 0]], np.uint64), 0, array)
        made._first = (_address_of(array), len(head))
        return made

    def carry(self, address: int, length: int) -> Vector:
        """The same head again, before another range (vectors made by `framed` only)."""
        iov = self.iov
        iov[0, 0], iov[0, 1] = self._first
        iov[1, 0], iov[1, 1] = address, length
        self.left, self.row = self._first[1] + length, 0
        return self

    def again(self) -> Vector:
        """Ready for the same buffer once more (vectors made by `of` only)."""
        self.aim(*self._first)
        return self

    def aim(self, address: int, length: int) -> None:
        """Be about one other range (vectors of one row only)."""
        self.iov[0, 0], self.iov[0, 1] = address, length
        self.left, self.row = length, 0

    def advance(self, count: int) -> None:
        self.left -= count
        if self.left == 0:
            self.row = len(self.iov)
            return
        over = count
        if self.row < len(self.iov) - 1:
            ends = np.cumsum(self.iov[self.row :, 1])
            full = int(np.searchsorted(ends, np.uint64(count), side="right"))
            over -= int(ends[full - 1]) if full else 0
            self.row += full
        self.iov[self.row, 0] += np.uint64(over)
        self.iov[self.row, 1] -= np.uint64(over)

    def _message(self) -> int:
        if self.row == 0:
            return self._head_at
        self._head.iov = self._iov_at + 16 * self.row
        self._head.iov_count = min(len(self.iov) - self.row, MAX_IOV)
        return self._head_at


def _address_of(array: npt.NDArray[np.generic]) -> int:
    """Cheaper than `array.ctypes.data`, which makes an object."""
    return int(array.__array_interface__["data"][0])


def send(sock_fd: int, vector: Vector, check: Callable[[], None]) -> None:
    """Send it all. Raises what `check` raises (called every tick and after every partial send), or OSError."""
    flags = socket.MSG_NOSIGNAL
    while vector.left:
        sent = _sendmsg(sock_fd, vector._message(), flags)
        if sent > 0:
            vector.advance(sent)
            if not vector.left:
                return
        elif sent < 0:
            _raise_unless_tick()
        check()


def receive(sock_fd: int, vector: Vector, check: Callable[[], None]) -> None:
    """Fill it all. Raises what `check` raises, ConnectionResetError at the end of the stream, or OSError."""
    while vector.left:
        got = _recvmsg(sock_fd, vector._message(), socket.MSG_WAITALL)
        if got > 0:
            vector.advance(got)
            if not vector.left:
                return
        elif got == 0:
            raise ConnectionResetError("the peer closed the connection")
        else:
            _raise_unless_tick()
        check()


def receive_some(sock_fd: int, vector: Vector, check: Callable[[], None]) -> int:
    """Receive what one call brings, at least a byte; returns how many, and leaves the vector as it was. Raises like `receive`."""
    while (got := _recvmsg(sock_fd, vector._message(), 0)) <= 0:
        if got == 0:
            raise ConnectionResetError("the peer closed the connection")
        _raise_unless_tick()
        check()
    return got


def receive_soon(sock_fd: int, vector: Vector) -> int:
    """`receive_some` of what is expected within microseconds: looking again and again is quicker than being woken up. 0 when nothing
    came, or the connection is over. Raises nothing."""
    message, until = vector._message(), time.perf_counter() + SPIN_S
    while (got := _recvmsg(sock_fd, message, socket.MSG_DONTWAIT)) < 0 and time.perf_counter() < until:
        os.sched_yield()  # to the peer, if it shares this core
    return max(got, 0)


def _raise_unless_tick() -> None:
    code = ctypes.get_errno()
    if code not in (errno.EAGAIN, errno.EINTR):
        raise OSError(code, os.strerror(code))


def cross_copy(pid: int, local: U64, remote: U64, length: U64, *, write: bool) -> None:
    """Copy between our memory and process `pid`'s. Raises OSError: EPERM (not allowed), ESRCH (gone), EFAULT (not mapped)."""
    mine, theirs = Vector(local, length), Vector(remote, length)
    call = _vm_writev if write else _vm_readv
    while mine.left:
        a, b = mine.iov[mine.row : mine.row + MAX_IOV], theirs.iov[theirs.row : theirs.row + MAX_IOV]
        moved = call(pid, a.ctypes.data, len(a), b.ctypes.data, len(b), 0)
        if moved > 0:
            mine.advance(moved)
            theirs.advance(moved)
        elif moved == 0:
            raise OSError(errno.EFAULT, "nothing could be copied")
        elif ctypes.get_errno() != errno.EINTR:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


_memmove = ctypes.memmove
_PAGE_MASK, _CACHE_LINE, _STRING_COPY_BYTES, _ZERO = np.uint64(4095), np.uint64(64), np.uint64(2048), np.uint8(0)
"""memmove uses the processor's string copy, which on AMD Zen is 6 times slower where the target lies 1 to 63 bytes behind
the source modulo the page size (a numpy array against a mapped page); a vector operation is not."""
_self_copy = True


def copy(target: U64, source: U64, length: U64) -> None:
    """Copy ranges within this process. Many small ranges go in one system call (a cross-process copy to ourselves), which
    takes the GIL once; few or large ones by memmove."""
    global _self_copy
    aliased = (target - source) & _PAGE_MASK
    slow = (aliased > 0) & (aliased < _CACHE_LINE) & (length >= _STRING_COPY_BYTES)
    if _self_copy and len(length) > 8 and not slow.any() and int(length.sum()) < len(length) * _GATHER_BELOW_BYTES:
        try:
            return cross_copy(os.getpid(), source, target, length, write=True)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOSYS):
                raise
            _self_copy = False
    rows = zip(target.tolist(), source.tolist(), length.tolist(), slow.tolist(), strict=True)
    for to, of, count, vectors in rows:
        _move(to, of, count, bool(vectors))


def copy_one(target: int, source: int, length: int) -> None:
    """`copy` of one range, without arrays."""
    _move(target, source, length, length >= 2048 and 0 < (target - source) % 4096 < 64)


def _move(target: int, source: int, length: int, vectors: bool) -> None:
    if vectors:
        np.bitwise_or(_bytes_at(source, length), _ZERO, out=_bytes_at(target, length))
    else:
        _memmove(target, source, length)


def _bytes_at(address: int, count: int) -> npt.NDArray[np.uint8]:
    return np.frombuffer(memoryview((ctypes.c_char * count).from_address(address)), np.uint8)


def read_memory(pid: int, address: int, count: int) -> bytes:
    """Raises OSError like `cross_copy`."""
    buffer = np.empty(count, np.uint8)
    here = np.array([buffer.ctypes.data], np.uint64)
    cross_copy(pid, here, np.array([address], np.uint64), np.array([count], np.uint64), write=False)
    return buffer.tobytes()


def is_mapped(address: int, length: int) -> bool:
    """Whether the first and last byte of a range can be read. True also where that cannot be found out."""
    try:
        read_memory(os.getpid(), address, 1)
        read_memory(os.getpid(), address + length - 1, 1)
    except OSError as error:
        return error.errno != errno.EFAULT
    return True
