from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Extent(_message.Message):
    __slots__ = ("address", "length")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    address: int
    length: int
    def __init__(self, address: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class Replica(_message.Message):
    __slots__ = ("segment", "engine_address", "instance_id", "extents", "control_address", "mount")
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    CONTROL_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MOUNT_FIELD_NUMBER: _ClassVar[int]
    segment: str
    engine_address: str
    instance_id: str
    extents: _containers.RepeatedCompositeFieldContainer[Extent]
    control_address: str
    mount: int
    def __init__(self, segment: _Optional[str] = ..., engine_address: _Optional[str] = ..., instance_id: _Optional[str] = ..., extents: _Optional[_Iterable[_Union[Extent, _Mapping]]] = ..., control_address: _Optional[str] = ..., mount: _Optional[int] = ...) -> None: ...

class HeldObject(_message.Message):
    __slots__ = ("key", "length", "extents", "version", "removed")
    KEY_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    length: int
    extents: _containers.RepeatedCompositeFieldContainer[Extent]
    version: int
    removed: bool
    def __init__(self, key: _Optional[bytes] = ..., length: _Optional[int] = ..., extents: _Optional[_Iterable[_Union[Extent, _Mapping]]] = ..., version: _Optional[int] = ..., removed: _Optional[bool] = ...) -> None: ...

class OpenWrite(_message.Message):
    __slots__ = ("extents", "expires_in_s")
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_IN_S_FIELD_NUMBER: _ClassVar[int]
    extents: _containers.RepeatedCompositeFieldContainer[Extent]
    expires_in_s: float
    def __init__(self, extents: _Optional[_Iterable[_Union[Extent, _Mapping]]] = ..., expires_in_s: _Optional[float] = ...) -> None: ...

class MountRequest(_message.Message):
    __slots__ = ("segment", "engine_address", "instance_id", "address", "length", "held", "control_address", "mount", "open", "continued", "more")
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    CONTROL_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MOUNT_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    CONTINUED_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    segment: str
    engine_address: str
    instance_id: str
    address: int
    length: int
    held: _containers.RepeatedCompositeFieldContainer[HeldObject]
    control_address: str
    mount: int
    open: _containers.RepeatedCompositeFieldContainer[OpenWrite]
    continued: bool
    more: bool
    def __init__(self, segment: _Optional[str] = ..., engine_address: _Optional[str] = ..., instance_id: _Optional[str] = ..., address: _Optional[int] = ..., length: _Optional[int] = ..., held: _Optional[_Iterable[_Union[HeldObject, _Mapping]]] = ..., control_address: _Optional[str] = ..., mount: _Optional[int] = ..., open: _Optional[_Iterable[_Union[OpenWrite, _Mapping]]] = ..., continued: _Optional[bool] = ..., more: _Optional[bool] = ...) -> None: ...

class MountResponse(_message.Message):
    __slots__ = ("master_epoch", "restart")
    MASTER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    RESTART_FIELD_NUMBER: _ClassVar[int]
    master_epoch: int
    restart: bool
    def __init__(self, master_epoch: _Optional[int] = ..., restart: _Optional[bool] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("segment", "instance_id", "master_epoch", "mount", "dropped_ack")
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    MASTER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    MOUNT_FIELD_NUMBER: _ClassVar[int]
    DROPPED_ACK_FIELD_NUMBER: _ClassVar[int]
    segment: str
    instance_id: str
    master_epoch: int
    mount: int
    dropped_ack: int
    def __init__(self, segment: _Optional[str] = ..., instance_id: _Optional[str] = ..., master_epoch: _Optional[int] = ..., mount: _Optional[int] = ..., dropped_ack: _Optional[int] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ("remount", "master_epoch", "dropped", "dropped_seq", "removed")
    REMOUNT_FIELD_NUMBER: _ClassVar[int]
    MASTER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    DROPPED_SEQ_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    remount: bool
    master_epoch: int
    dropped: _containers.RepeatedScalarFieldContainer[int]
    dropped_seq: int
    removed: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, remount: _Optional[bool] = ..., master_epoch: _Optional[int] = ..., dropped: _Optional[_Iterable[int]] = ..., dropped_seq: _Optional[int] = ..., removed: _Optional[_Iterable[int]] = ...) -> None: ...

class UnmountRequest(_message.Message):
    __slots__ = ("segment", "instance_id")
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    segment: str
    instance_id: str
    def __init__(self, segment: _Optional[str] = ..., instance_id: _Optional[str] = ...) -> None: ...

class UnmountResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class QueryRequest(_message.Message):
    __slots__ = ("keys", "want_replicas")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    WANT_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    keys: bytes
    want_replicas: bool
    def __init__(self, keys: _Optional[bytes] = ..., want_replicas: _Optional[bool] = ...) -> None: ...

class QueryResponse(_message.Message):
    __slots__ = ("lengths", "prefix", "objects")
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    lengths: _containers.RepeatedScalarFieldContainer[int]
    prefix: int
    objects: _containers.RepeatedCompositeFieldContainer[FoundObject]
    def __init__(self, lengths: _Optional[_Iterable[int]] = ..., prefix: _Optional[int] = ..., objects: _Optional[_Iterable[_Union[FoundObject, _Mapping]]] = ...) -> None: ...

class GetStartRequest(_message.Message):
    __slots__ = ("keys", "reader", "lease_s")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    READER_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    keys: bytes
    reader: str
    lease_s: float
    def __init__(self, keys: _Optional[bytes] = ..., reader: _Optional[str] = ..., lease_s: _Optional[float] = ...) -> None: ...

class FoundObject(_message.Message):
    __slots__ = ("found", "length", "replicas")
    FOUND_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    found: bool
    length: int
    replicas: _containers.RepeatedCompositeFieldContainer[Replica]
    def __init__(self, found: _Optional[bool] = ..., length: _Optional[int] = ..., replicas: _Optional[_Iterable[_Union[Replica, _Mapping]]] = ...) -> None: ...

class GetStartResponse(_message.Message):
    __slots__ = ("lease_id", "lease_s", "objects")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    lease_s: float
    objects: _containers.RepeatedCompositeFieldContainer[FoundObject]
    def __init__(self, lease_id: _Optional[int] = ..., lease_s: _Optional[float] = ..., objects: _Optional[_Iterable[_Union[FoundObject, _Mapping]]] = ...) -> None: ...

class RenewLeaseRequest(_message.Message):
    __slots__ = ("lease_id", "lease_s")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    lease_s: float
    def __init__(self, lease_id: _Optional[int] = ..., lease_s: _Optional[float] = ...) -> None: ...

class RenewLeaseResponse(_message.Message):
    __slots__ = ("lease_s",)
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    lease_s: float
    def __init__(self, lease_s: _Optional[float] = ...) -> None: ...

class GetEndRequest(_message.Message):
    __slots__ = ("lease_id", "dead_instances")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    DEAD_INSTANCES_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    dead_instances: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, lease_id: _Optional[int] = ..., dead_instances: _Optional[_Iterable[str]] = ...) -> None: ...

class GetEndResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PutStartRequest(_message.Message):
    __slots__ = ("keys", "lengths", "writer", "preferred_segment", "replicas", "lease_s")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    WRITER_FIELD_NUMBER: _ClassVar[int]
    PREFERRED_SEGMENT_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    keys: bytes
    lengths: _containers.RepeatedScalarFieldContainer[int]
    writer: str
    preferred_segment: str
    replicas: int
    lease_s: float
    def __init__(self, keys: _Optional[bytes] = ..., lengths: _Optional[_Iterable[int]] = ..., writer: _Optional[str] = ..., preferred_segment: _Optional[str] = ..., replicas: _Optional[int] = ..., lease_s: _Optional[float] = ...) -> None: ...

class PutSlot(_message.Message):
    __slots__ = ("code", "replicas", "version")
    CODE_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    code: int
    replicas: _containers.RepeatedCompositeFieldContainer[Replica]
    version: int
    def __init__(self, code: _Optional[int] = ..., replicas: _Optional[_Iterable[_Union[Replica, _Mapping]]] = ..., version: _Optional[int] = ...) -> None: ...

class PutStartResponse(_message.Message):
    __slots__ = ("put_id", "slots", "lease_s")
    PUT_ID_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    put_id: int
    slots: _containers.RepeatedCompositeFieldContainer[PutSlot]
    lease_s: float
    def __init__(self, put_id: _Optional[int] = ..., slots: _Optional[_Iterable[_Union[PutSlot, _Mapping]]] = ..., lease_s: _Optional[float] = ...) -> None: ...

class PutEndRequest(_message.Message):
    __slots__ = ("put_id", "written", "quiesced", "failed_segments", "dead_instances")
    PUT_ID_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_FIELD_NUMBER: _ClassVar[int]
    QUIESCED_FIELD_NUMBER: _ClassVar[int]
    FAILED_SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    DEAD_INSTANCES_FIELD_NUMBER: _ClassVar[int]
    put_id: int
    written: _containers.RepeatedScalarFieldContainer[bool]
    quiesced: bool
    failed_segments: _containers.RepeatedScalarFieldContainer[str]
    dead_instances: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, put_id: _Optional[int] = ..., written: _Optional[_Iterable[bool]] = ..., quiesced: _Optional[bool] = ..., failed_segments: _Optional[_Iterable[str]] = ..., dead_instances: _Optional[_Iterable[str]] = ...) -> None: ...

