"""A seeded world in virtual time: real master cores and manifests, nodes with memory of tags, writers that die or linger,
slow readers, restarting masters and nodes, and former masters that do not know yet that they are. No reader that may
trust its lease ever sees another object's tag."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from store import codes
from store.extents import GRANULE_BYTES as G
from store.extents import Extent, round_up
from store.master import messages as m
from store.master.core import MasterCore
from store.master.replicas import Replica, State
from store.node.manifest import BUSY, OK, Entry, Manifest, OpenPut

SETTINGS = m.Settings(
    segment_fresh_s=2.0,
    segment_timeout_s=4.0,
    suspect_s=1.0,
    max_read_lease_s=2.0,
    max_put_lease_s=3.0,
    put_grace_s=1.0,
)
BASE = 1 << 30
GRANULES = 24
KEYS = [bytes([n]) * 16 for n in range(14)]


@dataclass
class Node:
    name: str
    life: str
    manifest: Manifest
    memory: dict[int, int] = field(default_factory=dict)
    epoch: int = -1
    ack: int = 0
    stalled_until_s: float = 0.0


class World:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.epoch = 1
        self.lives = 0
        self.core = MasterCore(SETTINGS, self.epoch)
        self.former: tuple[MasterCore, float] | None = None
        self.nodes: dict[str, Node] = {}
        self.lives_by_id: dict[str, Node] = {}
        self.fenced: set[tuple[int, str]] = set()
        self.ended: set[int] = set()
        self.good_reads = self.discarded_reads = self.writes = self.busy = 0
        self.queue: list[tuple[float, int, Iterator[float]]] = []
        self.count = 0
        for n in range(3):
            self.new_life(f"s{n}")

    # --- machinery ---

    def spawn(self, actor: Iterator[float], delay: float = 0.0) -> None:
        self.count += 1
        heapq.heappush(self.queue, (self.now + delay, self.count, actor))

    def run(self, until: float) -> None:
        while self.queue and self.queue[0][0] <= until:
            self.now, _, actor = heapq.heappop(self.queue)
            delay = next(actor, None)
            if delay is not None:
                self.spawn(actor, delay)
        self.now = until

    def chance(self, p: float) -> bool:
        return self.random.random() < p

    def some(self, low: float, high: float) -> float:
        return self.random.uniform(low, high)

    def a_master(self) -> MasterCore:
        if self.former is not None and self.now < self.former[1] and self.chance(0.5):
            return self.former[0]
        return self.core

    # --- nodes and masters ---

    def new_life(self, name: str) -> None:
        self.lives += 1
        manifest = Manifest(BASE, GRANULES * G, put_grace_s=SETTINGS.put_grace_s)
        node = Node(name, f"{name}-{self.lives}", manifest)
        self.nodes[name] = self.lives_by_id[node.life] = node

    def node_loop(self, name: str) -> Iterator[float]:
        while True:
            node = self.nodes[name]
            if self.now >= node.stalled_until_s:
                self.speak(node)
            yield self.some(0.3, 0.7)

    def speak(self, node: Node) -> None:
        core = self.core
        if node.epoch == core.epoch:
            answer = core.heartbeat(self.now, node.name, node.life, node.manifest.mount, node.ack)
            if not answer.remount:
                node.manifest.mark_removed(answer.removed)
                node.manifest.forget(answer.dropped)
                node.ack = answer.dropped_seq
                return
        held, writes = node.manifest.report(self.now, node.manifest.mount + 1)
        if self.chance(0.1):
            return  # the report is lost
        half = len(held) // 2
        lines = [m.Held(e.key, e.version, e.length, e.extents, e.removed) for e in held]
        opens = [m.OpenWrite(*write) for write in writes]
        common = (node.name, node.life, node.manifest.mount, BASE, GRANULES * G)
        assert core.mount(self.now, m.Report(*common, held=lines[:half], open=opens, more=True))
        assert core.mount(self.now, m.Report(*common, held=lines[half:], continued=True))
        node.epoch, node.ack = core.epoch, 0

    def trouble(self) -> Iterator[float]:
        while True:
            yield self.some(1, 8)
            kind = self.random.choice(["master", "node", "stall", "report"])
            if kind == "master":
                self.former = (self.core, self.now + self.some(0, 6))
                self.epoch += 1
                self.core = MasterCore(SETTINGS, self.epoch)
            else:
                node = self.nodes[self.random.choice(sorted(self.nodes))]
                if kind == "node":
                    self.new_life(node.name)
                elif kind == "stall":
                    node.stalled_until_s = self.now + self.some(1, 7)
                else:
                    self.a_master().report_dead(self.now, [node.life])

    # --- clients ---

    def writer(self, name: str) -> Iterator[float]:
        while True:
            yield self.some(0, 0.3)
            core, began = self.a_master(), self.now
            keys = self.random.sample(KEYS, 3)
            lengths = [self.random.randint(1, 6 * G) for _ in keys]
            granted = core.put_start(
                self.now, keys, lengths, writer=name, preferred=f"s{self.random.randint(0, 2)}",
                replicas=self.random.choice([1, 1, 2]), lease_s=self.some(0.5, 3),
            )  # fmt: skip
            self.check_space(core, granted, lengths)
            if not granted.put_id:
                continue
            yield self.some(0, 0.1)
            yield from self.write(core, granted, keys, lengths, began + granted.lease_s)

    def write(
        self, core: MasterCore, granted: m.PutGranted, keys: list[bytes], lengths: list[int], ends_s: float
    ) -> Iterator[float]:
        names = sorted({r.segment.name for slot in granted.slots for r in slot.replicas})
        parts: dict[str, list[tuple[int, Entry]]] = {name: [] for name in names}
        lives: dict[str, tuple[str, int]] = {}
        for at, slot in enumerate(granted.slots):
            for replica in slot.replicas:
                entry = Entry(keys[at], slot.version, lengths[at], replica.extents)
                parts[replica.segment.name].append((at, entry))
                lives[replica.segment.name] = (replica.segment.instance_id, replica.segment.mount)
        failed, lingering = set(), self.some(0, 0.5)
        for name in names:
            node = self.lives_by_id[lives[name][0]]
            put = OpenPut(granted.put_id, granted.put_id, "", "", tuple(e for _, e in parts[name]), ends_s)
            if self.begin(node, lives[name][1], put) != OK:
                failed.add(name)
            yield self.some(0, 0.1)
        todo = [(name, entry) for name in names if name not in failed for _, entry in parts[name]]
        done, pace = set(), self.random.choice([0.005, 0.02, 0.3])
        for name, entry in todo:
            for extent in entry.extents:
                for address in range(extent.address, extent.end, G):
                    if self.now > ends_s + lingering or (granted.put_id, lives[name][0]) in self.fenced:
                        break
                    if self.chance(0.005):
                        return  # killed
                    self.lives_by_id[lives[name][0]].memory[address] = entry.version
                    yield self.some(0, pace)
                else:
                    continue
                break
            else:
                done.add((name, entry.version))
        yield from self.finish(core, granted, parts, lives, failed, done)

    def begin(self, node: Node, mount: int, put: OpenPut) -> int:
        if self.nodes[node.name] is not node or self.now < node.stalled_until_s:
            return -900
        code, older = node.manifest.begin(self.now, mount, put)
        if code == BUSY:
            self.busy += 1
            for other in older:
                if other.put_id in self.ended or self.chance(0.5):
                    self.fenced.add((other.put_id, node.life))
                    node.manifest.forget_open(other.put_id)
            code, _ = node.manifest.begin(self.now, mount, put)
        return code

    def finish(
        self, core: MasterCore, granted: m.PutGranted, parts: dict[str, list[tuple[int, Entry]]],
        lives: dict[str, tuple[str, int]], failed: set[str], done: set[tuple[str, int]],
    ) -> Iterator[float]:  # fmt: skip
        quiesced = self.chance(0.7)
        self.ended.add(granted.put_id)
        for name, entries in parts.items():
            node = self.lives_by_id[lives[name][0]]
            if name in failed or self.nodes[name] is not node or self.now < node.stalled_until_s or self.chance(0.05):
                failed.add(name)
                continue
            written = [(name, entry.version) in done for _, entry in entries]
            if node.manifest.end(lives[name][1], granted.put_id, written, quiesced=quiesced) != OK:
                failed.add(name)
        if self.chance(0.05):
            return
        yield self.some(0, 0.1)
        whole = [
            bool(slot.replicas)
            and all(r.segment.name in failed or (r.segment.name, slot.version) in done for r in slot.replicas)
            and any((r.segment.name, slot.version) in done for r in slot.replicas)
            for slot in granted.slots
        ]
        ended = core.put_end(self.now, granted.put_id, whole, quiesced=quiesced, failed_segments=failed)
        self.writes += sum(code == 0 and ok for code, ok in zip(ended, whole, strict=True))

    def reader(self) -> Iterator[float]:
        while True:
            yield self.some(0, 0.2)
            core, began = self.a_master(), self.now
            keys = self.random.sample(KEYS, 2)
            granted = core.get_start(self.now, keys, self.some(0.2, 2))
            versions = [core.pool.index[k].version if f else 0 for k, f in zip(keys, granted.objects, strict=True)]
            ends_s = began + granted.lease_s
            seen = []
            for version, found in zip(versions, granted.objects, strict=True):
                if found is None:
                    continue
                replica = self.random.choice(found.replicas)
                pace = self.random.choice([0.0, 0.05, 0.3])
                memory = self.lives_by_id[replica.segment.instance_id].memory
                for address in granules(replica):
                    yield self.some(0, pace)
                    seen.append((version, memory.get(address)))
                if self.chance(0.3):
                    before = self.now
                    renewed = core.renew(self.now, granted.lease_id, 1.0)
                    ends_s = max(ends_s, before + renewed) if renewed else 0.0
            if self.now < ends_s:
                assert all(version == tag for version, tag in seen), (self.now, granted, seen)
                self.good_reads += len(seen)
            else:
                self.discarded_reads += 1
            if self.chance(0.8):
                core.get_end(self.now, granted.lease_id)

    def remover(self) -> Iterator[float]:
        while True:
            yield self.some(1, 4)
            self.a_master().remove(self.now, [self.random.choice(KEYS)], force=self.chance(0.5))

    # --- what must always hold ---

    def check_space(self, core: MasterCore, granted: m.PutGranted, lengths: list[int]) -> None:
        usable = [s for s in core.pool.segments.values() if core._usable(self.now, s)]
        if granted.slots[-1].code == codes.NO_SPACE:
            for segment in usable:
                assert segment.allocator.free_bytes + core.pool.lru.evictable_bytes(segment) < round_up(lengths[-1])

    def check_idle(self) -> None:
        for segment in self.core.pool.segments.values():
            records = segment.records.values()
            assert all(r.state is State.LIVE and not r.pins for r in records)
            used = sum(
                round_up(e.length) for r in records for p in r.replicas if p.segment is segment for e in p.extents
            )
            assert used == segment.allocator.allocated_bytes
            assert used == self.core.pool.lru.evictable_bytes(segment)
            assert set(segment.records) <= set(self.nodes[segment.name].manifest.entries)


def granules(replica: Replica) -> list[int]:
    return [a for e in replica.extents for a in range(e.address, Extent(*e).end, G)]


@pytest.mark.parametrize("seed", range(12))
def test_no_reader_sees_another_objects_bytes(seed: int) -> None:
    print(f"seed {seed}")
    world = World(seed)
    for name in world.nodes:
        world.spawn(world.node_loop(name))
    world.spawn(world.trouble())
    for n in range(5):
        world.spawn(world.writer(f"w{n}"))
        world.spawn(world.reader())
    world.spawn(world.remover())
    world.run(until=120.0)
    assert world.good_reads > 300 and world.writes > 100
    print(world.good_reads, world.discarded_reads, world.writes, world.busy, world.core.pool.evictions)
    # Everybody leaves; leases, graces and holds pass.
    world.queue.clear()
    for node in world.nodes.values():
        node.stalled_until_s = 0.0
    for _ in range(60):
        world.run(world.now + 0.5)
        for node in world.nodes.values():
            world.speak(node)
    world.check_idle()
