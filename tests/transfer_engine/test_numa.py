"""Which NUMA node memory lies on: here, and in a machine with two of them."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import pytest

from transfer_engine import EngineConfig, TransferEngine
from transfer_engine.numa import node_of
from transfer_engine.topology import discover

PAGE = mmap.PAGESIZE
_MBIND, _BIND, _INTERLEAVE = 237, 2, 3


def address_of(memory: mmap.mmap) -> int:
    return np.frombuffer(memory, np.uint8).ctypes.data


def test_touched_memory_lies_on_a_node_that_sysfs_knows() -> None:
    memory = mmap.mmap(-1, 64 * PAGE)
    assert node_of(address_of(memory), 64 * PAGE) is None, "nothing is there yet"
    memory[17 * PAGE] = 1
    assert f"cpu:{node_of(address_of(memory), 64 * PAGE)}" in discover().locations
    assert node_of(address_of(memory) + 17 * PAGE + 5, 1) is not None
    assert node_of(address_of(memory) + 18 * PAGE, PAGE) is None


@pytest.mark.parametrize(("address", "length"), [(0, 1), (1 << 46, PAGE), (PAGE, 0)])
def test_what_is_not_memory_is_nowhere(address: int, length: int) -> None:
    assert node_of(address, length) is None


@pytest.mark.slow
@pytest.mark.elsewhere("vm")
def test_two_nodes() -> None:
    """x86-64, as the virtual machine is."""
    for node in (0, 1):
        memory = _placed(_BIND, 1 << node)
        assert node_of(address_of(memory), len(memory)) == node
    spread = _placed(_INTERLEAVE, 0b11)
    assert node_of(address_of(spread), len(spread)) is None
    assert {node_of(address_of(spread) + at * PAGE, PAGE) for at in range(8)} == {0, 1}


@pytest.mark.elsewhere("fake")
def test_what_nics_have_pinned_is_registered_where_it_lies() -> None:
    with TransferEngine(EngineConfig(transports=("rdma",))) as engine:
        memory = np.ones(1 << 20, np.uint8)
        at = engine.register_buffer(memory)
        elsewhere = np.ones(1 << 20, np.uint8)
        engine.register_buffer(elsewhere, location="cpu:7")  # the application knows better
        found = {region.address: region.location for region in engine.memory.regions()}
        assert found[at] == f"cpu:{node_of(at, 1 << 20)}"
        assert "cpu:7" in found.values()


def _placed(policy: int, nodes: int) -> mmap.mmap:
    memory = mmap.mmap(-1, 256 * PAGE)
    mask = ctypes.c_ulong(nodes)
    done = ctypes.CDLL(None).syscall(
        _MBIND, ctypes.c_void_p(address_of(memory)), ctypes.c_ulong(len(memory)), policy, ctypes.byref(mask), 64, 0
    )
    assert done == 0
    memory[:] = b"x" * len(memory)
    return memory
