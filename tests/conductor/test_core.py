"""The Conductor core by event lists: placing, rejecting, charging, learning, losing instances. Time is a number."""

from __future__ import annotations

import pytest

from conductor.config import ConductorConfig
from conductor.core import Conductor
from conductor.messages import EventKind, LoadSample
from mooncake.common.ids import InstanceId, InstanceName
from tests.conductor.helpers import (
    BLOCK,
    MODEL,
    add_worker,
    cluster,
    event,
    keys,
    life,
    nothing_charged,
    placed,
    prefill_names,
    rejected,
    report,
    request,
    teach,
)

# --- who is chosen ---


def test_a_fresh_cluster_serves_and_takes_turns() -> None:
    core = cluster("p0", "p1", "d0", "d1")
    results = [core.place(request(f"r{i}"), 0.0) for i in range(4)]
    assert prefill_names(results) == ["p0", "p1", "p0", "p1"]
    assert [placed(r).decode.name for r in results] == ["d0", "d1", "d0", "d1"]
    assert placed(results[0]).prefill.http_url == "http://p0"  # type: ignore[union-attr]


def test_the_instance_that_holds_the_prefix_is_preferred_until_its_queue_is_too_long() -> None:
    core = cluster("p0", "p1", "d0")
    for name in ("p0", "p1", "d0"):
        teach(core, name)
    prompt = keys(20, salt=1)
    core.worker_report(report("p1", 2, "prefill", stored=prompt[:15]), 0.0)
    results = [placed(core.place(request(f"r{i}", 2000, block_keys=prompt), 0.0)) for i in range(4)]
    assert prefill_names(results)[0] == "p1"
    assert results[0].prefix_tokens == 1500
    assert results[0].estimate.prefill_s == pytest.approx(0.5, rel=0.2)
    core.place(request("busy", 9000, pin_prefill="p1"), 0.0)
    assert prefill_names([core.place(request("late", 2000, block_keys=prompt, pool_prefix_tokens=0), 0.0)]) == ["p0"]


def test_siblings_of_a_burst_follow_the_first_before_any_event() -> None:
    core = cluster("p0", "p1", "p2", "d0")
    for name in ("p0", "p1", "p2", "d0"):
        teach(core, name)
    prompt = keys(40, salt=2)
    results = [core.place(request(f"r{i}", 4000, block_keys=prompt), 0.0) for i in range(3)]
    assert len(set(prefill_names(results))) == 1
    assert placed(results[1]).prefix_tokens == 4000
    core.report(
        [event("r0", EventKind.LEG_FAILED), event("r1", EventKind.FINISHED), event("r2", EventKind.FINISHED)], 0.1
    )
    assert placed(core.place(request("next", 4000, block_keys=prompt), 0.2)).prefix_tokens == 0


def test_a_prefix_of_the_pool_is_planned_to_be_loaded() -> None:
    core = cluster("p0", "d0")
    teach(core, "p0")
    core.worker_report(report("p0", 2, "prefill", load_samples=[LoadSample(1000, 0.01)] * 5), 0.0)
    result = placed(core.place(request("r", 5000, pool_prefix_tokens=4800), 0.0))
    assert (result.prefix_tokens, result.pool_prefix_tokens) == (0, 4800)
    assert 0 < result.estimate.transfer_s < 0.1
    assert core.totals.pool_tokens == 4800


def test_decoding_is_balanced_by_count_and_counts_what_is_still_in_prefill() -> None:
    core = cluster("p0", "d0", "d1")
    for name in ("d0", "d1"):
        teach(core, name)
    core.place(request("long", 10_000), 0.0)  # on d0, though it will be in prefill for ten seconds
    names = [placed(core.place(request(f"r{i}", 100), 0.0)).decode.name for i in range(5)]
    assert names == ["d1", "d1", "d0", "d1", "d0"]  # one each, then always the fewer; at a tie the fewer KV tokens


def test_sequences_of_before_a_fail_over_count() -> None:
    core = cluster("p0", "d0", "d1")
    for name in ("d0", "d1"):
        teach(core, name)
    core.worker_report(report("d0", 2, "decode", running=5), 0.0)
    assert [placed(core.place(request(f"r{i}"), 0.0)).decode.name for i in range(3)] == ["d1", "d1", "d1"]


def test_models_live_side_by_side() -> None:
    core = cluster("p0", "d0")
    for name in ("p1", "d1"):
        add_worker(core, name, model="other")
    assert placed(core.place(request("a", model="other"), 0.0)).decode.name == "d1"
    assert placed(core.place(request("b"), 0.0)).decode.name == "d0"


