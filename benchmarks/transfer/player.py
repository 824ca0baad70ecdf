"""What every competitor's process does: hold a buffer, obey commands on stdin, answer on stdout, time steps.

Knows: the parent's commands (JSON lines) and how a step is timed. Does not know: how bytes move (the `move` it is given).
Imports numpy only, because it also runs in the rivals' own environments.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

import numpy as np

Step = Callable[[], None]


def answers() -> TextIO:
    """Where answers go; whatever a rival prints on stdout goes to stderr from now on."""
    mine = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return mine


def orders(count: int) -> list[int]:
    """The source slot of each target slot: another order on either side, so that nothing can be joined."""
    return [int(slot) for slot in np.random.default_rng(0).permutation(count)]


def timed(step: Step, seconds: float) -> dict[str, float]:
    """Run for about `seconds`, at least once; seconds per step."""
    times: list[float] = []
    until = time.perf_counter() + seconds
    while not times or time.perf_counter() < until:
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    p99 = statistics.quantiles(times, n=100)[98] if len(times) > 1 else times[0]
    return {"p50_s": statistics.median(times), "p99_s": p99, "best_s": min(times), "steps": len(times)}


class Player:
    """`buffer` is this side's memory; `step(command)` prepares one step: `count` blocks of `size` bytes, `op` WRITE or READ."""

    def __init__(self, out: TextIO, buffer: np.ndarray, step: Callable[[dict[str, Any]], Step] | None = None) -> None:
        self._out = out
        self._buffer = buffer
        self._step = step
        self._warm: set[tuple[Any, ...]] = set()

    def say(self, what: Any) -> None:
        print(json.dumps(what), file=self._out, flush=True)

    def obey(self) -> None:
        """Until the parent says `end` or is gone."""
        for line in sys.stdin:
            command = json.loads(line)
            if command["do"] == "end":
                return
            self.say(getattr(self, command["do"])(command))

    def fill(self, command: dict[str, Any]) -> bool:
        self._buffer[: command["length"]] = command["value"]
        return True

    def sum(self, command: dict[str, Any]) -> int:
        return int(self._buffer[: command["length"]].sum(dtype=np.uint64))

    def move(self, command: dict[str, Any]) -> bool:
        assert self._step is not None
        self._step(command)()
        return True

    def measure(self, command: dict[str, Any]) -> dict[str, float]:
        assert self._step is not None
        step = self._step(command)
        key = (command.get("way"), command["op"], command["size"])
        if key not in self._warm:
            self._warm.add(key)
            step()
        return timed(step, command["seconds"])
