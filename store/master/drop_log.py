"""What a node has yet to hear: versions that were evicted or removed, until it says that it has heard.

Knows: one node life's backlog, bounded. Does not know: objects, time. Without it a removed object would come back with
the next report (a node keeps intact bytes until they are overwritten). A version that readers may still read is told as
*removed*: the node keeps its place taken, so that no new master gives it away. When the last reader has left it is told as
*dropped*.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import NamedTuple


class Told(NamedTuple):
    """`sequence` is the number of the last line."""

    dropped: list[int]
    removed: list[int]
    sequence: int


class DropLog:
    """At the bound the oldest lines are forgotten (`lost` counts them): those objects might come back with a new master."""

    def __init__(self, instance_id: str, max_lines: int) -> None:
        self.instance_id = instance_id
        self.lost = 0
        self._max = max_lines
        self._backlog: deque[tuple[int, bool]] = deque()  # (version, dropped)
        self._pending: Counter[int] = Counter()
        self._acked = 0  # sequence number of the line before the backlog's first

    def __len__(self) -> int:
        return len(self._backlog)

    def __contains__(self, version: int) -> bool:
        """Whether the node may not have heard yet that this version is gone."""
        return version in self._pending

    def add(self, version: int, *, dropped: bool) -> None:
        """`dropped`: nobody reads it any more."""
        self._backlog.append((version, dropped))
        self._pending[version] += 1
        if len(self._backlog) > self._max:
            self._pop()
            self.lost += 1

    def ack(self, sequence: int) -> None:
        """The node has applied everything up to `sequence`."""
        while self._backlog and self._acked < sequence:
            self._pop()

    def next(self, max_lines: int) -> Told:
        lines = [self._backlog[at] for at in range(min(max_lines, len(self._backlog)))]
        dropped = [version for version, final in lines if final]
        removed = [version for version, final in lines if not final]
        return Told(dropped, removed, self._acked + len(lines))

    def _pop(self) -> None:
        version, _ = self._backlog.popleft()
        self._acked += 1
        self._pending[version] -= 1
        if not self._pending[version]:
            del self._pending[version]
