from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RequestEventKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REQUEST_EVENT_UNSPECIFIED: _ClassVar[RequestEventKind]
    PREFILL_STARTED: _ClassVar[RequestEventKind]
    PREFILL_FINISHED: _ClassVar[RequestEventKind]
    FIRST_TOKEN: _ClassVar[RequestEventKind]
    FINISHED: _ClassVar[RequestEventKind]
    LEG_FAILED: _ClassVar[RequestEventKind]
REQUEST_EVENT_UNSPECIFIED: RequestEventKind
PREFILL_STARTED: RequestEventKind
PREFILL_FINISHED: RequestEventKind
FIRST_TOKEN: RequestEventKind
FINISHED: RequestEventKind
LEG_FAILED: RequestEventKind

class PlaceRequest(_message.Message):
    __slots__ = ("request_id", "model", "block_keys", "block_size", "prompt_tokens", "max_output_tokens", "ttft_slo_s", "tbt_slo_s", "exclude_instances", "pin_prefill", "pin_decode", "priority", "single_worker", "elapsed_s")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    BLOCK_KEYS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TTFT_SLO_S_FIELD_NUMBER: _ClassVar[int]
    TBT_SLO_S_FIELD_NUMBER: _ClassVar[int]
    EXCLUDE_INSTANCES_FIELD_NUMBER: _ClassVar[int]
    PIN_PREFILL_FIELD_NUMBER: _ClassVar[int]
    PIN_DECODE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    SINGLE_WORKER_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_S_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    block_keys: bytes
    block_size: int
    prompt_tokens: int
    max_output_tokens: int
    ttft_slo_s: float
    tbt_slo_s: float
    exclude_instances: _containers.RepeatedScalarFieldContainer[str]
    pin_prefill: str
    pin_decode: str
    priority: int
    single_worker: bool
    elapsed_s: float
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., block_keys: _Optional[bytes] = ..., block_size: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., max_output_tokens: _Optional[int] = ..., ttft_slo_s: _Optional[float] = ..., tbt_slo_s: _Optional[float] = ..., exclude_instances: _Optional[_Iterable[str]] = ..., pin_prefill: _Optional[str] = ..., pin_decode: _Optional[str] = ..., priority: _Optional[int] = ..., single_worker: _Optional[bool] = ..., elapsed_s: _Optional[float] = ...) -> None: ...

class Instance(_message.Message):
    __slots__ = ("name", "instance_id", "http_url")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    HTTP_URL_FIELD_NUMBER: _ClassVar[int]
    name: str
    instance_id: str
    http_url: str
    def __init__(self, name: _Optional[str] = ..., instance_id: _Optional[str] = ..., http_url: _Optional[str] = ...) -> None: ...

class Estimate(_message.Message):
    __slots__ = ("transfer_s", "queue_s", "prefill_s", "ttft_s", "ttft_error_s", "tbt_s", "tbt_error_s")
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    TTFT_ERROR_S_FIELD_NUMBER: _ClassVar[int]
    TBT_S_FIELD_NUMBER: _ClassVar[int]
    TBT_ERROR_S_FIELD_NUMBER: _ClassVar[int]
    transfer_s: float
    queue_s: float
    prefill_s: float
    ttft_s: float
    ttft_error_s: float
    tbt_s: float
    tbt_error_s: float
    def __init__(self, transfer_s: _Optional[float] = ..., queue_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., ttft_s: _Optional[float] = ..., ttft_error_s: _Optional[float] = ..., tbt_s: _Optional[float] = ..., tbt_error_s: _Optional[float] = ...) -> None: ...

class Placement(_message.Message):
    __slots__ = ("prefill", "decode", "prefix_tokens", "pool_prefix_tokens", "estimate", "degraded")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    PREFIX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    POOL_PREFIX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ESTIMATE_FIELD_NUMBER: _ClassVar[int]
    DEGRADED_FIELD_NUMBER: _ClassVar[int]
    prefill: Instance
    decode: Instance
    prefix_tokens: int
    pool_prefix_tokens: int
    estimate: Estimate
    degraded: bool
    def __init__(self, prefill: _Optional[_Union[Instance, _Mapping]] = ..., decode: _Optional[_Union[Instance, _Mapping]] = ..., prefix_tokens: _Optional[int] = ..., pool_prefix_tokens: _Optional[int] = ..., estimate: _Optional[_Union[Estimate, _Mapping]] = ..., degraded: _Optional[bool] = ...) -> None: ...

class Rejection(_message.Message):
    __slots__ = ("status", "reason", "message", "retry_after_s", "estimate")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    ESTIMATE_FIELD_NUMBER: _ClassVar[int]
    status: int
    reason: str
    message: str
    retry_after_s: float
    estimate: Estimate
    def __init__(self, status: _Optional[int] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ..., retry_after_s: _Optional[float] = ..., estimate: _Optional[_Union[Estimate, _Mapping]] = ...) -> None: ...

class PlaceResponse(_message.Message):
    __slots__ = ("placement", "rejection")
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    REJECTION_FIELD_NUMBER: _ClassVar[int]
    placement: Placement
    rejection: Rejection
    def __init__(self, placement: _Optional[_Union[Placement, _Mapping]] = ..., rejection: _Optional[_Union[Rejection, _Mapping]] = ...) -> None: ...

