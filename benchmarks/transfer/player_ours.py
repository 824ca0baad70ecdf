"""Our engine, all ways to one target process, and the memcpy limit.

The target offers a shared buffer (for shm-mapped) and plain memory (for shm-cma and tcp). `local` goes to a second engine of
the initiator's own process, and `memcpy` copies the same blocks there, one memmove each, in one thread.
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

import numpy as np

from benchmarks.transfer.player import Player, Step, answers, orders
from transfer_engine import EngineConfig, Opcode, SegmentHandle, TransferEngine, TransferVector


def _target(length: int) -> None:
    out = answers()
    with TransferEngine() as engine:
        plain = np.ones(length, np.uint8)
        shared = engine.allocate_shared(length)
        view = np.frombuffer(shared.view, np.uint8)
        view[:] = 1
        bases = {"tcp": engine.register_buffer(plain), "shm-mapped": shared.address}
        player = _Target(out, plain, view)
        player.say({"address": engine.address, "bases": bases | {"shm-cma": bases["tcp"]}, "length": length})
        player.obey()
        del player, view


class _Target(Player):
    def __init__(self, out: Any, plain: np.ndarray, shared: np.ndarray) -> None:
        super().__init__(out, plain)
        self._of = {"shm-mapped": shared}
        self._plain = plain

    def fill(self, command: dict[str, Any]) -> bool:
        self._buffer = self._of.get(command["way"], self._plain)
        return super().fill(command)

    def sum(self, command: dict[str, Any]) -> int:
        self._buffer = self._of.get(command["way"], self._plain)
        return super().sum(command)


class _Initiator:
    def __init__(self, peer: dict[str, Any]) -> None:
        self._bases: dict[str, int] = peer["bases"]
        self.source = np.ones(peer["length"], np.uint8)
        self.copy = np.ones(peer["length"], np.uint8)
        self._here = TransferEngine()
        self._bases["local"] = self._here.register_buffer(self.copy)
        self._engines: dict[str, tuple[TransferEngine, SegmentHandle]] = {}
        for way in self._bases:
            engine = TransferEngine(
                EngineConfig(transports=(way.split("-")[0],), shm_mapping=way != "shm-cma")  # one way each: forced
            )
            engine.register_buffer(self.source)
            address = self._here.address if way == "local" else peer["address"]
            self._engines[way] = engine, engine.open_segment(address)

    def step(self, command: dict[str, Any]) -> Step:
        way, size, count = command["way"], command["size"], command["count"]
        at, write = self.source.ctypes.data, command["op"] == "WRITE"
        if way == "memcpy":
            far = self.copy.ctypes.data
            rows = [(far + to * size, at + of * size, size) for to, of in enumerate(orders(count))]
            return lambda: _memcpy(rows if write else [(of, to, n) for to, of, n in rows])
        engine, segment = self._engines[way]
        slots = np.arange(count, dtype=np.uint64) * np.uint64(size)
        local = np.uint64(at) + slots[orders(count)]
        vector = TransferVector(
            Opcode[command["op"]],
            segment,
            local,
            np.uint64(self._bases[way]) + slots,
            np.full(count, size, np.uint64),
        )

        def step() -> None:
            engine.transfer_sync(vector, 60.0)

        return step

    def close(self) -> None:
        for engine, _ in self._engines.values():
            engine.close()
        self._here.close()


def _memcpy(rows: list[tuple[int, int, int]]) -> None:
    for to, of, size in rows:
        ctypes.memmove(to, of, size)


class _Player(Player):
    """`local` and `memcpy` have their target in this process: commands to it say `far`."""

    def __init__(self, out: Any, initiator: _Initiator) -> None:
        super().__init__(out, initiator.source, initiator.step)
        self._sides = (initiator.source, initiator.copy)

    def fill(self, command: dict[str, Any]) -> bool:
        self._buffer = self._sides[bool(command.get("far"))]
        return super().fill(command)

    def sum(self, command: dict[str, Any]) -> int:
        self._buffer = self._sides[bool(command.get("far"))]
        return super().sum(command)


def main() -> None:
    if sys.argv[1] == "target":
        return _target(int(sys.argv[2]))
    out = answers()
    initiator = _Initiator(json.loads(sys.stdin.readline()))
    player = _Player(out, initiator)
    player.say("ready")
    player.obey()
    initiator.close()


if __name__ == "__main__":
    main()
