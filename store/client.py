"""`StoreClient`: how an inference engine uses the pool. Blocking calls with deadlines, safe from many threads.

Knows: the public contract. Does not know: the steps of a read or a write (batch_get.py, batch_put.py). Paper 4.2; DESIGN.md
section 4: the inference path never depends on the store, so every call ends by its deadline with what was possible, and a
master that does not answer is left alone for a while (StoreUnavailable at once).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from mooncake.common.block_key import pack_keys
from mooncake.common.errors import StoreUnavailable
from mooncake.common.proto import store_pb2 as pb
from store.batch_get import BatchGet
from store.batch_put import BatchPut
from store.breaker import Breaker
from store.client_core import ClientStats, Environment, GetItem, Janitor, PutItem
from store.master_session import Masters, MasterSession
from store.peer_cache import PeerCache
from transfer_engine import TransferEngine

__all__ = ["GetItem", "PutItem", "StoreClient"]


class StoreClient:
    """`masters`: addresses of store masters (one leads), or a function that tells them. `local_segment`: the node to write
    first, e.g. the one on this host. The engine stays the caller's: `close` does not close it, and closing the engine
    first is fine too. All keys are 16 bytes.

    Every call raises StoreUnavailable when no master answers within `deadline_s` (at once while the circuit is open).
    """

    def __init__(
        self,
        engine: TransferEngine,
        masters: Masters,
        *,
        token: str = "",
        name: str = "",
        local_segment: str = "",
        breaker_failures: int = 3,
        breaker_open_s: float = 3.0,
    ) -> None:
        breaker = Breaker(failures=breaker_failures, open_s=breaker_open_s)
        self._env = Environment(
            engine=engine,
            masters=MasterSession(masters, token=token, breaker=breaker),
            peers=PeerCache(engine, token=token),
            janitor=Janitor(name or "client"),
            stats=ClientStats(),
            name=name or engine.instance_id,
            local_segment=local_segment,
        )
        self._closed = False

    # --- looking ---

    def prefix_len(self, keys: Sequence[bytes], deadline_s: float) -> int:
        """How many leading keys are readable now. Pins nothing and counts as no use."""
        return int(self._query(keys, deadline_s).prefix) if keys else 0

    def query(self, keys: Sequence[bytes], deadline_s: float) -> list[int]:
        """Bytes of each object, 0 when it is not readable now. Pins nothing and counts as no use."""
        return list(self._query(keys, deadline_s).lengths) if keys else []

    def replicas(self, keys: Sequence[bytes], deadline_s: float) -> list[list[pb.Replica]]:
        """Where each object lies; empty when it is not readable now. For looking only: nothing holds them there."""
        if not keys:
            return []
        return [list(found.replicas) for found in self._query(keys, deadline_s, want_replicas=True).objects]

    def _query(self, keys: Sequence[bytes], deadline_s: float, want_replicas: bool = False) -> pb.QueryResponse:
        request = pb.QueryRequest(keys=pack_keys(keys), want_replicas=want_replicas)
        answer: pb.QueryResponse = self._call("Query", request, deadline_s)
        return answer

    # --- bytes ---

    def batch_get(self, items: Sequence[GetItem], deadline_s: float) -> list[int]:
        """Reads objects into local registered ranges, all at once. Per item the bytes read, or a negative code: -704 not
        there, -600 lengths differ or memory is not registered, -707 the lease ended first, -712 no replica is left, -800
        the transfer failed, -901 the deadline came first. Ranges of a negative item may hold anything. No byte is written
        into any range after the return."""
        return BatchGet(self._env, items, self._start(deadline_s)).run() if items else []

    def batch_put(self, items: Sequence[PutItem], deadline_s: float, *, replicas: int = 1) -> list[int]:
        """Makes objects of local registered ranges. Per item 0 (visible, was there already, or is just being written by
        another writer) or a negative code: -200 no room, -600 malformed or memory not registered, -800 and -900 a node
        failed, -901 the deadline came first (it may become visible all the same). The ranges are not read after the
        return."""
        return BatchPut(self._env, items, self._start(deadline_s), replicas).run() if items else []

    # --- removing, status ---

    def remove(self, keys: Sequence[bytes], deadline_s: float, *, force: bool = False) -> list[int]:
        """Per key 0, -704 (absent), or -706 (being read, and not `force`)."""
        if not keys:
            return []
        return list(self._call("Remove", pb.RemoveRequest(keys=pack_keys(keys), force=force), deadline_s).codes)

    def remove_all(self, deadline_s: float, *, force: bool = False) -> int:
        """How many objects were removed."""
        return int(self._call("Remove", pb.RemoveRequest(all=True, force=force), deadline_s).removed)

    def status(self, deadline_s: float) -> pb.StoreStatusResponse:
        """Segments and totals, as the master sees them."""
        answer: pb.StoreStatusResponse = self._call("Status", pb.StoreStatusRequest(), deadline_s)
        return answer

    def stats(self) -> dict[str, int]:
        """Counters since the start, and `circuit_open` (0 or 1)."""
        return self._env.stats.snapshot() | {"circuit_open": int(self._env.masters.breaker.is_open)}

    # --- life ---

    def close(self) -> None:
        """Ends within about a second: revokes and leases that are still to be told are told, or left to their leases."""
        if self._closed:
            return
        self._closed = True
        self._env.janitor.close(1.0)
        self._env.masters.close()
        self._env.peers.close()

    def _start(self, deadline_s: float) -> float:
        if self._closed:
            raise StoreUnavailable("this store client is closed")
        return time.monotonic() + deadline_s

    def _call(self, method: str, request: Any, deadline_s: float) -> Any:
        return self._env.masters.call(method, request, self._start(deadline_s))
