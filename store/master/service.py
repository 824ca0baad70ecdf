"""gRPC in front of the core: decodes, calls with the time of now, encodes.

Knows: protobuf, one core while this master leads. Does not know: any rule of the store, etcd. A master that does not lead
answers UNAVAILABLE, so that a client tries the next address.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc.aio
from prometheus_client import CollectorRegistry

from mooncake.common.errors import MooncakeError, StoreUnavailable
from mooncake.common.proto import store_pb2 as pb
from mooncake.common.proto import store_pb2_grpc
from mooncake.common.rpc import abort_with
from store import codes, wire
from store.master import messages as m
from store.master.core import MasterCore
from store.master.metrics import MasterMetrics

T = TypeVar("T")
Handler = Callable[["MasterService", MasterCore, Any], Any]


def _call(name: str) -> Callable[[Handler], Callable[[MasterService, Any, Any], Awaitable[Any]]]:
    """Counts and times a call, and turns our errors into statuses."""

    def wrap(handler: Handler) -> Callable[[MasterService, Any, Any], Awaitable[Any]]:
        async def serve(self: MasterService, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            began = time.perf_counter()
            self.metrics.requests.labels(name).inc()
            try:
                if self.core is None:
                    raise StoreUnavailable("this store master does not lead")
                return handler(self, self.core, request)
            except MooncakeError as error:
                self.metrics.failures.labels(name).inc()
                await abort_with(context, error)
            finally:
                self.metrics.seconds.labels(name).observe(time.perf_counter() - began)

        return serve

    return wrap


class MasterService(store_pb2_grpc.StoreMasterServicer):
    """`core` is None while this master does not lead."""

    def __init__(self, settings: m.Settings, registry: CollectorRegistry) -> None:
        self._settings = settings
        self.core: MasterCore | None = None
        self.metrics = MasterMetrics(registry, lambda: self.core)

    def lead(self, epoch: int) -> None:
        """Begins with nothing: nodes report what they hold."""
        self.core = MasterCore(self._settings, epoch)

    def step_down(self) -> None:
        self.core = None

    def tick(self) -> None:
        if self.core is not None:
            self.core.tick(time.monotonic())

    # --- nodes ---

    @_call("mount_segment")
    def MountSegment(self, core: MasterCore, request: pb.MountRequest) -> pb.MountResponse:
        complete = core.mount(time.monotonic(), wire.report_of(request))
        return pb.MountResponse(master_epoch=core.epoch, restart=not complete)

    @_call("heartbeat")
    def Heartbeat(self, core: MasterCore, request: pb.HeartbeatRequest) -> pb.HeartbeatResponse:
        answer = core.heartbeat(
            time.monotonic(), request.segment, request.instance_id, request.mount, request.dropped_ack
        )
        return pb.HeartbeatResponse(
            remount=answer.remount,
            master_epoch=core.epoch,
            dropped=answer.dropped,
            removed=answer.removed,
            dropped_seq=answer.dropped_seq,
        )

    @_call("unmount_segment")
    def UnmountSegment(self, core: MasterCore, request: pb.UnmountRequest) -> pb.UnmountResponse:
        core.unmount(time.monotonic(), request.segment, request.instance_id)
        return pb.UnmountResponse()

    # --- readers ---

    @_call("query")
    def Query(self, core: MasterCore, request: pb.QueryRequest) -> pb.QueryResponse:
        found = core.query(time.monotonic(), wire.keys_of(request.keys))
        prefix = next((at for at, item in enumerate(found) if item is None), len(found))
        objects = [wire.pb_found(item) for item in found] if request.want_replicas else []
        return pb.QueryResponse(lengths=[item.length if item else 0 for item in found], prefix=prefix, objects=objects)

    @_call("get_start")
    def GetStart(self, core: MasterCore, request: pb.GetStartRequest) -> pb.GetStartResponse:
        granted = core.get_start(time.monotonic(), wire.keys_of(request.keys), request.lease_s)
        objects = [wire.pb_found(item) for item in granted.objects]
        return pb.GetStartResponse(lease_id=granted.lease_id, lease_s=granted.lease_s, objects=objects)

    @_call("renew_lease")
    def RenewLease(self, core: MasterCore, request: pb.RenewLeaseRequest) -> pb.RenewLeaseResponse:
        return pb.RenewLeaseResponse(lease_s=core.renew(time.monotonic(), request.lease_id, request.lease_s))

    @_call("get_end")
    def GetEnd(self, core: MasterCore, request: pb.GetEndRequest) -> pb.GetEndResponse:
        core.get_end(time.monotonic(), request.lease_id, request.dead_instances)
        return pb.GetEndResponse()

    # --- writers ---

    @_call("put_start")
    def PutStart(self, core: MasterCore, request: pb.PutStartRequest) -> pb.PutStartResponse:
        granted = core.put_start(
            time.monotonic(),
            wire.keys_of(request.keys),
            request.lengths,
            writer=request.writer,
            preferred=request.preferred_segment,
            replicas=request.replicas,
            lease_s=request.lease_s,
        )
        for slot in granted.slots:
            self.metrics.put_codes.labels(str(slot.code)).inc()
        slots = [
            pb.PutSlot(code=s.code, version=s.version, replicas=[wire.pb_replica(r) for r in s.replicas])
            for s in granted.slots
        ]
        return pb.PutStartResponse(put_id=granted.put_id, slots=slots, lease_s=granted.lease_s)

    @_call("put_end")
    def PutEnd(self, core: MasterCore, request: pb.PutEndRequest) -> pb.PutEndResponse:
        ended = core.put_end(
            time.monotonic(),
            request.put_id,
            list(request.written),
            quiesced=request.quiesced,
            failed_segments=request.failed_segments,
            dead_instances=request.dead_instances,
        )
        return pb.PutEndResponse(codes=ended)

    @_call("remove")
    def Remove(self, core: MasterCore, request: pb.RemoveRequest) -> pb.RemoveResponse:
        now = time.monotonic()
        if request.all:
            return pb.RemoveResponse(removed=core.remove_all(now, force=request.force))
        removed = core.remove(now, wire.keys_of(request.keys), force=request.force)
        return pb.RemoveResponse(removed=removed.count(codes.OK), codes=removed)

    @_call("status")
    def Status(self, core: MasterCore, request: pb.StoreStatusRequest) -> pb.StoreStatusResponse:
        status = core.status(time.monotonic())
        segments = [
            pb.SegmentStatus(
                segment=s.name,
                instance_id=s.instance_id,
                capacity_bytes=s.capacity_bytes,
                allocated_bytes=s.allocated_bytes,
                objects=s.objects,
                heartbeat_age_s=s.heartbeat_age_s,
                engine_address=s.engine_address,
                control_address=s.control_address,
            )
            for s in status.segments
        ]
        return pb.StoreStatusResponse(
            segments=segments,
            objects=status.objects,
            evictions_total=status.evictions,
            master_epoch=core.epoch,
            leases=status.leases,
            puts=status.puts,
        )
