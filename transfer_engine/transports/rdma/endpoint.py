"""Our end of one queue pair: what is out on it, and the life it leads.

Knows: states, tickets (one per posted chain), when everything posted has come back. Does not know: which slice should go
where, the control link. All methods are called under the transport's lock, but `create` and `connect`.

    CONNECTING -> PROBING -> READY -> DYING -> GONE         any state may go to DYING, which waits for the flushed requests
"""

from __future__ import annotations

import enum
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mooncake.common.errors import MooncakeError, TransferError
from transfer_engine.config import EngineConfig
from transfer_engine.lanes import Slice
from transfer_engine.link import Link
from transfer_engine.memory import Hold
from transfer_engine.protocol import EndpointOffer
from transfer_engine.segment import Session
from transfer_engine.transports.rdma.chain import Piece
from transfer_engine.transports.rdma.nic import CHAIN, Nic
from transfer_engine.transports.rdma.path import Path
from transfer_engine.transports.rdma.queue_pair import QueuePair
from transfer_engine.types import Opcode


class EndpointState(enum.Enum):
    CONNECTING = "connecting"
    PROBING = "probing"
    READY = "ready"
    DYING = "dying"
    GONE = "gone"


@dataclass(slots=True, eq=False)
class Posted:
    """A chain that is out. `piece` None: a probe."""

    piece: Slice | None
    hold: Hold | None
    requests: int
    n_bytes: int
    began: float
    tail_seen: bool = False
    finished: bool = False


@dataclass(slots=True, eq=False)
class Endpoint:
    """`due` is when the present state must be over; `innocent` slices do not pay an attempt for its end; `link` is the control
    connection that it was asked for over, with which the target ends its side."""

    nic: Nic
    session: Session
    path: Path
    stream_id: str
    due: float
    link: Link | None = None
    state: EndpointState = EndpointState.CONNECTING
    pair: QueuePair | None = None
    out: dict[int, Posted] = field(default_factory=dict)
    requests: int = 0
    outstanding_bytes: int = 0
    moved_at: float = 0.0
    error: MooncakeError | None = None
    innocent: bool = False
    culprit: Posted | None = None

    @property
    def key(self) -> tuple[str, int, int]:
        return self.session.instance_id, self.path.local, self.path.remote

    @property
    def busy(self) -> bool:
        """Must not be evicted: on its way in or out, or carrying slices."""
        return bool(self.out) or self.state is not EndpointState.READY

    @property
    def cut_off(self) -> bool:
        """Whether the target ended its side because the control connection broke: that says nothing of the path."""
        return self.link is not None and self.link.broken and self.session.down is None

    def room(self, config: EngineConfig, depth: int) -> bool:
        """Whether one more chain fits. Half of the completion queue is left to what dead queue pairs leave behind."""
        return (
            self.requests + CHAIN <= depth
            and self.outstanding_bytes < config.rdma_window_bytes
            and self.nic.posted + CHAIN <= self.nic.device.depth // 2
        )

    # --- on the NIC's thread, without the lock ----------------------------------------------------------------------

    def create(self, config: EngineConfig, depth: int) -> EndpointOffer:
        """Raises TransferError."""
        self.nic.device.renew_gid()
        self.pair = QueuePair(self.nic.device, config, depth)
        return self.pair.offer(self.stream_id, self.nic.index, self.path.remote)

    # --- under the lock ---------------------------------------------------------------------------------------------

    def send_probe(self) -> None:
        """Raises TransferError."""
        self.state = EndpointState.PROBING
        self._post(self.nic.probe, None, Posted(None, None, 1, 0, time.perf_counter()))

    def send(self, piece: Slice, pieces: Sequence[Piece], hold: Hold) -> None:
        """Post a slice as one chain. Raises TransferError: part of it may be out then, so the endpoint must go."""
        posted = Posted(piece, hold, len(pieces), piece.n_bytes, time.perf_counter())
        self._post(self.nic.chains[piece.job.opcode], pieces, posted)

    def _post(self, chain: Any, pieces: Sequence[Piece] | None, posted: Posted) -> None:
        nic, ticket = self.nic, next(self.nic.tickets)
        if not self.out:
            self.moved_at = time.monotonic()
        self.out[ticket] = posted
        nic.owners[ticket] = self
        self.requests += posted.requests
        self.outstanding_bytes += posted.n_bytes
        nic.posted += posted.requests
        nic.outstanding_bytes += posted.n_bytes
        if self.pair is None:
            raise TransferError("no queue pair")
        if nic.dozing:
            nic.wake()
        self.pair.post(chain.fill(ticket) if pieces is None else chain.fill(ticket, pieces, len(pieces)))

    def take_back(self, ticket: int) -> Posted:
        """A chain came back, one way or the other."""
        nic, posted = self.nic, self.out.pop(ticket)
        del nic.owners[ticket]
        self.requests -= posted.requests
        self.outstanding_bytes -= posted.n_bytes
        nic.posted -= posted.requests
        nic.outstanding_bytes -= posted.n_bytes
        self.moved_at = time.monotonic()
        return posted

    @property
    def flushed(self) -> bool:
        return all(posted.tail_seen for posted in self.out.values())

    def overdue(self, now: float, stall_timeout_s: float, grace_s: float) -> tuple[MooncakeError, bool] | None:
        """Why it must end now, if it must, and whether its path is to blame."""
        if self.state in (EndpointState.CONNECTING, EndpointState.PROBING):
            return (TransferError("no connection in time"), True) if now >= self.due else None
        if self.state is not EndpointState.READY or not self.out:
            return None
        if now - self.moved_at > stall_timeout_s:
            return TransferError(f"nothing completed for {stall_timeout_s} s"), True
        for posted in self.out.values():
            if posted.piece is not None and posted.piece.job.submission.stop_at + grace_s <= now:
                return TransferError("given up"), False
        return None

    def lost(self) -> list[Posted]:
        """Take back everything that is out; the queue pair must be gone."""
        return [self.take_back(ticket) for ticket in list(self.out)]

    def wrote(self) -> bool:
        return any(p.piece is not None and p.piece.job.opcode is Opcode.WRITE for p in self.out.values())
