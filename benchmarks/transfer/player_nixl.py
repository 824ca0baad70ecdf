"""NIXL with its UCX backend; UCX_TLS in the environment says which way UCX takes. Runs by path in an environment of its own."""

from __future__ import annotations

import base64
import json
import os
import sys
from typing import Any

import numpy as np
from nixl_cu12._api import nixl_agent, nixl_agent_config  # type: ignore[import-not-found]
from player import Player, Step, answers, orders  # type: ignore[import-not-found]  # by path


def _agent(name: str, length: int) -> tuple[np.ndarray, Any]:
    buffer = np.ones(length, np.uint8)
    agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
    agent.register_memory([(buffer.ctypes.data, length, 0, "")], "DRAM")
    return buffer, agent


def main() -> None:
    out = answers()
    if sys.argv[1] == "target":
        buffer, agent = _agent("target", int(sys.argv[2]))
        player = Player(out, buffer)
        metadata = base64.b64encode(agent.get_agent_metadata()).decode()
        player.say({"metadata": metadata, "base": buffer.ctypes.data, "length": len(buffer)})
    else:
        peer = json.loads(sys.stdin.readline())
        buffer, agent = _agent("initiator", peer["length"])
        name = agent.add_remote_agent(base64.b64decode(peer["metadata"]))
        name = name.decode() if isinstance(name, bytes) else name
        player = Player(out, buffer, lambda command: _step(agent, name, peer, buffer.ctypes.data, command))
        player.say("ready")
    player.obey()
    os._exit(0)


def _step(agent: Any, name: str, peer: dict[str, Any], at: int, command: dict[str, Any]) -> Step:
    size, count = command["size"], command["count"]
    local = agent.get_xfer_descs([(at + slot * size, size, 0) for slot in orders(count)], "DRAM")
    remote = agent.get_xfer_descs([(peer["base"] + slot * size, size, 0) for slot in range(count)], "DRAM")
    handle = agent.initialize_xfer(command["op"], local, remote, name)

    def step() -> None:
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        if state != "DONE":
            raise SystemExit(f"a transfer ended as {state}")

    return step


if __name__ == "__main__":
    main()
