"""GPU memory when something is wrong: too few buffers, a failing driver, deadlines, cancels and fences. On the fake driver."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from mooncake.common.errors import DeviceError, MooncakeError, PeerUnavailable, TransferCancelled, TransferError
from tests.transfer_engine.gpu import EAGER, MOODY, Gpu, fake_driver
from tests.transfer_engine.test_device_memory import LENGTH, SLICE, config
from transfer_engine import Opcode, TransferEngine, TransferRequest, TransferState

OUT_OF_MEMORY, ILLEGAL_ADDRESS = 2, 700


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    made = Gpu(fake_driver())
    made.temper(EAGER)
    before = made.pinned_bytes(), made.streams()
    yield made
    made.fail("nothing", 0)
    assert (made.pinned_bytes(), made.streams()) == before
    made.free_all()


class Side:
    """An engine with one region on a GPU, open towards another such engine."""

    def __init__(self, gpu: Gpu, *transports: str, **more: object) -> None:
        self.gpu = gpu
        self.engine = TransferEngine(config(fake_driver(), *transports, **more))
        self.at = gpu.allocate(4 * LENGTH)
        self.engine.register_local_memory(self.at, 4 * LENGTH, location="cuda:0")

    def open(self, other: Side) -> None:
        self.other = other
        self.segment = self.engine.open_segment(other.engine.address)

    def request(self, opcode: Opcode, offset: int, length: int) -> TransferRequest:
        return TransferRequest(opcode, self.at + offset, self.segment, self.other.at + offset, length)


@pytest.fixture(params=["local", "tcp"])
def sides(gpu: Gpu, request: pytest.FixtureRequest) -> Iterator[tuple[Side, Side]]:
    yield from _sides(gpu, request.param)


@pytest.fixture
def tcp(gpu: Gpu) -> Iterator[tuple[Side, Side]]:
    yield from _sides(gpu, "tcp")


@pytest.fixture
def narrow(gpu: Gpu) -> Iterator[tuple[Side, Side]]:
    """Over sockets that hold less than a slice: who sends waits until the other side has a buffer."""
    yield from _sides(gpu, "tcp", socket_buffer_bytes=16 << 10)


def _sides(gpu: Gpu, way: str, **more: object) -> Iterator[tuple[Side, Side]]:
    one, other = (Side(gpu, way, staging_buffers=1, **more) for _ in range(2))
    one.open(other)
    other.open(one)
    yield one, other
    one.engine.close()
    other.engine.close()


def _random(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, length, dtype=np.uint8)


def test_one_buffer_serves_both_directions_at_once_without_deadlock(narrow: tuple[Side, Side], gpu: Gpu) -> None:
    """Eight threads READ and WRITE between two engines, each with one buffer a direction."""
    gpu.temper(MOODY)
    share = 4 * LENGTH // 8
    problems: list[BaseException] = []

    def work(index: int) -> None:
        mine, opcode = narrow[index % 2], Opcode(index // 2 % 2)
        source = mine if opcode is Opcode.WRITE else mine.other
        target = mine.other if opcode is Opcode.WRITE else mine
        try:
            for turn in range(3):
                content = _random(100 * turn + index, share)
                gpu.fill(source.at + index * share, content)
                gpu.fill(target.at + index * share, bytes(share))
                mine.engine.transfer_sync([mine.request(opcode, index * share, share)], 20.0)
                assert np.array_equal(gpu.read(target.at + index * share, share), content)
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not problems and not any(thread.is_alive() for thread in threads)
    assert all(side.engine.stats()["staging_buffers"] <= 2 for side in narrow)


FUNCTIONS = [
    ("cuMemHostAlloc", OUT_OF_MEMORY),
    ("cuStreamCreate", OUT_OF_MEMORY),
    ("cuCtxPushCurrent_v2", 201),
    ("cuMemcpyAsync", 1),
    ("cuStreamSynchronize", ILLEGAL_ADDRESS),
    ("copy", ILLEGAL_ADDRESS),
]


@pytest.mark.parametrize("opcode", list(Opcode))
@pytest.mark.parametrize("call", FUNCTIONS, ids=lambda call: call[0])
def test_every_failing_driver_call_is_a_typed_error_and_the_next_transfer_works(
    sides: tuple[Side, Side], gpu: Gpu, opcode: Opcode, call: tuple[str, int]
) -> None:
    one, other = sides
    source, target = (one, other) if opcode is Opcode.WRITE else (other, one)
    gpu.fill(source.at, content := _random(opcode, 3 * SLICE))
    met, outcomes = True, set()
    for nth in range(1, 60):
        gpu.fill(target.at, bytes(3 * SLICE))
        gpu.fail(call[0], nth, call[1])
        try:
            one.engine.transfer_sync([one.request(opcode, 0, 3 * SLICE)], 10.0)
        except MooncakeError as error:
            outcomes.add(type(error))
            worked = False
        else:
            worked = True  # not met, or met and repaired
        met = gpu.failures() > 0
        gpu.fail("nothing", 0)
        assert not worked or np.array_equal(gpu.read(target.at, 3 * SLICE), content)
        gpu.fill(target.at, bytes(3 * SLICE))
        one.engine.transfer_sync([one.request(opcode, 0, 3 * SLICE)], 10.0)
        assert np.array_equal(gpu.read(target.at, 3 * SLICE), content)
        if not met:
            break
        for side in sides:  # so that pinned memory and streams are made again
            side.engine.devices._out.trim(), side.engine.devices._in.trim(), side.engine.devices._direct.trim()
    assert not met
    # A target's failure is told as a refusal, or by a cut connection when it was in the middle of an answer.
    assert outcomes <= {DeviceError, TransferError, PeerUnavailable}
    assert DeviceError in outcomes or (call[0] == "cuMemHostAlloc" and one.engine.config.transports == ("local",))


@pytest.mark.parametrize("opcode", list(Opcode))
def test_a_driver_error_does_not_hurt_others_on_the_same_connection(
    tcp: tuple[Side, Side], gpu: Gpu, opcode: Opcode
) -> None:
    one, other = tcp
    host = np.zeros(LENGTH, np.uint8)
    far = np.zeros(LENGTH, np.uint8)
    here, there = one.engine.register_buffer(host), other.engine.register_buffer(far)
    (host if opcode is Opcode.WRITE else far)[:] = _random(1, LENGTH)
    plain = [TransferRequest(opcode, here + o, one.segment, there + o, SLICE) for o in range(0, LENGTH, SLICE)]
    failed = 0
    for nth in range(1, 12):
        gpu.fail("cuStreamSynchronize", nth)
        batches = [one.engine.allocate_batch_id(16) for _ in range(3)]
        one.engine.submit_transfer(batches[0], plain, deadline_s=10.0, max_retries=20)
        one.engine.submit_transfer(batches[1], [one.request(opcode, 0, 4 * SLICE)], deadline_s=10.0, max_retries=20)
        one.engine.submit_transfer(batches[2], plain, deadline_s=10.0, max_retries=20)
        states = [one.engine.wait(batch, 15.0) for batch in batches]
        assert states[0].ok and states[2].ok, states
        failed += not states[1].ok
        assert states[1].ok or isinstance(states[1].error, TransferError)
        for batch in batches:
            one.engine.free_batch_id(batch)
    gpu.fail("nothing", 0)
    assert failed and np.array_equal(host, far)


class Hog:
    """Holds all buffers of a pool."""

    def __init__(self, side: Side, which: str) -> None:
        self._pool = getattr(side.engine.devices, which)
        self._buffer = self._pool.take(side.gpu.driver, 0, lambda: None)

    def end(self) -> None:
        self._pool.give(self._buffer)


@pytest.mark.parametrize("ending", [TransferState.TIMED_OUT, TransferState.CANCELLED])
@pytest.mark.parametrize("opcode", list(Opcode))
def test_who_waits_for_a_buffer_still_ends_in_time(
    sides: tuple[Side, Side], opcode: Opcode, ending: TransferState
) -> None:
    one, _ = sides
    local = one.engine.config.transports == ("local",)
    hog = Hog(one, "_direct" if local else "_out" if opcode is Opcode.WRITE else "_in")
    batch = one.engine.allocate_batch_id(1)
    began = time.monotonic()
    request = [one.request(opcode, 0, 2 * SLICE)]
    submit = threading.Thread(  # a small local copy is made by the submitting thread
        target=one.engine.submit_transfer,
        args=(batch, request),
        kwargs={"deadline_s": 0.5 if ending is TransferState.TIMED_OUT else 20.0},
    )
    submit.start()
    if ending is TransferState.CANCELLED:
        until = time.monotonic() + 5.0
        while not one.engine.stats()["staging_waits"] + one.engine.devices._direct.waits and time.monotonic() < until:
            time.sleep(0.01)
        one.engine.cancel(batch)
    assert one.engine.wait(batch, 10.0).state is ending
    assert time.monotonic() - began < 8.0
    submit.join(5)
    hog.end()
    one.engine.transfer_sync(request, 5.0)


def test_a_fence_holds_against_bytes_that_wait_for_a_buffer(tcp: tuple[Side, Side], gpu: Gpu) -> None:
    one, other = tcp
    gpu.fill(one.at, b"\x01" * SLICE)
    hog = Hog(other, "_in")
    batch = one.engine.allocate_batch_id(1)
    one.engine.submit_transfer(batch, [one.request(Opcode.WRITE, 0, SLICE)], deadline_s=20.0, group=5)
    until = time.monotonic() + 5.0
    while not other.engine.stats()["staging_waits"] and time.monotonic() < until:
        time.sleep(0.01)
    assert other.engine.cancel_incoming(5, one.engine.address, timeout_s=5.0)
    hog.end()
    assert isinstance(one.engine.wait(batch, 5.0).error, TransferCancelled)
    assert not gpu.read(other.at, SLICE).any()
    one.engine.transfer_sync([one.request(Opcode.WRITE, 0, SLICE)], 5.0, group=6)
    assert gpu.read(other.at, SLICE).all()


@pytest.mark.parametrize("opcode", list(Opcode))
def test_an_interrupt_while_waiting_for_a_buffer_leaves_nothing_behind(
    sides: tuple[Side, Side], opcode: Opcode
) -> None:
    one, _ = sides
    local = one.engine.config.transports == ("local",)
    one.engine.transfer_sync([one.request(opcode, 0, SLICE)], 5.0)
    hog = Hog(one, "_direct" if local else "_out" if opcode is Opcode.WRITE else "_in")
    timer = threading.Timer(0.3, signal.raise_signal, [signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        one.engine.transfer_sync([one.request(opcode, 0, SLICE)], 20.0)
    timer.join()
    until = time.monotonic() + 3.0
    while one.engine.stats()["live_transfers"] and time.monotonic() < until:
        time.sleep(0.01)
    assert one.engine.stats()["live_transfers"] == 0
    hog.end()
    one.engine.transfer_sync([one.request(opcode, 0, SLICE)], 5.0)


@pytest.mark.parametrize("which", ["_out", "_in"])
def test_closing_while_somebody_waits_for_a_buffer(tcp: tuple[Side, Side], which: str) -> None:
    one, _ = tcp
    hog = Hog(one, which)
    batch = one.engine.allocate_batch_id(1)
    opcode = Opcode.WRITE if which == "_out" else Opcode.READ
    one.engine.submit_transfer(batch, [one.request(opcode, 0, SLICE)], deadline_s=20.0)
    began = time.monotonic()
    one.engine.close()
    assert time.monotonic() - began < 3.0
    assert one.engine.get_batch_status(batch).state.terminal
    hog.end()
    assert one.engine.stats()["staging_buffers"] == 0
