"""Circuit breakers: an instance that failed several times in a row is avoided for a while, then tried with one request.

Only failures of the instance count. A client's own error (4xx) is neither a failure nor a success: it says nothing about the instance.
Pure: takes `now`; does not know what an instance is.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class _Breaker:
    failures: int = 0
    open_until_s: float = 0.0


class Circuits:
    """Breakers by instance id. Closed breakers take no memory."""

    def __init__(self, *, failures: int, open_s: float) -> None:
        self._limit = failures
        self._open_s = open_s
        self._breakers: dict[str, _Breaker] = {}

    def failure(self, instance_id: str, now: float) -> bool:
        """True when this failure opened the breaker."""
        breaker = self._breakers.setdefault(instance_id, _Breaker())
        breaker.failures += 1
        opened = breaker.failures >= self._limit
        if opened:
            breaker.open_until_s = now + self._open_s
        return opened

    def success(self, instance_id: str) -> None:
        self._breakers.pop(instance_id, None)

    def tried(self, instance_id: str, now: float) -> None:
        """A request was sent there: while half open, that was the one that may."""
        breaker = self._breakers.get(instance_id)
        if breaker is not None and breaker.failures >= self._limit:
            breaker.open_until_s = now + self._open_s  # should its outcome never be told, another one may try later

    def open(self, now: float) -> set[str]:
        """Instances to avoid now."""
        return {i for i, b in self._breakers.items() if b.failures >= self._limit and now < b.open_until_s}

    def forget(self, instance_id: str) -> None:
        self._breakers.pop(instance_id, None)
