"""Messages between the connectors of a prefill and a decoding worker (docs/protocol.md §5).

msgpack of tagged structs, sent by `TransferEngine.send_notify`; the KV itself moves by one-sided writes.
Knows: the messages and the group of a stream. Does not know: who acts on them.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import msgspec

REASONS = frozenset(
    [
        "layout_mismatch",
        "prompt_mismatch",
        "bad_reserve",
        "prefill_aborted",
        "preempted",
        "released",
        "deadline",
        "gone",
        "duplicate",
        "cancelled",
        "write_failed",
        "peer_unavailable",
    ]
)
"""Why a stream fails; label values of metrics."""

MAX_MESSAGE_BYTES = 60_000
"""Below the transfer engine's bound for a notification."""


class Reserve(msgspec.Struct, tag="reserve", frozen=True):
    """Consumer to producer: these blocks of mine wait for that prompt. Repeating it is harmless."""

    transfer_id: str
    consumer_id: str
    address: str
    """Transfer engine of the consumer, host:port."""
    instance_id: str
    fingerprint: str
    digest: bytes
    """`block_key.prompt_digest` of the prompt."""
    prompt_tokens: int
    first_block: int
    """Index of the first block wanted; those before are in the consumer's prefix cache."""
    block_ids: bytes
    """The consumer's engine blocks for first_block.. as little-endian u32."""
    layers: list[tuple[int, int]]
    """Base address and block stride in bytes of each layer, in registration order."""
    deadline_s: float
    """What is left of the load's deadline when this is sent."""


class Landed(msgspec.Struct, tag="landed", frozen=True):
    """Producer to consumer: every byte is placed and acknowledged."""

    transfer_id: str
    consumer_id: str


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """Producer to consumer: the KV will not come. `stopped`: no write is or will be under way."""

    transfer_id: str
    consumer_id: str
    reason: str
    stopped: bool


class Cancel(msgspec.Struct, tag="cancel", frozen=True):
    """Consumer to producer: I do not want it any more (or never did)."""

    transfer_id: str
    consumer_id: str


ToProducer = Reserve | Cancel
ToConsumer = Landed | Failed
Message = Reserve | Landed | Failed | Cancel

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Message).decode


def group_of(transfer_id: str, consumer_id: str) -> int:
    """63-bit group of all writes of one stream: what the consumer fences."""
    raw = hashlib.sha256(f"{transfer_id}\0{consumer_id}".encode()).digest()
    return (int.from_bytes(raw[:8], "little") >> 1) or 1


def pack_ids(block_ids: Sequence[int]) -> bytes:
    """Block ids as little-endian u32."""
    return struct.pack(f"<{len(block_ids)}I", *block_ids)


def unpack_ids(raw: bytes) -> list[int]:
    """Inverse of `pack_ids`. Raises ValueError."""
    if len(raw) % 4:
        raise ValueError("block ids: not a multiple of 4 bytes")
    return list(struct.unpack(f"<{len(raw) // 4}I", raw))
