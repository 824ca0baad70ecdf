"""The producer's state machine by event lists, and any interleaving by hypothesis."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mooncake.vllm.stream_protocol import Failed, Landed, Reserve, pack_ids
from prefill.stream_core import StreamCore
from prefill.stream_events import (
    BlocksKnown,
    ConsumerCancelled,
    Effect,
    LayerReady,
    LetGo,
    Poisoned,
    Preempted,
    Quiet,
    Released,
    Reserved,
    StopWrite,
    StreamEnded,
    Tell,
    TransferBegan,
    TransferFinished,
    Write,
    WriteEnded,
)

LAYERS, BLOCK = 2, 4


def core() -> StreamCore:
    return StreamCore(layers=LAYERS, block_size=BLOCK, fingerprint="f")


def began(tid: str = "t", fan_out: int = 1, tokens: int = 10, deadline: float = 100.0) -> TransferBegan:
    return TransferBegan(tid, f"req-{tid}", fan_out, b"d", tokens, deadline)


def reserve(tid: str = "t", consumer: str = "c", first: int = 0, tokens: int = 10, **changes: Any) -> Reserve:
    blocks = -(-tokens // BLOCK)
    fields: dict[str, Any] = {
        "transfer_id": tid, "consumer_id": consumer, "address": "a:1", "instance_id": "i", "fingerprint": "f",
        "digest": b"d", "prompt_tokens": tokens, "first_block": first,
        "block_ids": pack_ids(range(50 + first, 50 + blocks)), "layers": [(0, 8)] * LAYERS, "deadline_s": 50.0,
    }  # fmt: skip
    return Reserve(**(fields | changes))


def reserved(**fields: Any) -> Reserved:
    return Reserved(reserve(**fields), 50.0)


def kinds(effects: list[Effect]) -> list[type]:
    return [type(effect) for effect in effects]


def writes(effects: list[Effect]) -> list[Write]:
    return [effect for effect in effects if isinstance(effect, Write)]


def run(machine: StreamCore, *events: Any, now: float = 0.0) -> list[Effect]:
    return [effect for event in events for effect in machine.handle(event, now)]


def finish_all(machine: StreamCore, effects: list[Effect]) -> list[Effect]:
    """Every write succeeds, and those that follow."""
    seen = list(effects)
    for effect in seen:
        if isinstance(effect, Write):
            seen += machine.handle(WriteEnded(effect.write_id, ok=True), 0.0)
    return seen


def test_layers_leave_one_by_one_and_landed_comes_last() -> None:
    machine = core()
    assert run(machine, began(), BlocksKnown("t", (7, 8, 9)), reserved()) == []
    first = run(machine, LayerReady("t", 0, 3))
    assert [(p.layer, p.source_blocks, p.target_blocks) for w in writes(first) for p in w.pieces] == [
        (0, (7, 8, 9), (50, 51, 52))
    ]
    second = run(machine, LayerReady("t", 1, 3))
    assert run(machine, WriteEnded(writes(first)[0].write_id, ok=True)) == []
    ends = run(machine, WriteEnded(writes(second)[0].write_id, ok=True))
    assert kinds(ends) == [Tell, StreamEnded, LetGo]
    assert isinstance(ends[0], Tell) and isinstance(ends[0].message, Landed)


def test_chunks_send_complete_blocks_first_and_the_tail_later() -> None:
    machine = core()
    run(machine, began(), BlocksKnown("t", (7, 8)), reserved())
    early = run(machine, LayerReady("t", None, 1))
    assert [p.source_blocks for p in writes(early)[0].pieces] == [(7,), (7,)]
    assert run(machine, BlocksKnown("t", (9,)), LayerReady("t", 0, 3)) == []  # layer 0 is still being written
    late = run(machine, WriteEnded(writes(early)[0].write_id, ok=True))
    assert [(p.layer, p.source_blocks) for w in writes(late) for p in w.pieces] == [(0, (8, 9))]
    rest = finish_all(machine, late + run(machine, LayerReady("t", 1, 3)))
    assert LetGo("t", "req-t", "ok") in rest


def test_a_reserve_before_its_prefill_waits_and_a_local_prefix_is_not_sent() -> None:
    machine = core()
    assert run(machine, reserved(first=2)) == []
    assert machine.parked == 1
    effects = run(machine, began(), BlocksKnown("t", (7, 8, 9)), LayerReady("t", None, 3))
    assert [(p.source_blocks, p.target_blocks) for p in writes(effects)[0].pieces] == [((9,), (52,)), ((9,), (52,))]


def test_every_fan_out_consumer_is_served_before_the_blocks_go() -> None:
    machine = core()
    run(machine, began(fan_out=2), BlocksKnown("t", (7, 8, 9)), LayerReady("t", None, 3))
    one = finish_all(machine, run(machine, reserved(consumer="c1")))
    assert not [e for e in one if isinstance(e, LetGo)]
    two = finish_all(machine, run(machine, reserved(consumer="c2")))
    assert LetGo("t", "req-t", "ok") in two
    again = run(machine, reserved(consumer="c1"))
    assert isinstance(again[0], Tell) and isinstance(again[0].message, Landed)


def test_what_does_not_match_is_refused_with_its_reason() -> None:
    cases = {
        "layout_mismatch": {"fingerprint": "other"},
        "prompt_mismatch": {"digest": b"x"},
        "bad_reserve": {"layers": [(0, 8)]},
    }
    for reason, change in cases.items():
        machine = core()
        run(machine, began(), BlocksKnown("t", (7, 8, 9)))
        effects = run(machine, reserved(**change))
        assert isinstance(effects[0], Tell)
        assert effects[0].message == Failed("t", "c", reason, True)
        assert LetGo("t", "req-t", "ok") in effects


def test_a_refusal_before_the_prefill_counts_when_it_begins() -> None:
    machine = core()
    run(machine, reserved(fingerprint="other"))
    assert LetGo("t", "req-t", "ok") in run(machine, began())


def test_an_aborted_prefill_stops_writes_before_it_tells() -> None:
    machine = core()
    write = writes(run(machine, began(), BlocksKnown("t", (7, 8, 9)), reserved(), LayerReady("t", 0, 1)))[0]
    assert run(machine, TransferFinished("t", complete=False)) == [StopWrite(write.write_id)]
    ends = run(machine, WriteEnded(write.write_id, ok=False, stopped=True))
    assert ends[0] == Tell(write.reserve, Failed("t", "c", "prefill_aborted", True))
    assert ends[-1] == LetGo("t", "req-t", "prefill_aborted")
    late = run(machine, reserved(consumer="c2"))
    assert late == [Tell(reserve(consumer="c2"), Failed("t", "c2", "prefill_aborted", True))]


def test_a_write_in_doubt_is_never_called_landed_nor_stopped() -> None:
    machine = core()
    write = writes(run(machine, began(), BlocksKnown("t", (7, 8, 9)), reserved(), LayerReady("t", None, 3)))[0]
    ends = run(machine, WriteEnded(write.write_id, ok=False, stopped=False, reason="write_failed"))
    assert ends[0] == Tell(write.reserve, Failed("t", "c", "write_failed", False))
    assert run(machine, reserved())[0] == Tell(reserve(), Failed("t", "c", "write_failed", False))


def test_release_works_before_during_and_after() -> None:
    machine = core()
    run(machine, Released("t"))
    assert run(machine, began()) == [LetGo("t", "req-t", "released")]
    machine = core()
    run(machine, began())
    assert run(machine, Released("t")) == [LetGo("t", "req-t", "released")]
    assert run(machine, Released("t")) == []


def test_deadlines_end_transfers_consumers_and_parked_reserves() -> None:
    machine = core()
    run(machine, began(deadline=10.0), reserved(tid="unknown"))
    assert machine.tick(9.0) == []
    assert machine.tick(10.0) == [LetGo("t", "req-t", "deadline")]
    assert kinds(machine.tick(50.0)) == [Tell]
    assert machine.parked == 0


def test_preemption_waits_for_writes_and_sends_again_after_the_resume() -> None:
    machine = core()
    write = writes(run(machine, began(), BlocksKnown("t", (7, 8, 9)), reserved(), LayerReady("t", None, 2)))[0]
    assert run(machine, Preempted("t")) == [StopWrite(write.write_id)]
    assert run(machine, WriteEnded(write.write_id, ok=False)) == [Quiet("t")]
    effects = run(machine, BlocksKnown("t", (1, 2, 3), restart=True), LayerReady("t", None, 3))
    assert [p.source_blocks for p in writes(effects)[0].pieces] == [(1, 2, 3), (1, 2, 3)]
    assert LetGo("t", "req-t", "ok") in finish_all(machine, effects)


def test_preempting_an_unknown_transfer_answers_at_once() -> None:
    assert run(core(), Preempted("t")) == [Quiet("t")]


class Interleavings(RuleBasedStateMachine):
    """Two transfers, up to three consumers each, everything in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.core = core()
        self.now = 0.0
        self.began: set[str] = set()
        self.let_go: dict[str, int] = {}
        self.running: dict[int, Write] = {}
        self.written: dict[tuple[str, str], set[tuple[int, int]]] = {}
        self.ended: dict[tuple[str, str], str] = {}
        self.generation: dict[str, int] = {}
        self.quiet_wanted: dict[str, bool] = {}

    def note(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Write(write_id=write_id):
                    assert write_id not in self.running
                    tid = effect.reserve.transfer_id
                    assert self.let_go.get(tid, 0) == 0, "reads blocks that were let go"
                    self.running[write_id] = effect
                case StopWrite(write_id=write_id):
                    assert write_id in self.running
                case Tell(message=Landed(transfer_id=tid, consumer_id=cid)):
                    key = (tid, cid)
                    wanted = {(layer, block) for layer in range(LAYERS) for block in range(50, 53)}
                    assert wanted <= self.written.get(key, set()), "landed before every block was written"
                    assert not [
                        w
                        for w in self.running.values()
                        if w.reserve.consumer_id == cid and w.reserve.transfer_id == tid
                    ]
                case Tell(message=Failed(transfer_id=tid, consumer_id=cid, stopped=True)):
                    assert not [
                        w
                        for w in self.running.values()
                        if w.reserve.consumer_id == cid and w.reserve.transfer_id == tid
                    ]
                case StreamEnded():
                    key = (effect.transfer_id, effect.consumer_id)
                    assert key not in self.ended
                    self.ended[key] = effect.result
                case Quiet(transfer_id=tid):
                    assert self.quiet_wanted.get(tid)
                    self.quiet_wanted[tid] = False
                    assert not [w for w in self.running.values() if w.reserve.transfer_id == tid]
                case LetGo(transfer_id=tid):
                    assert tid in self.began
                    self.let_go[tid] = self.let_go.get(tid, 0) + 1
                    assert self.let_go[tid] == 1
                    assert not [w for w in self.running.values() if w.reserve.transfer_id == tid]

    tids = st.sampled_from(["t", "u"])
    cids = st.sampled_from(["c1", "c2", "c3"])

    @rule(tid=tids, fan_out=st.integers(1, 3))
    def begin(self, tid: str, fan_out: int) -> None:
        if tid not in self.began:
            self.began.add(tid)
            self.note(self.core.handle(began(tid, fan_out), self.now))
            self.note(self.core.handle(BlocksKnown(tid, (7, 8, 9)), self.now))

    @rule(tid=tids, layer=st.sampled_from([None, 0, 1]), blocks=st.integers(0, 3))
    def compute(self, tid: str, layer: int | None, blocks: int) -> None:
        self.note(self.core.handle(LayerReady(tid, layer, blocks), self.now))

    @rule(tid=tids, cid=cids)
    def reserve(self, tid: str, cid: str) -> None:
        self.note(self.core.handle(Reserved(reserve(tid, cid), self.now + 30), self.now))

    @rule(tid=tids, cid=cids)
    def cancel(self, tid: str, cid: str) -> None:
        self.note(self.core.handle(ConsumerCancelled(tid, cid), self.now))

    @rule(tid=tids, event=st.sampled_from([Released, Poisoned]))
    def end(self, tid: str, event: type) -> None:
        self.note(self.core.handle(event(tid), self.now))

    @rule(tid=tids, complete=st.booleans())
    def finish(self, tid: str, complete: bool) -> None:
        self.note(self.core.handle(TransferFinished(tid, complete), self.now))

    @rule(tid=tids)
    def preempt_and_resume(self, tid: str) -> None:
        if tid not in self.began:
            return
        self.quiet_wanted[tid] = True
        self.note(self.core.handle(Preempted(tid), self.now))
        for write_id in [i for i, w in self.running.items() if w.reserve.transfer_id == tid]:
            self.finish_write(write_id, ok=False, stopped=True)
        assert not self.quiet_wanted[tid], "nothing reads the blocks, and nobody says so"
        self.note(self.core.handle(BlocksKnown(tid, (17, 18, 19), restart=True), self.now))

    def finish_write(self, write_id: int, ok: bool, stopped: bool) -> None:
        write = self.running.pop(write_id)
        if ok:
            done = self.written.setdefault((write.reserve.transfer_id, write.reserve.consumer_id), set())
            done |= {(p.layer, block) for p in write.pieces for block in p.target_blocks}
        self.note(self.core.handle(WriteEnded(write_id, ok, stopped), self.now))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), ok=st.booleans(), stopped=st.booleans())
    def write_ends(self, data: st.DataObject, ok: bool, stopped: bool) -> None:
        self.finish_write(data.draw(st.sampled_from(sorted(self.running))), ok, ok or stopped)

    @rule(seconds=st.floats(0, 20))
    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.note(self.core.tick(self.now))

    @invariant()
    def bounded(self) -> None:
        assert self.core.writes == len(self.running)

    def teardown(self) -> None:
        """In the end everything is let go, whatever happened before."""
        self.note(self.core.tick(self.now + 1000))
        for write_id in list(self.running):
            self.finish_write(write_id, ok=False, stopped=True)
        self.note(self.core.tick(self.now + 1000))
        assert {tid for tid in self.began if self.let_go.get(tid) != 1} == set()
        assert self.core.transfers == self.core.writes == self.core.parked == 0


Interleavings.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestInterleavings = Interleavings.TestCase
