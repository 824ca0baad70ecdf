"""The consumer's state machine by event lists, and any interleaving by hypothesis."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from decode.arrival_core import ArrivalCore, Phase
from decode.arrival_events import (
    Aborted,
    Effect,
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

WANTED = Wanted("r", "t", "peer", deadline=50.0)
LANDED = HasLanded("r", "t", "peer")


def failed(stopped: bool) -> HasFailed:
    return HasFailed("r", "t", "peer", "aborted_there", stopped)


def run(core: ArrivalCore, *events: Any, now: float = 0.0) -> list[Effect]:
    return [effect for event in events for effect in core.handle(event, now)]


def test_reserve_then_landed() -> None:
    core = ArrivalCore()
    assert run(core, WANTED) == [SendReserve("r")]
    assert run(core, ReserveSent("r"), LANDED) == [Report("r", "ok")]
    assert core.loads == 0


def test_landed_before_the_reserve_is_known_to_be_sent() -> None:
    core = ArrivalCore()
    assert run(core, WANTED, LANDED, ReserveSent("r")) == [SendReserve("r"), Report("r", "ok")]


def test_a_waiting_load_repeats_its_reserve() -> None:
    core = ArrivalCore(reserve_every_s=1.0)
    run(core, WANTED, ReserveSent("r"))
    assert core.tick(0.9) == []
    assert core.tick(1.0) == [SendReserve("r")]
    assert core.tick(5.0) == []  # one at a time
    run(core, ReserveFailed("r", fatal=False), now=5.0)
    assert core.tick(5.3) == [SendReserve("r")]


def test_a_dead_producer_is_fenced_before_the_load_fails() -> None:
    core = ArrivalCore()
    assert run(core, WANTED, ReserveFailed("r", fatal=True)) == [SendReserve("r"), Fence("r")]
    assert run(core, FenceEnded("r", ok=True)) == [Report("r", "peer_unavailable")]


def test_a_producer_that_has_stopped_needs_no_fence() -> None:
    core = ArrivalCore()
    assert run(core, WANTED, failed(stopped=True))[-1] == Report("r", "aborted_there")
    core = ArrivalCore()
    assert run(core, WANTED, failed(stopped=False))[-1] == Fence("r")
    assert run(core, FenceEnded("r", ok=True)) == [Report("r", "aborted_there")]


def test_words_of_another_producer_or_transfer_are_ignored() -> None:
    core = ArrivalCore()
    run(core, WANTED)
    assert run(core, HasLanded("r", "t", "stranger"), HasLanded("r", "other", "peer")) == []


def test_the_deadline_cancels_and_fences() -> None:
    core = ArrivalCore()
    run(core, WANTED, ReserveSent("r"))
    assert core.tick(50.0) == [SendCancel("r"), Fence("r")]
    assert run(core, FenceEnded("r", ok=True)) == [Report("r", "deadline")]


def test_a_fence_that_fails_is_repeated_and_its_blocks_are_quarantined() -> None:
    core = ArrivalCore()
    run(core, WANTED, Aborted("r"))
    assert run(core, FenceEnded("r", ok=False), now=1.0) == []
    assert core.in_phase(Phase.QUARANTINED) == ["r"]
    assert core.tick(1.1) == []
    assert core.tick(1.2) == [Fence("r")]
    assert run(core, FenceEnded("r", ok=True)) == [Report("r", "aborted")]


def test_an_abort_wins_over_a_late_landed_but_is_reported_once() -> None:
    core = ArrivalCore()
    assert run(core, WANTED, Aborted("r")) == [SendReserve("r"), SendCancel("r"), Fence("r")]
    assert run(core, LANDED, FenceEnded("r", ok=True)) == [Report("r", "aborted")]


def test_landed_behind_the_deadline_still_counts() -> None:
    core = ArrivalCore()
    run(core, WANTED)
    core.tick(50.0)
    assert run(core, LANDED, FenceEnded("r", ok=True)) == [Report("r", "ok")]


class Interleavings(RuleBasedStateMachine):
    """One report a load, and never a bad one before the fence or the producer's word."""

    def __init__(self) -> None:
        super().__init__()
        self.core = ArrivalCore()
        self.now = 0.0
        self.count = 0
        self.open: set[str] = set()
        self.safe: set[str] = set()
        self.aborted: set[str] = set()
        self.fencing: set[str] = set()

    def note(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Fence):
                assert effect.req_id not in self.fencing
                self.fencing.add(effect.req_id)
            if isinstance(effect, Report):
                assert effect.req_id in self.open
                self.open.discard(effect.req_id)
                assert effect.req_id in self.safe, "reported while bytes may still come"
                if effect.req_id in self.aborted:
                    assert effect.result == "aborted"

    @rule()
    def want(self) -> None:
        req_id = f"r{self.count}"
        self.count += 1
        self.open.add(req_id)
        self.note(self.core.handle(Wanted(req_id, "t", "peer", self.now + 30), self.now))

    requests = st.integers(0, 5).map(lambda i: f"r{i}")

    @rule(req_id=requests, ok=st.booleans(), fatal=st.booleans())
    def reserve_ends(self, req_id: str, ok: bool, fatal: bool) -> None:
        event = ReserveSent(req_id) if ok else ReserveFailed(req_id, fatal)
        self.note(self.core.handle(event, self.now))

    @rule(req_id=requests)
    def landed(self, req_id: str) -> None:
        self.safe.add(req_id)
        self.note(self.core.handle(HasLanded(req_id, "t", "peer"), self.now))

    @rule(req_id=requests, stopped=st.booleans())
    def failed(self, req_id: str, stopped: bool) -> None:
        if stopped:
            self.safe.add(req_id)
        self.note(self.core.handle(HasFailed(req_id, "t", "peer", "why", stopped), self.now))

    @rule(req_id=requests)
    def abort(self, req_id: str) -> None:
        if req_id in self.open:
            self.aborted.add(req_id)
        self.note(self.core.handle(Aborted(req_id), self.now))

    @rule(req_id=requests, ok=st.booleans())
    def fence_ends(self, req_id: str, ok: bool) -> None:
        if req_id in self.fencing:
            self.fencing.discard(req_id)
            if ok:
                self.safe.add(req_id)
            self.note(self.core.handle(FenceEnded(req_id, ok), self.now))

    @rule(seconds=st.floats(0, 20))
    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.note(self.core.tick(self.now))

    def teardown(self) -> None:
        """Whatever happened, a working fence ends every load."""
        for _ in range(3):
            self.now += 100
            self.note(self.core.tick(self.now))
            for req_id in sorted(self.fencing):
                self.fencing.discard(req_id)
                self.safe.add(req_id)
                self.note(self.core.handle(FenceEnded(req_id, True), self.now))
        assert self.open == set()
        assert self.core.loads == 0


Interleavings.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestInterleavings = Interleavings.TestCase
