"""The Nth system call of each kind fails, for N = 1, 2, ... until an operation passes untouched: right bytes or a typed error within the
deadline every time, and the engine works afterwards. Both sides of tcp and TLS, and what sets an engine up."""

from __future__ import annotations

import errno
import functools
import gc
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from mooncake.common.errors import MooncakeError
from tests.transfer_engine.chaos import config
from tests.transfer_engine.shim import FAIL, SHORT, Shim
from tests.transfer_engine.zygote import Rows, Victim, Zygote, _Child
from transfer_engine import EngineConfig, Opcode, TransferEngine, TransferRequest

LENGTH = 1 << 20
ROWS = [(100, 3000), (5000, 70_000), (90_001, 300_000)]
DEADLINE_S = 2.0
MARGIN_S = 2.0
_OLD = np.full(LENGTH, 1, np.uint8)
_NEW = np.random.default_rng(3).integers(2, 256, LENGTH, np.uint8)

ERRORS: dict[str, list[int]] = {
    "socket": [errno.EMFILE, errno.ENOBUFS],
    "connect": [errno.ETIMEDOUT, errno.EINTR, errno.EADDRNOTAVAIL],
    "accept": [errno.EMFILE, errno.ECONNABORTED, errno.EINTR],
    "setsockopt": [errno.ENOBUFS],
    "getsockopt": [errno.ENOBUFS],
    "ioctl": [errno.ENOMEM],
    "send": [errno.ECONNRESET, errno.ENOBUFS, errno.EINTR, errno.ETIMEDOUT],
    "recv": [errno.ECONNRESET, errno.EINTR, errno.ETIMEDOUT],
    "poll": [errno.EINTR, errno.ENOMEM],
    "shutdown": [errno.ENOTCONN],
    "close": [errno.EINTR, errno.EIO],
    "thread": [errno.EAGAIN],
}


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with Zygote() as made:
        yield made


class Side:
    """Our engine, which takes part in every operation."""

    def __init__(self, way: str, engine: TransferEngine | None = None) -> None:
        self.engine = engine or TransferEngine(config(way))
        self.memory: np.ndarray = np.zeros(LENGTH, np.uint8)
        self.at = self.engine.register_buffer(self.memory)

    def _requests(self, opcode: Opcode, segment: int, base: int) -> list[TransferRequest]:
        return [TransferRequest(opcode, self.at + at, segment, base + at, size) for at, size in ROWS]  # type: ignore[arg-type]

    def transfer(self, victim: Victim, base: int, opcode: Opcode) -> None:
        segment = self.engine.open_segment(victim.address, timeout_s=DEADLINE_S)
        try:
            self.engine.transfer_sync(self._requests(opcode, segment, base), DEADLINE_S, notify=b"told")
        finally:
            self.engine.close_segment(segment)


@pytest.fixture(scope="module", params=["tcp", "tcp-tls"])
def side(request: pytest.FixtureRequest) -> Iterator[tuple[str, Side]]:
    made = Side(request.param)
    yield request.param, made
    made.engine.close()


@pytest.fixture(scope="module")
def tcp() -> Iterator[Side]:
    made = Side("tcp")
    yield made
    made.engine.close()


class Operation:
    """WRITE and READ between a fresh victim and us, every connection included."""

    def __init__(self, side: Side, victim: Victim, victim_initiates: bool) -> None:
        self.side, self.victim, self.victim_initiates = side, victim, victim_initiates
        self.base, self.there = victim.memory(LENGTH, False)

    def one(self, opcode: Opcode, arm: tuple[int | str, ...] | None) -> BaseException | None:
        """How it ended, when not well. Fails when bytes are wrong or it took too long."""
        local, remote = (self.there, self.side.memory) if self.victim_initiates else (self.side.memory, self.there)
        sink, source = (remote, local) if opcode is Opcode.WRITE else (local, remote)
        sink[:], source[:] = _OLD, _NEW
        began = time.monotonic()
        ended = self._end(opcode, arm)
        assert time.monotonic() - began < 2 * DEADLINE_S + MARGIN_S  # opening and moving have a deadline each
        assert ((sink == _OLD) | (sink == _NEW)).all()
        if ended is None:
            for at, size in ROWS:
                assert np.array_equal(sink[at : at + size], _NEW[at : at + size])
                sink[at : at + size] = 1
            assert (sink == 1).all()
        return ended

    def _end(self, opcode: Opcode, arm: tuple[int | str, ...] | None) -> BaseException | None:
        try:
            if self.victim_initiates:
                rows: Rows = [(self.base + at, self.side.at + at, size) for at, size in ROWS]
                self.victim.call("transfer", opcode, self.side.engine.address, rows, DEADLINE_S, arm, timeout_s=30.0)
            else:
                if arm:
                    self.victim.call("arm", *arm)
                self.side.transfer(self.victim, self.base, opcode)
        except MooncakeError as error:
            return error
        return None

    def works_again(self) -> None:
        """Within a moment: a peer that seemed down rests first."""
        self.victim.call("counts")  # disarms
        until = time.monotonic() + 3.0
        for opcode in Opcode:
            while (error := self.one(opcode, None)) is not None:
                assert time.monotonic() < until, f"does not work again: {error!r}"
                time.sleep(0.05)