def test_pins_and_excludes() -> None:
    core = cluster("p0", "p1", "d0", "d1")
    pinned = placed(core.place(request("a", pin_prefill="p1", pin_decode=life("d1")), 0.0))
    assert pinned.prefill is not None
    assert (pinned.prefill.name, pinned.decode.name) == ("p1", "d1")
    away = placed(core.place(request("b", exclude=[life("p0"), life("d0")]), 0.0))
    assert away.prefill is not None
    assert (away.prefill.name, away.decode.name) == ("p1", "d1")
    refused = rejected(core.place(request("c", pin_decode="d1", exclude=[life("d1")]), 0.0))
    assert (refused.status, refused.reason) == (503, "rejected-no-endpoints")
    assert "'d1'" in refused.message


def test_instances_too_small_for_a_prompt_are_passed_over() -> None:
    core = cluster("p0", "p1", "d0")
    core.worker_report(report("p0", 1, "prefill", kv_capacity_tokens=4000), 0.0)
    assert prefill_names([core.place(request(f"r{i}", 4000), 0.0) for i in range(2)]) == ["p1", "p1"]


def test_draining_instances_get_nothing_new() -> None:
    core = cluster("p0", "p1", "d0")
    core.worker_report(report("p0", 1, "prefill", draining=True), 0.0)
    assert prefill_names([core.place(request(f"r{i}"), 0.0) for i in range(2)]) == ["p1", "p1"]


# --- one instance alone ---


def test_single_worker_requests_charge_their_prefill_to_the_decoding_instance() -> None:
    core = cluster("p0", "d0", "d1")
    result = placed(core.place(request("a", single_worker=True), 0.0))
    assert result.prefill is None
    loaded = next(each for each in core.fleet if each.name == result.decode.name)
    assert (len(loaded.queue), loaded.load.sequences) == (1, 1)
    assert not result.degraded
    core.report([event("a", EventKind.FIRST_TOKEN, at_s=0.5), event("a", EventKind.FINISHED)], 1.0)
    assert nothing_charged(core)


def test_without_prefill_instances_decoding_ones_serve_alone_and_it_is_counted() -> None:
    core = cluster("d0")
    result = placed(core.place(request("a"), 0.0))
    assert (result.prefill, result.degraded, core.totals.degraded) == (None, True, 1)
    assert rejected(core.place(request("b", pin_prefill="p0"), 0.0)).status == 503


def test_a_mixed_instance_serves_short_and_mostly_cached_prompts_alone() -> None:
    core = cluster("p0", "m0")
    prompt = keys(40, salt=3)
    core.worker_report(report("m0", 1, "prefill", "decode", stored=prompt), 0.0)
    assert placed(core.place(request("short", 50), 0.0)).prefill is None
    cached = placed(core.place(request("cached", 4050, block_keys=prompt), 0.0))
    assert (cached.prefill, cached.prefix_tokens, cached.degraded) == (None, 4000, False)


def test_a_pure_decoding_instance_never_skips_the_prefill_leg() -> None:
    core = cluster("p0", "d0")
    assert placed(core.place(request("short", 50), 0.0)).prefill is not None


# --- rejections ---


def test_unknown_model_and_missing_roles() -> None:
    core = cluster("p0")
    unknown = rejected(core.place(request("a", model="nope"), 0.0))
    assert (unknown.status, unknown.reason) == (404, "rejected-unknown-model")
    assert rejected(core.place(request("b"), 0.0)).status == 503
    core.instance_down(life("p0"), 0.0)
    core.stream_broken(life("p0"), 0.0)
    core.tick(100.0)
    assert rejected(core.place(request("c"), 100.0)).status == 503  # known, but nobody is there
    assert core.totals.rejected == {"rejected-unknown-model": 1, "rejected-no-endpoints": 2}


def test_a_queue_over_the_ttft_slo_is_429_and_retry_after_is_when_it_has_drained() -> None:
    core = cluster("p0", "d0", config=ConductorConfig(ttft_slo_s=5.0))
    for name in ("p0", "d0"):
        teach(core, name)
    results = [core.place(request(f"r{i}", 2000), 0.0) for i in range(4)]
    placed(results[1])
    assert [r.estimate.queue_s for r in results] == [pytest.approx(s, abs=0.2) for s in (0, 2, 4, 4)]
    refused = rejected(results[2])
    assert (refused.status, refused.reason) == (429, "rejected-saturated")
    assert refused.retry_after_s == pytest.approx(1.0, abs=0.3)
    core.report([event("r0", EventKind.PREFILL_STARTED)], 0.0)
    placed(core.place(request("again", 2000), refused.retry_after_s + 0.05))


