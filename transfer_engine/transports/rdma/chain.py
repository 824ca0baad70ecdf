"""Chains of work requests that are made once and filled again for every post.

Knows: pyverbs' SendWR and SGE, which are slow to make, copy what they are given, and are never freed: so each is made once
and only its fields change. Does not know: queue pairs. One signaled request ends a chain; a completion of it stands for all
(a reliable connection completes in order), and a failure of any is told for that one. Used under one lock.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from transfer_engine.transports.rdma import verbs

TAIL = 1
"""Bit of a work request's id: the last of its chain."""


class Piece(NamedTuple):
    """One contiguous part: ours, the peer's, and the keys of both."""

    local: int
    lkey: int
    remote: int
    rkey: int
    length: int


class Chain:
    """Up to `size` requests of one direction. Linked once, first to last; a shorter chain begins later."""

    def __init__(self, opcode: int, size: int) -> None:
        api = verbs.load()
        self.size = size
        self._nodes: list[Any] = []
        self._parts: list[Any] = []
        following = None
        for _ in range(size):  # a chain is linked from its end
            flags = 0 if following is not None else api.e.IBV_SEND_SIGNALED
            part = api.SGE(0, 0, 0)
            node = api.SendWR(
                opcode=opcode, num_sge=1, sg=[api.SGE(0, 0, 0)], send_flags=flags, next_wr=following
            )  # fmt: skip
            node.sg_list = part  # from now on it reads our part, not the copy
            self._nodes.append(node)
            self._parts.append(part)
            following = node
        self._nodes.reverse()
        self._parts.reverse()

    def fill(self, ticket: int, pieces: Iterable[Piece], count: int) -> Any:
        """Load `count` pieces; returns the request to post. Good until the next `fill`."""
        at = first = self.size - count
        tag = ticket << 1
        nodes, parts = self._nodes, self._parts
        for local, lkey, remote, rkey, length in pieces:
            part, node = parts[at], nodes[at]
            part.addr = local
            part.lkey = lkey
            part.length = length
            node.wr_id = tag
            node.set_wr_rdma(rkey, remote)
            at += 1
        nodes[-1].wr_id = tag | TAIL
        return nodes[first]


class Probe:
    """A WRITE of no bytes: travels to the peer's NIC and is acknowledged, touches no memory, needs no key (IB spec C9-88)."""

    def __init__(self) -> None:
        api = verbs.load()
        self._node = api.SendWR(
            opcode=api.e.IBV_WR_RDMA_WRITE, num_sge=1, sg=[api.SGE(0, 0, 0)], send_flags=api.e.IBV_SEND_SIGNALED
        )
        self._node.num_sge = 0
        self._node.set_wr_rdma(0, 0)

    def fill(self, ticket: int) -> Any:
        self._node.wr_id = ticket << 1 | TAIL
        return self._node
