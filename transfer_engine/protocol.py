"""Wire format: pure encoding and decoding.

Knows: layouts, limits, error codes. Does not know: sockets. docs/transfer_engine.md draws the frames. Two kinds of
connection: control (msgpack messages, both ways) and data (binary frames, requests from the initiator only).
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import msgspec
import numpy as np

from mooncake.common.errors import (
    MooncakeError,
    NotRegistered,
    Overloaded,
    PeerUnavailable,
    ProtocolViolation,
    TransferCancelled,
    TransferError,
    TransferTimeout,
)
from transfer_engine.config import MAX_IOV
from transfer_engine.slices import U64

# --- data connections -----------------------------------------------------------------------------------------------

DATA_MAGIC = 0x3144434D  # "MCD1"
WRITE, READ, ACK, DATA = 1, 2, 3, 4
HEADER = struct.Struct("<IBBHIIQQQ")
HEADER_BYTES = HEADER.size
ROW = struct.Struct("<QQ")
SMALL = struct.Struct("<IBBHIIQQQQQ")
"""A header and a table of one row."""
MAX_FRAME_BYTES = 1 << 30


class FrameHeader(NamedTuple):
    """`count` table entries of 16 bytes (address, length) follow a WRITE or READ, then, for WRITE, `total` payload bytes.
    ACK has no more; DATA answers a READ and is followed by `total` bytes when `status` is 0."""

    kind: int
    status: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody wants here
    frame_id: int
    group: int
    total: int

    def encode(self) -> bytes:
        return HEADER.pack(DATA_MAGIC, self.kind, self.status, 0, self.count, 0, self.frame_id, self.group, self.total)


def decode_header(raw: bytes | bytearray | memoryview) -> FrameHeader:
    """Raises ProtocolViolation."""
    magic, kind, status, zero, count, pad, frame_id, group, total = HEADER.unpack(raw)
    if magic != DATA_MAGIC or zero or pad or not WRITE <= kind <= DATA:
        raise ProtocolViolation(f"not a frame header: {bytes(raw)[:16].hex()}")
    if kind in (WRITE, READ):
        if not 1 <= count <= MAX_IOV or not 1 <= total <= MAX_FRAME_BYTES or status:
            raise ProtocolViolation(f"frame out of bounds: {count} entries, {total} bytes")
    elif count or total > MAX_FRAME_BYTES or (kind == ACK and total):
        raise ProtocolViolation(f"malformed answer frame: {count} entries, {total} bytes")
    return FrameHeader(kind, status, count, frame_id, group, total)


def check_table(table: U64, total: int) -> None:
    """`table` is (n, 2): address, length. Raises ProtocolViolation unless lengths are positive and add up to `total`."""
    lengths = table[:, 1]
    if len(lengths) == 1 and int(lengths[0]) == total > 0:
        return  # a header's total is within bounds
    if int(lengths.max()) > MAX_FRAME_BYTES or int(lengths.min()) == 0 or int(lengths.sum()) != total:
        raise ProtocolViolation(f"frame table does not add up to {total} bytes")


# --- errors ---------------------------------------------------------------------------------------------------------

_CODES: tuple[tuple[int, type[MooncakeError]], ...] = (
    (1, NotRegistered), (2, TransferCancelled), (3, ProtocolViolation), (4, TransferTimeout),
    (5, Overloaded), (6, PeerUnavailable), (7, TransferError),
)  # fmt: skip


def error_code(error: BaseException) -> int:
    """Wire code of an error; 7 for what has none of its own."""
    return next((code for code, kind in _CODES if isinstance(error, kind)), 7)


def error_from(code: int, text: str) -> MooncakeError:
    return dict(_CODES).get(code, TransferError)(text)


# --- control connections --------------------------------------------------------------------------------------------

CONTROL = struct.Struct("<IBQ")
MAX_CONTROL_BYTES = 8 << 20
REQUEST, REPLY = 0, 1


class RegionInfo(msgspec.Struct, frozen=True, array_like=True):
    """A registered region as peers see it; `fd` (-1: none), `inode` and `file_offset` say where a peer on this host can map it;
    `keys` are its remote keys, one per NIC in the order of `Reply.nics`; `location` says where it lies (`cuda:N`: no CPU reaches it),
    `nic_shift` what is added to its addresses with those keys (modulo 2**64; a dmabuf has addresses of its own)."""

    address: int
    length: int
    fd: int = -1
    inode: int = 0
    file_offset: int = 0
    keys: tuple[int, ...] = ()
    location: str = "cpu"
    nic_shift: int = 0


class NicInfo(msgspec.Struct, frozen=True, array_like=True):
    """A NIC that peers may connect to. `gid` in eight groups of four digits; `mtu` in bytes; `numa_node` -1: unknown."""

    name: str
    gid: str
    mtu: int = 1024
    numa_node: int = -1
    rate_bits_per_s: int = 0


class EndpointOffer(msgspec.Struct, frozen=True, array_like=True):
    """One end of a queue pair (InfiniBand spec 12.7). `nic` counts in the sender's NIC list, `peer_nic` in the receiver's;
    `stream_id` names the pair on both sides."""

    stream_id: str
    nic: int
    peer_nic: int
    qpn: int
    psn: int
    gid: str
    mtu: int
    lid: int = 0


class Ping(msgspec.Struct, frozen=True, array_like=True, tag="ping"):
    pass


class GetRegions(msgspec.Struct, frozen=True, array_like=True, tag="regions"):
    """Asks for the region table, which grants direct access (shm, local) or access by remote keys (rdma)."""


class GetFirstRegion(msgspec.Struct, frozen=True, array_like=True, tag="first_region"):
    """Asks where the region that was registered first is; grants nothing. For peers without a channel of their own."""


class Notify(msgspec.Struct, frozen=True, array_like=True, tag="notify"):
    payload: bytes


class CancelGroup(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """Target to initiator: stop everything of `group` that is aimed at me; answer when it has stopped."""

    group: int
    timeout_s: float


class Revoke(msgspec.Struct, frozen=True, array_like=True, tag="revoke"):
    """Target to a peer with direct access: this region (length 0: all) is going away; answer when you no longer touch it.
    A region table older than `version` is void."""

    address: int
    length: int
    version: int
    timeout_s: float


class StreamClose(msgspec.Struct, frozen=True, array_like=True, tag="stream_close"):
    """Initiator to target: drop that data connection; answer when nothing from it will be placed any more."""

    stream_id: str
    timeout_s: float


class ConnectEndpoint(msgspec.Struct, frozen=True, array_like=True, tag="endpoint"):
    """Initiator to target: make the other end of this queue pair. `StreamClose` with its `stream_id` ends it."""

    offer: EndpointOffer


class Goodbye(msgspec.Struct, frozen=True, array_like=True, tag="goodbye"):
    """The sender's engine has stopped all its work and closes."""


