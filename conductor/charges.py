"""What placed requests weigh on the instances they were sent to, and the one guard object of each request.

A `Charge` is bound to the load objects of one *life* of an instance, not to a name: when the instance is gone or came
back, releasing touches nobody else. Releasing twice is harmless. All sums are integers, so that they return to exactly
zero.
Knows: prefill work waiting on an instance and since when it is worked on; sequences and KV tokens heading to a decoder.
Does not know: how long work takes (estimators.py), or which instance is good (placement.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from conductor.messages import Estimate
from mooncake.common.ids import RequestId


class Work(NamedTuple):
    """Prefill work as the sums that the cost T(n, p) is linear in (estimators.py), so that queues can be added up."""

    prompts: int = 0
    new: int = 0  # sum of n - p
    square: int = 0  # sum of n^2 - p^2
    prefix: int = 0  # sum of p
    load_us: int = 0  # loading from the pool before computing

    def plus(self, other: Work) -> Work:
        return Work(*(a + b for a, b in zip(self, other, strict=True)))

    def minus(self, other: Work) -> Work:
        return Work(*(a - b for a, b in zip(self, other, strict=True)))


def prefill_work(prompt_tokens: int, prefix_tokens: int, load_s: float = 0.0) -> Work:
    """Work of one prompt. At least its last token is always computed."""
    p = max(0, min(prefix_tokens, prompt_tokens - 1))
    return Work(1, prompt_tokens - p, prompt_tokens**2 - p**2, p, round(load_s * 1e6))


@dataclass(slots=True)
class _Waiting:
    work: Work
    placed_at_s: float
    started_at_s: float | None = None


class PrefillQueue:
    """Prefills that one instance has yet to finish, first come first served, one after the other."""

    def __init__(self) -> None:
        self._waiting: dict[RequestId, _Waiting] = {}
        self._started: dict[RequestId, _Waiting] = {}
        self.total = Work()
        self._last_end_s = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request_id: RequestId, work: Work, now: float) -> None:
        self._waiting[request_id] = _Waiting(work, now)
        self.total = self.total.plus(work)

    def start(self, request_id: RequestId, now: float) -> None:
        entry = self._waiting.get(request_id)
        if entry is not None and entry.started_at_s is None:
            entry.started_at_s = now
            self._started[request_id] = entry

    def remove(self, request_id: RequestId, now: float) -> None:
        entry = self._waiting.pop(request_id, None)
        if entry is None:
            return
        self.total = self.total.minus(entry.work)
        if self._started.pop(request_id, None) is not None:
            self._last_end_s = now

    def in_progress(self) -> tuple[Work, float]:
        """What is being worked on and since when. An instance with work works, whether or not a start was reported."""
        if not self._waiting:
            return Work(), self._last_end_s
        active = list(self._started.values()) or [next(iter(self._waiting.values()))]
        work = Work()
        for entry in active:
            work = work.plus(entry.work)
        begun_s = min(w.placed_at_s if w.started_at_s is None else w.started_at_s for w in active)
        return work, max(begun_s, self._last_end_s)


@dataclass(slots=True)
class DecodeLoad:
    """Sequences that decode on one instance or will (those still in prefill count: paper §7.3's time lag otherwise)."""

    sequences: int = 0
    kv_tokens: int = 0

    def add(self, kv_tokens: int) -> None:
        self.sequences += 1
        self.kv_tokens += kv_tokens

    def remove(self, kv_tokens: int) -> None:
        self.sequences -= 1
        self.kv_tokens -= kv_tokens


class Stage(IntEnum):
    PLACED = 0
    PREFILLING = 1
    PREFILLED = 2
    DECODING = 3


@dataclass(slots=True, kw_only=True)
class Charge:
    """The guard object of one request."""

    request_id: RequestId
    model: str
    prompt_tokens: int
    queue: PrefillQueue
    load: DecodeLoad
    kv_tokens: int
    estimate: Estimate
    expires_at_s: float
    two_legs: bool
    presumed_prefilled_s: float = math.inf
    """When a prefill of which nobody tells counts as over."""
    stage: Stage = Stage.PLACED
    prefill_end_s: float = 0.0  # the gateway's at_s, as the next one
    first_token_s: float = 0.0
    _decoding: bool = True

    def start_prefill(self, now: float) -> None:
        if self.stage is Stage.PLACED:
            self.stage = Stage.PREFILLING
            self.queue.start(self.request_id, now)

    def end_prefill(self, now: float) -> None:
        self.start_prefill(now)
        if self.stage is Stage.PREFILLING:
            self.stage = Stage.PREFILLED
            self.queue.remove(self.request_id, now)

    def release(self, now: float) -> None:
        """Everything that is left. Idempotent."""
        self.queue.remove(self.request_id, now)
        if self._decoding:
            self._decoding = False
            self.load.remove(self.kv_tokens)


class ChargeBook:
    """All open charges by request. They share one lifetime, so the order of placement is the order of expiry."""

    def __init__(self) -> None:
        self._open: dict[RequestId, Charge] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Charge]:
        return iter(self._open.values())

    def get(self, request_id: RequestId) -> Charge | None:
        return self._open.get(request_id)

    def open(self, charge: Charge, work: Work, now: float) -> None:
        self.release(charge.request_id, now)
        charge.queue.add(charge.request_id, work, now)
        charge.load.add(charge.kv_tokens)
        self._open[charge.request_id] = charge

    def release(self, request_id: RequestId, now: float) -> Charge | None:
        """Ends a charge; None when there is none (any more)."""
        charge = self._open.pop(request_id, None)
        if charge is not None:
            charge.release(now)
        return charge

    def expire(self, now: float) -> list[Charge]:
        """Releases every charge past its lifetime: its gateway died or its events were lost."""
        ended = []
        while self._open:
            oldest = next(iter(self._open.values()))
            if oldest.expires_at_s > now:
                break
            self.release(oldest.request_id, now)
            ended.append(oldest)
        return ended
