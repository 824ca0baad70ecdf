"""The transfer engine: one-sided reads and writes between registered memory of any two processes (paper 3.2)."""

from mooncake.common.errors import (
    AuthenticationFailed,
    InvalidHandle,
    NotRegistered,
    PeerUnavailable,
    ProtocolViolation,
    RegionOverlap,
    TransferCancelled,
    TransferError,
    TransferTimeout,
)
from transfer_engine.config import EngineConfig
from transfer_engine.engine import TransferEngine
from transfer_engine.shared_buffer import SharedBuffer
from transfer_engine.types import (
    BatchId,
    Opcode,
    SegmentHandle,
    TransferRequest,
    TransferState,
    TransferStatus,
    TransferVector,
)

__all__ = [
    "AuthenticationFailed",
    "BatchId",
    "EngineConfig",
    "InvalidHandle",
    "NotRegistered",
    "Opcode",
    "PeerUnavailable",
    "ProtocolViolation",
    "RegionOverlap",
    "SegmentHandle",
    "SharedBuffer",
    "TransferCancelled",
    "TransferEngine",
    "TransferError",
    "TransferRequest",
    "TransferState",
    "TransferStatus",
    "TransferTimeout",
    "TransferVector",
]
