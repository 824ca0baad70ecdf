"""Replays a trace against the real Conductor core and stand-in workers: an event heap, no policy (DESIGN.md §4).

`python -m deploy.simulation.replay TRACE [--limit N] [--prefill N] [--decode N] [--seed N] [--speed X]` prints a table.
Knows: arrivals, delays of what the Conductor hears, outcomes. Does not know: what nodes cost (physics.py).
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from conductor.config import ConductorConfig
from conductor.core import Conductor
from conductor.messages import EventKind, Outcome, Placement, PlaceRequest, Rejection, RequestEvent
from deploy.simulation.cluster import MODEL, DecodeNode, Job, LruBlocks, PrefillNode
from deploy.simulation.physics import NodeModel
from deploy.simulation.trace import TRACE_BLOCK_TOKENS, TraceRequest, load_trace
from mooncake.common.ids import InstanceId, InstanceName, RequestId

_KINDS = {
    "prefill_started": EventKind.PREFILL_STARTED,
    "prefill_finished": EventKind.PREFILL_FINISHED,
    "first_token": EventKind.FIRST_TOKEN,
    "finished": EventKind.FINISHED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What is replayed on what. Delays in seconds."""

    prefill_nodes: int = 4
    decode_nodes: int = 4
    seed: int = 1
    speed: float = 1.0
    model: NodeModel = field(default_factory=NodeModel)
    config: ConductorConfig = field(
        default_factory=lambda: ConductorConfig(ttft_slo_s=30.0, tbt_slo_s=0.1, reject_infeasible=True)
    )
    event_delay_s: float = 0.02
    report_every_s: float = 0.5
    pool_tokens: int = 50_000_000


@dataclass(slots=True)
class Record:
    """The fate of one request."""

    request: TraceRequest
    rejection: Rejection | None = None
    placement: Placement | None = None
    outcome: Outcome | None = None
    job: Job | None = None
    ends: int = 0


