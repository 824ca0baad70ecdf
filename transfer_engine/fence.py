"""Cancelled groups: what must not move any more.

Knows: which (peer instance, group) pairs are fenced, for a bounded time and number, and which incoming frames of a group
are being placed right now. Does not know: sockets, batches. Used on both sides: a target refuses frames, an initiator
refuses submissions.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict

from mooncake.common.errors import Overloaded

Key = tuple[str, int]


class FenceTable:
    """Thread-safe. Keys are (peer instance id, group); group 0 is never fenced. An empty instance id in a fence means any peer."""

    def __init__(self, capacity: int, ttl_s: float) -> None:
        self._capacity = capacity
        self._ttl_s = ttl_s
        self._lock = threading.Lock()  # this one is entered, not the condition: threads.py
        self._changed = threading.Condition(self._lock)
        self._until: OrderedDict[Key, float] = OrderedDict()
        self._active: Counter[Key] = Counter()

    def add(self, key: Key) -> None:
        """Fence it; renews its time. Raises Overloaded when full of live fences (forgetting one early would be unsafe)."""
        now = time.monotonic()
        with self._lock:
            while self._until and next(iter(self._until.values())) <= now:
                self._until.popitem(last=False)
            if key not in self._until and len(self._until) >= self._capacity:
                raise Overloaded(f"{self._capacity} fenced groups are remembered already")
            self._until[key] = now + self._ttl_s
            self._until.move_to_end(key)

    def __contains__(self, key: Key) -> bool:
        until = self._until.get(key) or self._until.get(("", key[1]))
        return until is not None and until > time.monotonic()

    def enter(self, key: Key) -> bool:
        """A frame is about to be placed. False: fenced, do not. Pair with `leave`."""
        if key[1] == 0:
            return True
        with self._lock:
            if key in self:
                return False
            self._active[key] += 1
            return True

    def leave(self, key: Key) -> None:
        if key[1] == 0:
            return
        with self._lock:
            self._active[key] -= 1
            if self._active[key] <= 0:
                del self._active[key]
                self._changed.notify_all()

    def wait_clear(self, key: Key, timeout_s: float) -> bool:
        """True once no frame of the group is being placed. Call after `add`."""
        with self._lock:
            return self._changed.wait_for(lambda: not self._placing(key), timeout_s)

    def _placing(self, key: Key) -> bool:
        return key in self._active if key[0] else any(group == key[1] for _, group in self._active)

    def groups_of(self, instance_id: str) -> list[int]:
        now = time.monotonic()
        with self._lock:
            return [
                group
                for (instance, group), until in self._until.items()
                if instance in (instance_id, "") and until > now
            ]
