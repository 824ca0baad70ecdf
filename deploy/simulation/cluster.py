"""Stand-ins for workers and the store: they take time and hold blocks as real ones do, and report as real ones do.

Knows: physics, queues, LRU caches, what a worker measures. Does not know: the Conductor, or why a job came here.
"""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from conductor.messages import DecodeSample, LoadSample, PrefillSample, WorkerReport
from deploy.simulation.physics import NodeModel
from deploy.simulation.trace import TRACE_BLOCK_TOKENS, TraceRequest
from mooncake.common.ids import BlockKey, InstanceId, InstanceName

MODEL = "simulated"


class LruBlocks:
    """Least recently used blocks, up to `capacity`. `stored` and `removed` collect changes until they are taken."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[BlockKey, None] = OrderedDict()
        self.stored: list[BlockKey] = []
        self.removed: list[BlockKey] = []

    def leading(self, keys: Sequence[BlockKey]) -> int:
        """How many leading keys are held."""
        return next((i for i, key in enumerate(keys) if key not in self._blocks), len(keys))

    def touch(self, keys: Iterable[BlockKey]) -> None:
        """Stores or freshens `keys`; the last of a prompt is the first to go."""
        for key in reversed(list(keys)):
            if key not in self._blocks:
                self.stored.append(key)
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        while len(self._blocks) > self._capacity:
            self.removed.append(self._blocks.popitem(last=False)[0])

    def take_changes(self) -> tuple[list[BlockKey], list[BlockKey]]:
        changes = (self.stored, self.removed)
        self.stored, self.removed = [], []
        return changes


@dataclass(slots=True)
class Job:
    """One admitted request on its way."""

    index: int
    request: TraceRequest
    pool_prefix_tokens: int
    decode: DecodeNode
    produced: int = 0
    token_times_s: list[float] = field(default_factory=list)

    @property
    def kv_tokens(self) -> int:
        return self.request.prompt_tokens + self.produced


Schedule = Callable[[float, Callable[[float], None]], None]
"""Call back at a time."""
Tell = Callable[[str, Job, float], None]
"""Something happened to a job: prefill_started, prefill_finished, first_token, finished."""


@dataclass(slots=True)
class _Reporting:
    """The part of a stand-in that talks to the Conductor."""

    name: str
    role: str
    kv_capacity_tokens: int
    sequence: int = 0
    prefill_samples: list[PrefillSample] = field(default_factory=list)
    load_samples: list[LoadSample] = field(default_factory=list)

    def report(
        self, blocks: LruBlocks | None, running: int, waiting: int, steps: Sequence[DecodeSample]
    ) -> WorkerReport:
        stored, removed = blocks.take_changes() if blocks is not None else ([], [])
        report = WorkerReport(
            name=InstanceName(self.name),
            instance_id=InstanceId(f"{self.name}-life"),
            model=MODEL,
            roles=(self.role,),
            sequence=self.sequence,
            block_size=TRACE_BLOCK_TOKENS,
            snapshot=self.sequence == 0,
            stored=stored,
            removed=removed,
            running=running,
            waiting=waiting,
            kv_capacity_tokens=self.kv_capacity_tokens,
            prefill_samples=self.prefill_samples,
            decode_samples=steps,
            load_samples=self.load_samples,
        )
        self.sequence += 1
        self.prefill_samples, self.load_samples = [], []
        return report


class PrefillNode:
    """First come first served, whole prompts, one at a time; loads what it lacks from the pool first."""

    def __init__(
        self, name: str, model: NodeModel, pool: LruBlocks, schedule: Schedule, tell: Tell, rng: random.Random
    ) -> None:
        self._model, self._pool, self._schedule, self._tell, self._rng = model, pool, schedule, tell, rng
        self._blocks = LruBlocks(model.prefill_kv_tokens // TRACE_BLOCK_TOKENS)
        self._waiting: deque[Job] = deque()
        self._running: Job | None = None
        self._reporting = _Reporting(name, "prefill", model.prefill_kv_tokens)
        self.busy_s = 0.0

    def submit(self, job: Job, now: float) -> None:
        self._waiting.append(job)
        if self._running is None:
            self._start(now)

    def _start(self, now: float) -> None:
        job = self._running = self._waiting.popleft()
        keys = job.request.block_keys
        held = self._blocks.leading(keys)
        usable = max(held, min(self._pool.leading(keys), job.pool_prefix_tokens // TRACE_BLOCK_TOKENS))
        cached = min(usable * TRACE_BLOCK_TOKENS, job.request.prompt_tokens - 1)
        load_s = 0.0
        if usable > held:
            load_s = self._model.load_s((usable - held) * TRACE_BLOCK_TOKENS, self._rng)
            self._reporting.load_samples.append(LoadSample((usable - held) * TRACE_BLOCK_TOKENS, load_s))
        compute_s = self._model.prefill_s(job.request.prompt_tokens, cached, self._rng)
        self.busy_s += load_s + compute_s
        self._tell("prefill_started", job, now)
        self._schedule(now + load_s + compute_s, lambda at: self._finish(job, cached, compute_s, at))

    def _finish(self, job: Job, cached: int, compute_s: float, now: float) -> None:
        self._reporting.prefill_samples.append(PrefillSample(job.request.prompt_tokens, cached, compute_s))
        self._blocks.touch(job.request.block_keys)
        self._pool.touch(job.request.block_keys)
        self._tell("prefill_finished", job, now)
        self._schedule(now + self._model.tail_s(job.request.prompt_tokens), lambda at: job.decode.submit(job, at))
        self._running = None
        if self._waiting:
            self._start(now)

    def report(self) -> WorkerReport:
        return self._reporting.report(self._blocks, int(self._running is not None), len(self._waiting), ())


class DecodeNode:
    """Continuous batching; a joining request stalls the step; who finds no room in the KVCache waits."""

    def __init__(self, name: str, model: NodeModel, schedule: Schedule, tell: Tell, rng: random.Random) -> None:
        self._model, self._schedule, self._tell, self._rng = model, schedule, tell, rng
        self._batch: list[Job] = []
        self._waiting: deque[Job] = deque()
        self._stepping = False
        self._reporting = _Reporting(name, "decode", model.decode_kv_tokens)
        self._steps: list[DecodeSample] = []

    def submit(self, job: Job, now: float) -> None:
        self._waiting.append(job)
        if not self._stepping:
            self._step(now)

    def _step(self, now: float) -> None:
        kv_tokens, stall_s = sum(job.kv_tokens for job in self._batch), 0.0
        while self._waiting and kv_tokens + self._waiting[0].kv_tokens <= self._model.decode_kv_tokens:
            job = self._waiting.popleft()
            self._batch.append(job)
            kv_tokens += job.kv_tokens
            stall_s += self._model.join_token_s * job.kv_tokens
        self._stepping = bool(self._batch)
        if self._batch:
            step_s = self._model.step_s(len(self._batch), kv_tokens, self._rng) + stall_s
            self._steps.append(DecodeSample(len(self._batch), kv_tokens, step_s))
            self._schedule(now + step_s, self._end_step)

    def _end_step(self, now: float) -> None:
        for job in self._batch:
            job.produced += 1
            job.token_times_s.append(now)
            if job.produced == 1:
                self._tell("first_token", job, now)
            if job.produced >= job.request.output_tokens:
                self._tell("finished", job, now)
        self._batch = [job for job in self._batch if job.produced < job.request.output_tokens]
        self._step(now)

    def report(self) -> WorkerReport:
        """Means over the steps since the last report, as a worker host measures them."""
        steps, self._steps = self._steps, []
        means = []
        if steps:
            batch, kv_tokens, tbt_s = (sum(column) / len(steps) for column in zip(*map(_columns, steps), strict=True))
            means.append(DecodeSample(batch, kv_tokens, tbt_s))
        return self._reporting.report(None, len(self._batch), len(self._waiting), means)


def _columns(step: DecodeSample) -> tuple[float, float, float]:
    return step.batch, step.kv_tokens, step.tbt_s
