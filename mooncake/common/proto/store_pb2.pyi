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
    __slots__ = ("segment", "engine_address", "instance_id", "extents")
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    segment: str
    engine_address: str
    instance_id: str
    extents: _containers.RepeatedCompositeFieldContainer[Extent]
    def __init__(self, segment: _Optional[str] = ..., engine_address: _Optional[str] = ..., instance_id: _Optional[str] = ..., extents: _Optional[_Iterable[_Union[Extent, _Mapping]]] = ...) -> None: ...

class HeldObject(_message.Message):
    __slots__ = ("key", "length", "extents")
    KEY_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    length: int
    extents: _containers.RepeatedCompositeFieldContainer[Extent]
    def __init__(self, key: _Optional[bytes] = ..., length: _Optional[int] = ..., extents: _Optional[_Iterable[_Union[Extent, _Mapping]]] = ...) -> None: ...

class MountRequest(_message.Message):
    __slots__ = ("segment", "engine_address", "instance_id", "address", "length", "held")
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    segment: str
    engine_address: str
    instance_id: str
    address: int
    length: int
    held: _containers.RepeatedCompositeFieldContainer[HeldObject]
    def __init__(self, segment: _Optional[str] = ..., engine_address: _Optional[str] = ..., instance_id: _Optional[str] = ..., address: _Optional[int] = ..., length: _Optional[int] = ..., held: _Optional[_Iterable[_Union[HeldObject, _Mapping]]] = ...) -> None: ...

class MountResponse(_message.Message):
    __slots__ = ("master_epoch",)
    MASTER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    master_epoch: int
    def __init__(self, master_epoch: _Optional[int] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("segment", "instance_id", "master_epoch")
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    MASTER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    segment: str
    instance_id: str
    master_epoch: int
    def __init__(self, segment: _Optional[str] = ..., instance_id: _Optional[str] = ..., master_epoch: _Optional[int] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ("remount", "master_epoch")
    REMOUNT_FIELD_NUMBER: _ClassVar[int]
    MASTER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    remount: bool
    master_epoch: int
    def __init__(self, remount: _Optional[bool] = ..., master_epoch: _Optional[int] = ...) -> None: ...

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
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: bytes
    def __init__(self, keys: _Optional[bytes] = ...) -> None: ...

class QueryResponse(_message.Message):
    __slots__ = ("lengths", "prefix")
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    lengths: _containers.RepeatedScalarFieldContainer[int]
    prefix: int
    def __init__(self, lengths: _Optional[_Iterable[int]] = ..., prefix: _Optional[int] = ...) -> None: ...

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
    __slots__ = ("code", "replicas")
    CODE_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    code: int
    replicas: _containers.RepeatedCompositeFieldContainer[Replica]
    def __init__(self, code: _Optional[int] = ..., replicas: _Optional[_Iterable[_Union[Replica, _Mapping]]] = ...) -> None: ...

class PutStartResponse(_message.Message):
    __slots__ = ("put_id", "slots")
    PUT_ID_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    put_id: int
    slots: _containers.RepeatedCompositeFieldContainer[PutSlot]
    def __init__(self, put_id: _Optional[int] = ..., slots: _Optional[_Iterable[_Union[PutSlot, _Mapping]]] = ...) -> None: ...

class PutEndRequest(_message.Message):
    __slots__ = ("put_id", "written")
    PUT_ID_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_FIELD_NUMBER: _ClassVar[int]
    put_id: int
    written: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, put_id: _Optional[int] = ..., written: _Optional[_Iterable[bool]] = ...) -> None: ...

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
    __slots__ = ("removed",)
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    removed: int
    def __init__(self, removed: _Optional[int] = ...) -> None: ...

class StoreStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SegmentStatus(_message.Message):
    __slots__ = ("segment", "instance_id", "capacity_bytes", "allocated_bytes", "objects", "heartbeat_age_s")
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    ALLOCATED_BYTES_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_AGE_S_FIELD_NUMBER: _ClassVar[int]
    segment: str
    instance_id: str
    capacity_bytes: int
    allocated_bytes: int
    objects: int
    heartbeat_age_s: float
    def __init__(self, segment: _Optional[str] = ..., instance_id: _Optional[str] = ..., capacity_bytes: _Optional[int] = ..., allocated_bytes: _Optional[int] = ..., objects: _Optional[int] = ..., heartbeat_age_s: _Optional[float] = ...) -> None: ...

class StoreStatusResponse(_message.Message):
    __slots__ = ("segments", "objects", "evictions_total", "master_epoch")
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    EVICTIONS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    MASTER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    segments: _containers.RepeatedCompositeFieldContainer[SegmentStatus]
    objects: int
    evictions_total: int
    master_epoch: int
    def __init__(self, segments: _Optional[_Iterable[_Union[SegmentStatus, _Mapping]]] = ..., objects: _Optional[int] = ..., evictions_total: _Optional[int] = ..., master_epoch: _Optional[int] = ...) -> None: ...