def test_time_already_spent_counts_against_the_slo() -> None:
    core = cluster("p0", "d0", config=ConductorConfig(ttft_slo_s=5.0))
    teach(core, "p0")
    core.place(request("before", 2000), 0.0)
    placed(core.place(request("a", 2000, elapsed_s=0.0), 0.0))
    assert rejected(core.place(request("b", 1000, elapsed_s=4.5), 0.0)).estimate.ttft_s > 5.0


def test_a_full_batch_is_429_and_retry_after_comes_from_the_completion_rate() -> None:
    core = cluster("p0", "d0", config=ConductorConfig(tbt_slo_s=0.05, expected_output_tokens=100))
    teach(core, "d0")
    results = [core.place(request(f"r{i}", 100), 0.0) for i in range(6)]
    assert [placed(r).estimate.tbt_s for r in results[:5]] == [pytest.approx(0.01 * (i + 1), rel=0.1) for i in range(5)]
    refused = rejected(results[5])
    assert refused.status == 429
    assert refused.retry_after_s == pytest.approx(100 * 0.06 / 6, rel=0.5)  # one of six ends in a sixth of a lifetime


def test_a_clients_own_slo_wins() -> None:
    core = cluster("p0", "d0")
    teach(core, "p0")
    assert rejected(core.place(request("a", 4000, ttft_slo_s=1.0), 0.0)).status == 429
    placed(core.place(request("b", 4000), 0.0))


def test_what_could_never_meet_a_default_slo_is_served_when_nothing_waits() -> None:
    core = cluster("p0", "d0", config=ConductorConfig(ttft_slo_s=1.0))
    teach(core, "p0")
    placed(core.place(request("a", 4000), 0.0))
    assert rejected(core.place(request("b", 4000), 0.0)).status == 429
    strict = cluster("p0", "d0", config=ConductorConfig(ttft_slo_s=1.0, reject_infeasible=True))
    teach(strict, "p0")
    assert rejected(strict.place(request("a", 4000), 0.0)).status == 429


def test_slo_zero_never_rejects() -> None:
    core = cluster("p0", "d0", config=ConductorConfig(ttft_slo_s=0, tbt_slo_s=0))
    for name in ("p0", "d0"):
        teach(core, name)
    assert all(placed(core.place(request(f"r{i}", 4000), 0.0)) for i in range(50))


def test_too_many_in_flight_is_429() -> None:
    core = cluster("p0", "d0", config=ConductorConfig(max_in_flight=2))
    for i in range(2):
        placed(core.place(request(f"r{i}"), 0.0))
    assert rejected(core.place(request("r2"), 0.0)).status == 429
    placed(core.place(request("r1"), 0.0))  # the same request again takes no further room


# --- charges and events ---


def test_a_requests_life_is_charged_and_released() -> None:
    core = cluster("p0", "d0")
    core.place(request("a"), 0.0)
    p, d = (next(each for each in core.fleet if each.name == name) for name in ("p0", "d0"))
    assert (len(p.queue), d.load.sequences) == (1, 1)
    core.report([event("a", EventKind.PREFILL_STARTED), event("a", EventKind.PREFILL_FINISHED, at_s=1.0)], 1.0)
    assert (len(p.queue), d.load.sequences) == (0, 1)
    core.report([event("a", EventKind.FIRST_TOKEN, at_s=at_s) for at_s in (1.1, 1.2)], 1.2)
    (outcome,) = core.report([event("a", EventKind.FINISHED, at_s=2.0, output_tokens=5)] * 2, 2.0)
    assert (outcome.ttft_s, outcome.request_id) == (1.1, "a")
    assert nothing_charged(core)


def test_answers_that_are_not_streamed_teach_nothing_about_ttft() -> None:
    core = cluster("p0", "d0")
    teach(core, "d0")
    estimators = core.fleet.model(MODEL).estimators  # type: ignore[union-attr]
    before_s = estimators.hand_over_s(1000)
    for i in range(20):
        core.place(request(f"r{i}"), 10.0 * i)
        kinds = ((EventKind.PREFILL_FINISHED, 1.0), (EventKind.FIRST_TOKEN, 9.0), (EventKind.FINISHED, 9.01))
        events = [event(f"r{i}", kind, at_s=at_s, output_tokens=100) for kind, at_s in kinds]
        assert core.report(events, 10.0 * i + 9) == []
    assert estimators.hand_over_s(1000) == before_s
    assert estimators.ttft_bar.scale == 1.0
    assert nothing_charged(core)


