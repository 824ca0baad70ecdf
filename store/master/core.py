"""The master's state machine: who may read, who may write, until when. No I/O, no clock: every call takes `now`.

Knows: leases, unfinished puts, reports of nodes, suspects, and their ends. Does not know: holes and eviction order
(pool.py), gRPC (service.py), etcd. Paper: 4.2 (KVCache pool); DESIGN.md section 4 "Store".

Why no reader sees recycled bytes: a lease pins the record; memory of a removed record waits for its last pin. Why no
writer writes into another's object: revoked memory waits for the writer's word that it has stopped, else for its lease
plus a grace. Why a new master gives out nothing that lives: a segment has no free memory before its node's report, and
the node refuses writes that rest on an older report.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from mooncake.common.errors import BadRequest, Overloaded
from store import codes
from store.master import messages as m
from store.master.allocator import ExtentAllocator
from store.master.pool import Memory, Pool
from store.master.replicas import Record, Segment, State, writer_order

_MIN_LEASE_S = 0.05


@dataclass(slots=True)
class _Lease:
    records: list[Record]
    segments: frozenset[Segment]
    ends_s: float


@dataclass(slots=True)
class _Put:
    records: list[Record | None]
    ends_s: float


class MasterCore:
    """One master's life. Ids and versions carry the epoch, so those of a former master are never mistaken for ours."""

    def __init__(self, settings: m.Settings, epoch: int) -> None:
        self.settings = settings
        self.epoch = epoch
        self.pool = Pool(settings.max_dropped)
        self.counters = m.Counters()
        self._last_id = (epoch % (1 << 27)) << 36
        self._last_timer = 0
        self._leases: dict[int, _Lease] = {}
        self._puts: dict[int, _Put] = {}
        self._adopted: dict[Segment, list[Record]] = {}
        self._timers: list[tuple[float, int, Callable[[float], None]]] = []

    # --- nodes ---

    def mount(self, now: float, report: m.Report) -> bool:
        """Takes a node's report. False: a part is missing, the node has to start again."""
        self.tick(now)
        if report.continued:
            segment = self.pool.segments.get(report.segment)
            if segment is None or not segment.loading or segment.mount != report.mount:
                return False
        else:
            old = self.pool.segments.get(report.segment)
            if old is not None:
                self._drop(old)
            segment = Segment(
                report.segment, report.instance_id, report.mount, report.engine_address, report.control_address,
                ExtentAllocator(report.address, report.length), now, loading=True,
            )  # fmt: skip
            self.pool.add_segment(segment)
            self._adopted[segment] = []
        segment.heartbeat_s = now
        for write in report.open:
            if segment.allocator.reserve_all(write.extents):
                self._free_at(now + write.expires_in_s + self.settings.put_grace_s, [(segment, write.extents)])
            else:
                self.counters.refused_reports += 1
        for held in report.held:
            record = self.pool.adopt(segment, held.key, held.version, held.length, held.extents, removed=held.removed)
            if record is None:
                self.counters.refused_reports += 1
            else:
                record.held += 1
                self._adopted[segment].append(record)
        if not report.more:
            segment.loading = False
            self._hold(now, self._adopted.pop(segment))
        return True

    def _hold(self, now: float, records: list[Record]) -> None:
        """Pins what was reported until no lease of a former master can be out."""
        self.counters.adopted_objects += len(records)

        def end(_now: float) -> None:
            self._end_hold(records)

        if records:
            self._at(now + self.settings.hold_s, end)

    def _end_hold(self, records: Iterable[Record]) -> None:
        for record in records:
            record.held -= 1
            self.pool.unpin(record)

    def heartbeat(self, now: float, name: str, instance_id: str, mount: int, ack: int = 0) -> m.HeartbeatAnswer:
        self.tick(now)
        segment = self.pool.segments.get(name)
        if segment is None or segment.instance_id != instance_id or segment.mount != mount or segment.loading:
            return m.HeartbeatAnswer(remount=True)
        segment.heartbeat_s = now
        if segment.suspect_since_s is not None and now >= segment.suspect_since_s + self.settings.suspect_s:
            segment.suspect_since_s = None
        log = self.pool.drop_log(segment)
        log.ack(ack)
        return m.HeartbeatAnswer(False, *log.next(self.settings.dropped_per_heartbeat))

    def unmount(self, now: float, name: str, instance_id: str) -> None:
        """The node says goodbye."""
        self.tick(now)
        segment = self.pool.segments.get(name)
        if segment is not None and segment.instance_id == instance_id:
            self._drop(segment)

    def report_dead(self, now: float, instance_ids: Iterable[str]) -> None:
        """Somebody could not reach these: skip them until they are heard again."""
        dead = set(instance_ids)
        for segment in self.pool.segments.values():
            if segment.instance_id in dead:
                self.counters.suspects += segment.suspect_since_s is None
                segment.suspect_since_s = now

    def _usable(self, now: float, segment: Segment) -> bool:
        heard = segment.suspect_since_s is None and self._fresh(now, segment)
        return segment.alive and not segment.loading and heard

    def _fresh(self, now: float, segment: Segment) -> bool:
        return now - segment.heartbeat_s <= self.settings.segment_fresh_s

    def _drop(self, segment: Segment) -> None:
        self._end_hold(self._adopted.pop(segment, ()))
        self.pool.drop_segment(segment)

    # --- reading ---

    def query(self, now: float, keys: Sequence[bytes]) -> list[m.Found | None]:
        """What is readable now. Neither pins nor counts as a use."""
        self.tick(now)
        return [self._find(now, key) for key in keys]

    def _find(self, now: float, key: bytes) -> m.Found | None:
        record = self.pool.index.get(key)
        if record is None or record.state is not State.LIVE:
            return None
        usable = tuple(replica for replica in record.replicas if self._usable(now, replica.segment))
        return m.Found(record.length, usable) if usable else None

    def get_start(self, now: float, keys: Sequence[bytes], lease_s: float) -> m.Granted:
        """Pins what is found. Raises Overloaded when too many leases are out."""
        self.tick(now)
        if len(self._leases) >= self.settings.max_leases:
            raise Overloaded(f"{len(self._leases)} read leases are out")
        objects = [self._find(now, key) for key in keys]
        records = [self.pool.index[key] for key, found in zip(keys, objects, strict=True) if found is not None]
        self.counters.hits += len(records)
        self.counters.misses += len(keys) - len(records)
        if not records:
            return m.Granted(0, 0.0, objects)
        for record in records:
            self.pool.pin(record)
        lease_id, lease_s = self._new_id(), _clamp(lease_s, self.settings.max_read_lease_s)
        segments = frozenset(replica.segment for record in records for replica in record.replicas)
        self._leases[lease_id] = _Lease(records, segments, now + lease_s)
        self._at(now + lease_s, lambda at: self._lease_timer(at, lease_id))
        return m.Granted(lease_id, lease_s, objects)

    def renew(self, now: float, lease_id: int, lease_s: float) -> float:
        """Seconds that the lease now has; 0 when it is over. It grows only while all nodes that it names still speak to
        us: else one of them may speak to a new master, who waits for what was granted before and not longer."""
        self.tick(now)
        lease = self._leases.get(lease_id)
        if lease is None:
            return 0.0
        if all(segment.alive and self._fresh(now, segment) for segment in lease.segments):
            lease.ends_s = max(lease.ends_s, now + _clamp(lease_s, self.settings.max_read_lease_s))
        return lease.ends_s - now

    def get_end(self, now: float, lease_id: int, dead_instances: Iterable[str] = ()) -> None:
        self.tick(now)
        self.report_dead(now, dead_instances)
        lease = self._leases.pop(lease_id, None)
        for record in lease.records if lease else ():
            self.pool.unpin(record)

    def _lease_timer(self, now: float, lease_id: int) -> None:
        lease = self._leases.get(lease_id)
        if lease is None:
            return
        if lease.ends_s > now:
            self._at(lease.ends_s, lambda at: self._lease_timer(at, lease_id))
            return
        self.counters.expired_leases += 1
        self.get_end(now, lease_id)

    # --- writing ---

    def put_start(
        self, now: float, keys: Sequence[bytes], lengths: Sequence[int], *, writer: str, preferred: str = "",
        replicas: int = 1, lease_s: float = 30.0,
    ) -> m.PutGranted:  # fmt: skip
        """Allocates what does not exist yet. Raises BadRequest, and Overloaded when too many puts are unfinished."""
        self.tick(now)
        if len(keys) != len(lengths):
            raise BadRequest(f"{len(keys)} keys but {len(lengths)} lengths")
        if len(self._puts) >= self.settings.max_puts:
            raise Overloaded(f"{len(self._puts)} puts are unfinished")
        order = writer_order(writer, preferred, [s for s in self.pool.segments.values() if self._usable(now, s)])
        records, slots = [], []
        for key, length in zip(keys, lengths, strict=True):
            record, slot = self._allocate(now, order, key, length, max(1, replicas))
            records.append(record)
            slots.append(slot)
        if not any(records):
            return m.PutGranted(0, 0.0, slots)
        put_id, lease_s = self._new_id(), _clamp(lease_s, self.settings.max_put_lease_s)
        self._puts[put_id] = _Put(records, now + lease_s)
        self._at(now + lease_s, lambda at: self._put_timer(at, put_id))
        return m.PutGranted(put_id, lease_s, slots)

    def _allocate(
        self, now: float, order: list[Segment], key: bytes, length: int, replicas: int
    ) -> tuple[Record | None, m.Slot]:
        known = self.pool.index.get(key)
        if known is not None and known.state is State.WRITING:
            return None, m.Slot(codes.NOT_READY)
        if known is not None and self._find(now, key) is not None:
            return None, m.Slot(codes.EXISTS)
        if length <= 0:
            return None, m.Slot(codes.INVALID)
        if known is not None:  # all its replicas are out of reach: the new object takes its place
            self.pool.remove(known)
        record = self.pool.allocate(order, key, self._new_id(), length, replicas)
        if record is None:
            self.counters.alloc_failures += 1
            return None, m.Slot(codes.NO_SPACE)
        return record, m.Slot(codes.OK, record.version, tuple(record.replicas))

    def put_end(
        self, now: float, put_id: int, written: Sequence[bool], *, quiesced: bool = False,
        failed_segments: Iterable[str] = (), dead_instances: Iterable[str] = (),
    ) -> list[int]:  # fmt: skip
        """Makes written objects visible and revokes the others. A code a key; LEASE_EXPIRED when it came too late."""
        self.tick(now)
        self.report_dead(now, dead_instances)
        put = self._puts.pop(put_id, None)
        if put is None:
            return [codes.LEASE_EXPIRED] * len(written)
        failed = set(failed_segments)
        ended: list[int] = []
        for at, record in enumerate(put.records):
            done = at < len(written) and written[at]
            ended.append(self._end_one(record, done, failed, put.ends_s, now if quiesced else None))
        return ended

    def _end_one(
        self, record: Record | None, written: bool, failed: set[str], ends_s: float, free_s: float | None
    ) -> int:
        if record is None:
            return codes.OK
        memory = self.pool.revoke(record, lambda segment: not written or segment.name in failed)
        self._give_back(memory, ends_s, free_s)
        if not written:
            return codes.OK
        if not record.replicas:
            return codes.REPLICA_GONE
        self.pool.publish(record)
        return codes.OK

    def _put_timer(self, now: float, put_id: int) -> None:
        put = self._puts.pop(put_id, None)
        if put is None:
            return
        self.counters.expired_puts += 1
        for record in put.records:
            if record is not None:
                self._give_back(self.pool.revoke(record, lambda _: True), put.ends_s, None)

    def _give_back(self, memory: list[Memory], ends_s: float, free_s: float | None) -> None:
        """At once when the writer has stopped, else when it must have."""
        if free_s is not None:
            self.pool.free(memory)
        elif memory:
            self._free_at(ends_s + self.settings.put_grace_s, memory)

    def _free_at(self, at: float, memory: list[Memory]) -> None:
        self._at(at, lambda _now: self.pool.free(memory))

    # --- removing ---

    def remove(self, now: float, keys: Sequence[bytes], *, force: bool = False) -> list[int]:
        """A code a key. `force` also removes what is being read: readers keep right bytes until their leases end."""
        self.tick(now)
        return [self._remove_one(key, force) for key in keys]

    def remove_all(self, now: float, *, force: bool = False) -> int:
        """How many objects were removed."""
        self.tick(now)
        return sum(self._remove_one(key, force) == codes.OK for key in list(self.pool.index))

    def _remove_one(self, key: bytes, force: bool) -> int:
        record = self.pool.index.get(key)
        if record is None or record.state is not State.LIVE:
            return codes.NOT_FOUND
        if record.pins > record.held and not force:
            return codes.LEASED
        self.pool.remove(record)
        return codes.OK

    # --- time ---

    def tick(self, now: float) -> None:
        """Ends what is over by `now`. Every call does it; the shell calls it now and then as well."""
        while self._timers and self._timers[0][0] <= now:
            _, _, action = heapq.heappop(self._timers)
            action(now)
        for segment in list(self.pool.segments.values()):
            if now - segment.heartbeat_s > self.settings.segment_timeout_s:
                self.counters.dropped_segments += 1
                self._drop(segment)

    def _at(self, when: float, action: Callable[[float], None]) -> None:
        self._last_timer += 1
        heapq.heappush(self._timers, (when, self._last_timer, action))

    def _new_id(self) -> int:
        self._last_id += 1
        return self._last_id

    # --- looking ---

    def status(self, now: float) -> m.StatusView:
        self.tick(now)
        segments = [
            m.SegmentView(
                s.name, s.instance_id, s.engine_address, s.control_address,
                s.allocator.capacity_bytes, s.allocator.allocated_bytes,
                sum(r.state is State.LIVE for r in s.records.values()), now - s.heartbeat_s,
            )
            for _, s in sorted(self.pool.segments.items())
        ]  # fmt: skip
        writing = sum(r is not None and r.state is State.WRITING for p in self._puts.values() for r in p.records)
        live = len(self.pool.index) - writing
        return m.StatusView(segments, live, self.pool.evictions, len(self._leases), len(self._puts))


def _clamp(lease_s: float, most_s: float) -> float:
    return min(max(lease_s, _MIN_LEASE_S), most_s)
