"""Registering memory through the drop-in API."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from mooncake.engine import TransferEngine

PAGE = 4096


@pytest.fixture
def engine() -> Iterator[TransferEngine]:
    made = TransferEngine()
    assert made.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    yield made
    made.close()


@pytest.fixture
def memory() -> np.ndarray:
    return np.zeros(64 * PAGE, np.uint8)


def _regions(engine: TransferEngine) -> int:
    return int(engine.get_engine().stats()["regions"])


def test_the_same_range_twice_is_fine_and_ends_with_one_call(engine: TransferEngine, memory: np.ndarray) -> None:
    at = memory.ctypes.data
    assert engine.register_memory(at, PAGE) == 0
    assert engine.register_memory(at, PAGE, "cpu:0") == 0
    assert engine.batch_register_memory([at], [PAGE]) == 0
    assert _regions(engine) == 1
    assert engine.unregister_memory(at) == 0
    assert _regions(engine) == 0
    assert engine.unregister_memory(at) == -3
    assert engine.batch_unregister_memory([at]) == -3


def test_what_is_no_range(engine: TransferEngine, memory: np.ndarray) -> None:
    at = memory.ctypes.data
    assert engine.register_memory(at, 0) == -1
    assert engine.register_memory(0, PAGE) == -1
    assert engine.register_memory(at, (1 << 64) - 1) == -1
    assert engine.register_memory(64, PAGE) == -1, "not mapped"
    assert _regions(engine) == 0


@pytest.mark.parametrize("shift", [-1, 1, 100])
def test_an_overlap_is_an_error(engine: TransferEngine, memory: np.ndarray, shift: int) -> None:
    at = memory.ctypes.data + 8 * PAGE + 3
    assert engine.register_memory(at, PAGE) == 0
    assert engine.register_memory(at + shift, PAGE) == -7
    assert engine.register_memory(at, PAGE + shift) == -7
    assert engine.register_memory(at + PAGE, PAGE) == 0, "touching is not overlapping"


def test_a_batch_is_registered_whole_or_not_at_all(engine: TransferEngine, memory: np.ndarray) -> None:
    at = memory.ctypes.data
    assert engine.register_memory(at + 10 * PAGE, PAGE) == 0
    assert engine.batch_register_memory([at, at + PAGE, at + 10 * PAGE + 5], [PAGE] * 3) == -7
    assert engine.batch_register_memory([at, at + 5], [PAGE] * 2) == -7
    assert engine.batch_register_memory([at, 64], [PAGE] * 2) == -1
    assert engine.batch_register_memory([at, at + PAGE], [PAGE]) == -1
    assert _regions(engine) == 1
    assert engine.batch_register_memory([at, at + PAGE, at + 10 * PAGE], [PAGE] * 3) == 0
    assert engine.batch_register_memory([], []) == 0
    assert _regions(engine) == 3
    assert engine.batch_unregister_memory([at, 64, at + PAGE]) == -3, "what can be unregistered is"
    assert _regions(engine) == 1
    assert engine.batch_unregister_memory([]) == 0


def test_neighbours_of_one_storage_by_their_exact_bytes(engine: TransferEngine, memory: np.ndarray) -> None:
    """vLLM registers sibling views of one tensor, wherever they begin."""
    starts = [3, 1000, 1001, 4095, 4099]
    ends = [*starts[1:], 9000]
    at = memory.ctypes.data
    assert (
        engine.batch_register_memory([at + s for s in starts], [e - s for s, e in zip(starts, ends, strict=True)]) == 0
    )
    assert engine.batch_unregister_memory([at + s for s in starts]) == 0


def test_many_threads_register_at_once(engine: TransferEngine, memory: np.ndarray) -> None:
    results: list[int] = []

    def work(n: int) -> None:
        at = memory.ctypes.data + n * PAGE
        for _ in range(50):
            results.append(engine.register_memory(at, PAGE))
            results.append(engine.unregister_memory(at))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == [0] * 1000
    assert _regions(engine) == 0
