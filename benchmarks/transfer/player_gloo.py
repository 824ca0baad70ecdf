"""torch.distributed with Gloo between two processes: isend and irecv of each block, and one byte as acknowledgement or request.

Gloo is two-sided: the target must post its half of every step, so the initiator announces each series of steps to it. That
announcement is not timed; the acknowledgement (WRITE) and the request (READ) are, as they are for the one-sided engines.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from player import Player, answers, orders  # type: ignore[import-not-found]  # by path

_END = -1


def _join(rank: int, port: int) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)


class _Side:
    """One rank's half of a step."""

    def __init__(self, length: int, peer: int) -> None:
        self.buffer = np.ones(length, np.uint8)
        self._memory = torch.from_numpy(self.buffer)
        self._peer = peer
        self._token = torch.zeros(1, dtype=torch.uint8)

    def blocks(self, size: int, slots: list[int]) -> list[torch.Tensor]:
        return [self._memory[slot * size : (slot + 1) * size] for slot in slots]

    def push(self, blocks: list[torch.Tensor], *, ask: bool) -> None:
        """Send the blocks; `ask` for one byte afterwards, else be asked for them before."""
        if not ask:
            dist.recv(self._token, self._peer)
        for work in [dist.isend(block, self._peer, tag=tag) for tag, block in enumerate(blocks)]:
            work.wait()
        if ask:
            dist.recv(self._token, self._peer)

    def pull(self, blocks: list[torch.Tensor], *, ask: bool) -> None:
        if ask:
            dist.send(self._token, self._peer)
        works = [dist.irecv(block, self._peer, tag=tag) for tag, block in enumerate(blocks)]
        for work in works:
            work.wait()
        if not ask:
            dist.send(self._token, self._peer)


def _target(length: int, port: int, out: Any) -> None:
    """Commands on stdin are for checks only; steps are announced by the initiator."""
    import threading

    side = _Side(length, 0)
    player = Player(out, side.buffer)
    player.say({"port": port, "length": length})
    _join(1, port)
    threading.Thread(target=lambda: (player.obey(), os._exit(0)), daemon=True).start()
    while True:
        series = torch.zeros(4, dtype=torch.int64)
        dist.recv(series, 0, tag=1 << 20)
        write, size, count, steps = series.tolist()
        blocks = side.blocks(size, list(range(count)))
        for _ in range(steps):
            side.pull(blocks, ask=False) if write else side.push(blocks, ask=False)


class _Initiator(Player):
    def __init__(self, out: Any, side: _Side) -> None:
        super().__init__(out, side.buffer)
        self._side = side

    def _series(self, command: dict[str, Any], steps: int) -> list[float]:
        size, count, write = command["size"], command["count"], command["op"] == "WRITE"
        dist.send(torch.tensor([write, size, count, steps], dtype=torch.int64), 1, tag=1 << 20)
        blocks, times = self._side.blocks(size, orders(count)), []
        for _ in range(steps):
            began = time.perf_counter()
            self._side.push(blocks, ask=True) if write else self._side.pull(blocks, ask=True)
            times.append(time.perf_counter() - began)
        return times

    def move(self, command: dict[str, Any]) -> bool:
        return bool(self._series(command, 1))

    def measure(self, command: dict[str, Any]) -> dict[str, float]:
        first = self._series(command, 1)[0]
        times = self._series(command, max(1, min(5000, int(command["seconds"] / first))))
        p99 = statistics.quantiles(times, n=100)[98] if len(times) > 1 else times[0]
        return {"p50_s": statistics.median(times), "p99_s": p99, "best_s": min(times), "steps": len(times)}


def main() -> None:
    out = answers()
    if sys.argv[1] == "target":
        import socket

        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        _target(int(sys.argv[2]), port, out)
    peer = json.loads(sys.stdin.readline())
    side = _Side(peer["length"], 1)
    _join(0, peer["port"])
    player = _Initiator(out, side)
    player.say("ready")
    player.obey()
    os._exit(0)


if __name__ == "__main__":
    main()
