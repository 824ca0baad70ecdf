"""What the worker half owes vLLM: loads that ended, failed blocks, and finished requests whose blocks are free again.

vLLM's engine dies when a request is reported twice or unasked (scheduler.py, `_update_from_kv_xfer_finished`), and leaks its
blocks when it is never reported. This is the one place that counts. Knows: holds and reports; thread-safe.
Does not know: why something is held.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field


@dataclass
class Batch:
    """One step's report."""

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    bad_blocks: set[int] = field(default_factory=set)


class Reports:
    """`wake` is called (from any thread) when there is something to take."""

    def __init__(self, wake: Callable[[], None] = lambda: None) -> None:
        self._wake = wake
        self._lock = threading.Lock()
        self._batch = Batch()
        self._holds: dict[str, int] = {}
        self._finished: set[str] = set()
        self._loading: set[str] = set()

    # --- loads ---

    def load_began(self, req_id: str) -> None:
        """vLLM waits for this request from now on."""
        with self._lock:
            self._loading.add(req_id)

    def loading(self, req_id: str) -> bool:
        """vLLM still waits for this request."""
        with self._lock:
            return req_id in self._loading

    def load_ended(self, req_id: str, *, failed: bool = False, bad_blocks: Iterable[int] = ()) -> bool:
        """Reports the load once. False (and no report) when it is not awaited.

        `failed`: nothing of it is valid; `bad_blocks`: only these are not.
        """
        with self._lock:
            if req_id not in self._loading:
                return False
            self._loading.discard(req_id)
            self._batch.received.add(req_id)
            self._batch.bad_blocks.update(bad_blocks)
            if failed:
                self._batch.failed.add(req_id)
        self._wake()
        return True

    # --- holds ---

    def hold(self, req_id: str) -> None:
        """The request's blocks are being read: once more."""
        with self._lock:
            self._holds[req_id] = self._holds.get(req_id, 0) + 1

    def unhold(self, req_id: str) -> None:
        """One reader less."""
        with self._lock:
            left = self._holds.get(req_id, 0) - 1
            if left > 0:
                self._holds[req_id] = left
                return
            self._holds.pop(req_id, None)
            if req_id not in self._finished:
                return
            self._finished.discard(req_id)
            self._batch.sent.add(req_id)
        self._wake()

    def finished(self, req_id: str) -> None:
        """The engine is done with the request and keeps its blocks until it is reported as sent."""
        with self._lock:
            if self._holds.get(req_id, 0) > 0:
                self._finished.add(req_id)
                return
            self._batch.sent.add(req_id)
        self._wake()

    # --- vLLM ---

    def take(self) -> Batch:
        """Everything new since the last call."""
        with self._lock:
            batch, self._batch = self._batch, Batch()
            return batch

    def counts(self) -> tuple[int, int]:
        """(requests held after their end, loads awaited)."""
        with self._lock:
            return len(self._finished), len(self._loading)
