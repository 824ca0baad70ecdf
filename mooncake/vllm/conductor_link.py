"""The worker's stream to the Conductor: what it holds, how busy it is, what it measured (`Attach`, conductor.proto).

The first message of a stream is a snapshot, then come deltas, at most one message a flush interval. A broken stream, a
new leader or a lost message all end in a new snapshot, so nothing depends on what was delivered before.
Knows: WorkerReport and the leader key. Does not know: where events and loads come from.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import random
from typing import Any

import grpc
import grpc.aio
import msgspec

from mooncake.common.block_key import pack_keys
from mooncake.common.election import LeaderRecord
from mooncake.common.proto import conductor_pb2, conductor_pb2_grpc
from mooncake.common.registry import Registry
from mooncake.common.rpc import aio_channel
from mooncake.vllm.engine_load import DecodeInterval, EngineLoad
from mooncake.vllm.host_link import LoadSample, PrefillFinished
from mooncake.vllm.kv_events import HeldBlocks

_log = logging.getLogger(__name__)
_BACKOFF_S = (0.1, 2.0)
_WRITE_TIMEOUT_S = 5.0
_MAX_SAMPLES = 1000


class WorkerIdentity(msgspec.Struct, frozen=True):
    """What every report says of the worker."""

    name: str
    instance_id: str
    model: str
    roles: tuple[str, ...]
    block_size: int
    kv_capacity_tokens: int
    http_url: str


class ConductorLink:
    """Feed it with `set_load`, `prefill_finished`, `loaded`, `decoded` and `kv_changed`; `run` does the rest until cancelled."""

    def __init__(
        self, registry: Registry, token: str, who: WorkerIdentity, held: HeldBlocks, *, flush_s: float = 0.05
    ) -> None:
        self.attached = False
        self.streams = 0
        self.attachments = 0
        self.snapshots = 0
        self._registry = registry
        self._token = token
        self._who = who
        self._held = held
        self._flush_s = flush_s
        self._load = EngineLoad()
        self._prefills: collections.deque[PrefillFinished] = collections.deque(maxlen=_MAX_SAMPLES)
        self._pool_loads: collections.deque[LoadSample] = collections.deque(maxlen=_MAX_SAMPLES)
        self._decodes: collections.deque[DecodeInterval] = collections.deque(maxlen=_MAX_SAMPLES)
        self._draining = False
        self._told_draining = asyncio.Event()
        self._wake = asyncio.Event()
        self._leader_changed = asyncio.Event()
        self._want_snapshot = False
        self._sequence = 0

    # --- what there is to tell ---

    def set_load(self, load: EngineLoad) -> None:
        self._load = load
        self._wake.set()

    def prefill_finished(self, sample: PrefillFinished) -> None:
        self._prefills.append(sample)
        self._wake.set()

    def loaded(self, sample: LoadSample) -> None:
        self._pool_loads.append(sample)
        self._wake.set()

    def decoded(self, interval: DecodeInterval) -> None:
        self._decodes.append(interval)

    def kv_changed(self) -> None:
        self._wake.set()

    async def drain(self, timeout_s: float = 1.0) -> None:
        """Tells the Conductor to send nobody here; returns when it was told or after `timeout_s`."""
        self._draining = True
        self._wake.set()
        if self.attached:
            try:
                await asyncio.wait_for(self._told_draining.wait(), timeout_s)
            except TimeoutError:
                _log.warning("the Conductor was not told of the drain in time")

    # --- streams ---

    async def run(self) -> None:
        """Keeps a stream to whoever leads. Ends by cancellation only."""
        stop_watching = self._registry.watch_leader("conductor", lambda _: self._leader_changed.set())
        backoff_s = _BACKOFF_S[0]
        try:
            while True:
                self._leader_changed.clear()
                leader = self._registry.leader("conductor")
                if leader is None:
                    await self._leader_changed.wait()
                    continue
                before = self.attachments
                await self._stream_to(leader)
                backoff_s = _BACKOFF_S[0] if self.attachments > before else min(_BACKOFF_S[1], backoff_s * 2)
                if not self._leader_changed.is_set():
                    await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
        finally:
            stop_watching()

    async def _stream_to(self, leader: LeaderRecord) -> None:
        """One stream, until it breaks or another leads."""
        channel = aio_channel(leader.address, self._token)
        call = conductor_pb2_grpc.ConductorStub(channel).Attach()
        self.streams += 1
        tasks = [
            asyncio.create_task(self._send(call), name="attach-send"),
            asyncio.create_task(self._receive(call), name="attach-receive"),
            asyncio.create_task(self._leader_changed.wait(), name="attach-leader"),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if (error := task.exception()) is not None:
                    self._report(error, leader)
        finally:
            self.attached = False
            for task in tasks:
                task.cancel()
            call.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await channel.close()

    def _report(self, error: BaseException, leader: LeaderRecord) -> None:
        if not isinstance(error, (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError, TimeoutError)):
            raise error
        text = error.details() if isinstance(error, grpc.aio.AioRpcError) else repr(error)
        level = logging.WARNING if self.attached else logging.INFO
        _log.log(level, "stream to the Conductor broke", extra={"fields": {"leader": leader.address, "error": text}})

    async def _receive(self, call: grpc.aio.StreamStreamCall) -> None:
        while True:
            ack: Any = await call.read()
            if ack is grpc.aio.EOF:
                await call.code()
                return
            if not self.attached:
                self.attached = True
                self.attachments += 1
                _log.info("attached to the Conductor")
            if ack.want_snapshot:
                self._want_snapshot = True
                self._wake.set()

    async def _send(self, call: grpc.aio.StreamStreamCall) -> None:
        self._want_snapshot = True
        while True:
            self._wake.clear()
            async with asyncio.timeout(_WRITE_TIMEOUT_S):  # wait_for can lose a cancellation before Python 3.12
                await call.write(self._next_report())
            if self._draining:
                self._told_draining.set()
            await asyncio.sleep(self._flush_s)
            await self._wake.wait()

    def _next_report(self) -> conductor_pb2.WorkerReport:
        who, load = self._who, self._load
        self._sequence += 1
        report = conductor_pb2.WorkerReport(
            name=who.name,
            instance_id=who.instance_id,
            model=who.model,
            roles=who.roles,
            sequence=self._sequence,
            running=load.running,
            waiting=load.waiting,
            kv_usage=load.kv_usage,
            kv_capacity_tokens=who.kv_capacity_tokens,
            draining=self._draining,
            block_size=who.block_size,
        )
        if self._want_snapshot:
            self._want_snapshot = False
            self.snapshots += 1
            report.snapshot = True
            report.http_url = who.http_url
            report.stored = pack_keys(self._held.snapshot())
        else:
            stored, removed = self._held.take_delta()
            report.stored, report.removed = pack_keys(stored), pack_keys(removed)
        self._add_samples(report)
        return report

    def _add_samples(self, report: conductor_pb2.WorkerReport) -> None:
        while self._prefills:
            sample = self._prefills.popleft()
            report.prefill_samples.add(
                prompt_tokens=sample.prompt_tokens, cached_tokens=sample.cached_tokens, compute_s=sample.compute_s
            )
        while self._pool_loads:
            load = self._pool_loads.popleft()
            report.load_samples.add(tokens=load.tokens, load_s=load.load_s)
        while self._decodes:
            interval = self._decodes.popleft()
            report.decode_samples.add(batch=interval.batch, kv_tokens=interval.kv_tokens, tbt_s=interval.tbt_s)
