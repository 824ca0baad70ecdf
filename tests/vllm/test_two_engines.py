"""Stream traffic and store traffic on engines of their own."""

from __future__ import annotations

import pytest

from mooncake.vllm.connector_config import ConnectorConfig
from mooncake.vllm.worker_runtime import WorkerRuntime


@pytest.mark.parametrize("nics", [[], ["mlx5_1"]])
def test_store_nics_get_an_engine_of_their_own(nics: list[str]) -> None:
    transfer = {"nics": ["mlx5_0"], "transports": ["local", "tcp"]}
    config = ConnectorConfig(name="w", transfer=transfer, store_nics=nics, cluster_token="t")
    runtime = WorkerRuntime(config, "engine", lambda _: None)
    try:
        assert (runtime.store_engine is runtime.engine) == (not nics)
        assert runtime.engine.config.nics == ("mlx5_0",)
        assert runtime.store_engine.config.nics == tuple(nics or ["mlx5_0"])
        assert runtime.store_engine.config.cluster_token == b"t"
        assert "cpu:0" in runtime.topology.locations
        told = runtime.counters.take_changes()
        assert told is not None and told["mooncake_transfer_open_sessions"] == 0
        runtime.store_engine.open_segment(runtime.engine.address)
        told = runtime.counters.take_changes()
        assert told is not None and told["mooncake_transfer_open_sessions"] == 1, "of both engines"
    finally:
        runtime.close()
    assert not runtime.store_engine.stats()["open_connections"]
