"""The consumer's state machine: from reserved blocks to arrived KV, or to blocks that surely nobody writes any more.

Events in, effects out; no clock, no thread, no socket (paper §3 step 3, docs/protocol.md §5).
Rules: a load is reported exactly once; it is reported as failed or aborted only behind a fence or after the producer said that
it has stopped; a fence that does not succeed is repeated with back-off, and until then the blocks are quarantined.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import assert_never

from decode.arrival_events import (
    Aborted,
    Effect,
    Event,
    Fence,
    FenceEnded,
    HasFailed,
    HasLanded,
    Report,
    ReserveFailed,
    ReserveSent,
    SendCancel,
    SendReserve,
    Wanted,
)

ABORTED = "aborted"
"""Result of a load that nobody waits for; never a producer's reason."""
_RETRY_S = 0.2
_FENCE_RETRY_S = (0.2, 0.5, 1.0, 2.0, 5.0)


class Phase(enum.Enum):
    WAITING = "waiting"
    FENCING = "fencing"
    QUARANTINED = "quarantined"
    """A fence failed; the next one comes with a tick."""


@dataclass
class _Load:
    wanted: Wanted
    phase: Phase = Phase.WAITING
    sending: bool = True
    next_reserve: float = 0.0
    result: str = ""
    """What will be reported behind the fence."""
    fences: int = 0
    next_fence: float = 0.0


class ArrivalCore:
    """All loads of one worker. `reserve_every_s`: a waiting load repeats its Reserve so often."""

    def __init__(self, *, reserve_every_s: float = 1.0) -> None:
        self._reserve_every_s = reserve_every_s
        self._loads: dict[str, _Load] = {}
        self._out: list[Effect] = []

    @property
    def loads(self) -> int:
        """Loads not reported yet."""
        return len(self._loads)

    def in_phase(self, phase: Phase) -> list[str]:
        """Request ids of the loads in a phase."""
        return [req_id for req_id, load in self._loads.items() if load.phase is phase]

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Takes one event; effects are to be run in order. Events of unknown requests change nothing."""
        if isinstance(event, Wanted):
            self._wanted(event, now)
            return self._take()
        load = self._loads.get(event.req_id)
        if load is not None:
            self._about(load, event, now)
        return self._take()

    def tick(self, now: float) -> list[Effect]:
        """Repeats Reserves and fences that are due and gives up what is late."""
        for req_id, load in self._loads.items():
            match load.phase:
                case Phase.WAITING if now >= load.wanted.deadline:
                    self._out.append(SendCancel(req_id))
                    self._fence(load, "deadline")
                case Phase.WAITING if not load.sending and now >= load.next_reserve:
                    load.sending = True
                    self._out.append(SendReserve(req_id))
                case Phase.QUARANTINED if now >= load.next_fence:
                    self._fence(load, load.result)
                case _:
                    pass
        return self._take()

    def _take(self) -> list[Effect]:
        out, self._out = self._out, []
        return out

    def _wanted(self, event: Wanted, now: float) -> None:
        if event.req_id not in self._loads:
            self._loads[event.req_id] = _Load(event, next_reserve=now)
            self._out.append(SendReserve(event.req_id))

    def _about(
        self, load: _Load, event: ReserveSent | ReserveFailed | HasLanded | HasFailed | Aborted | FenceEnded, now: float
    ) -> None:
        match event:
            case ReserveSent():
                load.sending = False
                load.next_reserve = now + self._reserve_every_s
            case ReserveFailed():
                self._reserve_failed(load, event.fatal, now)
            case HasLanded() | HasFailed():
                if (event.transfer_id, event.peer_instance_id) == (
                    load.wanted.transfer_id,
                    load.wanted.peer_instance_id,
                ):
                    self._producer_said(load, event)
            case Aborted():
                self._aborted(load)
            case FenceEnded():
                self._fence_ended(load, event.ok, now)
            case _:
                assert_never(event)

    def _reserve_failed(self, load: _Load, fatal: bool, now: float) -> None:
        load.sending = False
        load.next_reserve = now + _RETRY_S
        if fatal and load.phase is Phase.WAITING:
            self._fence(load, "peer_unavailable")

    def _producer_said(self, load: _Load, event: HasLanded | HasFailed) -> None:
        if isinstance(event, HasLanded):
            # Also behind our own fence request: all bytes are there and none will follow.
            self._report(load, ABORTED if load.result == ABORTED else "ok")
        elif event.stopped:
            self._report(load, load.result or event.reason)
        elif load.phase is Phase.WAITING:
            self._fence(load, event.reason)

    def _aborted(self, load: _Load) -> None:
        self._out.append(SendCancel(load.wanted.req_id))
        if load.phase is Phase.WAITING:
            self._fence(load, ABORTED)
        load.result = ABORTED

    def _fence(self, load: _Load, result: str) -> None:
        load.phase, load.result = Phase.FENCING, result
        self._out.append(Fence(load.wanted.req_id))

    def _fence_ended(self, load: _Load, ok: bool, now: float) -> None:
        if load.phase is not Phase.FENCING:
            return
        if ok:
            self._report(load, load.result)
            return
        load.phase = Phase.QUARANTINED
        load.next_fence = now + _FENCE_RETRY_S[min(load.fences, len(_FENCE_RETRY_S) - 1)]
        load.fences += 1

    def _report(self, load: _Load, result: str) -> None:
        del self._loads[load.wanted.req_id]
        self._out.append(Report(load.wanted.req_id, result))