class Replay:
    """One run. `run()` returns when every request has ended."""

    def __init__(self, trace: Sequence[TraceRequest], setup: Setup) -> None:
        self.setup = setup
        self.now = 0.0
        self.records = [Record(request) for request in trace]
        self.conductor = Conductor(setup.config)
        self.place_wall_s = 0.0
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []
        self._count = 0
        self._open = len(trace)
        rng = random.Random(setup.seed)
        self._pool = LruBlocks(setup.pool_tokens // TRACE_BLOCK_TOKENS)
        self.prefill = {
            f"prefill-{i}": PrefillNode(f"prefill-{i}", setup.model, self._pool, self._at, self._tell, rng)
            for i in range(setup.prefill_nodes)
        }
        self.decode = {
            f"decode-{i}": DecodeNode(f"decode-{i}", setup.model, self._at, self._tell, rng)
            for i in range(setup.decode_nodes)
        }

    def run(self) -> list[Record]:
        for role, nodes in (("prefill", self.prefill), ("decode", self.decode)):
            for name in nodes:
                self.conductor.instance_up(InstanceName(name), InstanceId(f"{name}-life"), MODEL, roles=(role,))
        self._report(0.0)
        for index, record in enumerate(self.records):
            self._at(record.request.arrival_s / self.setup.speed, partial(self._arrive, index))
        while self._heap:
            self.now, _, call = heapq.heappop(self._heap)
            call(self.now)
        return self.records

    def _at(self, at_s: float, call: Callable[[float], None]) -> None:
        self._count += 1
        heapq.heappush(self._heap, (at_s, self._count, call))

    def _arrive(self, index: int, now: float) -> None:
        record = self.records[index]
        keys = record.request.block_keys
        started_s = time.perf_counter()
        result = self.conductor.place(
            PlaceRequest(
                request_id=RequestId(str(index)),
                model=MODEL,
                prompt_tokens=record.request.prompt_tokens,
                block_keys=keys,
                block_size=TRACE_BLOCK_TOKENS,
                pool_prefix_tokens=self._pool.leading(keys) * TRACE_BLOCK_TOKENS,
            ),
            now,
        )
        self.place_wall_s += time.perf_counter() - started_s
        if isinstance(result, Rejection):
            record.rejection = result
            self._ended(record)
            return
        assert result.prefill is not None
        record.placement = result
        record.job = Job(index, record.request, result.pool_prefix_tokens, self.decode[result.decode.name])
        self.prefill[result.prefill.name].submit(record.job, now)

    def _tell(self, what: str, job: Job, now: float) -> None:
        """A gateway sees it and tells the Conductor a little later."""
        arrival_s = job.request.arrival_s / self.setup.speed
        event = RequestEvent(
            request_id=RequestId(str(job.index)), kind=_KINDS[what], at_s=now - arrival_s, output_tokens=job.produced
        )
        self._at(now + self.setup.event_delay_s, lambda at: self._hear(event, at))

    def _hear(self, event: RequestEvent, now: float) -> None:
        for outcome in self.conductor.report([event], now):
            self.records[int(outcome.request_id)].outcome = outcome
        if event.kind is EventKind.FINISHED:
            self._ended(self.records[int(event.request_id)])

    def _ended(self, record: Record) -> None:
        record.ends += 1
        self._open -= 1

    def _report(self, now: float) -> None:
        self._pool.take_changes()
        for report in [*(n.report() for n in self.prefill.values()), *(n.report() for n in self.decode.values())]:
            self.conductor.worker_report(report, now)
        self.conductor.tick(now)
        if self._open:
            self._at(now + self.setup.report_every_s, self._report)


def mean_of_largest_gaps_s(times_s: Sequence[float]) -> float:
    """The paper's TBT of one request: the mean of the largest tenth of the gaps between its tokens; 0 without gaps."""
    gaps = sorted((b - a for a, b in itertools.pairwise(times_s)), reverse=True)
    top = gaps[: -(-len(gaps) // 10)]
    return sum(top) / len(top) if top else 0.0


def quantile(values: Sequence[float], q: float) -> float:
    """Nearest rank; 0 for nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else 0.0


def summary(replay: Replay, *, warm_up: int = 100) -> dict[str, float]:
    """The numbers of a finished run. Error bars are judged on first tokens after the first `warm_up` ones."""
    outcomes = [r.outcome for r in replay.records if r.outcome is not None]
    judged = outcomes[warm_up:]
    ttft = [o.ttft_s for o in outcomes]
    tbt = [mean_of_largest_gaps_s(r.job.token_times_s) for r in replay.records if r.job is not None]
    totals, place_calls = replay.conductor.totals, max(1, len(replay.records))
    return {
        "requests": len(replay.records),
        "served": len(outcomes),
        "rejected": sum(r.rejection is not None for r in replay.records),
        "ttft_p50_s": quantile(ttft, 0.5),
        "ttft_p90_s": quantile(ttft, 0.9),
        "ttft_p99_s": quantile(ttft, 0.99),
        "tbt_p50_s": quantile(tbt, 0.5),
        "tbt_p90_s": quantile(tbt, 0.9),
        "within_bar": sum(o.within_bar for o in judged) / max(1, len(judged)),
        "error_over_ttft_p50": quantile([o.error_s / o.ttft_s for o in judged], 0.5),
        "bar_over_ttft_p50": quantile([o.estimate.ttft_error_s / o.ttft_s for o in judged], 0.5),
        "bar_over_ttft_p90": quantile([o.estimate.ttft_error_s / o.ttft_s for o in judged], 0.9),
        "prefix_share": totals.prefix_tokens / max(1, totals.prompt_tokens),
        "pool_share": totals.pool_tokens / max(1, totals.prompt_tokens),
        "prefill_busy_s_per_request": sum(n.busy_s for n in replay.prefill.values()) / max(1, len(outcomes)),
        "place_mean_ms": replay.place_wall_s / place_calls * 1e3,
        "virtual_s": replay.now,
    }


def table(numbers: dict[str, float]) -> str:
    return "\n".join(f"{name:<28} {value:>12.4g}" for name, value in numbers.items())


def main() -> None:
    parser = argparse.ArgumentParser(description="replay a trace against the Conductor core in virtual time")
    parser.add_argument("trace", type=Path)
    parser.add_argument("--limit", type=int, default=1000)
    parser.add_argument("--prefill", type=int, default=4)
    parser.add_argument("--decode", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--speed", type=float, default=1.0)
    args = parser.parse_args()
    setup = Setup(prefill_nodes=args.prefill, decode_nodes=args.decode, seed=args.seed, speed=args.speed)
    started_s = time.perf_counter()
    replay = Replay(load_trace(args.trace, args.limit), setup)
    replay.run()
    print(f"seed {args.seed}, {args.prefill}P{args.decode}D, speed {args.speed}")
    print(table(summary(replay) | {"wall_s": time.perf_counter() - started_s}))


if __name__ == "__main__":
    main()