Request = Ping | GetRegions | GetFirstRegion | Notify | CancelGroup | Revoke | StreamClose | ConnectEndpoint | Goodbye


class Reply(msgspec.Struct, frozen=True, array_like=True):
    """`code` 0 is success. `regions`, `version` and `nics` answer GetRegions, `endpoint` answers ConnectEndpoint, `fenced`
    (groups of the asker that are cancelled here) both."""

    code: int = 0
    text: str = ""
    regions: list[RegionInfo] = []
    version: int = 0
    fenced: list[int] = []
    nics: list[NicInfo] = []
    endpoint: EndpointOffer | None = None


_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(Request)
_replies = msgspec.msgpack.Decoder(Reply)


def encode_control(kind: int, message_id: int, message: Request | Reply) -> bytes:
    """Raises ProtocolViolation for a message above the limit."""
    body = _encoder.encode(message)
    if len(body) > MAX_CONTROL_BYTES:
        raise ProtocolViolation(f"control message of {len(body)} bytes")
    return CONTROL.pack(len(body), kind, message_id) + body


def decode_control_header(raw: bytes | bytearray) -> tuple[int, int, int]:
    """(body length, kind, message id). Raises ProtocolViolation."""
    length, kind, message_id = CONTROL.unpack(raw)
    if length > MAX_CONTROL_BYTES or kind not in (REQUEST, REPLY):
        raise ProtocolViolation(f"control frame of {length} bytes, kind {kind}")
    return length, kind, message_id


def decode_request(body: bytes | bytearray) -> Request:
    try:
        return _requests.decode(body)
    except msgspec.MsgspecError as error:
        raise ProtocolViolation(f"malformed control request: {error}") from error


def decode_reply(body: bytes | bytearray) -> Reply:
    try:
        return _replies.decode(body)
    except msgspec.MsgspecError as error:
        raise ProtocolViolation(f"malformed control reply: {error}") from error


def as_table(raw: bytearray | memoryview) -> U64:
    return np.frombuffer(raw, np.dtype("<u8")).reshape(-1, 2)
