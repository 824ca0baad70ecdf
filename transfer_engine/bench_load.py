"""One operation of `mooncake bench transfer`, timed, and the proof of its content.

Knows: an operation is one submission of so many blocks, in another order on either side, so that nothing can be joined. Does
not know: threads, options, reports.
"""

from __future__ import annotations

import random
import time
from array import array
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mooncake.common.errors import TransferError
from transfer_engine.engine import TransferEngine
from transfer_engine.types import Opcode, SegmentHandle, TransferRequest, TransferVector

Bytes = npt.NDArray[np.uint8]
SAMPLES = 1 << 18
"""Latencies kept per thread; beyond it a uniform sample of all."""


@dataclass(frozen=True)
class Load:
    """How much one phase moves. `ops` 0: until `seconds` have passed. Sizes in bytes."""

    block_bytes: int
    batch: int
    threads: int
    ops: int
    seconds: float
    deadline_s: float
    check: bool
    seed: int

    @property
    def op_bytes(self) -> int:
        return self.block_bytes * self.batch

    @property
    def total_bytes(self) -> int:
        return self.op_bytes * self.threads


class Latencies:
    """Durations in seconds, bounded."""

    def __init__(self, seed: int) -> None:
        self.count = 0
        self.sum_s = 0.0
        self.kept = array("d")
        self._random = random.Random(seed)

    def add(self, seconds: float) -> None:
        self.count += 1
        self.sum_s += seconds
        if len(self.kept) < SAMPLES:
            self.kept.append(seconds)
        elif (at := self._random.randrange(self.count)) < SAMPLES:
            self.kept[at] = seconds


class Share:
    """One thread's share: its own range on either side, and its own pattern."""

    def __init__(self, index: int, load: Load, engine: TransferEngine, target: SegmentHandle, there: int) -> None:
        self.load = load
        self.index = index
        self.target = target
        self.there = there + index * load.op_bytes
        self.local: Bytes = np.zeros(load.op_bytes, np.uint8)
        self.at = engine.register_buffer(self.local)
        self.proof: Bytes = np.zeros(load.op_bytes if load.check else 1, np.uint8)
        self.proof_at = engine.register_buffer(self.proof)
        self.order = np.random.default_rng([load.seed, index]).permutation(load.batch)
        self.latencies = Latencies(load.seed + index)
        self.engine = engine

    def vector(self, opcode: Opcode) -> TransferVector:
        slots = np.arange(self.load.batch, dtype=np.uint64) * np.uint64(self.load.block_bytes)
        local = np.uint64(self.at) + slots[self.order]
        lengths = np.full(self.load.batch, self.load.block_bytes, np.uint64)
        return TransferVector(opcode, self.target, local, np.uint64(self.there) + slots, lengths)

    def whole(self, opcode: Opcode) -> TransferRequest:
        """The range there in one piece, to or from the proof."""
        return TransferRequest(opcode, self.proof_at, self.target, self.there, self.load.op_bytes)

    def operate(self, opcode: Opcode, vector: TransferVector, turn: int) -> None:
        """One operation, timed; with its proof, which is not. Raises MooncakeError."""
        pattern = self._prepare(opcode, turn) if self.load.check else None
        began = time.perf_counter()
        self.engine.transfer_sync(vector, self.load.deadline_s)
        self.latencies.add(time.perf_counter() - began)
        if pattern is not None:
            self._prove(opcode, pattern, turn)

    def _prepare(self, opcode: Opcode, turn: int) -> Bytes:
        """Put this turn's pattern where it is to be moved from."""
        pattern = np.frombuffer(
            np.random.default_rng([self.load.seed, self.index, turn]).bytes(self.load.op_bytes), np.uint8
        )
        if opcode is Opcode.WRITE:
            self.local[:] = pattern
        else:
            self.local[:] = 0
            self.proof[:] = pattern
            self.engine.transfer_sync([self.whole(Opcode.WRITE)], self.load.deadline_s)
        return pattern

    def _prove(self, opcode: Opcode, pattern: Bytes, turn: int) -> None:
        """Block k there is block order[k] here. What was written is read back in one piece, so the ways differ."""
        blocks = pattern.reshape(self.load.batch, self.load.block_bytes)
        if opcode is Opcode.WRITE:
            self.engine.transfer_sync([self.whole(Opcode.READ)], self.load.deadline_s)
            same = np.array_equal(self.proof.reshape(blocks.shape), blocks[self.order])
        else:
            same = np.array_equal(self.local.reshape(blocks.shape)[self.order], blocks)
        if not same:
            raise TransferError(f"wrong bytes after {opcode.name} number {turn} of thread {self.index}")

    def close(self) -> None:
        self.engine.unregister_local_memory(self.at)
        self.engine.unregister_local_memory(self.proof_at)
