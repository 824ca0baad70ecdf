"""The open-source C++ engine by its Python API, protocol tcp. Runs by path in an environment of its own."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import numpy as np
from player import Player, Step, answers, orders  # type: ignore[import-not-found]  # by path

from mooncake.engine import TransferEngine


def _engine(length: int) -> tuple[np.ndarray, Any]:
    buffer, engine = np.ones(length, np.uint8), TransferEngine()
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") or engine.register_memory(buffer.ctypes.data, length):
        raise SystemExit("the engine does not start")
    return buffer, engine


def main() -> None:
    out = answers()
    if sys.argv[1] == "target":
        buffer, engine = _engine(int(sys.argv[2]))
        player = Player(out, buffer)
        player.say({"address": f"127.0.0.1:{engine.get_rpc_port()}", "base": buffer.ctypes.data, "length": len(buffer)})
    else:
        peer = json.loads(sys.stdin.readline())
        buffer, engine = _engine(peer["length"])
        player = Player(out, buffer, lambda command: _step(engine, peer, buffer.ctypes.data, command))
        player.say("ready")
    player.obey()
    os._exit(0)  # its threads do not end by themselves


def _step(engine: Any, peer: dict[str, Any], at: int, command: dict[str, Any]) -> Step:
    size, count, write = command["size"], command["count"], command["op"] == "WRITE"
    local = [at + slot * size for slot in orders(count)]
    remote = [peer["base"] + slot * size for slot in range(count)]
    one = engine.transfer_sync_write if write else engine.transfer_sync_read
    many = engine.batch_transfer_sync_write if write else engine.batch_transfer_sync_read

    def step() -> None:
        if count == 1:
            failed = one(peer["address"], local[0], remote[0], size)
        else:
            failed = many(peer["address"], local, remote, [size] * count)
        if failed:
            raise SystemExit(f"a transfer failed: {failed}")

    return step


if __name__ == "__main__":
    main()
