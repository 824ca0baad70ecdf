from __future__ import annotations

from store.breaker import Breaker


def test_opens_after_failures_in_a_row_and_probes_once() -> None:
    breaker = Breaker(failures=3, open_s=2.0)
    for outcome in (False, False, True, False, False):
        assert breaker.allow(0.0)
        breaker.success() if outcome else breaker.failure(0.0)
    assert breaker.allow(0.0), "a success in between"
    breaker.failure(0.0)
    assert breaker.is_open and not breaker.allow(1.9)
    assert breaker.allow(2.0) and not breaker.allow(2.0), "one probe"
    breaker.failure(2.5)
    assert not breaker.allow(4.4) and breaker.allow(4.5)
    breaker.success()
    assert breaker.allow(4.5) and breaker.allow(4.5) and not breaker.is_open


def test_a_probe_that_never_answers_does_not_block_for_ever() -> None:
    breaker = Breaker(failures=1, open_s=2.0)
    assert breaker.allow(0.0)
    breaker.failure(0.0)
    assert breaker.allow(2.0)
    assert not breaker.allow(3.9) and breaker.allow(4.0)
