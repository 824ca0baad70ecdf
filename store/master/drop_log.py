"""What a node has yet to hear: versions that were evicted or removed, until it says that it has heard.

Knows: one node life's backlog, bounded. Does not know: objects, time. Without it a removed object would come back with
the next report (a node keeps intact bytes until they are overwritten).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Sequence


class DropLog:
    """At the bound the oldest versions are forgotten (`lost` counts them): they might come back with a new master."""

    def __init__(self, instance_id: str, max_versions: int) -> None:
        self.instance_id = instance_id
        self.lost = 0
        self._max = max_versions
        self._backlog: deque[int] = deque()
        self._pending: set[int] = set()
        self._withheld: set[int] = set()
        self._acked = 0  # sequence number of the version before the backlog's first

    def __len__(self) -> int:
        return len(self._backlog)

    def __contains__(self, version: int) -> bool:
        return version in self._pending or version in self._withheld

    def withhold(self, version: int) -> None:
        """It is removed, but readers may still read it: the node must go on reporting it, so that no new master gives
        its memory to somebody else. `add` follows when the last reader has left."""
        self._withheld.add(version)

    def settle(self, reported: Container[int]) -> None:
        """The node has reported anew: what it does not hold any more needs no `add`."""
        self._withheld = {version for version in self._withheld if version in reported}

    def add(self, version: int) -> None:
        self._withheld.discard(version)
        self._backlog.append(version)
        self._pending.add(version)
        if len(self._backlog) > self._max:
            self._pop()
            self.lost += 1

    def ack(self, sequence: int) -> None:
        """The node has applied everything up to `sequence`."""
        while self._backlog and self._acked < sequence:
            self._pop()

    def next(self, max_versions: int) -> tuple[Sequence[int], int]:
        """Versions to tell, and the sequence number of the last of them."""
        told = [self._backlog[i] for i in range(min(max_versions, len(self._backlog)))]
        return told, self._acked + len(told)

    def _pop(self) -> None:
        self._pending.discard(self._backlog.popleft())
        self._acked += 1