class PutEndResponse(_message.Message):
    __slots__ = ("codes",)
    CODES_FIELD_NUMBER: _ClassVar[int]
    codes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, codes: _Optional[_Iterable[int]] = ...) -> None: ...

class RemoveRequest(_message.Message):
    __slots__ = ("keys", "all", "force")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    keys: bytes
    all: bool
    force: bool
    def __init__(self, keys: _Optional[bytes] = ..., all: _Optional[bool] = ..., force: _Optional[bool] = ...) -> None: ...

class RemoveResponse(_message.Message):
    __slots__ = ("removed", "codes")
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    CODES_FIELD_NUMBER: _ClassVar[int]
    removed: int
    codes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, removed: _Optional[int] = ..., codes: _Optional[_Iterable[int]] = ...) -> None: ...

class StoreStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SegmentStatus(_message.Message):
    __slots__ = ("segment", "instance_id", "capacity_bytes", "allocated_bytes", "objects", "heartbeat_age_s", "engine_address", "control_address")
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    ALLOCATED_BYTES_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_AGE_S_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CONTROL_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    segment: str
    instance_id: str
    capacity_bytes: int
    allocated_bytes: int
    objects: int
    heartbeat_age_s: float
    engine_address: str
    control_address: str
    def __init__(self, segment: _Optional[str] = ..., instance_id: _Optional[str] = ..., capacity_bytes: _Optional[int] = ..., allocated_bytes: _Optional[int] = ..., objects: _Optional[int] = ..., heartbeat_age_s: _Optional[float] = ..., engine_address: _Optional[str] = ..., control_address: _Optional[str] = ...) -> None: ...

