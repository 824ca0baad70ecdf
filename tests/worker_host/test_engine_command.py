"""vLLM's command line and environment."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mooncake.common.auth import derive_key
from mooncake.common.config import ClusterConfig, load
from mooncake.common.errors import ConfigError
from mooncake.vllm.connector_config import StoreConfig
from mooncake.vllm.connector_config import parse as parse_connector_config
from mooncake.vllm.engine_command import EngineCommand, EngineIdentity, build
from mooncake.vllm.host_config import WorkerConfig, engine_block_size, omp_threads
from mooncake.vllm.worker_runtime import engine_config

WHO = EngineIdentity(
    name="prefill-0",
    instance_id="prefill-0-1",
    roles=("prefill",),
    served_model="m",
    model_path=Path("/models/m"),
    port=1234,
    host_link="ipc:///run/x/host-link",
    kv_events="ipc:///run/x/kv-events",
)


def make(config: WorkerConfig, token: str = "", environ: dict[str, str] | None = None) -> EngineCommand:
    return build(ClusterConfig(cluster_token=token), config, WHO, runtime_dir=Path("/run/x"), environ=environ or {})


def value_of(argv: list[str], option: str) -> str | None:
    return argv[argv.index(option) + 1] if option in argv else None


def test_cpu() -> None:
    command = make(WorkerConfig(device="cpu", dtype="float32", kv_cache_memory_bytes=1 << 20, max_model_len=99))
    argv = command.argv
    assert value_of(argv, "--block-size") == "32"
    assert value_of(argv, "--kv-cache-memory-bytes") == str(1 << 20)
    assert value_of(argv, "--max-model-len") == "99"
    assert value_of(argv, "--max-num-seqs") is None
    assert value_of(argv, "--host") == "127.0.0.1"
    assert "--enforce-eager" not in argv
    assert "--enable-auto-tool-choice" not in argv
    assert command.env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert command.env["VLLM_HOST_IP"] == "127.0.0.1"
    events = json.loads(value_of(argv, "--kv-events-config") or "")
    assert events["endpoint"] == WHO.kv_events


def test_tls_files_reach_the_transfer_engine_as_absolute_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/run")  # vLLM may start elsewhere
    given = {"transfer_tls_cert": "x/cert.pem", "transfer_tls_key": "/keys/key.pem", "transfer_tls_ca": "x/ca.pem"}
    text = make(load(WorkerConfig, "worker", environ={}, given={"model": "/m", **given})).config_text
    connector = parse_connector_config(json.loads(text)["kv-transfer-config"]["kv_connector_extra_config"])
    settings = engine_config(connector)
    files = (settings.tls_cert, settings.tls_key, settings.tls_ca)
    assert files == ("/run/x/cert.pem", "/keys/key.pem", "/run/x/ca.pem")


def test_the_engine_binds_what_the_cluster_says() -> None:
    open_ = build(ClusterConfig(host="10.0.0.5"), WorkerConfig(device="cpu"), WHO, runtime_dir=Path("/run/x"))
    assert value_of(open_.argv, "--host") == "10.0.0.5"
    assert open_.env["VLLM_HOST_IP"] == "127.0.0.1"


def test_gpu_has_nothing_of_the_cpu() -> None:
    command = make(
        WorkerConfig(device="gpu", tool_call_parser="hermes", enforce_eager=True, extra_engine_args=["--seed", "1"])
    )
    assert value_of(command.argv, "--block-size") is None
    assert value_of(command.argv, "--kv-cache-memory-bytes") is None
    assert not {"VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS"} & set(command.env)
    assert "--enforce-eager" in command.argv and "--enable-auto-tool-choice" in command.argv
    assert command.argv[-2:] == ["--seed", "1"]


def test_secrets_are_in_neither_argv_nor_foreign_environment() -> None:
    environ = {"MOONCAKE_CLUSTER_TOKEN": "t0ken", "VLLM_API_KEY": "old", "PATH": "/bin"}
    command = make(WorkerConfig(device="cpu"), token="t0ken", environ=environ)
    assert "t0ken" not in " ".join(command.argv)
    assert "MOONCAKE_CLUSTER_TOKEN" not in command.env
    assert command.env["VLLM_API_KEY"] == derive_key("t0ken", "engine")
    assert set(command.secrets) == {"t0ken", derive_key("t0ken", "engine")}
    assert "VLLM_API_KEY" not in make(WorkerConfig(device="cpu"), environ=environ).env


def test_connector_accepts_what_the_host_writes() -> None:
    command = make(WorkerConfig(device="cpu", store_local_segment="store-node-0"), token="t")
    transfer = json.loads(command.config_text)["kv-transfer-config"]
    assert transfer["kv_role"] == "kv_both"
    assert transfer["kv_load_failure_policy"] == "recompute"
    config = parse_connector_config(transfer["kv_connector_extra_config"])
    assert config.host_link == WHO.host_link
    assert config.store is not None
    assert config.store.masters == []  # the host tells them
    told = make(WorkerConfig(device="cpu", store_masters=["127.0.0.1:5"]))
    transfer = json.loads(told.config_text)["kv-transfer-config"]
    assert parse_connector_config(transfer["kv_connector_extra_config"]).store == StoreConfig(masters=["127.0.0.1:5"])
    off = json.loads(make(WorkerConfig(device="cpu", store=False)).config_text)["kv-transfer-config"]
    assert off["kv_connector_extra_config"]["store"] is None


def test_config_contradictions() -> None:
    with pytest.raises(ConfigError, match="multiple"):
        engine_block_size(WorkerConfig(device="cpu", store_block_tokens=100))
    with pytest.raises(ConfigError, match="hang-after"):
        WorkerConfig(hang_after_s=5, health_timeout_s=10)
    with pytest.raises(ConfigError, match="transfer-nics and --store-nics share mlx5_0"):
        WorkerConfig(transfer_nics=["mlx5_0"], store_nics=["mlx5_0", "mlx5_1"])
    with pytest.raises(ConfigError, match="store-nics without --transfer-nics"):
        WorkerConfig(store_nics=["mlx5_1"])
    with pytest.raises(ConfigError, match="tensor-parallel-size 2: the connector does not support"):
        load(WorkerConfig, "worker", given={"tensor_parallel_size": "2"}, environ={})
    for extra in (["--seed", "0", "-tp", "2"], ["--tensor_parallel_size=4"], ["--pipeline-parallel-size", "2"]):
        with pytest.raises(ConfigError, match=r"extra-engine-args .* does not support"):
            WorkerConfig(extra_engine_args=extra)
    WorkerConfig(extra_engine_args=["--tensor-parallel-size", "1"])
    with pytest.raises(ConfigError, match="block-size"):
        load(WorkerConfig, "worker", given={"block_size": "many"}, environ={})


def test_threads_are_shared_among_workers() -> None:
    assert omp_threads(WorkerConfig(workers_on_machine=1000)) == 1
    assert omp_threads(WorkerConfig(omp_threads=7)) == 7
