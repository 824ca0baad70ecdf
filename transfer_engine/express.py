"""One small request that its caller waits for: a copy or a round trip on the caller's thread, without a submission.

Knows: when that is the same as the long way, only shorter: one request without group or notification, to a peer whose memory
this process reaches by itself, or that nothing but tcp reaches while nothing queues for it. Does not know: frames, what a lost
connection means (tcp). Whatever is unusual is left to the long way, which also finds the words for what is wrong.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

from mooncake.common.errors import MooncakeError
from transfer_engine.device.staging import DeviceMemory
from transfer_engine.handles import HandleTable
from transfer_engine.memory import RegionTable
from transfer_engine.router import Router
from transfer_engine.segment import Session
from transfer_engine.transports.base import Stats
from transfer_engine.transports.copying import CopyTransport
from transfer_engine.types import Opcode, SegmentHandle, TransferRequest, TransferStatus, TransferVector

_MAX_BYTES = 64 << 10

Single = tuple[Opcode, int, SegmentHandle, int, int]


class Express:
    def __init__(
        self,
        segments: HandleTable[Session],
        memory: RegionTable,
        devices: DeviceMemory,
        router: Router,
        counters: Stats,
    ) -> None:
        self._segments = segments
        self._memory = memory
        self._devices = devices
        self._router = router
        self._counters = counters

    def move(self, requests: Sequence[TransferRequest] | TransferVector, deadline: float) -> TransferStatus | None:
        """The status of success, or None: take the long way (from the start). Raises what made it fail, and InvalidHandle."""
        request = _single(requests) if not self._devices.active else None
        if request is None:
            return None
        opcode, source, target, offset, length = request
        session = self._segments.get(target)
        way = self._router.short_way(session)
        if way is None or session.down is not None or (isinstance(way, CopyTransport) and not session.lists_regions):
            return None
        region = self._memory.hold_one(source, length)
        if region is None:
            return None
        try:
            return way.exchange(session, opcode, source, offset, length, deadline)
        except MooncakeError:
            self._counters.add(transfers_failed=1, transfer_requests=1)
            raise
        finally:
            self._memory.release_one(region)


def _single(requests: Sequence[TransferRequest] | TransferVector) -> Single | None:
    """The only request, if it is small and well formed."""
    try:
        if isinstance(requests, TransferVector):
            opcode, target, sources, offsets, lengths = requests
            (source,), (offset,), (length,) = sources, offsets, lengths
        else:
            ((opcode, source, target, offset, length),) = requests
        source, offset, length = operator.index(source), operator.index(offset), operator.index(length)
    except (TypeError, ValueError):
        return None
    good = type(opcode) is Opcode and 0 < length <= _MAX_BYTES and source > 0 and 0 <= offset < (1 << 64) - length
    return (opcode, source, target, offset, length) if good else None
