"""What goes into the core and comes out of it: values without behaviour, free of protobuf.

Units: seconds of the caller's monotonic clock, bytes. Codes are those of the drop-in API (mooncake/common/errors.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from store.extents import Extent
from store.master.replicas import Replica


@dataclass(frozen=True, slots=True)
class Settings:
    """Numbers of the core; store/master/config.py says what they mean to an operator."""

    segment_fresh_s: float = 5.0
    segment_timeout_s: float = 10.0
    suspect_s: float = 2.0
    max_read_lease_s: float = 10.0
    max_put_lease_s: float = 60.0
    put_grace_s: float = 5.0
    max_leases: int = 65536
    max_puts: int = 65536
    max_dropped: int = 1 << 20
    dropped_per_heartbeat: int = 65536

    @property
    def hold_s(self) -> float:
        """After a report nothing reported is recycled for so long: a former master may have granted reads until its
        last heartbeat got old, and each of them may last its longest."""
        return self.segment_fresh_s + self.max_read_lease_s


class Held(NamedTuple):
    """One object in a node's report."""

    key: bytes
    version: int
    length: int
    extents: tuple[Extent, ...]
    removed: bool = False


class OpenWrite(NamedTuple):
    """Memory that some writer may still write, for `expires_in_s` more seconds."""

    extents: tuple[Extent, ...]
    expires_in_s: float


@dataclass(frozen=True, slots=True)
class Report:
    """A node's report (mount), or a further part of one."""

    segment: str
    instance_id: str
    mount: int
    address: int
    length: int
    engine_address: str = ""
    control_address: str = ""
    held: Sequence[Held] = ()
    open: Sequence[OpenWrite] = ()
    continued: bool = False
    more: bool = False


class HeartbeatAnswer(NamedTuple):
    remount: bool
    dropped: Sequence[int] = ()
    removed: Sequence[int] = ()
    dropped_seq: int = 0


class Found(NamedTuple):
    """A readable object; `replicas` are the usable ones, at least one."""

    length: int
    replicas: tuple[Replica, ...]


class Granted(NamedTuple):
    """`lease_id` is 0 when nothing was found."""

    lease_id: int
    lease_s: float
    objects: list[Found | None]


class Slot(NamedTuple):
    code: int
    version: int = 0
    replicas: tuple[Replica, ...] = ()


class PutGranted(NamedTuple):
    put_id: int
    lease_s: float
    slots: list[Slot]


@dataclass(slots=True)
class Counters:
    """Monotonic numbers for metrics, beyond those of the pool."""

    expired_leases: int = 0
    expired_puts: int = 0
    adopted_objects: int = 0
    refused_reports: int = 0
    suspects: int = 0
    dropped_segments: int = 0
    alloc_failures: int = 0
    hits: int = 0
    misses: int = 0


@dataclass(frozen=True, slots=True)
class SegmentView:
    """One segment as status and metrics see it."""

    name: str
    instance_id: str
    engine_address: str
    control_address: str
    capacity_bytes: int
    allocated_bytes: int
    objects: int
    heartbeat_age_s: float


@dataclass(frozen=True, slots=True)
class StatusView:
    segments: list[SegmentView] = field(default_factory=list)
    objects: int = 0
    evictions: int = 0
    leases: int = 0
    puts: int = 0
