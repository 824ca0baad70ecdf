"""The Conductor's gRPC surface: a thin shell around the core (conductor.proto tells the calls).

Only the leader answers Place, Report and Attach; a standby says UNAVAILABLE and who leads. Calls run one at a time
between two awaits on one event loop, so no two placements see the same picture.
Knows: gRPC, who leads, open streams. Does not know: policy, etcd.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable

import grpc
import grpc.aio
import msgspec

from conductor import wire
from conductor.core import Conductor
from conductor.pool import Pool
from conductor.telemetry import Telemetry
from mooncake.common.clock import Clock
from mooncake.common.ids import InstanceId
from mooncake.common.proto import conductor_pb2 as pb
from mooncake.common.proto import conductor_pb2_grpc

_log = logging.getLogger(__name__)


class ConductorService(conductor_pb2_grpc.ConductorServicer):
    """`leads()` is asked at each call; `leader_address()` is what a standby tells ("" when nobody leads)."""

    def __init__(
        self,
        core: Conductor,
        pool: Pool,
        telemetry: Telemetry,
        clock: Clock,
        *,
        leads: Callable[[], bool],
        leader_address: Callable[[], str],
    ) -> None:
        self._core = core
        self._pool = pool
        self._telemetry = telemetry
        self._clock = clock
        self._leads = leads
        self._leader_address = leader_address
        self._streams: dict[InstanceId, object] = {}  # the newest stream of each worker

    async def Place(self, request: pb.PlaceRequest, context: grpc.aio.ServicerContext) -> pb.PlaceResponse:
        await self._only_leader(context)
        try:
            asked = wire.place_request(request)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        started_s = time.perf_counter()
        pool_tokens = await self._pool.prefix_tokens(asked.block_keys, asked.block_size)
        looked_up_s = time.perf_counter()
        result = self._core.place(msgspec.structs.replace(asked, pool_prefix_tokens=pool_tokens), self._clock.now())
        self._telemetry.placed(looked_up_s - started_s, time.perf_counter() - looked_up_s)
        return wire.place_response(result)

    async def Report(self, request: pb.ReportRequest, context: grpc.aio.ServicerContext) -> pb.ReportResponse:
        await self._only_leader(context)
        self._telemetry.judged(self._core.report(wire.request_events(request), self._clock.now()))
        return pb.ReportResponse()

    async def Attach(
        self, request_iterator: AsyncIterator[pb.WorkerReport], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.WorkerAck]:
        instance_id, stream = InstanceId(""), object()
        try:
            async for message in request_iterator:
                await self._only_leader(context)
                try:
                    report = wire.worker_report(message)
                except ValueError as error:
                    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
                if instance_id and report.instance_id != instance_id:
                    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "one stream speaks for one instance")
                if not instance_id:
                    instance_id = report.instance_id
                    self._streams[instance_id] = stream
                    _log.info("worker attached", extra={"fields": {"worker": report.name, "instance": instance_id}})
                yield wire.worker_ack(self._core.worker_report(report, self._clock.now()))
        finally:
            self._stream_ended(instance_id, stream)

    async def Status(self, request: pb.StatusRequest, context: grpc.aio.ServicerContext) -> pb.StatusResponse:
        return wire.status(self._core, self._clock.now(), leader=self._leads())

    def _stream_ended(self, instance_id: InstanceId, stream: object) -> None:
        """A stream that was replaced by a newer one of the same worker says nothing about the worker."""
        if instance_id and self._streams.get(instance_id) is stream:
            del self._streams[instance_id]
            self._core.stream_broken(instance_id, self._clock.now())
            _log.info("worker's stream ended", extra={"fields": {"instance": instance_id}})

    async def _only_leader(self, context: grpc.aio.ServicerContext) -> None:
        if not self._leads():
            address = self._leader_address()
            text = f"standby: the leader is {address}" if address else "standby: nobody leads at the moment"
            await context.abort(grpc.StatusCode.UNAVAILABLE, text)
