"""From the application's requests to columns per peer and direction.

Knows: how to read thousands of requests without a Python step each, and what is malformed. Does not know: peers' addresses,
memory tables.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mooncake.common.errors import NotRegistered
from transfer_engine.slices import Columns, U64
from transfer_engine.types import Opcode, SegmentHandle, TransferRequest, TransferVector

Part = tuple[SegmentHandle, Opcode, Columns]


def parse(requests: Sequence[TransferRequest] | TransferVector) -> tuple[list[Part], U64]:
    """(parts of equal target and opcode, lengths in request order). Raises ValueError for negative or missized values,
    NotRegistered for a target range that wraps around."""
    if isinstance(requests, TransferVector):
        opcode, target, source, offset, length = requests
        columns = _columns(source, offset, length)
        return [(target, Opcode(opcode), columns)], columns.length
    if not requests:
        return [], np.zeros(0, np.uint64)
    opcodes, sources, targets, offsets, lengths = zip(*requests, strict=True)
    columns = _columns(sources, offsets, lengths)
    if opcodes.count(opcodes[0]) == len(opcodes) and targets.count(targets[0]) == len(targets):
        return [(targets[0], Opcode(opcodes[0]), columns)], columns.length
    rows: dict[tuple[SegmentHandle, Opcode], list[int]] = {}
    for row, key in enumerate(zip(targets, opcodes, strict=True)):
        rows.setdefault(key, []).append(row)
    return [(target, Opcode(opcode), columns.take(np.array(at, np.intp))) for (target, opcode), at in rows.items()], columns.length


def _columns(source: object, offset: object, length: object) -> Columns:
    local, remote, count = _u64(source), _u64(offset), _u64(length)
    if not len(local) == len(remote) == len(count):
        raise ValueError("sources, target offsets and lengths differ in number")
    if (remote + count < remote).any():
        raise NotRegistered("a target range wraps around the address space")
    return Columns(local, remote, count, np.arange(len(local), dtype=np.intp))


def _u64(values: object) -> U64:
    array = np.asarray(values)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and len(array)):
        try:  # integers of 2**63 and above next to smaller ones
            return np.array(values, np.uint64) if array.dtype.kind in "fO" and all(type(v) is int for v in values) else _refuse(values)  # type: ignore[attr-defined]
        except (OverflowError, TypeError) as error:
            raise ValueError("addresses and lengths must be integers from 0 to 2**64 - 1") from error
    if array.dtype.kind == "i" and len(array) and int(array.min()) < 0:
        raise ValueError("addresses and lengths must not be negative")
    return array.astype(np.uint64)


def _refuse(values: object) -> U64:
    raise ValueError(f"addresses and lengths must be integers, not {type(values).__name__}")