def _loop(make: Callable[[], Operation], kind: str, value: int, times: int, step: int, action: int = FAIL) -> list[str]:
    """All N of one kind and error; returns how each ended."""
    ends, nth = [], 1
    while True:
        operation = make()
        try:
            arm = (kind, action, value, nth, times)
            ended = operation.one(Opcode.WRITE, arm) or operation.one(Opcode.READ, None)
            fired = operation.victim.call("counts")[2]
            operation.works_again()
        except BaseException:
            print(f"{kind} number {nth} (and {times - 1} more): {errno.errorcode.get(value, value)}")
            raise
        finally:
            operation.victim.kill()
        if not fired:
            assert ended is None
            return ends
        ends.append(type(ended).__name__)
        nth += step


def _run(side: tuple[str, Side], zygote: Zygote, kind: str, initiates: bool, values: list[int], points: int) -> None:
    way, ours = side

    def make() -> Operation:
        return Operation(ours, zygote.fork(config(way)), initiates)

    calls = _calls(make)[kind]
    for value in values:
        ends = _loop(make, kind, value, 1, max(1, calls // points))
        print(kind, errno.errorcode[value], Counter(ends))
        assert ends or not calls


def _calls(make: Callable[[], Operation]) -> dict[str, int]:
    """How often an untouched operation makes each call on the victim's side."""
    operation = make()
    try:
        assert operation.one(Opcode.WRITE, ("send", FAIL, 0, 0)) is None
        assert operation.one(Opcode.READ, None) is None
        seen: dict[str, int] = operation.victim.call("counts")[0]
        return seen
    finally:
        operation.victim.kill()


def test_no_call_of_an_operation_is_left_out(side: tuple[str, Side], zygote: Zygote) -> None:
    way, ours = side
    for initiates in (True, False):
        calls = _calls(lambda: Operation(ours, zygote.fork(config(way)), initiates))  # noqa: B023
        made = {kind for kind, count in calls.items() if count}
        assert {"send", "recv", "setsockopt", "poll"} <= made
        assert made - {"getsockname"} <= ERRORS.keys()  # that one only reads what the kernel knows


@pytest.mark.parametrize("initiates", [True, False], ids=["initiator", "target"])
def test_a_sample_of_failing_calls(tcp: Side, zygote: Zygote, initiates: bool) -> None:
    for kind, values in ERRORS.items():
        _run(("tcp", tcp), zygote, kind, initiates, values[:1], 1)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("initiates", [True, False], ids=["initiator", "target"])
@pytest.mark.parametrize("kind", list(ERRORS))
def test_every_call_fails_once(side: tuple[str, Side], zygote: Zygote, kind: str, initiates: bool) -> None:
    """Over tcp each call that connects or moves bytes with one error; other errors, options, and the hundreds of calls of TLS at a few
    points. MOONCAKE_NTH_POINTS=1000000: each call with each error."""
    asked = int(os.environ.get("MOONCAKE_NTH_POINTS", "0"))
    first, *others = ERRORS[kind]
    _run(
        side,
        zygote,
        kind,
        initiates,
        [first],
        asked or (2 if side[0] != "tcp" else 6 if kind in ("ioctl", "setsockopt") else 1000),
    )
    if others and (asked or side[0] == "tcp"):
        _run(side, zygote, kind, initiates, others, asked or 2)


@pytest.mark.parametrize("initiates", [True, False], ids=["initiator", "target"])
@pytest.mark.parametrize(("kind", "action", "value", "times"), [
    ("send", SHORT, 999, 1 << 30), ("recv", SHORT, 999, 1 << 30), ("send", FAIL, errno.EINTR, 50), ("recv", FAIL, errno.EINTR, 50),
    ("poll", FAIL, errno.EINTR, 50), ("send", FAIL, errno.EAGAIN, 5),
])  # fmt: skip
def test_short_counts_and_interruptions_cost_nothing_but_time(
    side: tuple[str, Side], zygote: Zygote, initiates: bool, kind: str, action: int, value: int, times: int
) -> None:
    way, ours = side
    operation = Operation(ours, zygote.fork(config(way)), initiates)
    try:
        for opcode in Opcode:
            assert operation.one(opcode, (kind, action, value, 1, times)) is None
            assert operation.victim.call("counts")[2] > 1
    finally:
        operation.victim.kill()


@pytest.mark.slow
@pytest.mark.parametrize("initiates", [True, False], ids=["initiator", "target"])
@pytest.mark.parametrize(("kind", "value"), [("send", errno.ECONNRESET), ("recv", errno.ECONNRESET), ("thread", errno.EAGAIN),
                                             ("socket", errno.EMFILE), ("accept", errno.EMFILE)])  # fmt: skip
def test_what_fails_for_a_while_is_an_error_and_then_works(
    tcp: Side, zygote: Zygote, initiates: bool, kind: str, value: int
) -> None:
    """Longer than retries help."""
    for nth in (1, 5):
        operation = Operation(tcp, zygote.fork(config("tcp")), initiates)
        try:
            ended = operation.one(Opcode.WRITE, (kind, FAIL, value, nth, 1 << 30))
            fired = operation.victim.call("counts")[2]
            assert ended is not None or not fired or kind in ("thread", "accept", "socket")
            operation.works_again()
        finally:
            operation.victim.kill()


class _Fragile(_Child):
    """Its engine's constructor meets the failure. When it raises, nothing may be left, and the next one works."""

    def __init__(self, wanted: EngineConfig, *, arm: tuple[Any, ...]) -> None:
        shim = Shim()
        before = len(os.listdir("/proc/self/fd")), threading.active_count()
        shim.arm(*arm)
        self.failed: BaseException | None = None
        try:
            super().__init__(wanted)
        except (OSError, MooncakeError) as error:
            self.failed = error.with_traceback(None)
        self.fired = shim.fired()
        shim.disarm()
        if self.failed is not None:
            gc.collect()
            after = len(os.listdir("/proc/self/fd")), threading.active_count()
            self.left = [now - then for now, then in zip(after, before, strict=True)]
            super().__init__(wanted)

    def how(self) -> tuple[int, BaseException | None, list[int]]:
        return self.fired, self.failed, self.left if self.failed else []


@pytest.mark.parametrize("kind", ["socket", "bind", "listen", "setsockopt", "getsockname", "thread"])
def test_every_call_of_a_constructor_fails_once(tcp: Side, zygote: Zygote, kind: str) -> None:
    value = {"thread": errno.EAGAIN, "bind": errno.EADDRINUSE}.get(kind, errno.ENOBUFS)
    for nth in range(1, 50):
        victim = zygote.fork(config("tcp"), functools.partial(_Fragile, arm=(kind, FAIL, value, nth)))
        try:
            fired, failed, left = victim.call("how")
            print(kind, nth, fired, repr(failed), left)
            assert left in ([], [0, 0])
            assert Operation(tcp, victim, True).one(Opcode.WRITE, None) is None
            if not fired:
                assert nth > 1
                return
        finally:
            victim.kill()
    raise AssertionError("it never passes untouched")


@pytest.mark.parametrize("way", ["shm-mapped", "shm-cma"])
@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("vm_read", errno.ENOMEM),
        ("vm_write", errno.EFAULT),
        ("vm_write", errno.EINTR),
        ("mmap", errno.ENOMEM),
        ("recv", errno.ECONNRESET),
        ("send", errno.ECONNRESET),
        ("thread", errno.EAGAIN),
    ],
)
def test_calls_of_shared_memory_fail_once(zygote: Zygote, way: str, kind: str, value: int) -> None:
    """The victim initiates: the target of shared memory does nothing. Without tcp there is no other way to go."""
    ours = Side(way)
    try:
        ends = _loop(lambda: Operation(ours, zygote.fork(config(way)), True), kind, value, 1, 1)
        print(Counter(ends))
    finally:
        ours.engine.close()


@pytest.mark.parametrize(("kind", "opcode"), [("vm_read", Opcode.READ), ("vm_write", Opcode.WRITE)])
def test_a_kernel_that_forbids_cross_memory_attach_costs_only_speed(zygote: Zygote, kind: str, opcode: Opcode) -> None:
    """Also when it does so in the middle: the rest goes by tcp."""
    both = config("shm-cma", transports=("shm", "tcp"))
    with TransferEngine(both) as engine:
        ours = Side("shm-cma", engine)
        for nth in (1, 2):
            operation = Operation(ours, zygote.fork(both), True)
            try:
                assert operation.one(opcode, (kind, FAIL, errno.EPERM, nth, 1 << 30)) is None
                assert operation.victim.call("counts")[2] > 0
            finally:
                operation.victim.kill()
