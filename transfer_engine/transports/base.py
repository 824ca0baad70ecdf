"""What a transport must offer, and what it may ask of the engine.

Knows: the seams only. A transport claims the part of a job that it can reach, then owns it: takes its slices, moves them,
and reports each through the job's submission. Adding one (rdma, a fake) means one class with these methods and a name in
`EngineConfig.transports`.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Protocol, runtime_checkable

from mooncake.common.errors import MooncakeError
from transfer_engine.config import EngineConfig
from transfer_engine.device.staging import DeviceMemory
from transfer_engine.handshake import Identity
from transfer_engine.lanes import Job, Slice
from transfer_engine.memory import Region, RegionTable
from transfer_engine.protocol import EndpointOffer, NicInfo, Reply
from transfer_engine.segment import PeerRecord, Session
from transfer_engine.types import Opcode


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

    def count(self, name: str, amount: float) -> None:
        with self._lock:
            self._counts[name] += amount  # type: ignore[assignment]

    def exchanged(self, names: tuple[str, str, str], n_bytes: int, seconds: float) -> None:
        """A transfer that was one slice; `names` of its bytes, slices and seconds."""
        with self._lock:
            counts = self._counts
            counts[names[0]] += n_bytes
            counts[names[1]] += 1
            counts[names[2]] += seconds  # type: ignore[assignment]
            counts["transfers_completed"] += 1
            counts["transfer_requests"] += 1

    def snapshot(self) -> dict[str, float]:
        with self._lock:
            return dict(self._counts)


def counted(transport: str) -> dict[Opcode, tuple[str, str, str]]:
    """Names of a transport's counters of bytes, slices and seconds, by direction."""
    return {
        opcode: (f"{transport}_{name}_bytes", f"{transport}_{name}_slices", f"{transport}_{name}_seconds")
        for opcode, name in ((Opcode.READ, "read"), (Opcode.WRITE, "write"))
    }


class Host(Protocol):
    """The engine, as transports see it."""

    config: EngineConfig
    identity: Identity
    counters: Stats
    memory: RegionTable
    devices: DeviceMemory

    def learn_fences(self, session: Session, reply: Reply) -> None:
        """Stop what a target says is cancelled, before anything is done with the rest of its reply."""

    def route(self, job: Job) -> None:
        """Start a job anew: fetch what must be known of its peer, then offer it to all transports."""

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

    def forget(self, session: Session) -> None:
        """The session is closed and idle: give up what it holds."""

    def gauges(self) -> dict[str, float]:
        """What is open and waits now, for `stats()`: `<name>_queued_slices`, `open_<what>` (places: metrics.py)."""

    def close(self, deadline: float) -> bool:
        """Stop; True once nothing moves any more."""


@runtime_checkable
class KeyedTransport(Transport, Protocol):
    """A transport whose peers touch our memory by remote keys over endpoints of their own (rdma). At most one per engine.

    A class may also have `unavailable(config) -> str`, a class method that says why this machine cannot offer it ("": it can).
    """

    def register(self, region: Region) -> tuple[int, ...]:
        """Keys of a region that nobody sees yet, one per NIC of `nics`; none for device memory that no NIC can register
        (`DeviceMemory.dmabuf_fd` tells how), whose jobs it must not claim. What it raises refuses the registration."""

    def unregister(self, region: Region) -> None:
        """Nothing uses the region any more: void its keys. Idempotent."""

    def nics(self) -> list[NicInfo]:
        """In the order of the keys; constant over the engine's life."""

    def accept(self, record: PeerRecord, offer: EndpointOffer) -> EndpointOffer:
        """Target side of a ConnectEndpoint; short, on the link's reader thread. Puts a one-sided `Served` into
        `record.streams[offer.stream_id]`. Raises MooncakeError, which the initiator gets."""
