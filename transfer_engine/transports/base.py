"""What a transport must offer, and what it may ask of the engine.

Knows: the seam only. A transport claims the part of a job that it can reach, then owns it: takes its slices, moves them,
and reports each through the job's submission. Adding one (rdma, a fake) means one class with these methods and a name in
`EngineConfig.transports`.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Protocol

from mooncake.common.errors import MooncakeError
from transfer_engine.config import EngineConfig
from transfer_engine.handshake import Identity
from transfer_engine.lanes import Job, Slice
from transfer_engine.segment import Session


class Stats:
    """Counters, summed up without a lock being held for long."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, **amounts: float) -> None:
        with self._lock:
            for name, amount in amounts.items():
                self._counts[name] += amount  # type: ignore[assignment]

    def moved(self, transport: str, piece: Slice, seconds: float) -> None:
        what = f"{transport}_{piece.job.opcode.name.lower()}"
        with self._lock:
            self._counts[f"{what}_bytes"] += piece.n_bytes
            self._counts[f"{what}_slices"] += 1
            self._counts[f"{what}_seconds"] += seconds  # type: ignore[assignment]

    def snapshot(self) -> dict[str, float]:
        with self._lock:
            return dict(self._counts)


class Host(Protocol):
    """The engine, as transports see it."""

    config: EngineConfig
    identity: Identity
    counters: Stats

    def reroute(self, job: Job, after: Transport) -> None:
        """Offer (what is left of) a job to the transports that come after one in the order of preference."""


class Transport(Protocol):
    name: str

    def claim(self, job: Job, session: Session) -> tuple[Job | None, Job | None]:
        """(the part it takes, the rest). Must not block. Direct transports look at the session's region table."""

    def submit(self, job: Job) -> None:
        """Start moving a claimed job. Must not block."""

    def peer_down(self, session: Session, error: MooncakeError) -> None:
        """Fail what waits for that peer."""

    def close(self, deadline: float) -> bool:
        """Stop; True once nothing moves any more."""
