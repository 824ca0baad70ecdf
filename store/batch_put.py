"""One `batch_put`: allocate, announce, write, tell the nodes, make visible.

Knows: the order of a put's steps and what each failure leaves behind. Does not know: channels, how bytes move. Paper 4.2.
No byte is written before the node has heard of it (docs/protocol.md section 6), and none after the call's deadline; what is
unfinished then is revoked in the background, and by its lease should we die.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from mooncake.common.block_key import pack_keys
from mooncake.common.errors import MooncakeError, PeerUnavailable
from mooncake.common.proto import store_pb2 as pb
from store import client_core as c
from store import codes
from store.peer_cache import NodeCall
from store.ranges import length_of
from store.wire import extents_of
from transfer_engine import Opcode, TransferStatus

_STUCK_S = 1.0
_NODE_CALL_S = 3.0
"""A node that does not answer for so long is taken for dead, whatever the deadline."""


@dataclass
class _Node:
    """One node's share of a put."""

    replica: pb.Replica
    items: list[int] = field(default_factory=list)
    objects: list[pb.HeldObject] = field(default_factory=list)
    begun: bool = False
    transfer: c.NodeTransfer | None = None
    done: set[int] = field(default_factory=set)
    quiesced: bool = True


class BatchPut:
    """Use once: `run()`. Raises StoreUnavailable when the master does not answer the allocation."""

    def __init__(self, env: c.Environment, items: Sequence[c.PutItem], deadline: float, replicas: int) -> None:
        self._env = env
        self._items = items
        self._deadline = deadline
        self._copies_wanted = replicas
        self._codes = [codes.INVALID] * len(items)
        self._asked: list[int] = []  # the caller's index of each slot of the master's answer
        self._nodes: dict[str, _Node] = {}
        self._failed: set[str] = set()
        self._dead: set[str] = set()
        self._put_id = 0
        self._group = secrets.randbits(63) | 1

    def run(self) -> list[int]:
        """A code an item: 0 it is visible (or another writer is writing it just now), negative it is not."""
        self._asked = [at for at, item in enumerate(self._items) if c.is_valid(item)]
        if self._asked:
            self._allocate()
        if self._nodes:
            self._announce()
            self._write()
            self._finish()
        self._count()
        return list(self._codes)  # tidying up may still note errors in ours

    def _time_left(self) -> float:
        return self._deadline - time.monotonic()

    # --- the master ---

    def _allocate(self) -> None:
        began = time.monotonic()
        request = pb.PutStartRequest(
            keys=pack_keys([self._items[at].key for at in self._asked]),
            lengths=[length_of(self._items[at].ranges) for at in self._asked],
            writer=self._env.name,
            preferred_segment=self._env.local_segment,
            replicas=self._copies_wanted,
            lease_s=self._time_left() + self._env.lease_margin_s,
        )
        answer: pb.PutStartResponse = self._env.masters.call("PutStart", request, self._deadline)
        self._put_id = answer.put_id
        if answer.put_id:
            self._deadline = min(self._deadline, began + answer.lease_s)
        for at, slot in zip(self._asked, answer.slots, strict=True):
            there = slot.code in (codes.EXISTS, codes.NOT_READY)
            self._codes[at] = codes.OK if there else (slot.code or codes.TRANSFER_FAILED)
            for replica in slot.replicas:
                node = self._nodes.setdefault(replica.instance_id, _Node(replica))
                node.items.append(at)
                node.objects.append(
                    pb.HeldObject(
                        key=self._items[at].key,
                        length=length_of(self._items[at].ranges),
                        extents=replica.extents,
                        version=slot.version,
                    )
                )

    # --- the nodes ---

    def _announce(self) -> None:
        """To all nodes at once."""
        left_s = max(self._time_left(), 0.001)
        calls = []
        for node in self._nodes.values():
            request = pb.BeginPutRequest(
                instance_id=node.replica.instance_id,
                mount=node.replica.mount,
                put_id=self._put_id,
                group=self._group,
                writer_address=self._env.engine.address,
                writer_instance_id=self._env.engine.instance_id,
                lease_s=left_s + self._env.lease_margin_s,
                objects=node.objects,
            )
            calls.append((node, self._ask(node, "BeginPut", request, left_s)))
        for node, call in calls:
            try:
                answer: pb.BeginPutResponse = call.result()
                node.begun = answer.code == codes.OK
            except MooncakeError as error:  # it may have begun there: then its lease ends it. We write nothing.
                self._note(node, error)
            if not node.begun:
                self._failed.add(node.replica.segment)

    def _write(self) -> None:
        try:
            for node in self._nodes.values():
                if node.begun:
                    self._start(node)
        finally:
            for node in self._nodes.values():
                if node.transfer is not None:
                    status = self._wait(node.transfer)
                    node.quiesced = status.quiesced
                    node.done = node.transfer.end(status)
                    self._note(node, status.error)
                    if status.error is not None and self._copies_wanted > 1:
                        self._failed.add(node.replica.segment)  # the other replica may be whole

    def _start(self, node: _Node) -> None:
        try:
            copies = [
                c.copy_of(at, self._items[at].ranges, extents_of(held.extents))
                for at, held in zip(node.items, node.objects, strict=True)
            ]
            handle = self._env.peers.open(node.replica, self._deadline)
            node.transfer = c.NodeTransfer(
                self._env.engine, Opcode.WRITE, handle, copies, deadline=self._deadline, group=self._group
            )
        except MooncakeError as error:
            self._note(node, error)

    def _wait(self, transfer: c.NodeTransfer) -> TransferStatus:
        while True:
            status = transfer.wait(max(self._time_left(), _STUCK_S))
            if status is not None:
                return status
            if self._time_left() <= 0:
                transfer.cancel()

    def _note(self, node: _Node, error: MooncakeError | None) -> None:
        if error is None:
            return
        for at in node.items:
            if at not in node.done:
                self._codes[at] = error.code
        if isinstance(error, PeerUnavailable) and self._time_left() > 0:
            self._dead.add(node.replica.instance_id)
            self._env.peers.mark_dead(node.replica.instance_id)

    def _ask(self, node: _Node, method: str, request: object, left_s: float) -> NodeCall:
        return self._env.peers.ask(node.replica.control_address, method, request, min(left_s, _NODE_CALL_S))

    # --- the end ---

    def _finish(self) -> None:
        """Tells nodes and master. After the deadline the caller does not wait for it."""
        if self._time_left() > 0:
            written = self._tell(max(self._time_left(), 0.001))
            for at, code in written.items():
                self._codes[at] = code
            return
        for at in {at for node in self._nodes.values() for at in node.items}:
            self._codes[at] = codes.TIMED_OUT
        self._env.janitor.later(lambda: self._tell(self._env.cleanup_s))

    def _tell(self, timeout_s: float) -> dict[int, int]:
        """EndPut to the nodes, then PutEnd. Returns the code of every item that a node was to hold."""
        deadline = time.monotonic() + timeout_s
        quiesced = self._end_at_nodes(timeout_s)
        failed = self._failed
        good = [n for n in self._nodes.values() if n.replica.segment not in failed]
        whole = {at for n in good for at in n.done if self._whole(at, good)}
        request = pb.PutEndRequest(
            put_id=self._put_id,
            written=[at in whole for at in self._asked],
            quiesced=quiesced,
            failed_segments=sorted(failed),
            dead_instances=sorted(self._dead),
        )
        landed = {at: self._codes[at] for n in self._nodes.values() for at in n.items}
        try:
            answer: pb.PutEndResponse = self._env.masters.call("PutEnd", request, deadline)
        except MooncakeError as error:
            return landed | dict.fromkeys(whole, error.code)
        return landed | {at: code for at, code in zip(self._asked, answer.codes, strict=True) if at in whole}

    def _whole(self, at: int, good: list[_Node]) -> bool:
        """PutEnd names objects, not replicas: a replica that was only partly written revokes the object."""
        return all(at in node.done for node in good if at in node.items)

    def _end_at_nodes(self, timeout_s: float) -> bool:
        """Whether nothing of this put can be written any more, anywhere."""
        calls, quiesced = [], True
        for node in self._nodes.values():
            if node.replica.instance_id in self._dead:
                self._failed.add(node.replica.segment)
                quiesced &= node.quiesced
            elif node.begun:
                request = pb.EndPutRequest(
                    instance_id=node.replica.instance_id,
                    mount=node.replica.mount,
                    put_id=self._put_id,
                    written=[at in node.done for at in node.items],
                    quiesced=node.quiesced,
                )
                calls.append((node, self._ask(node, "EndPut", request, timeout_s)))
        for node, call in calls:
            try:
                answer: pb.EndPutResponse = call.result()
            except MooncakeError as error:
                self._failed.add(node.replica.segment)
                self._note(node, error)
                quiesced &= node.quiesced
            else:
                quiesced &= answer.quiesced
                if answer.code != codes.OK:
                    self._failed.add(node.replica.segment)
        return quiesced

    def _count(self) -> None:
        stats = self._env.stats
        stats.add("put_objects", self._codes.count(codes.OK))
        stats.add(
            "put_bytes",
            sum(length_of(self._items[at].ranges) for at in {a for n in self._nodes.values() for a in n.done}),
        )
        stats.add("put_no_space", self._codes.count(codes.NO_SPACE))
        stats.add("put_failures", sum(code < 0 for code in self._codes))
        stats.add("dead_nodes_reported", len(self._dead))