def test_a_prefill_of_which_nobody_tells_is_presumed_over_in_time() -> None:
    core = cluster("d0")
    core.place(request("whole", single_worker=True), 0.0)
    (d,) = core.fleet
    core.tick(1.0)
    assert len(d.queue) == 1
    core.tick(5.0)
    assert (len(d.queue), d.load.sequences) == (0, 1)
    core.report([event("whole", EventKind.FINISHED, at_s=9.0)], 9.0)
    assert nothing_charged(core)


def test_unknown_requests_are_ignored() -> None:
    core = cluster("p0", "d0")
    assert core.report([event("ghost", kind) for kind in EventKind], 0.0) == []


def test_a_failed_leg_frees_everything_and_the_request_goes_elsewhere() -> None:
    core = cluster("p0", "p1", "d0")
    first = placed(core.place(request("a"), 0.0))
    assert first.prefill is not None
    core.report([event("a", EventKind.LEG_FAILED, instance_id=first.prefill.instance_id)], 1.0)
    assert nothing_charged(core)
    second = placed(core.place(request("a", exclude=[first.prefill.instance_id]), 1.0))
    assert second.prefill is not None
    assert second.prefill.name != first.prefill.name
    core.report([event("a", EventKind.FINISHED)], 2.0)
    assert nothing_charged(core)


def test_charges_of_a_silent_gateway_expire() -> None:
    core = cluster("p0", "d0", config=ConductorConfig(charge_ttl_s=10.0, suspect_grace_s=1e6))
    core.place(request("a"), 0.0)
    core.tick(9.0)
    assert core.in_flight == 1
    core.tick(10.0)
    assert nothing_charged(core)
    assert core.totals.expired == 1


def test_the_queue_estimate_shrinks_with_time_and_never_below_the_others() -> None:
    core = cluster("p0", "d0")
    teach(core, "p0")
    for i in range(2):
        core.place(request(f"r{i}", 2000), 0.0)
    p = next(each for each in core.fleet if each.name == "p0")
    assert core.queue_s(p, 0.0) == pytest.approx(4.0, rel=0.1)
    assert core.queue_s(p, 1.0) == pytest.approx(3.0, rel=0.1)
    assert core.queue_s(p, 50.0) == pytest.approx(2.0, rel=0.1)  # r1 has not begun, as far as anybody said


def test_a_new_term_begins_without_charges() -> None:
    core = cluster("p0", "d0")
    core.place(request("a"), 0.0)
    core.begin_term(1.0)
    assert nothing_charged(core)


# --- instances come and go ---


def test_a_restart_under_the_same_name_is_a_new_life() -> None:
    core = cluster("p0", "d0")
    prompt = keys(20, salt=4)
    core.worker_report(report("p0", 1, "prefill", stored=prompt), 0.0)
    core.place(request("old"), 0.0)
    new = InstanceId("p0-life-2")
    core.worker_report(report("p0", 0, "prefill", instance_id=new), 1.0)
    result = placed(core.place(request("a", 2000, block_keys=prompt), 1.0))
    assert result.prefill is not None
    assert (result.prefill.instance_id, result.prefix_tokens) == (new, 0)
    core.worker_report(report("p0", 2, "prefill", stored=prompt), 1.5)  # late words of the old life
    core.instance_down(life("p0"), 1.5)
    assert [each.instance_id for each in core.fleet if each.name == "p0"] == [new]
    core.report([event("old", EventKind.FINISHED), event("a", EventKind.FINISHED)], 2.0)
    assert nothing_charged(core)


def test_a_broken_stream_makes_a_suspect_that_is_used_last_and_then_gone() -> None:
    core = cluster("p0", "p1", "d0", config=ConductorConfig(suspect_grace_s=10.0))
    core.stream_broken(life("p0"), 0.0)
    assert prefill_names([core.place(request(f"r{i}"), 0.0) for i in range(3)]) == ["p1", "p1", "p1"]
    core.stream_broken(life("p1"), 1.0)
    placed(core.place(request("last resort"), 1.0))
    core.instance_down(life("p0"), 2.0)
    assert "p0" not in [each.name for each in core.fleet]
    core.tick(11.5)
    assert "p1" in [each.name for each in core.fleet]  # etcd still has it
    add_worker(core, "p1")
    assert prefill_names([core.place(request("back"), 12.0)]) == ["p1"]


