"""Charges: bound to one life, released once, back to exactly zero."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from conductor.charges import Charge, ChargeBook, DecodeLoad, PrefillQueue, Work, prefill_work
from conductor.messages import Estimate
from mooncake.common.ids import RequestId


def charge(name: str, queue: PrefillQueue, load: DecodeLoad, expires_at_s: float = 100.0) -> Charge:
    return Charge(
        request_id=RequestId(name),
        model="m",
        prompt_tokens=1000,
        queue=queue,
        load=load,
        kv_tokens=1100,
        estimate=Estimate(),
        expires_at_s=expires_at_s,
        two_legs=True,
    )


def test_at_least_one_token_is_always_computed() -> None:
    assert prefill_work(1000, 1000) == Work(1, 1, 1000**2 - 999**2, 999, 0)
    assert prefill_work(1, 0) == Work(1, 1, 1, 0, 0)


def test_releasing_twice_is_harmless() -> None:
    queue, load, book = PrefillQueue(), DecodeLoad(), ChargeBook()
    guard = charge("r", queue, load)
    book.open(guard, prefill_work(1000, 0), 0.0)
    assert (len(queue), load.sequences, load.kv_tokens) == (1, 1, 1100)
    for _ in range(2):
        guard.release(1.0)
        book.release(RequestId("r"), 1.0)
    assert (len(queue), queue.total, load) == (0, Work(), DecodeLoad())


def test_opening_again_replaces() -> None:
    old, new, load, book = PrefillQueue(), PrefillQueue(), DecodeLoad(), ChargeBook()
    book.open(charge("r", old, load), prefill_work(1000, 0), 0.0)
    book.open(charge("r", new, load), prefill_work(1000, 0), 1.0)
    assert (len(old), len(new), load.sequences, len(book)) == (0, 1, 1, 1)


def test_expiry_takes_only_what_is_due_and_in_order() -> None:
    queue, load, book = PrefillQueue(), DecodeLoad(), ChargeBook()
    for n in range(4):
        book.open(charge(str(n), queue, load, expires_at_s=10.0 + n), prefill_work(100, 0), float(n))
    assert [c.request_id for c in book.expire(11.5)] == ["0", "1"]
    assert (len(queue), load.sequences, len(book)) == (2, 2, 2)


def test_the_head_of_a_queue_is_what_is_worked_on() -> None:
    queue = PrefillQueue()
    queue.add(RequestId("a"), prefill_work(1000, 0), 1.0)
    queue.add(RequestId("b"), prefill_work(2000, 0), 2.0)
    assert queue.in_progress() == (prefill_work(1000, 0), 1.0)  # it has not been told, but who has work works
    queue.start(RequestId("a"), 1.5)
    assert queue.in_progress() == (prefill_work(1000, 0), 1.5)
    queue.remove(RequestId("a"), 4.0)
    assert queue.in_progress() == (prefill_work(2000, 0), 4.0)  # since the other one ended
    queue.start(RequestId("b"), 4.1)
    queue.remove(RequestId("b"), 9.0)
    assert queue.in_progress()[0] == Work()


@given(
    st.lists(st.tuples(st.sampled_from("abcdef"), st.sampled_from(["open", "start", "end", "release"])), max_size=60)
)
def test_whatever_happens_the_sums_are_those_of_what_is_open(steps: list[tuple[str, str]]) -> None:
    queue, load, book = PrefillQueue(), DecodeLoad(), ChargeBook()
    for at, (name, step) in enumerate(steps):
        guard = book.get(RequestId(name))
        if step == "open":
            book.open(charge(name, queue, load), prefill_work(100 + at, at), float(at))
        elif step == "release":
            book.release(RequestId(name), float(at))
        elif guard is not None:
            guard.start_prefill(at) if step == "start" else guard.end_prefill(at)
        assert load.sequences == len(book)
        assert len(queue) <= len(book)
        assert queue.total.prompts == len(queue)
    for name in "abcdef":
        book.release(RequestId(name), 100.0)
    assert (len(queue), queue.total, load) == (0, Work(), DecodeLoad())
