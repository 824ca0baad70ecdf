"""Between protobuf and the values of the pure parts. Knows both; does nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mooncake.common.block_key import unpack_keys
from mooncake.common.errors import BadRequest
from mooncake.common.proto import store_pb2 as pb
from store.extents import Extent
from store.master import messages as m
from store.master.replicas import Replica
from store.node.manifest import Entry

MAX_KEYS = 65536
"""Keys of one call; 1 MiB of them."""


def keys_of(raw: bytes) -> Sequence[bytes]:
    """Packed keys of a request. Raises BadRequest."""
    try:
        keys = unpack_keys(raw)
    except ValueError as error:
        raise BadRequest(str(error)) from error
    if len(keys) > MAX_KEYS:
        raise BadRequest(f"{len(keys)} keys in one call; at most {MAX_KEYS}")
    return keys


def extents_of(extents: Iterable[pb.Extent]) -> tuple[Extent, ...]:
    return tuple(Extent(e.address, e.length) for e in extents)


def pb_extents(extents: Iterable[Extent]) -> list[pb.Extent]:
    return [pb.Extent(address=e.address, length=e.length) for e in extents]


def report_of(request: pb.MountRequest) -> m.Report:
    return m.Report(
        segment=request.segment,
        instance_id=request.instance_id,
        mount=request.mount,
        address=request.address,
        length=request.length,
        engine_address=request.engine_address,
        control_address=request.control_address,
        held=[m.Held(h.key, h.version, h.length, extents_of(h.extents), h.removed) for h in request.held],
        open=[m.OpenWrite(extents_of(w.extents), w.expires_in_s) for w in request.open],
        continued=request.continued,
        more=request.more,
    )


def pb_replica(replica: Replica) -> pb.Replica:
    segment = replica.segment
    return pb.Replica(
        segment=segment.name,
        engine_address=segment.engine_address,
        instance_id=segment.instance_id,
        extents=pb_extents(replica.extents),
        control_address=segment.control_address,
        mount=segment.mount,
    )


def pb_found(found: m.Found | None) -> pb.FoundObject:
    if found is None:
        return pb.FoundObject()
    return pb.FoundObject(found=True, length=found.length, replicas=[pb_replica(r) for r in found.replicas])


def pb_held(entry: Entry) -> pb.HeldObject:
    return pb.HeldObject(
        key=entry.key,
        version=entry.version,
        length=entry.length,
        extents=pb_extents(entry.extents),
        removed=entry.removed,
    )


def entry_of(held: pb.HeldObject) -> Entry:
    return Entry(held.key, held.version, held.length, extents_of(held.extents))
