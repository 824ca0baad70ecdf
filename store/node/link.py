"""The node's side of its talk with the master: reports, heartbeats, and what the master has dropped.

Knows: who leads (told by the registry), when a report is due. Does not know: writers, bytes. A report is due at the start,
to each new leader, and whenever the master says that it does not know us (any more).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Iterator

import grpc.aio

from mooncake.common.election import LeaderRecord
from mooncake.common.proto import store_pb2 as pb
from mooncake.common.proto import store_pb2_grpc
from mooncake.common.rpc import aio_channel
from store import wire
from store.node.config import NodeConfig
from store.node.metrics import NodeMetrics
from store.node.segment import NodeSegment

_log = logging.getLogger(__name__)


class MasterLink:
    """Run `run()` as a task; `on_leader` may be called at any time."""

    def __init__(
        self, segment: NodeSegment, config: NodeConfig, metrics: NodeMetrics, *, control_address: str, token: str
    ) -> None:
        self._segment = segment
        self._config = config
        self._metrics = metrics
        self._control_address = control_address
        self._token = token
        self._leader: LeaderRecord | None = None
        self._changed = asyncio.Event()
        self._channel: grpc.aio.Channel | None = None
        self._stub: store_pb2_grpc.StoreMasterStub | None = None
        self._mounted_epoch = -1
        self._ack = 0
        self._failing = False

    @property
    def mounted(self) -> bool:
        return self._mounted_epoch >= 0

    def on_leader(self, leader: LeaderRecord | None) -> None:
        self._leader = leader
        self._changed.set()

    async def run(self) -> None:
        """Never returns. What fails is tried again at the next beat."""
        known = ""
        while True:
            leader = self._leader
            if leader is not None:
                if leader.address != known:
                    await self._connect(leader.address)
                    known = leader.address
                await self._beat(leader.epoch)
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._config.heartbeat_s):
                    await self._changed.wait()

    async def _connect(self, address: str) -> None:
        if self._channel is not None:
            await self._channel.close(0)
        self._channel = aio_channel(address, self._token)
        self._stub = store_pb2_grpc.StoreMasterStub(self._channel)

    async def _beat(self, epoch: int) -> None:
        assert self._stub is not None
        try:
            if self._mounted_epoch != epoch or await self._heartbeat(self._stub):
                self._set_mounted(-1)
                self._set_mounted(await self._report(self._stub))
            self._failing = False
        except grpc.aio.AioRpcError as error:
            self._metrics.master_errors.inc()
            if not self._failing:
                fields = {"status": error.code().name, "details": error.details()}
                _log.warning("the store master does not answer", extra={"fields": fields})
            self._failing = True

    def _set_mounted(self, epoch: int) -> None:
        self._mounted_epoch = epoch
        self._metrics.mounted.set(epoch >= 0)

    async def _heartbeat(self, stub: store_pb2_grpc.StoreMasterStub) -> bool:
        """Whether a report is due."""
        request = pb.HeartbeatRequest(
            segment=self._segment.name,
            instance_id=self._segment.instance_id,
            master_epoch=self._mounted_epoch,
            mount=self._segment.manifest.mount,
            dropped_ack=self._ack,
        )
        answer = await stub.Heartbeat(request, timeout=self._config.master_timeout_s)
        if answer.remount or answer.master_epoch != self._mounted_epoch:
            return True
        self._segment.manifest.mark_removed(answer.removed)
        self._segment.manifest.forget(answer.dropped)
        self._metrics.forgotten.inc(len(answer.dropped))
        self._ack = answer.dropped_seq
        return False

    async def _report(self, stub: store_pb2_grpc.StoreMasterStub) -> int:
        """Tells everything; returns the master's epoch, or -1 when the master wants it from the start again."""
        self._metrics.reports.inc()
        self._ack = 0
        epoch, objects = -1, 0
        for request in self._parts():
            objects += len(request.held)
            answer = await stub.MountSegment(request, timeout=10 * self._config.master_timeout_s)
            if answer.restart or (request.continued and answer.master_epoch != epoch):
                return -1
            epoch = answer.master_epoch
        _log.info("reported", extra={"fields": {"epoch": epoch, "objects": objects}})
        return epoch

    def _parts(self) -> Iterator[pb.MountRequest]:
        """The report in messages of bounded size, all of one moment."""
        segment = self._segment
        held, writes = segment.manifest.report(time.monotonic(), segment.new_mount())
        mount = segment.manifest.mount
        step = self._config.report_part_objects
        starts = range(0, max(1, len(held)), step)
        for start in starts:
            yield pb.MountRequest(
                segment=segment.name,
                engine_address=segment.engine.address,
                instance_id=segment.instance_id,
                address=segment.buffer.address,
                length=segment.buffer.length,
                control_address=self._control_address,
                mount=mount,
                held=[wire.pb_held(entry) for entry in itertools.islice(held, start, start + step)],
                open=[pb.OpenWrite(extents=wire.pb_extents(e), expires_in_s=s) for e, s in writes] if not start else [],
                continued=start > 0,
                more=start + step < len(held),
            )

    async def close(self) -> None:
        """Says goodbye, so that nobody waits for our heartbeat."""
        if self._stub is not None and self.mounted:
            request = pb.UnmountRequest(segment=self._segment.name, instance_id=self._segment.instance_id)
            with contextlib.suppress(grpc.aio.AioRpcError):
                await self._stub.UnmountSegment(request, timeout=1.0)
        if self._channel is not None:
            await self._channel.close(0)
