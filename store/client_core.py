"""What batch_get and batch_put share: items, counters, the environment of one client, and transfers that surely stop.

Knows: the transfer engine. Does not know: how objects are found or announced (batch_get.py, batch_put.py).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

from mooncake.common.block_key import KEY_BYTES
from store.extents import Extent
from store.master_session import MasterSession
from store.peer_cache import PeerCache
from store.ranges import Pieces, Range, length_of, zip_ranges
from transfer_engine import (
    BatchId,
    Opcode,
    SegmentHandle,
    TransferEngine,
    TransferState,
    TransferStatus,
    TransferVector,
)

SAVE_PRIORITY = -1
"""Saves are background work: what a request waits for (streams, loads) overtakes them between two slices."""


class GetItem(NamedTuple):
    """Read the object `key` into these local registered ranges, in order. Their lengths add up to the object's."""

    key: bytes
    ranges: Sequence[Range]


class PutItem(NamedTuple):
    """Make an object `key` of the bytes in these local registered ranges, in order."""

    key: bytes
    ranges: Sequence[Range]


def is_valid(item: GetItem | PutItem) -> bool:
    lengths = [length for _, length in item.ranges]
    return len(item.key) == KEY_BYTES and bool(lengths) and min(lengths) >= 0 and length_of(item.ranges) > 0


@dataclass
class ClientStats:
    """Monotonic counters."""

    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    values: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, by: int = 1) -> None:
        with self.lock:
            self.values[name] = self.values.get(name, 0) + by

    def snapshot(self) -> dict[str, int]:
        with self.lock:
            return dict(self.values)


class Janitor:
    """Runs what a caller need not wait for, on one thread, with a bounded backlog. What is refused ends by its lease."""

    def __init__(self, name: str, backlog: int = 256) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=f"store-{name}")
        self._room = threading.Semaphore(backlog)

    def later(self, action: Callable[[], object]) -> bool:
        if not self._room.acquire(blocking=False):
            return False
        try:
            self._pool.submit(action).add_done_callback(lambda _: self._room.release())
        except RuntimeError:  # closed
            return False
        return True

    def close(self, timeout_s: float) -> None:
        over = threading.Event()
        self.later(over.set)
        over.wait(timeout_s)
        self._pool.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True, slots=True)
class Environment:
    """Everything an operation works with."""

    engine: TransferEngine
    masters: MasterSession
    peers: PeerCache
    janitor: Janitor
    stats: ClientStats
    name: str
    local_segment: str
    lease_margin_s: float = 1.0
    cleanup_s: float = 2.0
    """Longest call that only tidies up."""


class Copy(NamedTuple):
    """One object's pieces to or from one node; `item` is the caller's index."""

    item: int
    pieces: Pieces


def copy_of(item: int, ranges: Sequence[Range], extents: Sequence[Extent] | Sequence[Range]) -> Copy:
    return Copy(item, zip_ranges(ranges, [(e[0], e[1]) for e in extents]))


class NodeTransfer:
    """All copies of one call to or from one node, as one batch of the engine.

    Local memory is quiet once `wait` has returned. Raises from the engine at start (NotRegistered, InvalidHandle...).
    """

    def __init__(
        self, engine: TransferEngine, opcode: Opcode, handle: SegmentHandle, copies: Sequence[Copy], *,
        deadline: float, group: int = 0,
    ) -> None:  # fmt: skip
        self._engine = engine
        self._copies = copies
        local = [at for copy in copies for at in copy.pieces.local]
        remote = [at for copy in copies for at in copy.pieces.remote]
        length = [at for copy in copies for at in copy.pieces.length]
        left_s = min(max(deadline - time.monotonic(), 0.001), engine.config.max_deadline_s)
        self._batch: BatchId = engine.allocate_batch_id(len(length))
        try:
            vector = TransferVector(opcode, handle, local, remote, length)
            priority = SAVE_PRIORITY if opcode is Opcode.WRITE else 0
            engine.submit_transfer(self._batch, vector, deadline_s=left_s, group=group, priority=priority)
        except BaseException:
            engine.free_batch_id(self._batch)
            raise

    def wait(self, timeout_s: float) -> TransferStatus | None:
        """None while it runs."""
        status = self._engine.wait(self._batch, max(0.0, timeout_s))
        return status if status.state.terminal else None

    def cancel(self) -> None:
        self._engine.cancel(self._batch)

    def end(self, status: TransferStatus) -> set[int]:
        """The items that were copied whole; frees the batch."""
        try:
            if status.ok:
                return {copy.item for copy in self._copies}
            return set(self._complete())
        finally:
            self._engine.free_batch_id(self._batch)

    def _complete(self) -> list[int]:
        done, at = [], 0
        for copy in self._copies:
            rows = range(at, at + len(copy.pieces.length))
            at = rows.stop
            states = (self._engine.get_transfer_status(self._batch, row).state for row in rows)
            if all(state is TransferState.COMPLETED for state in states):
                done.append(copy.item)
        return done
