"""A bounded pool that forgets what nobody asks for: SIEVE (Zhang et al., NSDI'24), which the paper's endpoint pool uses (3.2.2).

Knows: keys, the order of insertion, one visited bit each, and the hand that walks from old to new. Does not know: what the
values are, nor how one is closed: evicted values are handed back to the caller. A hit only sets a bit; nothing moves.
Not thread-safe: its owner guards it. `busy` is called during `put` and must neither block nor call back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class _Node(Generic[K, V]):
    __slots__ = ("key", "newer", "older", "value", "visited")

    def __init__(self, key: K, value: V) -> None:
        self.key = key
        self.value = value
        self.visited = False
        self.newer: _Node[K, V] | None = None
        self.older: _Node[K, V] | None = None


class SievePool(Generic[K, V]):
    """At most `capacity` values, and beyond it only as many as are `busy`. Raises ValueError for a capacity below 1."""

    def __init__(self, capacity: int, busy: Callable[[V], bool]) -> None:
        if capacity < 1:
            raise ValueError(f"a pool needs a capacity of at least 1, not {capacity}")
        self.capacity = capacity
        self._busy = busy
        self._nodes: dict[K, _Node[K, V]] = {}
        self._newest: _Node[K, V] | None = None
        self._oldest: _Node[K, V] | None = None
        self._hand: _Node[K, V] | None = None

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, key: K) -> bool:
        return key in self._nodes

    def get(self, key: K) -> V | None:
        """The value, marked as visited; None when there is none."""
        node = self._nodes.get(key)
        if node is None:
            return None
        node.visited = True
        return node.value

    def put(self, key: K, value: V) -> list[V]:
        """Add a value, or replace the one under `key` (a hit); returns what had to go for it, the replaced one included.
        A busy value is never evicted, only replaced. Up to two rounds of the hand for each value that goes."""
        node = self._nodes.get(key)
        if node is not None:
            replaced, node.value, node.visited = node.value, value, True
            return [] if replaced is value else [replaced]
        evicted = []
        while len(self._nodes) >= self.capacity and (victim := self._find_victim()) is not None:
            evicted.append(self._remove(victim))
        self._insert(_Node(key, value))
        return evicted

    def discard(self, key: K) -> V | None:
        """Take a value out, busy or not; None when there is none."""
        node = self._nodes.get(key)
        return None if node is None else self._remove(node)

    def values(self) -> list[V]:
        """All values, newest first."""
        found, node = [], self._newest
        while node is not None:
            found.append(node.value)
            node = node.older
        return found

    def _find_victim(self) -> _Node[K, V] | None:
        """Walk the hand to the first idle value whose bit is off. One round clears every idle value's bit, so the second
        finds one unless all are busy. A busy value keeps its bit: it is being used."""
        node = self._hand or self._oldest
        for _ in range(2 * len(self._nodes)):
            assert node is not None
            if not self._busy(node.value):
                if not node.visited:
                    self._hand = node
                    return node
                node.visited = False
            node = node.newer or self._oldest
        self._hand = node
        return None

    def _insert(self, node: _Node[K, V]) -> None:
        node.older = self._newest
        if self._newest is not None:
            self._newest.newer = node
        self._newest = node
        self._oldest = self._oldest or node
        self._nodes[node.key] = node

    def _remove(self, node: _Node[K, V]) -> V:
        del self._nodes[node.key]
        if self._hand is node:
            self._hand = node.newer
        if node.newer is not None:
            node.newer.older = node.older
        else:
            self._newest = node.older
        if node.older is not None:
            node.older.newer = node.newer
        else:
            self._oldest = node.newer
        node.newer = node.older = None  # no cycle left for the collector
        return node.value