class RequestEvent(_message.Message):
    __slots__ = ("request_id", "kind", "instance_id", "at_s", "output_tokens", "cached_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    AT_S_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    kind: RequestEventKind
    instance_id: str
    at_s: float
    output_tokens: int
    cached_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., kind: _Optional[_Union[RequestEventKind, str]] = ..., instance_id: _Optional[str] = ..., at_s: _Optional[float] = ..., output_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[RequestEvent]
    def __init__(self, events: _Optional[_Iterable[_Union[RequestEvent, _Mapping]]] = ...) -> None: ...

class ReportResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PrefillSample(_message.Message):
    __slots__ = ("prompt_tokens", "cached_tokens", "compute_s")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    cached_tokens: int
    compute_s: float
    def __init__(self, prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., compute_s: _Optional[float] = ...) -> None: ...

class DecodeSample(_message.Message):
    __slots__ = ("batch", "kv_tokens", "tbt_s")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TBT_S_FIELD_NUMBER: _ClassVar[int]
    batch: float
    kv_tokens: float
    tbt_s: float
    def __init__(self, batch: _Optional[float] = ..., kv_tokens: _Optional[float] = ..., tbt_s: _Optional[float] = ...) -> None: ...

class LoadSample(_message.Message):
    __slots__ = ("tokens", "load_s")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOAD_S_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    load_s: float
    def __init__(self, tokens: _Optional[int] = ..., load_s: _Optional[float] = ...) -> None: ...

class WorkerReport(_message.Message):
    __slots__ = ("name", "instance_id", "model", "roles", "sequence", "snapshot", "stored", "removed", "running", "waiting", "kv_usage", "kv_capacity_tokens", "prefill_samples", "decode_samples", "draining", "block_size", "http_url", "load_samples")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    KV_USAGE_FIELD_NUMBER: _ClassVar[int]
    KV_CAPACITY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    DECODE_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    HTTP_URL_FIELD_NUMBER: _ClassVar[int]
    LOAD_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    name: str
    instance_id: str
    model: str
    roles: _containers.RepeatedScalarFieldContainer[str]
    sequence: int
    snapshot: bool
    stored: bytes
    removed: bytes
    running: int
    waiting: int
    kv_usage: float
    kv_capacity_tokens: int
    prefill_samples: _containers.RepeatedCompositeFieldContainer[PrefillSample]
    decode_samples: _containers.RepeatedCompositeFieldContainer[DecodeSample]
    draining: bool
    block_size: int
    http_url: str
    load_samples: _containers.RepeatedCompositeFieldContainer[LoadSample]
    def __init__(self, name: _Optional[str] = ..., instance_id: _Optional[str] = ..., model: _Optional[str] = ..., roles: _Optional[_Iterable[str]] = ..., sequence: _Optional[int] = ..., snapshot: _Optional[bool] = ..., stored: _Optional[bytes] = ..., removed: _Optional[bytes] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., kv_usage: _Optional[float] = ..., kv_capacity_tokens: _Optional[int] = ..., prefill_samples: _Optional[_Iterable[_Union[PrefillSample, _Mapping]]] = ..., decode_samples: _Optional[_Iterable[_Union[DecodeSample, _Mapping]]] = ..., draining: _Optional[bool] = ..., block_size: _Optional[int] = ..., http_url: _Optional[str] = ..., load_samples: _Optional[_Iterable[_Union[LoadSample, _Mapping]]] = ...) -> None: ...

class WorkerAck(_message.Message):
    __slots__ = ("sequence", "want_snapshot")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    WANT_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    want_snapshot: bool
    def __init__(self, sequence: _Optional[int] = ..., want_snapshot: _Optional[bool] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class InstanceStatus(_message.Message):
    __slots__ = ("name", "instance_id", "model", "roles", "running", "waiting", "kv_usage", "held_blocks", "queue_s", "report_age_s", "draining", "attached", "suspect", "events_seen", "http_url")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    KV_USAGE_FIELD_NUMBER: _ClassVar[int]
    HELD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    REPORT_AGE_S_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    SUSPECT_FIELD_NUMBER: _ClassVar[int]
    EVENTS_SEEN_FIELD_NUMBER: _ClassVar[int]
    HTTP_URL_FIELD_NUMBER: _ClassVar[int]
    name: str
    instance_id: str
    model: str
    roles: _containers.RepeatedScalarFieldContainer[str]
    running: int
    waiting: int
    kv_usage: float
    held_blocks: int
    queue_s: float
    report_age_s: float
    draining: bool
    attached: bool
    suspect: bool
    events_seen: int
    http_url: str
    def __init__(self, name: _Optional[str] = ..., instance_id: _Optional[str] = ..., model: _Optional[str] = ..., roles: _Optional[_Iterable[str]] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., kv_usage: _Optional[float] = ..., held_blocks: _Optional[int] = ..., queue_s: _Optional[float] = ..., report_age_s: _Optional[float] = ..., draining: _Optional[bool] = ..., attached: _Optional[bool] = ..., suspect: _Optional[bool] = ..., events_seen: _Optional[int] = ..., http_url: _Optional[str] = ...) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("instances", "placements_in_flight", "placed_total", "rejected_total", "leader")
    INSTANCES_FIELD_NUMBER: _ClassVar[int]
    PLACEMENTS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    PLACED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    REJECTED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    LEADER_FIELD_NUMBER: _ClassVar[int]
    instances: _containers.RepeatedCompositeFieldContainer[InstanceStatus]
    placements_in_flight: int
    placed_total: int
    rejected_total: int
    leader: bool
    def __init__(self, instances: _Optional[_Iterable[_Union[InstanceStatus, _Mapping]]] = ..., placements_in_flight: _Optional[int] = ..., placed_total: _Optional[int] = ..., rejected_total: _Optional[int] = ..., leader: _Optional[bool] = ...) -> None: ...
