"""All threads of one direction of `mooncake bench transfer`, started together, and what they measured.

Knows: warming up, the common start, when to stop, the first error. Does not know: what an operation is (bench_load.py).
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import time
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from mooncake.common.errors import TransferTimeout
from transfer_engine.bench_load import Latencies, Load, Share
from transfer_engine.engine import TransferEngine
from transfer_engine.metrics import values
from transfer_engine.types import Opcode, SegmentHandle, TransferVector


@dataclass
class Measured:
    """One direction's run. `seconds`: from the first to the last operation; of a checked run without the checks."""

    opcode: Opcode
    operations: int
    seconds: float
    latencies_s: npt.NDArray[np.float64]
    moved: dict[tuple[str, str], int] = field(default_factory=dict)
    """(transport, NIC) to bytes."""


class Phase:
    """All threads of one direction."""

    def __init__(self, opcode: Opcode, load: Load, engine: TransferEngine, target: SegmentHandle, there: int) -> None:
        self._opcode = opcode
        self._load = load
        self._engine = engine
        self._threads = [Share(index, load, engine, target, there) for index in range(load.threads)]
        self._stop = threading.Event()
        self._start = threading.Barrier(load.threads + 1, action=self._begin)
        self._began = 0.0
        self._before: dict[tuple[str, str], int] = {}
        self._errors: list[BaseException] = []
        self._patience_s = 4 * load.deadline_s + 10.0  # a first operation with its proof is three transfers

    def run(self) -> Measured:
        """Warm up, measure, wait for all. Raises what the first thread to fail met."""
        threads = [threading.Thread(target=self._main, args=(one,), daemon=True) for one in self._threads]
        for thread in threads:
            thread.start()
        try:
            with contextlib.suppress(threading.BrokenBarrierError):
                self._start.wait(self._patience_s)
            for thread in threads:
                thread.join()
            seconds = time.perf_counter() - self._began
        finally:
            self._stop.set()
        if self._errors:
            raise self._errors[0]
        return self._measured(seconds)

    def _begin(self) -> None:
        """Everybody is warm, and nobody has started."""
        self._before = _moved(self._engine, self._opcode)
        self._began = time.perf_counter()

    def _measured(self, seconds: float) -> Measured:
        of = [thread.latencies for thread in self._threads]
        if self._load.check:  # the threads' mean time in operations
            seconds = math.fsum(one.sum_s for one in of) / len(of)
        moved = {at: n - self._before.get(at, 0) for at, n in _moved(self._engine, self._opcode).items()}
        for thread in self._threads:
            thread.close()
        latencies = np.concatenate([np.array(one.kept) for one in of])
        return Measured(
            self._opcode, sum(one.count for one in of), seconds, latencies, {k: n for k, n in moved.items() if n}
        )

    def _main(self, thread: Share) -> None:
        try:
            vector = thread.vector(self._opcode)
            thread.operate(self._opcode, vector, 0)
            thread.latencies = Latencies(self._load.seed + thread.index)
            self._start.wait(self._patience_s)
            self._repeat(thread, vector)
        except threading.BrokenBarrierError:
            self._errors.append(TransferTimeout("another thread failed, or was not ready in time"))
        except BaseException as error:  # told by the main thread
            self._errors.append(error)
            self._stop.set()
            self._start.abort()

    def _repeat(self, thread: Share, vector: TransferVector) -> None:
        load = self._load
        share = load.ops // load.threads + (thread.index < load.ops % load.threads)
        until = time.perf_counter() + load.seconds
        for turn in range(1, share + 1) if load.ops else itertools.count(1):
            if self._stop.is_set() or (not load.ops and time.perf_counter() >= until):
                return
            thread.operate(self._opcode, vector, turn)


def _moved(engine: TransferEngine, opcode: Opcode) -> dict[tuple[str, str], int]:
    """(transport, NIC) to bytes so far, of one direction."""
    by_path = values([engine.stats()])["bytes_total"]
    return {(way, nic): int(n) for (way, nic, op), n in by_path.items() if op == opcode.name.lower()}
