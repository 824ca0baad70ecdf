"""Peers killed, frozen and replaced at random points of transfers (chaos.py): a sample always, hundreds in a full run.

MOONCAKE_CHAOS_SEEDS sets how many; `python -m tests.transfer_engine.chaos` runs thousands.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest

from tests.transfer_engine.chaos import Chaos, Plan


@pytest.fixture(scope="module")
def chaos() -> Iterator[Chaos]:
    with Chaos() as made:
        yield made


def _run(chaos: Chaos, seeds: range) -> None:
    for seed in seeds:
        try:
            chaos.run(seed)
        except Exception as error:
            raise AssertionError(
                f"python -m tests.transfer_engine.chaos --seeds 1 --first {seed}\n{Plan.of(seed)}"
            ) from error
    print(f"seeds {seeds.start} to {seeds.stop}: {chaos.fired} hit in the middle, {dict(chaos.outcomes)}")


def test_a_sample_of_seeds(chaos: Chaos) -> None:
    _run(chaos, range(20))
    assert chaos.fired >= 5


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_hundreds_of_fresh_seeds(chaos: Chaos) -> None:
    """Other ones in every run."""
    count = int(os.environ.get("MOONCAKE_CHAOS_SEEDS", "200"))
    first, before = random.randrange(1 << 30), chaos.fired
    descriptors = len(os.listdir("/proc/self/fd"))
    _run(chaos, range(first, first + count))
    assert chaos.fired - before > count // 4
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 10  # of the last victims, and of the other ways' engines
