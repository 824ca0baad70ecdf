"""What waits for one peer, and the paths to it.

Knows: the order of jobs (priority, then age). Does not know: endpoints, verbs. Guarded by the transport's lock.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

from transfer_engine.lanes import Job
from transfer_engine.segment import Session
from transfer_engine.transports.rdma.path import PathTable, Tiers


class Waiting(NamedTuple):
    """`rank` orders: more urgent first, then older."""

    rank: tuple[int, int]
    job: Job
    tiers: Tiers


class Peer:
    """`forgotten`: the application closed its last handle; nothing new is to be kept for it."""

    def __init__(self, session: Session, paths: PathTable) -> None:
        self.session = session
        self.paths = paths
        self.forgotten = False
        self._queue: list[tuple[tuple[int, int], Waiting]] = []
        self.last_error = "none was tried"

    def push(self, waiting: Waiting) -> None:
        heapq.heappush(self._queue, (waiting.rank, waiting))

    def head(self) -> Waiting | None:
        return self._queue[0][1] if self._queue else None

    @property
    def queued(self) -> int:
        """Slices that are on no NIC yet."""
        return sum(waiting.job.left for _, waiting in self._queue)

    def drop(self, waiting: Waiting) -> None:
        """Take the head out."""
        if self._queue and self._queue[0][1] is waiting:
            heapq.heappop(self._queue)

    def drain(self) -> list[Job]:
        jobs = [waiting.job for _, waiting in self._queue]
        self._queue.clear()
        return jobs

    def prune(self) -> None:
        """Forget jobs whose submission is over."""
        if any(waiting.job.submission.doomed for _, waiting in self._queue):
            self._queue = [entry for entry in self._queue if not entry[1].job.submission.doomed]
            heapq.heapify(self._queue)
