"""Scheduler side of loading a prompt's prefix from the store: what is there, and into which blocks it goes.

The look-up runs on a pool thread under a deadline while the scheduler passes the request over; what is found is loaded
asynchronously by the worker half. Knows: keys, tokens, vLLM's asking order. Does not know: bytes. Paper §6 (KVCache pool).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mooncake.common.errors import MooncakeError
from mooncake.vllm.connector_config import StoreConfig
from mooncake.vllm.counters import CounterSet
from mooncake.vllm.request_keys import KeySpace, RequestKeys
from mooncake.vllm.step_plan import StepPlan, StoreLoad

if TYPE_CHECKING:
    from vllm.v1.request import Request

_log = logging.getLogger(__name__)
_MAX_LOOKUPS = 256
_GRACE_S = 0.1

PrefixLen = Callable[[Sequence[bytes], float], int]
"""`prefix_len(keys, deadline_s)`: how many leading keys the store holds; blocks; raises MooncakeError."""


@dataclass
class _Prefix:
    request: Request
    keys: RequestKeys
    lookup: Future[int] | None = None
    asked_at: float = 0.0
    found_tokens: int | None = None
    """End of the prefix that the store holds; None: not known yet."""
    loading: bool = False


class PrefixLoader:
    """Called by the engine's thread only; `wake` is called from pool threads."""

    def __init__(
        self,
        space: KeySpace,
        config: StoreConfig,
        prefix_len: PrefixLen,
        counters: CounterSet,
        wake: Callable[[], None],
    ) -> None:
        self._space, self._config, self._prefix_len = space, config, prefix_len
        self._counters, self._wake = counters, wake
        self._min_tokens = config.min_load_tokens or space.block_tokens
        self._pool = ThreadPoolExecutor(4, thread_name_prefix="mooncake-lookup")
        self._prefixes: dict[str, _Prefix] = {}
        self._loads: list[StoreLoad] = []
        self._aborted: list[str] = []
        self._room = threading.BoundedSemaphore(_MAX_LOOKUPS)

    def add(self, request: Request, keys: RequestKeys) -> None:
        """A request that may load is queued."""
        self._prefixes[request.request_id] = _Prefix(request, keys)

    def loading(self, req_id: str) -> bool:
        """vLLM holds the request's blocks until the worker half reports its load."""
        prefix = self._prefixes.get(req_id)
        return prefix is not None and prefix.loading

    def pending(self) -> bool:
        """There is something to tell the worker half."""
        return bool(self._loads or self._aborted)

    def matched(self, req_id: str, computed_tokens: int) -> int | None:
        """Tokens that the store holds beyond the local prefix; None while that is being found out."""
        prefix = self._prefixes.get(req_id)
        if prefix is None:
            return 0
        if prefix.found_tokens is None:
            self._find(prefix, computed_tokens)
        if prefix.found_tokens is None:
            return None
        gain = prefix.found_tokens - computed_tokens
        return gain if gain >= self._min_tokens else 0

    def _find(self, prefix: _Prefix, computed_tokens: int) -> None:
        if prefix.lookup is None:
            self._ask(prefix, computed_tokens)
        elif prefix.lookup.done():
            prefix.found_tokens = prefix.lookup.result()
        elif time.monotonic() - prefix.asked_at > self._config.lookup_deadline_s + _GRACE_S:
            self._counters.add("store_lookups_total", result="late")
            prefix.found_tokens = 0

    def _ask(self, prefix: _Prefix, computed_tokens: int) -> None:
        # At least one token has to be computed, so that there is something to sample from.
        keys = prefix.keys.upto(prefix.request.num_prompt_tokens - 1)
        first = computed_tokens // self._space.block_tokens
        gain = len(keys) * self._space.block_tokens - computed_tokens
        if gain < self._min_tokens or not self._room.acquire(blocking=False):
            prefix.found_tokens = 0
            return
        prefix.asked_at = time.monotonic()
        prefix.lookup = self._pool.submit(self._look_up, keys[first:], first)

    def _look_up(self, keys: Sequence[bytes], first: int) -> int:
        """On a pool thread. End of the found prefix in tokens, 0 when there is none."""
        result, found = "error", 0
        try:
            found = self._prefix_len(keys, self._config.lookup_deadline_s)
            result = "hit" if found else "miss"
        except MooncakeError as error:
            _log.debug("look-up in the store failed: %s", error)
        finally:
            self._room.release()
            self._counters.add("store_lookups_total", result=result)
            self._wake()
        return (first + found) * self._space.block_tokens if found else 0

    def allocated(self, req_id: str, block_ids: list[int], external_tokens: int) -> None:
        """vLLM has allocated the request's blocks, `external_tokens` of them for what the store holds."""
        prefix = self._prefixes.get(req_id)
        if prefix is None or prefix.found_tokens is None or external_tokens <= 0:
            return
        space, end = self._space, prefix.found_tokens
        begin = end - external_tokens
        first = begin // space.block_tokens
        prefix.found_tokens, prefix.loading = 0, True
        self._loads.append(
            StoreLoad(
                req_id=req_id,
                keys=list(prefix.keys.upto(end)[first:]),
                block_ids=block_ids[begin // space.block_size : end // space.block_size],
                skip_blocks=(begin - first * space.block_tokens) // space.block_size,
                deadline=time.monotonic() + self._config.load_deadline_s,
            )
        )

    def received(self, req_id: str) -> None:
        """The worker half has reported the load."""
        if (prefix := self._prefixes.get(req_id)) is not None:
            prefix.loading = False

    def preempted(self, req_id: str) -> None:
        """The request starts again, perhaps with less in the local cache."""
        if (prefix := self._prefixes.get(req_id)) is not None:
            prefix.lookup, prefix.found_tokens = None, None

    def finished(self, req_id: str) -> None:
        """The engine is done with the request."""
        prefix = self._prefixes.pop(req_id, None)
        if prefix is not None and prefix.loading:
            self._aborted.append(req_id)

    def plan(self, plan: StepPlan) -> None:
        """Adds what the worker half has to know."""
        plan.store_loads, self._loads = self._loads, []
        plan.aborted_loads.extend(self._aborted)
        self._aborted = []

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
