"""The words of the transfer engine's API: opcodes, requests, states, statuses and handle types.

Knows: shapes only. Does not know: how anything moves. Paper 3.2, Listing 1.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, NewType

import numpy as np
import numpy.typing as npt

from mooncake.common.errors import MooncakeError

BatchId = NewType("BatchId", int)
"""63 bit, never 0; carries the engine's serial number and a generation."""

SegmentHandle = NewType("SegmentHandle", int)
"""63 bit, never 0; one opening of one peer."""


class Opcode(enum.IntEnum):
    """READ: target to source address; WRITE: source to target address. "Source" is always local memory."""

    READ = 0
    WRITE = 1


class TransferRequest(NamedTuple):
    """One contiguous copy. Addresses are virtual addresses in the process that owns them; `length` is in bytes, 64 bit."""

    opcode: Opcode
    source: int
    target: SegmentHandle
    target_offset: int
    length: int


class TransferVector(NamedTuple):
    """Many requests of one direction to one target as columns (sequences or numpy integer arrays of equal length).
    The fast way: no Python object per request."""

    opcode: Opcode
    target: SegmentHandle
    source: Sequence[int] | npt.NDArray[np.integer]
    target_offset: Sequence[int] | npt.NDArray[np.integer]
    length: Sequence[int] | npt.NDArray[np.integer]


class TransferState(enum.Enum):
    """Life of a request and of a batch; the last four are terminal."""

    WAITING = "waiting"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed_out"

    @property
    def terminal(self) -> bool:
        return self not in (TransferState.WAITING, TransferState.RUNNING)


@dataclass(frozen=True, slots=True)
class TransferStatus:
    """What is known of a request or a batch.

    `quiesced` matters in a terminal state other than COMPLETED: True means that no byte of it will be written any more,
    on either side. False means that the target may still be written (it is frozen or cut off); only its fence
    (`cancel_incoming` on the target) can tell. Local memory is always quiet once the state is terminal.
    """

    state: TransferState
    transferred_bytes: int
    error: MooncakeError | None = None
    quiesced: bool = True

    @property
    def ok(self) -> bool:
        return self.state is TransferState.COMPLETED

    def raise_for_error(self) -> None:
        """Raise `error` when the transfer ended badly; nothing otherwise."""
        if self.error is not None:
            raise self.error
