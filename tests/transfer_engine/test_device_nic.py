"""GPU memory and NICs: registered as a dmabuf, or left to tcp. With the fake driver, by the verbs provider in memory and, for
what NICs without access to GPUs do, soft-RoCE."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

from tests.rdma.fabric import Fabric
from tests.transfer_engine.conftest import NICS
from tests.transfer_engine.gpu import Gpu, fake_driver
from tests.transfer_engine.test_device_memory import LENGTH, SLICE, config
from transfer_engine import Opcode, TransferEngine, TransferError, TransferRequest

pytestmark = pytest.mark.elsewhere("fake")

OFFSET = 100
"""Where the registered range begins in its allocation, so that a dmabuf's addresses differ from ours by no whole page."""


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    made = Gpu(fake_driver())
    yield made
    made.dmabuf(True)
    made.free_all()


class Two:
    """Two engines with NICs of their own, each with host and GPU memory."""

    def __init__(self, gpu: Gpu, *transports: str, place: str = "fake") -> None:
        self.gpu = gpu
        nics = NICS[f"rdma-{place}"]
        self.engines = [TransferEngine(config(fake_driver(), *transports, nics=names)) for names in nics]
        self.host = [np.zeros(LENGTH, np.uint8) for _ in nics]
        self.at = [{"host": e.register_buffer(h)} for e, h in zip(self.engines, self.host, strict=True)]
        for engine, at in zip(self.engines, self.at, strict=True):
            at["gpu"] = gpu.allocate(LENGTH + OFFSET) + OFFSET
            engine.register_local_memory(at["gpu"], LENGTH, location="cuda:0")
        self.segment = self.engines[0].open_segment(self.engines[1].address)

    def fill(self, side: int, kind: str, content: np.ndarray) -> None:
        if kind == "gpu":
            self.gpu.fill(self.at[side][kind], content)
        else:
            self.host[side][: len(content)] = content

    def read(self, side: int, kind: str, length: int) -> np.ndarray:
        return self.gpu.read(self.at[side][kind], length) if kind == "gpu" else self.host[side][:length]

    def move(self, opcode: Opcode, mine: str, theirs: str, length: int = LENGTH) -> None:
        source, target = ((0, mine), (1, theirs)) if opcode is Opcode.WRITE else ((1, theirs), (0, mine))
        content = np.random.default_rng(opcode).integers(0, 256, length, dtype=np.uint8)
        self.fill(*source, content)
        self.fill(*target, np.zeros(length, np.uint8))
        requests = [
            TransferRequest(opcode, self.at[0][mine] + o, self.segment, self.at[1][theirs] + o, min(SLICE, length - o))
            for o in range(0, length, SLICE)
        ]
        self.engines[0].transfer_sync(requests, 20.0)
        assert np.array_equal(self.read(*target, length), content), (opcode, mine, theirs)

    def moved(self, way: str) -> float:
        stats = self.engines[0].stats()
        return stats.get(f"{way}_read_bytes", 0) + stats.get(f"{way}_write_bytes", 0)

    def close(self) -> None:
        for engine in self.engines:
            engine.close()


def _device_descriptors() -> int:
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return sum("fakecuda" in os.readlink(link) for link in links if os.path.islink(link))


PAIRINGS = [("host", "gpu"), ("gpu", "host"), ("gpu", "gpu")]


def test_a_dmabuf_is_reached_by_the_nics_without_staging(gpu: Gpu) -> None:
    live = Fabric().live_objects()
    two = Two(gpu, "rdma", "tcp")
    assert all(len(region.keys) == 2 for engine in two.engines for region in engine.memory.regions())
    assert _device_descriptors() == 2  # one of each allocation; those of the exports are closed
    for opcode in Opcode:
        for mine, theirs in PAIRINGS:
            two.move(opcode, mine, theirs)
    assert two.moved("rdma") == 6 * LENGTH and two.moved("tcp") == 0
    assert two.engines[0].stats()["staging_buffers"] == 0
    for engine, at in zip(two.engines, two.at, strict=True):
        engine.unregister_local_memory(at["gpu"])
    two.close()
    assert Fabric().live_objects() == live


@pytest.mark.parametrize("place", ["fake", pytest.param("vm", marks=[pytest.mark.slow, pytest.mark.elsewhere("vm")])])
def test_without_peer_access_gpu_memory_goes_by_tcp_and_the_rest_by_nic(gpu: Gpu, place: str) -> None:
    gpu.dmabuf(place == "vm")  # soft-RoCE refuses dmabufs by itself
    two = Two(gpu, "rdma", "tcp", place=place)
    for engine, at in zip(two.engines, two.at, strict=True):
        assert {r.address: len(r.keys) for r in engine.memory.regions()} == {at["host"]: 2, at["gpu"]: 0}
    for opcode in Opcode:
        for mine, theirs in PAIRINGS:
            two.move(opcode, mine, theirs)
        two.move(opcode, "host", "host")
    assert two.moved("rdma") == 2 * LENGTH and two.moved("tcp") == 6 * LENGTH
    assert two.engines[0].stats()["staging_buffers"] > 0
    two.close()


def test_without_peer_access_and_any_other_way_registration_says_what_is_missing(gpu: Gpu) -> None:
    gpu.dmabuf(False)
    with TransferEngine(config(fake_driver(), "rdma")) as engine:
        address = gpu.allocate(4096)
        with pytest.raises(TransferError, match=r"nvidia-peermem"):
            engine.register_local_memory(address, 4096, location="cuda:0")
        assert engine.memory.regions() == []
