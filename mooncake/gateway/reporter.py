"""Tells the Conductor what became of placed requests: soon, in batches, and patiently while it is away.

Knows: `Conductor.Report`. Does not know: who leads, what the events mean.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque

import grpc

from mooncake.common.proto import conductor_pb2 as pb
from mooncake.common.proto.conductor_pb2_grpc import ConductorStub
from mooncake.gateway.metrics import GatewayMetrics

REPORTS_KEPT = 10_000
REPORT_EVERY_S = 0.02
REPORT_TIMEOUT_S = 2.0
AGAIN_S = 0.5


class Reporter:
    """Make it inside of a running event loop."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics
        self._events: deque[pb.RequestEvent] = deque()
        self._stub: ConductorStub | None = None
        self._wake = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name="report")

    def use(self, stub: ConductorStub | None) -> None:
        """Another leader, or none for now."""
        self._stub = stub
        self._wake.set()

    def report(self, event: pb.RequestEvent) -> None:
        """Never waits. The oldest event is lost, and counted, when too many wait."""
        self._events.append(event)
        self._bound()
        self._wake.set()

    def _bound(self) -> None:
        while len(self._events) > REPORTS_KEPT:
            self._events.popleft()
            self._metrics.reports_lost.inc()

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            await asyncio.sleep(REPORT_EVERY_S)
            self._wake.clear()
            if not self._events or self._stub is None:
                continue
            batch = list(self._events)
            self._events.clear()
            try:
                await self._stub.Report(pb.ReportRequest(events=batch), timeout=REPORT_TIMEOUT_S)
            except grpc.RpcError:
                self._events.extendleft(reversed(batch))
                self._bound()
                await asyncio.sleep(AGAIN_S)
                self._wake.set()

    async def close(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        if self._events and self._stub is not None:
            with contextlib.suppress(grpc.RpcError):
                await self._stub.Report(pb.ReportRequest(events=list(self._events)), timeout=1.0)
