"""Other workers' transfer engines: opening them once and sending them messages.

Knows: addresses and instance ids, and how many handles to keep. Does not know: what is said. Blocks: call it from pool threads
only.
"""

from __future__ import annotations

import collections
import threading

from mooncake.common.errors import PeerUnavailable
from mooncake.vllm.stream_protocol import Message, encode
from transfer_engine.engine import TransferEngine
from transfer_engine.types import SegmentHandle

_MAX_PEERS = 256
_OPEN_TIMEOUT_S = 3.0


class Peers:
    """Thread-safe."""

    def __init__(self, engine: TransferEngine) -> None:
        self._engine = engine
        self._segments: collections.OrderedDict[tuple[str, str], SegmentHandle] = collections.OrderedDict()
        self._lock = threading.Lock()

    def segment(self, address: str, instance_id: str, timeout_s: float = _OPEN_TIMEOUT_S) -> SegmentHandle:
        """The open segment of that very instance. Raises PeerUnavailable, TransferTimeout, AuthenticationFailed…"""
        key = (address, instance_id)
        with self._lock:
            if (handle := self._segments.get(key)) is not None:
                self._segments.move_to_end(key)
                return handle
        handle = self._engine.open_segment(address, instance_id=instance_id, timeout_s=timeout_s)
        with self._lock:
            self._segments[key] = handle
            # Evicted handles are not closed: a write may be using one. The engine bounds what idles.
            while len(self._segments) > _MAX_PEERS:
                self._segments.popitem(last=False)
        return handle

    def send(self, address: str, instance_id: str, message: Message, timeout_s: float) -> None:
        """Returns when the message is in the peer's queue. Raises PeerUnavailable, TransferTimeout, Overloaded…"""
        segment = self.segment(address, instance_id, timeout_s)
        try:
            self._engine.send_notify(segment, encode(message), deadline_s=timeout_s)
        except PeerUnavailable:
            self.forget(address, instance_id)
            raise

    def forget(self, address: str, instance_id: str) -> None:
        """The next use opens it again."""
        with self._lock:
            self._segments.pop((address, instance_id), None)
