"""What is read from vLLM's metrics text, and what the host's own page is made of."""

from __future__ import annotations

import math

import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from mooncake.common.metrics import new_registry
from mooncake.vllm.counters import METRICS, PREFIX
from mooncake.vllm.engine_load import EngineLoad, LoadTracker
from mooncake.vllm.engine_metrics import connector_text, merge
from transfer_engine import metrics as transfer

VLLM = """\
# HELP python_info Python platform information
# TYPE python_info gauge
python_info{implementation="CPython"} 1.0
# HELP vllm:num_requests_running Number of requests
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a b"} 2.0
# HELP vllm:num_requests_waiting Waiting
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="a b"} 1.0
# HELP vllm:kv_cache_usage_perc KV
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="a b"} 0.25
# HELP vllm:iteration_tokens_total Histogram
# TYPE vllm:iteration_tokens_total histogram
vllm:iteration_tokens_total_bucket{engine="0",le="+Inf",model_name="a b"} 7.0
vllm:iteration_tokens_total_count{engine="0",model_name="a b"} 7.0
vllm:iteration_tokens_total_sum{engine="0",model_name="a b"} 70.0
"""


def with_latency(sum_s: float, count: float, running: float = 2.0) -> str:
    before, after = 'requests_running{engine="0",model_name="a b"} 2.0', f'requests_running{{engine="0"}} {running}'
    text = VLLM.replace(before, after)
    labels = 'vllm:inter_token_latency_seconds_{}{{engine="0",model_name="a b"}} {}\n'
    return text + labels.format("sum", sum_s) + labels.format("count", count)


def test_load() -> None:
    load, decoded = LoadTracker(1000).update(VLLM, 0.0)
    assert load == EngineLoad(running=2, waiting=1, kv_usage=0.25, steps=7)
    assert decoded is None


def test_decode_intervals() -> None:
    tracker = LoadTracker(1000)
    assert tracker.update(with_latency(1.0, 10), 0.0)[1] is None
    decoded = tracker.update(with_latency(3.0, 50, running=4.0), 0.5)[1]
    assert decoded is not None
    assert decoded.tbt_s == pytest.approx(0.05)
    assert decoded.batch == pytest.approx(4.0)  # 2 s of waiting in 0.5 s
    assert decoded.kv_tokens == pytest.approx(250)
    assert tracker.update(with_latency(3.0, 50), 1.0)[1] is None, "nothing was decoded"
    burst = tracker.update(with_latency(3.01, 51, running=0.0), 1.5)[1]
    assert burst is not None
    assert burst.batch == 1.0


def test_garbage_is_no_load() -> None:
    assert LoadTracker(1000).update("vllm:num_requests_running nonsense\n\x00\nvllm:", 0.0)[0] == EngineLoad()


def test_two_engines_add_up() -> None:
    text = 'vllm:kv_cache_usage_perc{engine="0"} 0.5\nvllm:kv_cache_usage_perc{engine="1"} 0.1\n'
    text += 'vllm:num_requests_running{engine="0"} 1\nvllm:num_requests_running{engine="1"} 2\n'
    load, _ = LoadTracker(1).update(text, 0.0)
    assert (load.running, load.kv_usage) == (3, pytest.approx(0.3))


def test_connector_counters_are_typed_and_added_up() -> None:
    halves = [
        {'mooncake_connector_loads_total{result="ok"}': 2.0, "mooncake_connector_quarantined_blocks": 1.0},
        {'mooncake_connector_loads_total{result="ok"}': 3, 'mooncake_connector_loads_total{result="late"}': 1.0},
        {"mooncake_connector_load_seconds_sum": 0.5, "mooncake_connector_load_seconds_count": math.inf},
        {"evil 1\nvllm:fake": 1.0, "other_name": 1.0, 'mooncake_connector_x{a="b"': 1.0},
    ]
    families = {f.name: f for f in text_string_to_metric_families(connector_text(halves))}
    assert {(n, f.type) for n, f in families.items()} == {
        ("mooncake_connector_loads", "counter"),
        ("mooncake_connector_quarantined_blocks", "gauge"),
        ("mooncake_connector_load_seconds_sum", "unknown"),
        ("mooncake_connector_load_seconds_count", "unknown"),
    }
    values = {s.labels["result"]: s.value for s in families["mooncake_connector_loads"].samples}
    assert values == {"ok": 5.0, "late": 1.0}


def test_connector_metrics_bring_their_own_texts() -> None:
    text = connector_text([{PREFIX + name: 1.0 for name in METRICS}])
    for name, metric in METRICS.items():
        assert f"# HELP {PREFIX}{name} {metric.help}\n# TYPE {PREFIX}{name} {metric.kind}\n" in text
        assert (metric.kind == "counter") == name.endswith("_total"), "as Prometheus names them"
    assert list(METRICS) == sorted(METRICS)


def test_the_engines_of_the_transfers_bring_theirs() -> None:
    sample = 'mooncake_transfer_bytes_total{transport="rdma",nic="mlx5_0",op="write"}'
    families = {f.name: f for f in text_string_to_metric_families(connector_text([{sample: 2.0}, {sample: 3.0}]))}
    (family,) = families.values()
    assert (family.name, family.type) == ("mooncake_transfer_bytes", "counter")
    assert family.documentation == transfer.METRICS["bytes_total"].help
    assert family.samples[0].value == 5.0
    assert family.samples[0].labels == {"transport": "rdma", "nic": "mlx5_0", "op": "write"}


def test_the_page_is_valid_and_has_no_family_twice() -> None:
    registry: CollectorRegistry = new_registry()
    Counter("mooncake_worker_things", "Things", registry=registry).inc()
    page = merge(generate_latest(registry), [{"mooncake_connector_a_total": 1.0}], VLLM).decode()
    names = [f.name for f in text_string_to_metric_families(page)]
    assert len(names) == len(set(names))
    assert {"vllm:num_requests_running", "mooncake_connector_a", "mooncake_worker_things", "python_info"} <= set(names)
    headers = [line.split()[:3] for line in page.splitlines() if line.startswith("#")]
    assert len(headers) == len({tuple(h) for h in headers})


def test_without_engine_and_connector_the_page_is_the_hosts_own() -> None:
    assert merge(b"own 1\n", [], "") == b"own 1\n"
