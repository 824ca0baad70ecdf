"""Submissions in progress: admitting them, and what happens when they move on.

Knows: which submissions live, their deadlines and groups, and that their local memory is held until they settle. Does not
know: the application's handles, transports.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np

from mooncake.common.errors import TransferCancelled, TransferError, TransferTimeout
from transfer_engine.batch import Batch, Submission
from transfer_engine.config import MAX_NOTIFY_BYTES, EngineConfig
from transfer_engine.connections import Connections
from transfer_engine.fence import FenceTable
from transfer_engine.lanes import Job
from transfer_engine.memory import Hold, RegionTable
from transfer_engine.requests import Part
from transfer_engine.router import Router
from transfer_engine.segment import Session
from transfer_engine.slices import U64, Columns, slice_size, split
from transfer_engine.sweep import Sweeper
from transfer_engine.transports.base import Stats
from transfer_engine.types import SegmentHandle, TransferState


class Terms:
    """What a submission is asked to be: everything but its bytes. `deadline` is monotonic."""

    def __init__(
        self,
        deadline_s: float,
        group: int,
        priority: int,
        notify: bytes | None,
        inline: bool,
        max_retries: int,
        nic: str,
    ) -> None:
        self.deadline = time.monotonic() + deadline_s
        self.group = group
        self.priority = priority
        self.notify = notify
        self.inline = inline
        self.max_retries = max_retries
        self.nic = nic
        self._seconds = deadline_s

    def check(self, max_deadline_s: float) -> None:
        """Raises ValueError."""
        if not 0 < self._seconds <= max_deadline_s:
            raise ValueError(f"deadline_s must be above 0 and at most {max_deadline_s}")
        if not 0 <= self.group < 1 << 64:
            raise ValueError("group must be a 64 bit number")
        if self.max_retries < 0:
            raise ValueError("max_retries must not be negative")
        check_notify(self.notify)


def check_notify(payload: bytes | None) -> None:
    """Raises ValueError when it is too long."""
    if payload is not None and len(payload) > MAX_NOTIFY_BYTES:
        raise ValueError(f"a notification holds at most {MAX_NOTIFY_BYTES} bytes, not {len(payload)}")


class Work:
    def __init__(
        self,
        config: EngineConfig,
        memory: RegionTable,
        outgoing: FenceTable,
        connections: Connections,
        counters: Stats,
        label: str,
    ) -> None:
        self._config = config
        self._memory = memory
        self._outgoing = outgoing
        self._connections = connections
        self._counters = counters
        self._lock = threading.Lock()
        self._live: set[Submission] = set()
        self._closed = False
        self.router: Router
        self._sweeper = Sweeper(f"te-sweep-{label}", self._sweep)

    @property
    def live(self) -> int:
        return len(self._live)

    def submit(
        self,
        batch: Batch,
        parts: Sequence[Part],
        lengths: U64,
        sessions: dict[SegmentHandle, Session],
        terms: Terms,
    ) -> None:
        """Admit and hand out. Raises InvalidHandle, NotRegistered, TransferCancelled, TransferError (closed)."""
        filled = [
            (target, opcode, columns) for target, opcode, columns in map(_without_empty, parts) if len(columns.length)
        ]
        hold = self._hold([columns for _, _, columns in filled]) if filled else None
        try:
            submission = self._admit(batch, lengths, frozenset(s.instance_id for s in sessions.values()), terms, hold)
        except BaseException:
            if hold is not None:
                self._memory.release(hold)
            raise
        self._sweeper.expect(submission.deadline)
        try:
            for target, opcode, columns in filled:
                self.router.route(Job(submission, sessions[target], opcode, self._split(columns)))
        except BaseException as error:  # KeyboardInterrupt, while this thread moved the bytes itself
            submission.abort(TransferState.CANCELLED, TransferCancelled(f"interrupted by {error!r}"), 0.0)
            raise
        finally:
            submission.open()

    def _hold(self, columns: list[Columns]) -> Hold:
        if len(columns) == 1:
            return self._memory.hold(columns[0].local, columns[0].length)
        return self._memory.hold(
            np.concatenate([c.local for c in columns]), np.concatenate([c.length for c in columns])
        )

    def _admit(self, batch: Batch, lengths: U64, peers: frozenset[str], terms: Terms, hold: Hold | None) -> Submission:
        with self._lock:
            if self._closed:
                raise TransferError("the transfer engine is closed")
            if terms.group and any((peer, terms.group) in self._outgoing for peer in peers):
                raise TransferCancelled(f"group {terms.group:#x} was cancelled by the target")
            submission = Submission(
                batch,
                lengths,
                deadline=terms.deadline,
                group=terms.group,
                priority=terms.priority,
                notify=terms.notify,
                peers=peers,
                effects=self,
                max_retries=terms.max_retries,
                nic=terms.nic,
            )
            submission.hold = hold
            submission.inline_thread = threading.get_ident() if terms.inline else 0
            batch.admit(submission)
            self._live.add(submission)
            return submission

    def _split(self, columns: Columns) -> Columns:
        config = self._config
        lanes = max(config.streams_per_peer, config.copy_threads)
        size = slice_size(int(columns.length.sum()), lanes, config.slice_min_bytes, config.slice_bytes)
        return split(columns, size)

    def submissions_of(self, instance_id: str, group: int) -> list[Submission]:
        """Those of a group that are aimed at a peer."""
        with self._lock:
            return [s for s in self._live if s.group == group and instance_id in s.peers]

    def bytes_placed(self, submission: Submission) -> None:
        sessions = [s for s in map(self._connections.get, submission.peers) if s is not None]
        self.router.notify(submission, sessions)

    def settled(self, submission: Submission) -> None:
        if isinstance(submission.hold, Hold):
            self._memory.release(submission.hold)
        submission.hold = None
        with self._lock:
            self._live.discard(submission)
        self._counters.add(**{f"transfers_{submission.state.value}": 1, "transfer_requests": len(submission.length)})

    def _sweep(self, now: float) -> float | None:
        with self._lock:
            live = list(self._live)
        for submission in live:
            if submission.deadline <= now and not submission.doomed:
                submission.abort(TransferState.TIMED_OUT, TransferTimeout("the transfer's deadline passed"), now)
        for link in self._connections.links():
            link.expire(now)
        return min((s.deadline for s in live if not s.doomed), default=None)

    def cancel_all(self) -> None:
        """The engine closes: nothing is admitted any more, and what runs ends."""
        with self._lock:
            self._closed = True
            live = list(self._live)
        for submission in live:
            submission.abort_closed()

    def close(self) -> None:
        self._sweeper.close(0.2)


def _without_empty(part: Part) -> Part:
    target, opcode, columns = part
    return part if columns.length.all() else (target, opcode, columns.take(columns.length > 0))
