"""Algorithm 1 with estimators as tables: each branch of the paper's text."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from conductor.algorithm import Candidate, DecodePlan, Prompt, Schedule, Slo, kvcache_centric_schedule

NO_SLO = Slo(float("inf"), float("inf"))


@dataclass
class Tables:
    """1 ms a computed token, 0.1 ms a transferred one."""

    queue_s: dict[str, float] = field(default_factory=dict)
    transfer_token_s: float = 1e-4

    def estimate_transfer(self, instance: str, tokens: int) -> float:
        return tokens * self.transfer_token_s

    def estimate_queue(self, instance: str) -> float:
        return self.queue_s.get(instance, 0.0)

    def estimate_prefill(self, instance: str, prompt_tokens: int, prefix_tokens: int) -> float:
        return (prompt_tokens - prefix_tokens) * 1e-3


def schedule(
    prefixes: dict[str, int], pool: int = 0, slo: Slo = NO_SLO, tbt_s: float = 0.05, tables: Tables | None = None
) -> Schedule[str]:
    return kvcache_centric_schedule(
        Prompt(1000, pool),
        [Candidate(name, prefix) for name, prefix in prefixes.items()],
        lambda plan: DecodePlan("d", tbt_s),
        tables or Tables(),
        slo,
        kvcache_balancing_threshold=1.3,
    )


def test_cache_aware_the_longest_prefix_wins_when_queues_are_equal() -> None:
    chosen = schedule({"a": 0, "b": 600, "c": 300}).prefill
    assert (chosen.instance, chosen.prefix_tokens, chosen.loaded_tokens) == ("b", 600, 0)
    assert chosen.ttft_s == pytest.approx(0.4)


def test_a_long_queue_outweighs_a_long_prefix() -> None:
    chosen = schedule({"a": 0, "b": 600}, tables=Tables(queue_s={"b": 0.7})).prefill
    assert chosen.instance == "a"


def test_balancing_an_idle_instance_loads_the_prefix_from_the_pool() -> None:
    chosen = schedule({"a": 0, "b": 600}, pool=600, tables=Tables(queue_s={"b": 0.7})).prefill
    assert (chosen.instance, chosen.prefix_tokens, chosen.loaded_tokens) == ("a", 600, 600)
    assert chosen.transfer_s == pytest.approx(0.06)
    assert chosen.ttft_s == pytest.approx(0.46)


def test_only_what_the_pool_holds_can_be_loaded() -> None:
    chosen = schedule({"a": 100, "b": 600}, pool=400, tables=Tables(queue_s={"b": 5.0})).prefill
    assert (chosen.prefix_tokens, chosen.loaded_tokens) == (400, 300)


def test_below_the_threshold_nothing_is_loaded() -> None:
    """600 / 500 < 1.3: recomputing 100 tokens is taken even though loading them would be faster."""
    chosen = schedule({"a": 500, "b": 600}, pool=600, tables=Tables(queue_s={"b": 5.0})).prefill
    assert (chosen.instance, chosen.prefix_tokens, chosen.loaded_tokens) == ("a", 500, 0)


def test_a_load_that_is_slower_than_computing_is_not_made() -> None:
    chosen = schedule({"a": 0}, pool=600, tables=Tables(transfer_token_s=0.01)).prefill
    assert (chosen.prefix_tokens, chosen.loaded_tokens) == (0, 0)


def test_the_pool_outlives_the_instance_that_computed_the_prefix() -> None:
    assert schedule({"a": 0}, pool=600).prefill.loaded_tokens == 600


def test_waiting_for_a_siblings_prefix_is_preferred_to_computing_it_again_in_the_same_time() -> None:
    tables = Tables(queue_s={"b": 0.61})
    assert schedule({"a": 0, "b": 600}, tables=tables).prefill.instance == "b"
    assert schedule({"a": 0, "b": 600}, tables=Tables(queue_s={"b": 0.7})).prefill.instance == "a"


def test_among_equals_the_first_wins() -> None:
    assert schedule({"b": 0, "a": 0}).prefill.instance == "b"


@pytest.mark.parametrize(
    ("slo", "tbt_s", "rejected"),
    [
        (Slo(2.0, 0.1), 0.05, ()),
        (Slo(0.5, 0.1), 0.05, ("ttft",)),
        (Slo(2.0, 0.1), 0.2, ("tbt",)),
        (Slo(0.5, 0.1), 0.2, ("ttft", "tbt")),
    ],
)
def test_line_25_rejects_over_either_slo(slo: Slo, tbt_s: float, rejected: tuple[str, ...]) -> None:
    assert schedule({"a": 0}, slo=slo, tbt_s=tbt_s).rejected == rejected


def test_an_empty_pool_is_the_callers_mistake() -> None:
    with pytest.raises(ValueError):
        schedule({})
