"""What goes into the Conductor's core and what comes out of it, as plain frozen structs.

Knows: the fields of conductor.proto, in Python's types. Seconds are `_s`; token counts are ints.
Does not know: protobuf (wire.py translates) or what any of it is used for.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import TypeAlias

import msgspec

from mooncake.common.ids import BlockKey, InstanceId, InstanceName, RequestId

PREFILL = "prefill"
DECODE = "decode"

REJECTED_SATURATED = "rejected-saturated"
REJECTED_NO_ENDPOINTS = "rejected-no-endpoints"
REJECTED_UNKNOWN_MODEL = "rejected-unknown-model"


class PlaceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request that asks for instances. `pool_prefix_tokens` was looked up in the store by the shell."""

    request_id: RequestId
    model: str
    prompt_tokens: int
    block_keys: Sequence[BlockKey] = ()
    block_size: int = 0
    pool_prefix_tokens: int = 0
    max_output_tokens: int = 0
    ttft_slo_s: float = 0.0
    tbt_slo_s: float = 0.0
    elapsed_s: float = 0.0
    exclude: Sequence[str] = ()
    pin_prefill: str = ""
    pin_decode: str = ""
    single_worker: bool = False


class Chosen(msgspec.Struct, frozen=True):
    """An instance as a placement names it."""

    name: InstanceName
    instance_id: InstanceId
    http_url: str


class Estimate(msgspec.Struct, frozen=True):
    """Seconds. `ttft_s` counts from the request's arrival; `*_error_s` is the half-width of the error bar."""

    transfer_s: float = 0.0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    ttft_s: float = 0.0
    ttft_error_s: float = 0.0
    tbt_s: float = 0.0
    tbt_error_s: float = 0.0


class Placement(msgspec.Struct, frozen=True):
    """Where a request goes. `prefill is None`: the decoding instance serves the whole request."""

    prefill: Chosen | None
    decode: Chosen
    prefix_tokens: int
    pool_prefix_tokens: int
    estimate: Estimate
    degraded: bool = False


class Rejection(msgspec.Struct, frozen=True):
    """Why not. `status` is the HTTP status that the gateway answers."""

    status: int
    reason: str
    message: str
    retry_after_s: float = 0.0
    estimate: Estimate = Estimate()


PlaceResult: TypeAlias = Placement | Rejection


class EventKind(IntEnum):
    """Numbers of conductor.proto's RequestEventKind."""

    UNSPECIFIED = 0
    PREFILL_STARTED = 1
    PREFILL_FINISHED = 2
    FIRST_TOKEN = 3
    FINISHED = 4
    LEG_FAILED = 5


class RequestEvent(msgspec.Struct, frozen=True, kw_only=True):
    """What a gateway saw of a placed request. `at_s` is seconds since the request arrived there."""

    request_id: RequestId
    kind: EventKind
    instance_id: str = ""
    at_s: float = 0.0
    output_tokens: int = 0
    cached_tokens: int = 0


class Outcome(msgspec.Struct, frozen=True):
    """A first token beside what was promised for it."""

    request_id: RequestId
    model: str
    estimate: Estimate
    ttft_s: float

    @property
    def error_s(self) -> float:
        return abs(self.ttft_s - self.estimate.ttft_s)

    @property
    def within_bar(self) -> bool:
        return self.error_s <= self.estimate.ttft_error_s


class PrefillSample(msgspec.Struct, frozen=True):
    prompt_tokens: int
    cached_tokens: int
    compute_s: float


class DecodeSample(msgspec.Struct, frozen=True):
    batch: float
    kv_tokens: float
    tbt_s: float


class LoadSample(msgspec.Struct, frozen=True):
    tokens: int
    load_s: float


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker tells about itself; see conductor.proto."""

    name: InstanceName
    instance_id: InstanceId
    model: str
    roles: Sequence[str]
    sequence: int
    block_size: int = 0
    snapshot: bool = False
    stored: Sequence[BlockKey] = ()
    removed: Sequence[BlockKey] = ()
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    kv_capacity_tokens: int = 0
    prefill_samples: Sequence[PrefillSample] = ()
    decode_samples: Sequence[DecodeSample] = ()
    load_samples: Sequence[LoadSample] = ()
    draining: bool = False
    http_url: str = ""


class WorkerAck(msgspec.Struct, frozen=True):
    sequence: int
    want_snapshot: bool
