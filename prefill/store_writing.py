"""Scheduler side of saving to the store: which store blocks a step completes.

Prompt and generated tokens alike: the next turn of a conversation starts with both. What a request found (local prefix, store,
stream) is not saved again. Knows: keys and block tables. Does not know: whether a save succeeds. Paper §6.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mooncake.vllm.request_keys import KeySpace, RequestKeys
from mooncake.vllm.step_plan import StepPlan, StoreSave

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from prefill.producer import Scheduled


@dataclass
class _Written:
    request: Request
    keys: RequestKeys
    next_object: int | None = None
    """Index of the first store block that is not saved; None before the first step."""
    table: list[int] = field(default_factory=list)
    issued: bool = False


class StoreWriter:
    """Called by the engine's thread only."""

    def __init__(self, space: KeySpace) -> None:
        self._space = space
        self._requests: dict[str, _Written] = {}

    def add(self, request: Request, keys: RequestKeys) -> None:
        """A request whose KV has keys is queued."""
        self._requests[request.request_id] = _Written(request, keys)

    def plan(self, scheduled: list[Scheduled], plan: StepPlan) -> None:
        """Adds the store blocks that are complete after this step."""
        for one in scheduled:
            written = self._requests.get(one.req_id)
            if written is not None:
                self._advance(written, one, plan)

    def _advance(self, written: _Written, one: Scheduled, plan: StepPlan) -> None:
        if one.whole_table:
            written.table = []
        written.table += one.block_ids
        if written.next_object is None:
            written.next_object = one.computed_tokens // self._space.block_tokens
        # Draft tokens are not the request's yet.
        end = min(one.computed_tokens + one.tokens, written.request.num_tokens)
        if end // self._space.block_tokens <= written.next_object:
            return
        keys, each = written.keys.upto(end), self._space.blocks_per_object
        for index in range(written.next_object, len(keys)):
            plan.saves.append(StoreSave(one.req_id, keys[index], written.table[index * each : (index + 1) * each]))
        written.next_object, written.issued = len(keys), True

    def finished(self, req_id: str) -> bool:
        """The engine is done with the request. True: the worker half may still be reading its blocks."""
        written = self._requests.pop(req_id, None)
        return written is not None and written.issued
