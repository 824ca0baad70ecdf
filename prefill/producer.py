"""The producer in the scheduler process: which blocks of a prefill leg are complete after each step.

Only complete blocks leave before the last chunk; the tail leaves with it. Knows: vLLM's scheduler output (new block ids are
increments, except for requests that resume after a preemption). Does not know: consumers, bytes. Paper §5.1 (chunked
pipeline), §5.2.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mooncake.vllm.host_link import PrefillStarted
from mooncake.vllm.leg import Leg, leg_digest
from mooncake.vllm.step_plan import Chunk, StepPlan, TransferEnd, TransferStart

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


@dataclass
class _Prefill:
    leg: Leg
    digest: bytes
    prompt_tokens: int
    deadline: float
    begun: bool = False
    complete: bool = False


@dataclass(frozen=True)
class Scheduled:
    """One request of a scheduler output."""

    req_id: str
    block_ids: list[int]
    whole_table: bool
    computed_tokens: int
    tokens: int


def scheduled_requests(output: SchedulerOutput) -> Iterator[Scheduled]:
    """New and continued requests alike. Single KV cache group."""
    for new in output.scheduled_new_reqs:
        tokens = output.num_scheduled_tokens[new.req_id]
        yield Scheduled(new.req_id, list(new.block_ids[0]), True, new.num_computed_tokens, tokens)
    cached = output.scheduled_cached_reqs
    for index, req_id in enumerate(cached.req_ids):
        fresh = cached.new_block_ids[index]
        yield Scheduled(
            req_id,
            list(fresh[0]) if fresh is not None else [],
            req_id in cached.resumed_req_ids,
            cached.num_computed_tokens[index],
            output.num_scheduled_tokens[req_id],
        )


class ProducerScheduler:
    """Called by the engine's thread only."""

    def __init__(self, block_size: int, tell: Callable[[PrefillStarted], None]) -> None:
        self._block_size, self._tell = block_size, tell
        self._prefills: dict[str, _Prefill] = {}
        self._ended: list[TransferEnd] = []

    def add(self, request: Request, leg: Leg, deadline: float) -> None:
        """A prefill leg is queued."""
        self._prefills[request.request_id] = _Prefill(leg, leg_digest(request), request.num_prompt_tokens, deadline)

    def pending(self) -> bool:
        """There is something to tell the worker half."""
        return bool(self._ended)

    def plan(self, output: SchedulerOutput, scheduled: list[Scheduled], plan: StepPlan) -> None:
        """Adds this step's chunks, preemptions and ends."""
        for req_id in output.preempted_req_ids or ():
            prefill = self._prefills.get(req_id)
            if prefill is not None and prefill.begun:
                prefill.complete = False
                plan.preempted_transfers.append(prefill.leg.transfer_id)
        for one in scheduled:
            prefill = self._prefills.get(one.req_id)
            if prefill is not None and (one.whole_table or not prefill.complete):
                plan.chunks.append(self._chunk(prefill, one))
        plan.ended, self._ended = self._ended, []

    def _chunk(self, prefill: _Prefill, one: Scheduled) -> Chunk:
        end = one.computed_tokens + one.tokens
        last = end >= prefill.prompt_tokens
        prefill.complete = last
        ready = -(-prefill.prompt_tokens // self._block_size) if last else end // self._block_size
        start = None if prefill.begun else self._start(prefill, one)
        prefill.begun = True
        return Chunk(one.req_id, prefill.leg.transfer_id, one.block_ids, one.whole_table, ready, last, start)

    def _start(self, prefill: _Prefill, one: Scheduled) -> TransferStart:
        now, leg = time.time(), prefill.leg
        self._tell(
            PrefillStarted(
                transfer_id=leg.transfer_id,
                computed_tokens=one.computed_tokens,
                prompt_tokens=prefill.prompt_tokens,
                at_s=now,
            )
        )
        return TransferStart(
            fan_out=leg.fan_out,
            digest=prefill.digest,
            prompt_tokens=prefill.prompt_tokens,
            cached_tokens=one.computed_tokens,
            deadline=prefill.deadline,
            scheduled_at=now,
            request_id=leg.request_id,
        )

    def finished(self, req_id: str, *, aborted: bool) -> bool:
        """The engine is done with a request. True: the worker half holds its blocks until it says otherwise."""
        prefill = self._prefills.pop(req_id, None)
        if prefill is None:
            return False
        complete = prefill.complete and not aborted
        self._ended.append(TransferEnd(prefill.leg.transfer_id, req_id, complete))
        return prefill.begun
