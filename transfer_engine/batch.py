"""Batches and submissions: the states a transfer goes through.

Knows: which slices are open, which requests are done, when a batch is over and what it ended as. Does not know: clocks it
was not given, transports, sockets. Everything here is a state machine under one lock per batch; effects (sending the
notification, giving regions back) are calls to `Submission.effects`, made without the lock. Paper 3.2, Listing 1.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from mooncake.common.errors import InvalidHandle, MooncakeError, TransferCancelled
from transfer_engine.slices import U64
from transfer_engine.types import TransferState, TransferStatus


class Effects(Protocol):
    """What the engine does when a submission moves on."""

    def bytes_placed(self, submission: Submission) -> None:
        """All bytes are acknowledged and a notification is due. Must end in `notified`."""

    def settled(self, submission: Submission) -> None:
        """The submission is over; nothing of it runs any more."""


class Submission:
    """One `submit_transfer`: requests that share a deadline, a group and a priority. The unit of cancelling."""

    def __init__(
        self,
        batch: Batch,
        length: U64,
        *,
        deadline: float,
        group: int,
        priority: int,
        notify: bytes | None,
        peers: frozenset[str],
        effects: Effects,
        max_retries: int = 0,
        nic: str = "",
    ) -> None:
        self.batch = batch
        self.length = length
        self.deadline = deadline
        self.group = group
        self.priority = priority
        self.notify = notify
        self.peers = peers
        self.effects = effects
        self.max_retries = max_retries
        self.nic = nic
        self.hold: object = None
        self.inline_thread = 0
        """Thread that waits for the end right after submitting, and may do the moving itself; 0: none."""
        self.done: npt.NDArray[np.uint64] = np.zeros(len(length), np.uint64)
        self.bytes_left = int(length.sum())
        self.bytes_total = self.bytes_left
        self.in_flight = 0
        self.state = TransferState.WAITING
        self.error: MooncakeError | None = None
        self.quiesced = True
        self.stop_at = math.inf
        """Monotonic time after which running slices must give up; set by `abort`."""
        self._doom: TransferState | None = None
        self._notifying = False
        self._open = False
        self._watchers: list[Callable[[], None]] = []

    def when_settled(self, watcher: Callable[[], None]) -> None:
        """Call `watcher` once when nothing of the submission runs any more; now if that is so already."""
        with self.batch.lock:
            if not self.state.terminal:
                self._watchers.append(watcher)
                return
        watcher()

    @property
    def terminal(self) -> bool:
        return self.state.terminal

    @property
    def doomed(self) -> bool:
        return self._doom is not None

    def open(self) -> None:
        """All jobs are handed out: from now on the submission can end."""
        with self.batch.lock:
            self._open = True
            effect = self._step()
        self._run(effect)

    def start_slice(self) -> bool:
        """A worker takes a slice. False: the submission is doomed, leave it."""
        with self.batch.lock:
            if self._doom is not None or self.state.terminal:
                return False
            self.in_flight += 1
            self.state = TransferState.RUNNING
            return True

    def finish_slice(self, index: npt.NDArray[np.intp], length: U64, n_bytes: int) -> None:
        """A slice's bytes are placed and acknowledged."""
        with self.batch.lock:
            self.in_flight -= 1
            self.bytes_left -= n_bytes
            if len(index) == 1:
                self.done[index[0]] += length[0]
            else:
                np.add.at(self.done, index, length)
            effect = self._step()
        self._run(effect)

    def return_slice(self, *, quiesced: bool = True) -> None:
        """A slice stopped without effect that matters; it will be tried again (or the submission is doomed)."""
        with self.batch.lock:
            self.in_flight -= 1
            self.quiesced &= quiesced
            effect = self._step()
        self._run(effect)

    def fail_slice(self, error: MooncakeError, *, quiesced: bool = True) -> None:
        """A slice failed for good, and with it the submission. `quiesced` as in TransferStatus."""
        with self.batch.lock:
            self.in_flight -= 1
            self.quiesced &= quiesced
            refused = isinstance(error, TransferCancelled)
            self._condemn(TransferState.CANCELLED if refused else TransferState.FAILED, error, 0.0)
            effect = self._step()
        self._run(effect)

    def abort_closed(self) -> None:
        """The engine closes."""
        self.abort(TransferState.CANCELLED, TransferCancelled("the transfer engine is closed"), 0.0)

    def abort(self, state: TransferState, error: MooncakeError, stop_at: float) -> bool:
        """End it as `state` as soon as no slice runs; running slices have until `stop_at`. False: it is already over."""
        with self.batch.lock:
            if self.state.terminal:
                return False
            self._condemn(state, error, stop_at)
            effect = self._step()
        self._run(effect)
        return True

    def notified(self, error: MooncakeError | None) -> None:
        """The notification was acknowledged, or failed."""
        with self.batch.lock:
            self.notify = None
            if error is not None:
                self._condemn(TransferState.FAILED, error, 0.0)
            effect = self._step()
        self._run(effect)

    def _condemn(self, state: TransferState, error: MooncakeError, stop_at: float) -> None:
        if self._doom is None:
            self._doom, self.error = state, error
        self.stop_at = min(self.stop_at, stop_at)

    def _step(self) -> Callable[[Submission], None] | None:
        if self.state.terminal or self.in_flight or not self._open:
            return None
        if self._doom is not None:
            return self._settle(self._doom)
        if self.bytes_left:
            return None
        if self.notify is None:
            return self._settle(TransferState.COMPLETED)
        if self._notifying:
            return None
        self._notifying = True
        return self.effects.bytes_placed

    def _settle(self, state: TransferState) -> Callable[[Submission], None]:
        self.state = state
        return self.effects.settled

    def _run(self, effect: Callable[[Submission], None] | None) -> None:
        if effect is None:
            return
        effect(self)
        if effect == self.effects.settled:
            with self.batch.lock:
                watchers, self._watchers = self._watchers, []
            for watcher in watchers:
                watcher()
            self.batch.wake()

    def status_of(self, row: int) -> TransferStatus:
        done, length = int(self.done[row]), int(self.length[row])
        if done == length and (self.state.terminal or length):
            return TransferStatus(TransferState.COMPLETED, done)
        if self.state.terminal:
            return TransferStatus(self.state, done, self.error, self.quiesced)
        return TransferStatus(TransferState.RUNNING if done or self.in_flight else TransferState.WAITING, done)


