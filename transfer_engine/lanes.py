"""Queues of jobs and the threads that work on them.

Knows: priorities, fairness by slice, starting and ending worker threads. Does not know: what a slice is moved by (the body
a lane is given). The head job is worked on by all workers of a lane; a more urgent job overtakes between two slices, so
background saves do not hold up streams that a decoding instance waits for.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from mooncake.common.errors import Overloaded
from transfer_engine import threads
from transfer_engine.batch import Submission
from transfer_engine.slices import Columns, cut
from transfer_engine.types import Opcode, TransferState


@dataclass(slots=True, eq=False)
class Slice:
    """Pieces [low, high) of a job: the unit of moving, retrying and cancelling."""

    job: Job
    columns: Columns
    n_bytes: int
    attempts: int = 0


class Job:
    """The part of a submission that goes to one peer in one direction by one transport."""

    def __init__(self, submission: Submission, session: object, opcode: Opcode, columns: Columns) -> None:
        self.submission = submission
        self.session = session
        self.opcode = opcode
        self.columns = columns
        self.n_bytes = int(columns.length.sum())
        self._bounds: list[int] = [0]
        self._next = 0
        self._again: list[Slice] = []
        self._lock = threading.Lock()

    def cut(self, slice_bytes: int, max_pieces: int) -> int:
        """Cut into slices; returns their number."""
        self._bounds, self._next = cut(self.columns.length, slice_bytes, max_pieces), 0
        return len(self._bounds) - 1

    def take(self) -> Slice | None:
        """The next slice, in flight from now on; None when there is none (left)."""
        with self._lock:
            if self._again:
                piece = self._again.pop()
            elif self._next + 1 < len(self._bounds):
                low, high = self._bounds[self._next], self._bounds[self._next + 1]
                self._next += 1
                columns = self.columns.take(slice(low, high))
                piece = Slice(self, columns, int(columns.length.sum()))
            else:
                return None
        return piece if self.submission.start_slice() else None

    @property
    def left(self) -> int:
        """Slices that nobody has taken."""
        return max(0, len(self._bounds) - 1 - self._next) + len(self._again)

    def give_back(self, piece: Slice) -> None:
        with self._lock:
            self._again.append(piece)

    def part(self, columns: Columns) -> Job:
        return Job(self.submission, self.session, self.opcode, columns)


class Lane:
    """A priority queue with up to `max_workers` daemon threads running `body(lane)`; they end when it returns."""

    def __init__(self, name: str, max_workers: int, body: Callable[[Lane], None]) -> None:
        self.name = name
        self._max_workers = max_workers
        self._body = body
        self._lock = threading.Lock()  # this one is entered, not the condition: threads.py
        self._ready = threading.Condition(self._lock)
        self._heap: list[tuple[int, int, Job]] = []
        self._order = itertools.count()
        self._threads: set[threading.Thread] = set()
        self._waiting = 0
        self.closed = False

    def push(self, job: Job, slices: int) -> bool:
        """Queue a job that was cut into `slices`. False when the lane is closed."""
        problem = None
        with self._lock:
            if self.closed:
                return False
            heapq.heappush(self._heap, (-job.submission.priority, next(self._order), job))
            wanted = min(slices, self._max_workers)
            woken = min(wanted, self._waiting)
            self._waiting -= woken
            self._ready.notify(woken)
            try:
                for _ in range(min(wanted - woken, self._max_workers - len(self._threads))):
                    self._start()
            except Overloaded as error:
                problem = None if self._threads else error
        if problem is not None:
            job.submission.abort(TransferState.FAILED, problem, 0.0)
        return True

    @property
    def idle(self) -> bool:
        """Nothing is queued (work may be in progress)."""
        return not self._heap and not self.closed

    @property
    def queued(self) -> int:
        """Slices that no worker has taken."""
        with self._lock:
            return sum(job.left for _, _, job in self._heap)

    def _start(self) -> None:
        self._threads.add(threads.start(f"{self.name}-{len(self._threads)}", self._main))

    def _main(self) -> None:
        try:
            self._body(self)
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())
                if self._heap and not self.closed and not self._threads:
                    with contextlib.suppress(Overloaded):  # the next push tries again; deadlines hold meanwhile
                        self._start()

    def take(self, timeout_s: float) -> Slice | None:
        """The next slice of the most urgent job; None after `timeout_s` or when closed."""
        deadline = 0.0
        while True:
            job = self._head()
            if job is not None:
                piece = job.take()
                if piece is not None:
                    return piece
                self._drop(job)
                continue
            if timeout_s <= 0:
                return None
            now = time.monotonic()
            deadline = deadline or now + timeout_s
            with self._lock:
                if self.closed or now >= deadline:
                    return None
                if not self._heap:
                    self._waiting += 1
                    if not self._ready.wait(deadline - now):
                        self._waiting = max(0, self._waiting - 1)

    def _head(self) -> Job | None:
        with self._lock:
            return self._heap[0][2] if self._heap else None

    def _drop(self, job: Job) -> None:
        with self._lock:
            if self._heap and self._heap[0][2] is job:
                heapq.heappop(self._heap)

    def drain(self) -> list[Job]:
        """Take all queued jobs out."""
        with self._lock:
            jobs = [job for _, _, job in self._heap]
            self._heap.clear()
        return jobs

    def close(self) -> None:
        with self._lock:
            self.closed = True
            self._waiting = 0
            self._ready.notify_all()

    def join(self, deadline: float) -> bool:
        """False when a worker still runs at the deadline."""
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)
