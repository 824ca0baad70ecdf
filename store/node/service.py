"""gRPC of a node: writers announce what they will write and tell what they have written.

Knows: manifest and fences. Does not know: masters, bytes. The manifest is only touched on the event loop; fences block and
run in threads.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc.aio

from mooncake.common.proto import store_pb2 as pb
from mooncake.common.proto import store_pb2_grpc
from store import wire
from store.node.manifest import BROKEN, BUSY, OK, REFUSED, OpenPut
from store.node.metrics import NodeMetrics
from store.node.segment import NodeSegment

_REASONS = {
    OK: "",
    REFUSED: "it rests on an older report of this node",
    BUSY: "an older writer of this memory cannot be proven gone",
    BROKEN: "extents out of this segment, or that do not add up",
}
_Context = grpc.aio.ServicerContext[Any, Any]


class NodeService(store_pb2_grpc.StoreNodeServicer):
    """See docs/protocol.md section 6."""

    def __init__(self, segment: NodeSegment, metrics: NodeMetrics) -> None:
        self._segment = segment
        self._metrics = metrics

    async def BeginPut(self, request: pb.BeginPutRequest, context: _Context) -> pb.BeginPutResponse:
        code = await self._begin(request)
        self._metrics.begins.labels(str(code)).inc()
        return pb.BeginPutResponse(code=code, reason=_REASONS.get(code, "too many unfinished writes"))

    async def _begin(self, request: pb.BeginPutRequest) -> int:
        if request.instance_id != self._segment.instance_id or not request.group:
            return REFUSED
        put = OpenPut(
            put_id=request.put_id,
            group=request.group,
            writer_address=request.writer_address,
            writer_instance_id=request.writer_instance_id,
            objects=tuple(wire.entry_of(held) for held in request.objects),
            ends_s=time.monotonic() + request.lease_s,
        )
        manifest = self._segment.manifest
        while True:
            code, older = manifest.begin(time.monotonic(), request.mount, put)
            if code != BUSY:
                return code
            proven = await asyncio.gather(*(self._fence(other) for other in older))
            for other, gone in zip(older, proven, strict=True):
                if gone:
                    manifest.forget_open(other.put_id)
            if not all(proven):
                return BUSY

    async def EndPut(self, request: pb.EndPutRequest, context: _Context) -> pb.EndPutResponse:
        manifest = self._segment.manifest
        put = manifest.open_puts.get(request.put_id)
        if request.instance_id != self._segment.instance_id or put is None:
            return pb.EndPutResponse(code=REFUSED, quiesced=request.quiesced)
        quiesced = request.quiesced or await self._fence(put)
        code = manifest.end(request.mount, request.put_id, list(request.written), quiesced=quiesced)
        self._metrics.ends.labels(str(code)).inc()
        return pb.EndPutResponse(code=code, quiesced=quiesced)

    async def _fence(self, put: OpenPut) -> bool:
        gone = await asyncio.to_thread(self._segment.fence, put)
        self._metrics.fences.labels("proven" if gone else "open").inc()
        return gone