_ORDER = (TransferState.FAILED, TransferState.TIMED_OUT, TransferState.CANCELLED)


class Batch:
    """What a BatchId names: room for `size` requests, filled by one or more submissions."""

    MAX_CALLBACKS = 64

    def __init__(self, size: int) -> None:
        self.size = size
        self.lock = threading.Lock()
        self._over = threading.Condition(self.lock)
        self._pending = 0
        self.submissions: list[Submission] = []
        self.used = 0
        self._callbacks: list[Callable[[], None]] = []

    def admit(self, submission: Submission) -> None:
        """Add a submission. Raises InvalidHandle when the batch has no room for it."""
        with self.lock:
            if self.used + len(submission.length) > self.size:
                raise InvalidHandle(
                    f"batch has room for {self.size - self.used} more requests, not {len(submission.length)}"
                )
            self.used += len(submission.length)
            self.submissions.append(submission)
            self._pending += 1

    def wake(self) -> None:
        """A submission has settled (its effects ran). Waiters and callbacks go off with the last one."""
        with self.lock:
            self._pending -= 1
            if self._pending:
                return
            callbacks, self._callbacks = self._callbacks, []
            self._over.notify_all()
        for callback in callbacks:
            callback()

    @property
    def idle(self) -> bool:
        return self._pending == 0

    def wait(self, timeout_s: float) -> bool:
        with self.lock:
            return self._over.wait_for(lambda: self._pending == 0, timeout_s)

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """Keep `callback` for the end. False: the batch is idle, the caller calls it."""
        with self.lock:
            if self._pending == 0:
                return False
            if len(self._callbacks) >= self.MAX_CALLBACKS:
                raise InvalidHandle(f"more than {self.MAX_CALLBACKS} callbacks on one batch")
            self._callbacks.append(callback)
            return True

    def status(self) -> TransferStatus:
        """Running while any submission runs; else the worst end among them."""
        with self.lock:
            done = sum(s.bytes_total - s.bytes_left for s in self.submissions)
            if self._pending or not self.submissions:
                busy = any(s.state is not TransferState.WAITING for s in self.submissions)
                return TransferStatus(TransferState.RUNNING if busy else TransferState.WAITING, done)
            worst = min(self.submissions, key=lambda s: _ORDER.index(s.state) if s.state in _ORDER else len(_ORDER))
            return TransferStatus(worst.state, done, worst.error, all(s.quiesced for s in self.submissions))

    def request_status(self, row: int) -> TransferStatus:
        """Status of the row-th request in submission order. Raises InvalidHandle."""
        with self.lock:
            at = row
            for submission in self.submissions:
                if 0 <= at < len(submission.length):
                    return submission.status_of(at)
                at -= len(submission.length)
        raise InvalidHandle(f"the batch has no request {row}")
