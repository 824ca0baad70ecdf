"""vLLM's command line, environment and configuration file for one worker.

Knows: vLLM's options (0.32) and docs/protocol.md §7. Does not know: processes. Secrets never go to the command line,
which every user of the machine can read: the connector's configuration is in a file of mode 600, the API key in the
environment.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from mooncake.common.auth import derive_key
from mooncake.common.config import ClusterConfig
from mooncake.vllm.host_config import WorkerConfig, device_of, engine_block_size, omp_threads

DEFAULT_CPU_KV_BYTES = 1 << 30
KEY_PURPOSE = "engine"


class EngineIdentity(msgspec.Struct, frozen=True):
    """Who the engine is: what differs between two workers of one configuration."""

    name: str
    instance_id: str
    roles: tuple[str, ...]
    served_model: str
    model_path: Path
    port: int
    host_link: str
    kv_events: str


class EngineCommand(msgspec.Struct, frozen=True):
    """What to start. `secrets` must not show in logs."""

    argv: list[str]
    env: dict[str, str]
    config_file: Path
    config_text: str
    secrets: tuple[str, ...]


def served_model_name(config: WorkerConfig) -> str:
    """What clients call the model."""
    return config.served_model_name or Path(config.model).name


def connector_config(cluster: ClusterConfig, config: WorkerConfig, who: EngineIdentity) -> dict[str, Any]:
    """`kv_connector_extra_config`, docs/protocol.md §7."""
    store = {
        "masters": config.store_masters,
        "local_segment": config.store_local_segment,
        "block_tokens": config.store_block_tokens,
        "lookup_deadline_s": config.store_lookup_deadline_s,
        "load_deadline_s": config.store_load_deadline_s,
        "save_deadline_s": config.store_save_deadline_s,
    }
    transfer = {
        "host": cluster.host,
        "port": config.transfer_port,
        "name": who.name,
        "transports": config.transports,
        "nics": config.transfer_nics,
        "topology_file": config.transfer_topology and os.path.abspath(config.transfer_topology),
        "tls_cert": config.transfer_tls_cert and os.path.abspath(config.transfer_tls_cert),
        "tls_key": config.transfer_tls_key and os.path.abspath(config.transfer_tls_key),
        "tls_ca": config.transfer_tls_ca and os.path.abspath(config.transfer_tls_ca),
    }
    return {
        "host_link": who.host_link,
        "name": who.name,
        "instance_id": who.instance_id,
        "transfer": transfer,
        "store": store if config.store else None,
        "store_nics": config.store_nics if config.store else [],
        "fingerprint_salt": config.fingerprint_salt,
        "served_model": who.served_model,
        "roles": list(who.roles),
        "cluster_token": cluster.cluster_token,
    }


def build(
    cluster: ClusterConfig,
    config: WorkerConfig,
    who: EngineIdentity,
    *,
    runtime_dir: Path,
    environ: Mapping[str, str] | None = None,
) -> EngineCommand:
    """Everything that is needed to start vLLM. Writes nothing. Raises ConfigError."""
    config_file = runtime_dir / "engine.yaml"
    in_file = {
        "kv-transfer-config": {
            "kv_connector": "MooncakeConnector",
            "kv_connector_module_path": config.connector_module,
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "engine_id": who.instance_id,
            "kv_connector_extra_config": connector_config(cluster, config, who),
        }
    }
    argv = [sys.executable, "-m", "mooncake.vllm.engine_main", "--config", str(config_file)]
    argv += _options(cluster, config, who)
    key = derive_key(cluster.cluster_token, KEY_PURPOSE)
    return EngineCommand(
        argv=argv,
        env=_environment(cluster, config, os.environ if environ is None else environ),
        config_file=config_file,
        config_text=msgspec.json.encode(in_file).decode(),  # JSON is YAML
        secrets=tuple(secret for secret in (cluster.cluster_token, key) if secret),
    )


def _options(cluster: ClusterConfig, config: WorkerConfig, who: EngineIdentity) -> list[str]:
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": who.kv_events}
    kv_bytes = config.kv_cache_memory_bytes or (DEFAULT_CPU_KV_BYTES if device_of(config) == "cpu" else 0)
    valued: list[tuple[str, object]] = [
        ("--model", who.model_path),
        ("--served-model-name", who.served_model),
        ("--host", cluster.host),
        ("--port", who.port),
        ("--dtype", config.dtype),
        ("--tensor-parallel-size", config.tensor_parallel_size),
        ("--block-size", engine_block_size(config)),
        ("--kv-cache-memory-bytes", kv_bytes),
        ("--max-model-len", config.max_model_len),
        ("--max-num-seqs", config.max_num_seqs),
        ("--max-num-batched-tokens", config.max_num_batched_tokens),
        ("--tool-call-parser", config.tool_call_parser),
        ("--reasoning-parser", config.reasoning_parser),
        ("--chat-template", config.chat_template),
        ("--kv-events-config", msgspec.json.encode(events).decode()),
    ]
    argv = [text for option, value in valued if value for text in (option, str(value))]
    argv += ["--disable-hybrid-kv-cache-manager", "--enable-prompt-tokens-details", "--disable-uvicorn-access-log"]
    argv += ["--enforce-eager"] if config.enforce_eager else []
    argv += ["--enable-auto-tool-choice"] if config.tool_call_parser else []
    return argv + config.extra_engine_args


def _environment(cluster: ClusterConfig, config: WorkerConfig, environ: Mapping[str, str]) -> dict[str, str]:
    env = {name: value for name, value in environ.items() if not name.startswith("MOONCAKE_")}
    env |= {
        "HF_HUB_OFFLINE": "1",  # the model is always a folder: nothing is to be fetched
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",  # else vLLM's inner message queue listens on the machine's other address
        "PYTHONUNBUFFERED": "1",
    }
    env.pop("VLLM_API_KEY", None)
    if key := derive_key(cluster.cluster_token, KEY_PURPOSE):
        env["VLLM_API_KEY"] = key
    if device_of(config) == "cpu":
        # "auto" pins the engines of all workers to the first core.
        env |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(omp_threads(config))}
    return env
