"""Engines of the drop-in API: one here, peers in processes of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from mooncake.engine import TransferEngine
from tests.drop_in.peer import Peer

BYTES = 8 << 20


class Here:
    """An engine of this process, with registered memory."""

    def __init__(self, protocol: str = "tcp", host: str = "127.0.0.1", length: int = BYTES) -> None:
        self.engine = TransferEngine()
        assert self.engine.initialize(host, "P2PHANDSHAKE", protocol, "") == 0
        self.array = np.random.default_rng(1).integers(0, 256, length, dtype=np.uint8)
        self.at = int(self.array.ctypes.data)
        assert self.engine.register_memory(self.at, length) == 0


@pytest.fixture
def make_peer() -> Iterator[Callable[..., Peer]]:
    made: list[Peer] = []

    def make(*args: Any, **kwargs: Any) -> Peer:
        made.append(Peer(*args, **kwargs))
        return made[-1]

    yield make
    for peer in made:
        peer.close()


@pytest.fixture
def here() -> Iterator[Here]:
    made = Here()
    yield made
    made.engine.close()


WAYS = {"tcp": ("tcp", {"MC_FORCE_TCP": "1"}), "shm": ("shm", {}), "default": ("tcp", {})}
"""Protocol and environment."""


class Pair:
    """`here` and a peer with `BYTES` at `base`."""

    def __init__(self, way: str, peer: Peer) -> None:
        self.way, self.peer = way, peer
        self.here = Here(WAYS[way][0])
        self.base: int = peer.call("allocate", BYTES)

    @property
    def engine(self) -> TransferEngine:
        return self.here.engine


@pytest.fixture(scope="module", params=WAYS)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    protocol, environ = WAYS[request.param]
    peer = Peer(protocol, environ=environ)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environ.items():
            patch.setenv(name, value)
        made = Pair(request.param, peer)
    yield made
    made.engine.close()
    peer.close()
