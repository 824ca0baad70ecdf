"""One `batch_get`: find, read everything at once, and say which bytes may be trusted.

Knows: leases, replicas, dead nodes, the caller's deadline. Does not know: gRPC channels, how bytes move. Paper 4.2.
A lease counts from before it was asked for; what arrives after its end is discarded, however right it may be.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from mooncake.common.block_key import pack_keys
from mooncake.common.errors import MooncakeError, NotRegistered, PeerUnavailable, TransferError
from mooncake.common.proto import store_pb2 as pb
from store import client_core as c
from store import codes
from store.ranges import length_of
from store.wire import extents_of
from transfer_engine import Opcode, TransferStatus

_STUCK_S = 1.0


class BatchGet:
    """Use once: `run()`. Raises StoreUnavailable when the master does not answer the look-up."""

    def __init__(self, env: c.Environment, items: Sequence[c.GetItem], deadline: float) -> None:
        self._env = env
        self._items = items
        self._deadline = deadline
        self._codes = [codes.NOT_FOUND] * len(items)
        self._replicas: dict[int, list[pb.Replica]] = {}  # what is still to be read, and where it could be
        self._dead: set[str] = set()
        self._lease_id = 0
        self._lease_ends = 0.0
        self._lease_s = 0.0

    def run(self) -> list[int]:
        """Bytes read or a negative code, one an item. No byte is written into the items' ranges afterwards."""
        wanted = [at for at, item in enumerate(self._items) if c.is_valid(item)]
        for at in set(range(len(self._items))) - set(wanted):
            self._codes[at] = codes.INVALID
        if not wanted:
            return self._codes
        self._look_up(wanted)
        try:
            while self._replicas and self._lease_left() > 0 and self._time_left() > 0:
                self._round()
        finally:
            self._give_back()
        late = codes.LEASE_EXPIRED if self._lease_left() <= 0 else codes.TIMED_OUT
        for at in self._replicas:
            self._codes[at] = late
        self._count()
        return self._codes

    def _time_left(self) -> float:
        return self._deadline - time.monotonic()

    def _lease_left(self) -> float:
        return self._lease_ends - time.monotonic()

    def _look_up(self, wanted: list[int]) -> None:
        began = time.monotonic()
        request = pb.GetStartRequest(
            keys=pack_keys([self._items[at].key for at in wanted]),
            reader=self._env.name,
            lease_s=self._time_left() + self._env.lease_margin_s,
        )
        answer: pb.GetStartResponse = self._env.masters.call("GetStart", request, self._deadline)
        self._lease_id, self._lease_s = answer.lease_id, answer.lease_s
        self._lease_ends = began + answer.lease_s
        for at, found in zip(wanted, answer.objects, strict=True):
            if not found.found:
                continue
            if found.length != length_of(self._items[at].ranges):
                self._codes[at] = codes.INVALID
            else:
                self._replicas[at] = self._preferred_first(self._items[at].key, list(found.replicas))

    def _preferred_first(self, key: bytes, replicas: list[pb.Replica]) -> list[pb.Replica]:
        """The local node, else an order that spreads objects over their nodes."""
        turn = key[-1] % len(replicas)
        turned = replicas[turn:] + replicas[:turn]
        return sorted(turned, key=lambda replica: replica.segment != self._env.local_segment)

    def _round(self) -> None:
        """Reads everything that is left, each object from its first replica; what fails goes to its next one."""
        transfers: list[tuple[str, list[int], c.NodeTransfer]] = []
        try:
            for instance_id, at_node in self._by_node().items():
                transfer = self._start(at_node)
                if transfer is not None:
                    transfers.append((instance_id, at_node, transfer))
        finally:
            ended = [(node, items, transfer, self._wait(transfer)) for node, items, transfer in transfers]
        in_time = self._lease_left() > 0
        for instance_id, at_node, transfer, status in ended:
            done = transfer.end(status)
            for at in done:
                self._codes[at] = length_of(self._items[at].ranges) if in_time else codes.LEASE_EXPIRED
                del self._replicas[at]
            failed = [at for at in at_node if at not in done]
            if failed and self._time_left() > 0 and self._lease_left() > 0:
                self._next_replica(failed, status.error, instance_id)

    def _by_node(self) -> dict[str, list[int]]:
        nodes: dict[str, list[int]] = {}
        for at, replicas in self._replicas.items():
            nodes.setdefault(replicas[0].instance_id, []).append(at)
        return nodes

    def _start(self, at_node: list[int]) -> c.NodeTransfer | None:
        replica = self._replicas[at_node[0]][0]
        copies = [c.copy_of(at, self._items[at].ranges, extents_of(self._replicas[at][0].extents)) for at in at_node]
        try:
            handle = self._env.peers.open(replica, self._deadline)
            return c.NodeTransfer(self._env.engine, Opcode.READ, handle, copies, deadline=self._deadline)
        except NotRegistered:  # local: the caller's own ranges
            for at in at_node:
                self._codes[at] = codes.INVALID
                del self._replicas[at]
        except MooncakeError as error:
            self._next_replica(at_node, error, replica.instance_id)
        return None

    def _wait(self, transfer: c.NodeTransfer) -> TransferStatus:
        """Until it is over; renews the lease meanwhile. After the deadline the engine stops it, which takes a moment."""
        while True:
            renew_in = self._lease_left() - self._lease_s / 2
            status = transfer.wait(min(renew_in if renew_in > 0 else _STUCK_S, max(self._time_left(), _STUCK_S)))
            if status is not None:
                return status
            if self._time_left() <= 0 or self._lease_left() <= 0 or not self._renew():
                transfer.cancel()

    def _renew(self) -> bool:
        """False when there is no lease any more. When the master does not answer, the present one still counts."""
        if self._lease_left() > self._lease_s / 2 or self._lease_ends > self._deadline:
            return True
        began = time.monotonic()
        request = pb.RenewLeaseRequest(lease_id=self._lease_id, lease_s=self._lease_s)
        timeout_s = min(self._env.cleanup_s, max(self._lease_left() / 2, 0.01))
        try:
            answer: pb.RenewLeaseResponse = self._env.masters.call("RenewLease", request, began + timeout_s)
        except MooncakeError:
            return True
        self._lease_ends = began + answer.lease_s if answer.lease_s else 0.0
        return answer.lease_s > 0

    def _next_replica(self, failed: list[int], error: MooncakeError | None, instance_id: str) -> None:
        if isinstance(error, PeerUnavailable):
            self._dead.add(instance_id)
            self._env.peers.mark_dead(instance_id)
        code = error.code if isinstance(error, TransferError) else codes.TRANSFER_FAILED
        for at in failed:
            left = [r for r in self._replicas[at][1:] if r.instance_id not in self._dead]
            if left:
                self._replicas[at] = left
            else:
                self._codes[at] = codes.REPLICA_GONE if isinstance(error, PeerUnavailable) else code
                del self._replicas[at]

    def _give_back(self) -> None:
        if not self._lease_id:
            return
        request = pb.GetEndRequest(lease_id=self._lease_id, dead_instances=sorted(self._dead))
        env = self._env

        def end() -> None:
            env.masters.call("GetEnd", request, time.monotonic() + env.cleanup_s)

        if self._dead:  # the next look-up should not find them again
            try:
                env.masters.call("GetEnd", request, time.monotonic() + min(env.cleanup_s, max(self._time_left(), 0.05)))
            except MooncakeError:
                env.janitor.later(end)
        else:
            env.janitor.later(end)

    def _count(self) -> None:
        stats = self._env.stats
        got = [code for code in self._codes if code > 0]
        stats.add("get_objects", len(got))
        stats.add("get_bytes", sum(got))
        stats.add("get_misses", self._codes.count(codes.NOT_FOUND))
        stats.add("get_failures", len(self._codes) - len(got) - self._codes.count(codes.NOT_FOUND))
        stats.add("get_lease_expired", self._codes.count(codes.LEASE_EXPIRED))
        stats.add("dead_nodes_reported", len(self._dead))
