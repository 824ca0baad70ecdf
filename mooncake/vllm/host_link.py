"""Host link: what the connector halves inside vLLM's processes and their worker host tell each other.

ZMQ over an ipc socket: the host binds a ROUTER, each connector half connects a DEALER whose identity is its half's name.
Messages are msgpack of the structs below (tag field `type`). Nobody waits for an answer; a full queue drops metrics and
trace messages first. Knows the messages; does not know who acts on them.
"""

from __future__ import annotations

from typing import Any

import msgspec

from transfer_engine.topology import Topology


class WorkerHello(msgspec.Struct, tag="worker_hello"):
    """The worker half has registered the KV caches: the instance can be announced."""

    transfer_address: str
    transfer_instance_id: str
    fingerprint: str
    layers: int
    num_blocks: int
    block_size: int
    block_bytes: int
    """Bytes of one engine block of one layer."""
    topology: Topology = Topology()
    """What the streams' transfer engine sees of its machine."""


class SchedulerHello(msgspec.Struct, tag="scheduler_hello"):
    """The scheduler half is up."""

    block_size: int
    max_model_len: int


class PrefillStarted(msgspec.Struct, tag="prefill_started"):
    """The first chunk of a prefill leg was scheduled. `computed_tokens` were there already (local prefix and store)."""

    transfer_id: str
    computed_tokens: int
    prompt_tokens: int
    at_s: float
    """Unix time."""


class PrefillFinished(msgspec.Struct, tag="prefill_finished"):
    """The last chunk of a prefill leg was computed (not: sent)."""

    transfer_id: str
    prompt_tokens: int
    cached_tokens: int
    compute_s: float
    """From the first chunk's scheduling to the end of the last chunk's step."""
    request_id: str = ""


class LoadSample(msgspec.Struct, tag="load_sample"):
    """A load of a prefix from the store that brought something has ended; what the Conductor's estimate of a load learns from."""

    tokens: int
    """That arrived, beyond the local prefix."""
    load_s: float


class TraceEvents(msgspec.Struct, tag="trace"):
    """Trace events of one transfer, in time order; see docs/protocol.md §4."""

    transfer_id: str
    events: list[dict[str, Any]]


class Counters(msgspec.Struct, tag="counters"):
    """Absolute values of this half's metrics, by Prometheus sample name with labels, e.g. `mooncake_connector_loads_total{result="ok"}`."""

    half: str
    values: dict[str, float]


class Release(msgspec.Struct, tag="release"):
    """Host to worker half: the decoding leg of this transfer will not come (or is gone)."""

    transfer_id: str


class StoreMasters(msgspec.Struct, tag="store_masters"):
    """Host to every half, after its hello and at each change: where store masters are, best first. Never empty."""

    addresses: list[str]


ToHost = WorkerHello | SchedulerHello | PrefillStarted | PrefillFinished | LoadSample | TraceEvents | Counters
ToConnector = Release | StoreMasters

encode = msgspec.msgpack.Encoder().encode
decode_to_host = msgspec.msgpack.Decoder(ToHost).decode
decode_to_connector = msgspec.msgpack.Decoder(ToConnector).decode
