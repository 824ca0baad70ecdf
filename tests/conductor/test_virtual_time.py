"""The very Conductor core through the first 1,000 requests of the paper's conversation trace, in virtual time (issue 2,
9).

Prints its seed and a table: `pytest -s tests/conductor/test_virtual_time.py`.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from conductor.config import ConductorConfig
from deploy.simulation.physics import NodeModel
from deploy.simulation.replay import Replay, Setup, summary, table
from deploy.simulation.trace import TraceRequest, load_trace
from tests.conductor.helpers import keys, nothing_charged

TRACE = Path(__file__).parents[2].parent / "shared" / "traces" / "conversation_trace.jsonl"
WARM_UP = 100
needs_trace = pytest.mark.skipif(not TRACE.exists(), reason=f"the paper's trace is not at hand ({TRACE})")


def ended_well(replay: Replay) -> bool:
    """Every request ended exactly once, served in full or rejected, and nothing is left behind."""
    for record in replay.records:
        served = record.outcome is not None and record.job is not None
        assert record.ends == 1
        assert served != (record.rejection is not None)
        assert record.job is None or record.job.produced == record.request.output_tokens
    return nothing_charged(replay.conductor)


@needs_trace
@pytest.mark.parametrize("seed", [1, 2])
def test_conversation_trace_4p4d(seed: int) -> None:
    started_s = time.perf_counter()
    replay = Replay(load_trace(TRACE, 1000), Setup(seed=seed))
    replay.run()
    numbers = summary(replay, warm_up=WARM_UP)
    wall_s = time.perf_counter() - started_s
    print(f"\nseed {seed}, 4P4D, first 1,000 requests of the conversation trace\n{table(numbers)}\nwall_s {wall_s:.2f}")

    assert ended_well(replay)
    assert numbers["served"] + numbers["rejected"] == 1000
    assert numbers["served"] > 600  # 4 decoding nodes at TBT <= 100 ms cannot take all of 3 requests a second
    # Honest bars: they cover, and they are narrow.
    assert numbers["within_bar"] >= 0.90
    assert numbers["bar_over_ttft_p50"] < 0.30
    assert numbers["error_over_ttft_p50"] < 0.10
    # What was admitted meets its objectives: the estimates were worth something.
    assert numbers["ttft_p99_s"] < 30.0
    assert numbers["tbt_p50_s"] < 0.12
    # Rejections say when to come back, and each says why.
    rejections = [r.rejection for r in replay.records if r.rejection is not None]
    assert all(r.status == 429 and 0 < r.retry_after_s <= 60 and "allowed" in r.message for r in rejections)
    assert wall_s < 60  # about 3 s on a quiet core


@needs_trace
def test_the_same_seed_gives_the_same_run() -> None:
    def fates() -> list[object]:
        replay = Replay(load_trace(TRACE, 200), Setup(seed=7))
        return [(r.placement, r.rejection, r.outcome) for r in replay.run()]

    assert fates() == fates()


def test_other_machines_are_learned_without_any_setting() -> None:
    """Ten times slower nodes, four times the noise: bars widen and still cover."""
    slow = NodeModel(
        prefill_base_s=0.6, prefill_token_s=1.1e-3, prefill_square_s=7e-9, step_base_s=0.2, step_sequence_s=0.03,
        prefill_noise=0.2, decode_noise=0.1,
    )  # fmt: skip
    trace = [
        TraceRequest(
            1.5 * i, 200 + 137 * (i * i % 23), 5 + i % 20, keys((200 + 137 * (i * i % 23)) // 512, salt=i % 40)
        )
        for i in range(500)
    ]
    setup = Setup(seed=3, model=slow, config=ConductorConfig(ttft_slo_s=60, tbt_slo_s=0))
    replay = Replay(trace, setup)
    replay.run()
    numbers = summary(replay, warm_up=WARM_UP)
    print(f"\nseed 3, slow machines\n{table(numbers)}")
    assert ended_well(replay)
    assert numbers["served"] >= 490
    assert numbers["within_bar"] >= 0.90
    assert numbers["bar_over_ttft_p50"] < 1.0


def test_an_overloaded_cluster_rejects_and_keeps_its_promises_to_the_rest() -> None:
    trace = [TraceRequest(0.1 * i, 8000, 20, keys(15, salt=i)) for i in range(600)]
    replay = Replay(trace, replace(Setup(seed=4), config=ConductorConfig(ttft_slo_s=10.0, tbt_slo_s=0.3)))
    replay.run()
    numbers = summary(replay, warm_up=WARM_UP)
    print(f"\nseed 4, overload\n{table(numbers)}")
    assert ended_well(replay)
    assert numbers["rejected"] > 100
    assert numbers["ttft_p99_s"] < 11.5
    assert numbers["within_bar"] >= 0.90
