"""All competitors in one run: contents checked, then rounds in which each takes its turn at every cell.

Knows: the order of turns and what a cell's value is. Does not know: processes, tables. Taking turns within seconds lets noise
of the machine hit all alike; a cell's value is the median of its rounds' medians, the best of them is kept beside it.
"""

from __future__ import annotations

import statistics
import time
from typing import Any, NamedTuple

from benchmarks.transfer.rivals import Missing, Pair, Rival

BLOCKS = 64
SIZES = (16 << 10, 128 << 10, 1 << 20, 16 << 20)
LATENCY_BYTES = 4096
OPS = ("WRITE", "READ")
_CHECKED_BYTES = 128 << 10
_IN_PROCESS = ("local", "memcpy")


class Cell(NamedTuple):
    way: str
    op: str
    size: int
    blocks: int


class Contest:
    def __init__(self, rivals: list[Rival], ways: set[str], sizes: tuple[int, ...]) -> None:
        self.missing: dict[str, str] = {}
        self._pairs: list[tuple[Pair, list[str]]] = []
        self._sizes = sizes
        for rival in rivals:
            chosen = [way for way in rival.ways if way in ways]
            if chosen:
                self._enter(rival, chosen, BLOCKS * max(sizes))

    def _enter(self, rival: Rival, ways: list[str], length: int) -> None:
        try:
            pair = Pair(rival, length)
        except Missing as error:
            self.missing |= dict.fromkeys(ways, str(error))
            return
        try:
            for way in ways:
                _check(pair, way)
            pair.pause()
            self._pairs.append((pair, ways))
        except Missing as error:
            self.missing |= dict.fromkeys(ways, str(error))
            pair.close()

    def run(self, rounds: int, seconds: float, until: float) -> list[dict[str, Any]]:
        """One row per cell. Rounds after the first end at `until` (monotonic): the machine may be slow."""
        turns: dict[Cell, list[dict[str, float]]] = {}
        plan = [(LATENCY_BYTES, 1), *((size, BLOCKS) for size in self._sizes)]
        for done in range(rounds):
            for size, count in plan:
                for op in OPS:
                    if done and time.monotonic() > until:
                        break
                    for pair, ways in list(self._pairs):
                        self._turn(pair, ways, op, size, count, seconds, turns)
        return [_row(cell, results) for cell, results in turns.items()]

    def _turn(
        self,
        pair: Pair,
        ways: list[str],
        op: str,
        size: int,
        count: int,
        seconds: float,
        turns: dict[Cell, list[dict[str, float]]],
    ) -> None:
        pair.resume()
        for way in ways:
            try:
                result = pair.ask(pair.initiator, do="measure", way=way, op=op, size=size, count=count, seconds=seconds)
            except Missing as error:
                self.missing |= dict.fromkeys(ways, str(error))
                self._pairs.remove((pair, ways))
                pair.close()
                return
            turns.setdefault(Cell(way, op, size, count), []).append(result)
        pair.pause()

    def close(self) -> None:
        for pair, _ in self._pairs:
            pair.close()


def _row(cell: Cell, results: list[dict[str, float]]) -> dict[str, Any]:
    middle = statistics.median(result["p50_s"] for result in results)
    best = min(result["best_s"] for result in results)
    row: dict[str, Any] = {"way": cell.way, "op": cell.op, "block_bytes": cell.size, "blocks": cell.blocks}
    if cell.blocks == 1:
        p99 = statistics.median(result["p99_s"] for result in results)
        return row | {"latency_us_p50": middle * 1e6, "latency_us_p99": p99 * 1e6, "latency_us_best": best * 1e6}
    moved = cell.size * cell.blocks
    return row | {"bytes_per_s": moved / middle, "best_bytes_per_s": moved / best}


def _check(pair: Pair, way: str) -> None:
    """Every byte arrives, both ways. Raises Missing."""
    length = BLOCKS * _CHECKED_BYTES
    far: dict[str, Any] = {"way": way, "length": length}
    other = pair.target
    if way in _IN_PROCESS:
        far["far"], other = True, pair.initiator
    for op, value in (("WRITE", 3), ("READ", 5)):
        from_here = op == "WRITE"
        pair.ask(pair.initiator, do="fill", way=way, length=length, value=value if from_here else 1)
        pair.ask(other, do="fill", **far, value=1 if from_here else value)
        pair.ask(pair.initiator, do="move", way=way, op=op, size=_CHECKED_BYTES, count=BLOCKS)
        arrived = (
            pair.ask(other, do="sum", **far)
            if from_here
            else pair.ask(pair.initiator, do="sum", way=way, length=length)
        )
        if arrived != value * length:
            raise Missing(f"{pair.rival.name}: wrong bytes arrived by {way}")