def test_a_worker_that_only_its_stream_names_is_gone_after_the_grace() -> None:
    core = Conductor(ConductorConfig(suspect_grace_s=10.0))
    core.worker_report(report("d0", 0, "decode", http_url="http://d0"), 0.0)
    assert placed(core.place(request("a"), 0.0)).decode.http_url == "http://d0"
    core.stream_broken(life("d0"), 1.0)
    core.tick(10.0)
    assert len(list(core.fleet)) == 1
    core.tick(11.0)
    assert list(core.fleet) == []
    core.worker_report(report("d0", 0, "decode"), 12.0)  # the same life attaches again
    assert len(list(core.fleet)) == 1


def test_losing_the_lease_alone_ends_nobody() -> None:
    core = cluster("p0", "d0", config=ConductorConfig(suspect_grace_s=10.0))
    core.instance_down(life("p0"), 0.0)
    core.worker_report(report("p0", 1, "prefill"), 1.0)
    core.tick(15.0)
    assert "p0" in [each.name for each in core.fleet]


def test_an_open_but_silent_stream_makes_a_suspect() -> None:
    core = cluster("p0", "p1", "d0", config=ConductorConfig(report_stale_s=5.0, suspect_grace_s=100.0))
    for at in (3.0, 6.0):
        for name, role in (("p1", "prefill"), ("d0", "decode")):
            core.worker_report(report(name, int(at / 3), role), at)
    core.tick(6.0)
    assert prefill_names([core.place(request(f"r{i}"), 6.0) for i in range(2)]) == ["p1", "p1"]


def test_a_gap_in_the_sequence_asks_for_a_snapshot_until_one_comes() -> None:
    core = cluster("p0", "d0")
    assert not core.worker_report(report("p0", 1, "prefill", stored=keys(5)), 0.0).want_snapshot
    assert core.worker_report(report("p0", 3, "prefill"), 0.0).want_snapshot
    assert core.worker_report(report("p0", 4, "prefill"), 0.0).want_snapshot
    assert not core.worker_report(report("p0", 5, "prefill", snapshot=True, stored=keys(2)), 0.0).want_snapshot
    assert core.fleet.held_blocks(life("p0")) == 2
    assert core.fleet.sequence_gaps == 1


def test_a_stream_that_begins_without_a_snapshot_is_asked_for_one() -> None:
    core = Conductor(ConductorConfig())
    assert core.worker_report(report("p0", 7, "prefill", snapshot=False), 0.0).want_snapshot


def test_tables_are_bounded() -> None:
    core = Conductor(ConductorConfig(max_instances=3, max_models=2))
    for i in range(5):
        core.worker_report(report(f"d{i}", 0, "decode", model=f"model-{i}"), 0.0)
    assert [each.name for each in core.fleet] == ["d0", "d1", "d2"]


def test_other_block_sizes_and_no_keys_mean_no_prefix() -> None:
    core = cluster("p0", "d0")
    prompt = keys(10, salt=5)
    core.worker_report(report("p0", 1, "prefill", stored=prompt), 0.0)
    assert placed(core.place(request("a", 1000, block_keys=prompt, block_size=BLOCK // 2), 0.0)).prefix_tokens == 0
    assert placed(core.place(request("b", 1000, block_keys=()), 0.0)).prefix_tokens == 0
    assert core.totals.without_kv == 1


def test_roles_can_be_flipped_by_a_report() -> None:
    core = cluster("p0", "d0", "d1")
    core.worker_report(report("d1", 1, "prefill"), 0.0)
    results = [core.place(request(f"r{i}"), 0.0) for i in range(4)]
    assert set(prefill_names(results)) == {"p0", "d1"}
    assert {placed(r).decode.name for r in results} == {"d0"}


def test_the_same_history_gives_the_same_answers() -> None:
    def history() -> list[object]:
        core = cluster("p0", "p1", "p2", "d0", "d1")
        teach(core, "p1")
        answers: list[object] = []
        for i in range(50):
            answers.append(core.place(request(f"r{i}", 100 + 37 * i), float(i)))
            core.report([event(f"r{i // 2}", EventKind(1 + i % 5), at_s=1.0)], i + 0.5)
        return answers

    assert history() == history()


def test_registry_names_what_a_report_has_not() -> None:
    core = Conductor(ConductorConfig())
    core.instance_up(InstanceName("d0"), life("d0"), MODEL, roles=["decode"], http_url="http://x", block_size=BLOCK)
    assert placed(core.place(request("a"), 0.0)).decode.http_url == "http://x"
    core.instance_up(InstanceName("d0"), life("d0"), "renamed", roles=["decode"])
    assert rejected(core.place(request("b"), 0.0)).status == 503
    placed(core.place(request("c", model="renamed"), 0.0))
