"""Objects and their replicas: the records that the core keeps, and on which segments a new one goes.

Knows: what a record is, the order of segments for a writer. Does not know: time, holes, leases' ends.
Paper: 4.2 (KVCache pool), 6.2 (cache spread); DESIGN.md section 4 "Store".
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field

from store.extents import Extent
from store.master.allocator import ExtentAllocator


class State(enum.Enum):
    """WRITING: allocated, invisible. LIVE: readable. GONE: not in the index; its memory may wait for readers."""

    WRITING = "writing"
    LIVE = "live"
    GONE = "gone"


@dataclass(slots=True, eq=False)
class Segment:
    """One report (mount) of one node. A new report makes a new object, and allocations of the old one die with it."""

    name: str
    instance_id: str
    mount: int
    engine_address: str
    control_address: str
    allocator: ExtentAllocator
    heartbeat_s: float
    """When the node was last heard."""
    loading: bool = False
    """Parts of the report are missing: nothing may be allocated or read yet."""
    alive: bool = True
    suspect_since_s: float | None = None
    """When somebody found it dead; skipped until it is heard again."""
    records: dict[int, Record] = field(default_factory=dict)
    """Version -> record of everything that has memory here."""


@dataclass(slots=True, eq=False)
class Replica:
    """One copy of an object: trimmed extents of one segment."""

    segment: Segment
    extents: tuple[Extent, ...]


@dataclass(slots=True, eq=False)
class Record:
    """One object's life. `version` names it for ever: a later object of the same key has a higher one."""

    key: bytes
    version: int
    length: int
    replicas: list[Replica] = field(default_factory=list)
    state: State = State.WRITING
    pins: int = 0
    """Leases that hold its memory."""
    held: int = 0
    """How many of the pins are those of fresh reports: leases of a former master may still be out."""
    stamp: int = 0
    """Position in the LRU order; only eviction.py writes it."""

    @property
    def evictable(self) -> bool:
        return self.state is State.LIVE and not self.pins


def writer_order(writer: str, preferred: str, segments: Iterable[Segment]) -> list[Segment]:
    """The preferred segment, then the others in an order that is fixed for a writer and differs between writers, so
    that one writer's blocks stay together and writers spread (rendezvous hashing: one that comes or goes moves no
    other)."""

    def rank(segment: Segment) -> tuple[bool, bytes, str]:
        digest = hashlib.sha256(f"{writer}\0{segment.name}".encode()).digest()
        return segment.name != preferred, digest, segment.name

    return sorted(segments, key=rank)
