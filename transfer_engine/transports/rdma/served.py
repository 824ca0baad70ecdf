"""Target side: queue pairs through which peers reach our memory.

Knows: making one for an offer, bounding them, ending them. Does not know: what is done through them (nobody here does: they are
one-sided). Ending one is what makes a fence true: after `stop`, the NIC places nothing more of it.
"""

from __future__ import annotations

import threading

from mooncake.common.errors import Overloaded, ProtocolViolation
from transfer_engine.config import EngineConfig
from transfer_engine.protocol import EndpointOffer
from transfer_engine.segment import PeerRecord
from transfer_engine.transports.base import Stats
from transfer_engine.transports.rdma.nic import Nic
from transfer_engine.transports.rdma.queue_pair import QueuePair

ACCEPTED_PER_OPENED = 4
"""We accept so many times the endpoints that we open: every peer may come over every NIC."""
_SEND_DEPTH = 1


class ServedEndpoint:
    """`record.streams` holds it until it has ended."""

    one_sided = True

    def __init__(self, owner: ServedEndpoints, record: PeerRecord, stream_id: str, pair: QueuePair) -> None:
        self._owner, self._record, self._stream_id, self._pair = owner, record, stream_id, pair
        self._lock = threading.Lock()

    def stop(self, timeout_s: float) -> bool:
        """Destroying it is all there is to do, and takes no time; `timeout_s` is not needed."""
        with self._lock:
            self._pair.close()
        self._record.streams.pop(self._stream_id, None)
        self._owner.ended(self)
        return True


class ServedEndpoints:
    """Thread-safe."""

    def __init__(self, config: EngineConfig, counters: Stats, nics: list[Nic]) -> None:
        self._config, self._counters, self._nics = config, counters, nics
        self._capacity = ACCEPTED_PER_OPENED * config.rdma_max_endpoints
        self._lock = threading.Lock()
        self._served: set[ServedEndpoint] = set()
        self._closed = False

    def __len__(self) -> int:
        return len(self._served)

    def accept(self, record: PeerRecord, offer: EndpointOffer) -> EndpointOffer:
        """Raises ProtocolViolation, Overloaded, TransferError."""
        if not 0 <= offer.peer_nic < len(self._nics):
            raise ProtocolViolation(f"no NIC {offer.peer_nic} here")
        if not offer.stream_id or offer.stream_id in record.streams:
            raise ProtocolViolation("that stream id is taken")
        if self._closed or len(self._served) >= self._capacity:
            raise Overloaded(f"{self._capacity} endpoints are open here; rdma_max_endpoints sets it")
        nic = self._nics[offer.peer_nic]
        pair = QueuePair(nic.device, self._config, _SEND_DEPTH)
        try:
            pair.connect(offer)
        except BaseException:
            pair.close()
            raise
        served = ServedEndpoint(self, record, offer.stream_id, pair)
        with self._lock:
            self._served.add(served)
        record.streams[offer.stream_id] = served
        self._counters.add(rdma_accepts=1)
        if self._closed:  # it closed meanwhile
            served.stop(0.0)
        return pair.offer(offer.stream_id, offer.peer_nic, offer.nic)

    def ended(self, served: ServedEndpoint) -> None:
        with self._lock:
            self._served.discard(served)

    def close(self) -> None:
        self._closed = True
        with self._lock:
            served = list(self._served)
        for endpoint in served:
            endpoint.stop(0.0)
