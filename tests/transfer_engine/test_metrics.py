"""Everything that an engine counts reaches Prometheus, under its name and with its labels."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric as Family
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.transfer_engine.conftest import TOKEN, Pair
from transfer_engine import AuthenticationFailed, EngineConfig, Opcode, TransferEngine, TransferRequest, metrics
from transfer_engine.transports.rdma.counters import PER_NIC, TOTALS

SOURCES = Path(metrics.__file__).parent
SUMS = {f"rdma_{op}_{what}" for op in ("read", "write") for what in ("bytes", "slices", "seconds")}
"""Told by their parts, NIC by NIC."""


def counted() -> Iterator[tuple[str, str]]:
    """File and keyword of every `….counters.add(keyword=…)` in the engine's sources."""
    for file in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add":
                holder = node.func.value
                name = holder.attr if isinstance(holder, ast.Attribute) else getattr(holder, "id", "")
                if name.endswith("counters"):
                    yield from ((file.name, word.arg) for word in node.keywords if word.arg is not None)


def test_every_counter_in_the_sources_has_a_place() -> None:
    found = set(counted())
    assert ("tcp_worker.py", "tcp_dials") in found, "the search sees what it looks for"
    assert not [(file, key) for file, key in found if metrics.place(key) is None]


@pytest.mark.parametrize("nic", ["mlx5_0", "rxe_a0", "bnxt_re-bond.1", "read_write_bytes"])
def test_every_counter_of_a_nic_has_a_place(nic: str) -> None:
    for key in PER_NIC:
        at = metrics.place(f"rdma_{nic}_{key}")
        assert at is not None and nic in at[1]
        assert len(at[1]) == len(metrics.METRICS[at[0]].labels)
    for key in TOTALS:
        at = metrics.place(key)
        assert at is not None and at[1] == ("rdma",)


def test_names_are_prometheus_own() -> None:
    for name, metric in metrics.METRICS.items():
        assert (metric.kind == "counter") == name.endswith("_total"), name
        assert metric.help and not metric.help.endswith("."), name


def test_what_engines_counted_is_exported(pair: Pair) -> None:
    n_bytes = 1 << 20
    for opcode in (Opcode.WRITE, Opcode.READ):
        pair.engine.transfer_sync([pair.request(opcode, 0, 0, n_bytes)], 10.0)
    stats = pair.engine.stats()
    assert not {key for key in stats if metrics.place(key) is None} - SUMS
    transport = pair.way.split("-")[0]
    values = metrics.values([stats])
    for op in ("read", "write"):
        if transport != "fake":  # counts nothing
            paths = [(way, nic) for way, nic, _ in values["bytes_total"]]
            assert {way for way, _ in paths} == {transport}
            assert all(bool(nic) == (transport == "rdma") for _, nic in paths), "by NIC where there are any"
            assert sum(n for (_, _, of), n in values["bytes_total"].items() if of == op) >= n_bytes
            assert sum(s for (_, _, of), s in values["slice_seconds_total"].items() if of == op) > 0
    assert values["transfers_total"]["completed",] >= 2
    assert values["regions"][()] >= 1
    if transport == "rdma":
        assert values["open_endpoints"][()] >= 1 and values["connects_total"]["rdma",] >= 1
        assert values["queued_slices"]["rdma",] == 0
    if transport == "tcp":
        assert values["open_streams"][()] >= 1 and values["connects_total"]["tcp",] >= 1
        assert values["queued_slices"]["tcp",] == 0


def test_a_scrape(pair: Pair) -> None:
    registry = CollectorRegistry()
    metrics.register(registry, pair.engine.stats)
    pair.engine.transfer_sync([pair.request(Opcode.WRITE, 0, 0, 4096)], 10.0)
    families = {f.name: f for f in text_string_to_metric_families(generate_latest(registry).decode())}
    assert set(families) == {metrics.PREFIX + name.removesuffix("_total") for name in metrics.METRICS}
    for name, metric in metrics.METRICS.items():
        family = families[metrics.PREFIX + name.removesuffix("_total")]
        assert (family.type, family.documentation) == (metric.kind, metric.help)
        assert all(set(sample.labels) == set(metric.labels) for sample in family.samples)
    # The text that the connector sends is the text that a registry shows.
    told = "".join(f"{sample} {value}\n" for sample, value in metrics.samples([pair.engine.stats()]).items())
    assert _labels(text_string_to_metric_families(told)) == _labels(families.values())


def _labels(families: Iterable[Family]) -> set[tuple[str, frozenset[tuple[str, str]]]]:
    return {(s.name, frozenset(s.labels.items())) for f in families for s in f.samples}


def test_engines_of_one_process_add_up() -> None:
    one = {"rdma_mlx5_0_write_bytes": 5, "rdma_write_bytes": 5, "open_links": 1, "unheard_of": 1}
    two = {"rdma_mlx5_1_write_bytes": 7, "rdma_write_bytes": 7, "open_links": 2}
    assert metrics.samples([one, two]) == {
        'mooncake_transfer_bytes_total{transport="rdma",nic="mlx5_0",op="write"}': 5,
        'mooncake_transfer_bytes_total{transport="rdma",nic="mlx5_1",op="write"}': 7,
        "mooncake_transfer_open_links": 3,
    }


def test_slices_that_wait_are_counted_and_refusals_have_a_reason() -> None:
    config = EngineConfig(cluster_token=TOKEN, transports=("tcp",))
    with TransferEngine(config) as target, TransferEngine(config) as engine:
        at = target.register_buffer(there := np.zeros(64 << 20, np.uint8))
        here = np.ones_like(there)
        segment = engine.open_segment(target.address)
        batch = engine.allocate_batch_id(64)
        from_ = engine.register_buffer(here)
        requests = [(Opcode.WRITE, from_ + (i << 20), segment, at + (i << 20), 1 << 20) for i in range(64)]
        engine.submit_transfer(batch, [TransferRequest(*r) for r in requests], deadline_s=30)
        waiting = metrics.values([engine.stats()])["queued_slices"]["tcp",]
        assert engine.wait(batch, 30).ok
        assert 0 < waiting <= 64 and engine.stats()["tcp_queued_slices"] == 0
        with (
            TransferEngine(EngineConfig(cluster_token=b"wrong", transports=("tcp",))) as stranger,
            pytest.raises(AuthenticationFailed),
        ):
            stranger.open_segment(target.address)
        refused = metrics.values([target.stats()])["refused_connections_total"]
        assert refused == {("handshake",): 1}  # the target's proof was wrong to the stranger, who hung up


def test_the_package_needs_numpy_and_msgspec_only() -> None:
    """Neither Prometheus nor gRPC nor torch comes with it, its metrics' table included."""
    code = """
import sys, transfer_engine, transfer_engine.metrics, transfer_engine.topology
heavy = {"prometheus_client", "grpc", "torch", "vllm", "pyverbs", "aiohttp", "zmq"} & set(sys.modules)
sys.exit(f"imported {heavy}" if heavy else 0)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
