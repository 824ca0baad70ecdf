"""Which workers serve a request: the Conductor's answer, or, while it cannot be asked, the least busy ones as far as this gateway knows.

Knows: `Conductor.Place`, who leads (from the registry), the fallback. Does not know: legs, HTTP, why a leg failed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field

import grpc
import grpc.aio

from mooncake.common.election import LeaderRecord
from mooncake.common.errors import MooncakeError
from mooncake.common.proto import conductor_pb2 as pb
from mooncake.common.proto.conductor_pb2_grpc import ConductorStub
from mooncake.common.rpc import aio_channel
from mooncake.gateway.directory import Directory, Model, Worker
from mooncake.gateway.metrics import GatewayMetrics
from mooncake.gateway.reporter import Reporter

_log = logging.getLogger(__name__)
STALE_WAIT_S = 1.0
"""How long to wait for the registry to tell of an instance that the Conductor knows already."""
SLOW_CONDUCTOR_S = 2.0
"""After a Place that timed out, the Conductor is not asked for so long."""


@dataclass(frozen=True)
class Wish:
    """What placement needs to know of a request."""

    request_id: str
    model: Model
    block_keys: bytes = b""
    prompt_tokens: int = 0
    max_output_tokens: int = 0
    ttft_slo_s: float = 0.0
    tbt_slo_s: float = 0.0
    arrived_s: float | None = None
    """Monotonic time at which the request came; what has passed since counts against its TTFT objective."""
    priority: int = 0
    single_worker: bool = False
    pin_prefill: str = ""
    pin_decode: str = ""


@dataclass(frozen=True)
class Placed:
    """`prefill` None: the decoding instance serves the whole request."""

    decode: Worker
    prefill: Worker | None = None
    pool_prefix_tokens: int = 0
    fallback: str = ""
    """Why the Conductor had no say; empty when it had."""


class Rejected(MooncakeError):
    """No instance for this request now. `reason` goes into x-mooncake-dropped-reason."""

    def __init__(self, status: int, reason: str, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.http_status = status
        self.error_type = {404: "not_found_error", 429: "rate_limit_error"}.get(status, "service_unavailable_error")
        self.reason = reason
        self.retry_after_s = retry_after_s


@dataclass
class Placer:
    """Make it inside of a running event loop; `close()` sends what is left to report."""

    directory: Directory
    metrics: GatewayMetrics
    token: str
    timeout_s: float = 1.0
    _address: str = ""
    _channel: grpc.aio.Channel | None = None
    _stub: ConductorStub | None = None
    _skip_until_s: float = 0.0
    _warned: bool = False
    _turn: int = 0
    reporter: Reporter = field(init=False)
    _closing: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.reporter = Reporter(self.metrics)

    def on_leader(self, leader: LeaderRecord | None) -> None:
        """What `Registry.watch_leader("conductor", …)` calls."""
        address = leader.address if leader is not None else ""
        if address == self._address:
            return
        self._drop_channel()
        self._address, self._skip_until_s = address, 0.0
        if address:
            self._channel = aio_channel(address, self.token)
            self._stub = ConductorStub(self._channel)
        self.reporter.use(self._stub)

    def _drop_channel(self) -> None:
        if self._channel is not None:
            closing = asyncio.ensure_future(self._channel.close(1.0))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        self._channel = self._stub = None

    async def close(self) -> None:
        await self.reporter.close()
        self._drop_channel()
        await asyncio.gather(*self._closing, return_exceptions=True)

    # --- placing ---

    async def place(self, wish: Wish, failed: frozenset[str] = frozenset()) -> Placed:
        """Never an instance of `failed`. Raises Rejected."""
        avoided = self.directory.circuits.open(time.monotonic()) - failed
        placed = await self._try(wish, failed | avoided)
        if isinstance(placed, Rejected) and placed.http_status == 503 and avoided:
            placed = await self._try(wish, failed)  # better a doubtful instance than none
        if isinstance(placed, Rejected):
            self.metrics.rejections.labels(placed.reason).inc()
            raise placed
        return placed

    async def _try(self, wish: Wish, exclude: frozenset[str]) -> Placed | Rejected:
        if self._stub is None:
            return self._fallback(wish, exclude, "no-conductor")
        if time.monotonic() < self._skip_until_s:
            return self._fallback(wish, exclude, "slow-conductor")
        try:
            answer: pb.PlaceResponse = await self._stub.Place(_message(wish, exclude), timeout=self.timeout_s)
        except grpc.RpcError as error:
            status = error.code() if isinstance(error, grpc.aio.AioRpcError) else grpc.StatusCode.UNKNOWN
            if status is grpc.StatusCode.DEADLINE_EXCEEDED:
                self._skip_until_s = time.monotonic() + SLOW_CONDUCTOR_S
            return self._fallback(wish, exclude, status.name.lower())
        if self._warned:
            _log.warning("the Conductor places requests again")
            self._warned = False
        if answer.WhichOneof("result") == "placement":
            return await self._placed(wish, exclude, answer.placement)
        rejection = answer.rejection
        if rejection.status in (404, 503):
            # A Conductor that has just started knows no workers yet; those that we know may well be there.
            found = self._fallback(wish, exclude, "conductor-knows-none")
            if isinstance(found, Placed):
                return found
        return Rejected(
            rejection.status or 503,
            rejection.reason or "rejected-no-endpoints",
            rejection.message or "Rejected.",
            rejection.retry_after_s,
        )

    async def _placed(self, wish: Wish, exclude: frozenset[str], placement: pb.Placement) -> Placed | Rejected:
        decode = await self._worker(placement.decode)
        prefill = await self._worker(placement.prefill) if placement.HasField("prefill") else None
        if decode is None or (prefill is None and placement.HasField("prefill")):
            return self._fallback(wish, exclude, "stale-placement")
        if prefill is not None and prefill.instance_id == decode.instance_id:
            prefill = None  # a mixed worker that got both halves needs no transfer
        return Placed(decode, prefill, placement.pool_prefix_tokens)

    async def _worker(self, instance: pb.Instance) -> Worker | None:
        deadline = time.monotonic() + STALE_WAIT_S
        while (worker := self.directory.by_instance_id(instance.name, instance.instance_id)) is None:
            if time.monotonic() > deadline:
                return None
            await asyncio.sleep(0.02)
        return worker

    # --- without the Conductor ---

    def _fallback(self, wish: Wish, exclude: frozenset[str], reason: str) -> Placed | Rejected:
        """Least in flight from here; equally busy ones take turns."""
        usable = [w for w in wish.model.workers if w.instance_id not in exclude and not w.draining and self._present(w)]
        decodes = [w for w in usable if "decode" in w.roles]
        if not decodes:
            return Rejected(
                503, "rejected-no-endpoints", f"No worker can serve the model `{wish.model.name}` now.", 2.0
            )
        if reason != "conductor-knows-none" and not self._warned:
            _log.error(
                "the Conductor cannot be asked, placing by local load",
                extra={"fields": {"reason": reason, "conductor": self._address}},
            )
            self._warned = True
        self.metrics.placement_fallback.labels(reason).inc()
        self._turn += 1
        decode = self._least_busy(decodes, wish.pin_decode)
        prefills = [
            w
            for w in usable
            if "prefill" in w.roles and w.fingerprint == decode.fingerprint and w.instance_id != decode.instance_id
        ]
        if wish.single_worker or not prefills:
            return Placed(decode, fallback=reason)
        return Placed(decode, self._least_busy(prefills, wish.pin_prefill), fallback=reason)

    def _present(self, worker: Worker) -> bool:
        return self.directory.by_instance_id(worker.name, worker.instance_id) is not None

    def _least_busy(self, workers: list[Worker], pin: str) -> Worker:
        for worker in workers:
            if pin and pin in (worker.name, worker.instance_id):
                return worker
        turned = workers[self._turn % len(workers) :] + workers[: self._turn % len(workers)]
        return min(turned, key=lambda worker: self.directory.in_flight[worker.instance_id])


def _message(wish: Wish, exclude: frozenset[str]) -> pb.PlaceRequest:
    return pb.PlaceRequest(
        request_id=wish.request_id,
        model=wish.model.name,
        block_keys=wish.block_keys,
        block_size=wish.model.block_size,
        prompt_tokens=wish.prompt_tokens,
        max_output_tokens=wish.max_output_tokens,
        ttft_slo_s=wish.ttft_slo_s,
        tbt_slo_s=wish.tbt_slo_s,
        exclude_instances=sorted(exclude),
        pin_prefill=wish.pin_prefill,
        pin_decode=wish.pin_decode,
        priority=wish.priority,
        single_worker=wish.single_worker,
        elapsed_s=max(0.0, time.monotonic() - wish.arrived_s) if wish.arrived_s is not None else 0.0,
    )