class StoreStatusResponse(_message.Message):
    __slots__ = ("segments", "objects", "evictions_total", "master_epoch", "leases", "puts")
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    EVICTIONS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    MASTER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    PUTS_FIELD_NUMBER: _ClassVar[int]
    segments: _containers.RepeatedCompositeFieldContainer[SegmentStatus]
    objects: int
    evictions_total: int
    master_epoch: int
    leases: int
    puts: int
    def __init__(self, segments: _Optional[_Iterable[_Union[SegmentStatus, _Mapping]]] = ..., objects: _Optional[int] = ..., evictions_total: _Optional[int] = ..., master_epoch: _Optional[int] = ..., leases: _Optional[int] = ..., puts: _Optional[int] = ...) -> None: ...

class BeginPutRequest(_message.Message):
    __slots__ = ("instance_id", "mount", "put_id", "group", "writer_address", "writer_instance_id", "lease_s", "objects")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    MOUNT_FIELD_NUMBER: _ClassVar[int]
    PUT_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    WRITER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    WRITER_INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    mount: int
    put_id: int
    group: int
    writer_address: str
    writer_instance_id: str
    lease_s: float
    objects: _containers.RepeatedCompositeFieldContainer[HeldObject]
    def __init__(self, instance_id: _Optional[str] = ..., mount: _Optional[int] = ..., put_id: _Optional[int] = ..., group: _Optional[int] = ..., writer_address: _Optional[str] = ..., writer_instance_id: _Optional[str] = ..., lease_s: _Optional[float] = ..., objects: _Optional[_Iterable[_Union[HeldObject, _Mapping]]] = ...) -> None: ...

class BeginPutResponse(_message.Message):
    __slots__ = ("code", "reason")
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    code: int
    reason: str
    def __init__(self, code: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class EndPutRequest(_message.Message):
    __slots__ = ("instance_id", "mount", "put_id", "written", "quiesced")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    MOUNT_FIELD_NUMBER: _ClassVar[int]
    PUT_ID_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_FIELD_NUMBER: _ClassVar[int]
    QUIESCED_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    mount: int
    put_id: int
    written: _containers.RepeatedScalarFieldContainer[bool]
    quiesced: bool
    def __init__(self, instance_id: _Optional[str] = ..., mount: _Optional[int] = ..., put_id: _Optional[int] = ..., written: _Optional[_Iterable[bool]] = ..., quiesced: _Optional[bool] = ...) -> None: ...

class EndPutResponse(_message.Message):
    __slots__ = ("code", "quiesced")
    CODE_FIELD_NUMBER: _ClassVar[int]
    QUIESCED_FIELD_NUMBER: _ClassVar[int]
    code: int
    quiesced: bool
    def __init__(self, code: _Optional[int] = ..., quiesced: _Optional[bool] = ...) -> None: ...
