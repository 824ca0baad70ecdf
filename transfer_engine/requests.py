"""From the application's requests to columns per peer and direction.

Knows: how to read thousands of requests without a Python step each, and what is malformed. Does not know: peers' addresses,
memory tables.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mooncake.common.errors import NotRegistered
from transfer_engine.slices import U64, Columns
from transfer_engine.types import Opcode, SegmentHandle, TransferRequest, TransferVector

Values = Sequence[int] | npt.NDArray[np.integer]
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
    return [
        (target, Opcode(opcode), columns.take(np.array(at, np.intp))) for (target, opcode), at in rows.items()
    ], columns.length


def _columns(source: Values, offset: Values, length: Values) -> Columns:
    local, remote, count = _u64(source), _u64(offset), _u64(length)
    if not len(local) == len(remote) == len(count):
        raise ValueError("sources, target offsets and lengths differ in number")
    if (remote + count < remote).any():
        raise NotRegistered("a target range wraps around the address space")
    return Columns(local, remote, count, np.arange(len(local), dtype=np.intp))


def _u64(values: Values) -> U64:
    if isinstance(values, np.ndarray):
        if values.ndim != 1 or values.dtype.kind not in "iu":
            raise ValueError(f"addresses and lengths must be one-dimensional integers, not {values.dtype}")
        if values.dtype.kind == "i" and len(values) and int(values.min()) < 0:
            raise ValueError("addresses and lengths must not be negative")
        return values.astype(np.uint64, copy=False)
    if not values:
        return np.zeros(0, np.uint64)
    try:
        numbers = values if set(map(type, values)) == {int} else list(map(operator.index, values))
        if min(numbers) < 0:
            raise ValueError("addresses and lengths must not be negative")
        return np.array(numbers, np.uint64)
    except (OverflowError, TypeError) as error:
        raise ValueError("addresses and lengths must be integers from 0 to 2**64 - 1") from error
