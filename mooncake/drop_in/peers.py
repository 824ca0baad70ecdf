"""Open segments by the name that the application uses, kept, checked and bounded.

Knows: which handle belongs to a target, when it must be verified again, and that a peer which did not answer is left alone for
a while. Does not know: transfers. A call never moves to another instance half-way: addresses that the caller got from the
dead one mean nothing in its successor. Between calls a new instance at the same address is simply opened.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator

from mooncake.common.errors import MooncakeError, PeerUnavailable, TransferTimeout
from mooncake.drop_in.names import Names
from transfer_engine import SegmentHandle, TransferEngine

OPEN_TIMEOUT_S = 2.0
VERIFY_AFTER_S = 5.0
"""A connection that was silent for longer is tried by a round trip first: its peer may have been replaced unnoticed."""
CAPACITY = 200
"""Below the engine's own bound on sessions (`EngineConfig.max_peers`)."""
_FIRST_REST_S, _LONGEST_REST_S = 1.0, 30.0


class _Peer:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.handle: SegmentHandle | None = None
        self.verified_at = 0.0
        self.users = 0
        self.replaced: list[SegmentHandle] = []
        """Handles that users may still hold."""
        self.rest_s = _FIRST_REST_S
        self.rest_until = 0.0
        self.problem: MooncakeError | None = None


class Peers:
    """Thread-safe."""

    def __init__(self, engine: TransferEngine, names: Names, capacity: int = CAPACITY) -> None:
        self._engine = engine
        self._names = names
        self._capacity = capacity
        self._lock = threading.Lock()
        self._peers: OrderedDict[str, _Peer] = OrderedDict()

    def __len__(self) -> int:
        return len(self._peers)

    @contextlib.contextmanager
    def use(self, target: str) -> Iterator[SegmentHandle]:
        """The open segment of a target. An error of the peer's inside makes the next use verify it first.
        Raises what opening raises: PeerUnavailable, TransferTimeout, AuthenticationFailed, ValueError."""
        peer = self._enter(target)
        try:
            yield self._segment(target, peer)
        except (PeerUnavailable, TransferTimeout):
            peer.verified_at = 0.0
            raise
        finally:
            self._leave(peer)

    def _enter(self, target: str) -> _Peer:
        with self._lock:
            peer = self._peers.get(target)
            if peer is None:
                self._make_room()
                peer = self._peers[target] = _Peer()
            self._peers.move_to_end(target)
            peer.users += 1
            return peer

    def _leave(self, peer: _Peer) -> None:
        with self._lock:
            peer.users -= 1
            idle, peer.replaced = (peer.replaced, []) if peer.users == 0 else ([], peer.replaced)
        for handle in idle:
            self._engine.close_segment(handle)

    def _make_room(self) -> None:
        """Forget the one that was used longest ago and is not in use now."""
        if len(self._peers) < self._capacity:
            return
        for target, peer in self._peers.items():
            if peer.users == 0:
                del self._peers[target]
                if peer.handle is not None:
                    self._engine.close_segment(peer.handle)
                return

    def _segment(self, target: str, peer: _Peer) -> SegmentHandle:
        with peer.lock:  # threads that come while one opens wait for what it finds
            now = time.monotonic()
            if peer.problem is not None and now < peer.rest_until:
                raise peer.problem
            known = peer.handle
            if known is not None and now - peer.verified_at < VERIFY_AFTER_S and self._engine.segment_is_up(known):
                peer.verified_at = now
                return known
            return self._open(target, peer)

    def _open(self, target: str, peer: _Peer) -> SegmentHandle:
        """Anew, or verified: the old handle stays where the same instance answers."""
        try:
            fresh = self._engine.open_segment(self._names.address_of(target), timeout_s=OPEN_TIMEOUT_S)
        except MooncakeError as error:
            self._replace(peer, None)
            if isinstance(
                error, TransferTimeout
            ):  # the expensive kind: it costs its time once, then nothing for a while
                peer.problem, peer.rest_until = error, time.monotonic() + peer.rest_s
                peer.rest_s = min(2 * peer.rest_s, _LONGEST_REST_S)
            raise
        peer.verified_at = time.monotonic()
        peer.problem, peer.rest_s = None, _FIRST_REST_S
        known, instance = peer.handle, self._engine.segment_instance
        if known is not None and instance(known) == instance(fresh):
            self._engine.close_segment(fresh)
            return known
        self._replace(peer, fresh)
        return fresh

    def _replace(self, peer: _Peer, handle: SegmentHandle | None) -> None:
        with self._lock:  # closed with the last user: another thread may be about to submit with it
            if peer.handle is not None:
                peer.replaced.append(peer.handle)
            peer.handle = handle

    def probe(self, target: str) -> bool:
        """Whether an engine answers there now; if so, its rest is over. Raises ValueError and what the names raise."""
        good = self._engine.send_probe(self._names.address_of(target), timeout_s=OPEN_TIMEOUT_S)
        peer = self._peers.get(target)
        if good and peer is not None:
            peer.problem = None
        return good
