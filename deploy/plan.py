"""From the options of `mooncake up` to the processes to run: names, ports, command lines, stages.

Does not know: how they are kept running. Options that roles and `up` share are passed by name, so that a role's own
config struct stays the only place that knows their meaning.
"""

from __future__ import annotations

import secrets
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from deploy.child import ChildSpec
from deploy.etcd import etcd_command, find_etcd
from deploy.run_dir import RunDir
from deploy.up_config import UpConfig
from mooncake.common.errors import ConfigError
from mooncake.common.net import format_address, free_port, port_is_free

CLUSTER = "local"
LOOPBACK = "127.0.0.1"
CPU_KV_CACHE_BYTES = 256 << 20
"""Enough to try things, and little enough for several workers on a laptop."""
STOP_ORDER = (
    frozenset({"gateway"}),
    frozenset({"prefill", "decode"}),
    frozenset({"conductor", "store-node", "store-master"}),
    frozenset({"etcd"}),
)
_GATEWAY_GRACE_S = 4.0
_WORKER_GRACE_S = 8.0
_WORKER_DRAIN_S = 2.0


@dataclass(frozen=True)
class Plan:
    """Everything that runs, in stages, and where the cluster is reached."""

    endpoint: str
    etcd: list[str]
    cluster_token: str
    model: str
    stages: list[list[ChildSpec]] = field(default_factory=list)


def make_plan(
    config: UpConfig,
    run_dir: RunDir,
    model_dir: Path,
    *,
    device: Literal["cpu", "gpu"],
    config_file: Path | None,
    worker_options: frozenset[str],
    gateway_options: frozenset[str],
    node_options: frozenset[str],
) -> Plan:
    """`*_options` are the fields of the roles' config structs. Only the gateway binds `config.host`.

    Raises ConfigError, e.g. when `--port` is taken.
    """
    if config.port and not port_is_free(config.host, config.port):
        raise ConfigError(
            f"--port {config.port}: another program listens on {format_address(config.host, config.port)}"
        )
    ports = _Ports(LOOPBACK, config.port)
    client_port, peer_port = ports.take(), ports.take()
    etcd = format_address(LOOPBACK, client_port)
    token = secrets.token_hex(32)
    model = config.served_model_name or _name_of(config.model)
    environment = {
        "MOONCAKE_CLUSTER": CLUSTER,
        "MOONCAKE_ETCD": etcd,
        "MOONCAKE_CLUSTER_TOKEN": token,
        "MOONCAKE_LOG_LEVEL": config.log_level,
        "PYTHONUNBUFFERED": "1",
    }

    def role(
        role_name: str, index: int, port: int, options: dict[str, Any], grace_s: float = 2.0, host: str = LOOPBACK
    ) -> ChildSpec:
        name = f"{role_name}-{index}"
        command = [sys.executable, "-m", "mooncake", role_name, "--name", name, "--port", str(port)]
        command += ["--config", str(config_file)] if config_file else []
        return ChildSpec(
            name=name,
            role=role_name,
            command=[*command, *_flags(options)],
            log=run_dir.logs / f"{name}.log",
            environment=environment | {"MOONCAKE_HOST": host},
            port=port,
            host=host,
            start_timeout_s=config.start_timeout_s,
            stop_grace_s=grace_s,
        )

    worker = _known(_worker_values(config, model_dir, model, device), worker_options)

    def of_worker(index: int) -> dict[str, Any]:
        """Workers share the store nodes evenly as their near one."""
        local = {"store_local_segment": f"store-node-{index % config.store_nodes}"} if config.store_nodes else {}
        return worker | _known(local, worker_options)

    etcd_spec = ChildSpec(
        name="etcd",
        role="etcd",
        command=etcd_command(
            find_etcd(), run_dir.etcd_data, host=LOOPBACK, client_port=client_port, peer_port=peer_port
        ),
        log=run_dir.logs / "etcd.log",
        port=client_port,
        ready_port=client_port,
        host=LOOPBACK,
        start_timeout_s=30.0,
    )
    nodes = [role("store-node", i, ports.take(), _node_values(config, node_options)) for i in range(config.store_nodes)]
    masters = [role("store-master", 0, ports.take(), {})] if nodes else []
    control = [role("conductor", 0, ports.take(), {}), *masters]
    workers = [
        role(kind, i, ports.take(), of_worker(i + first), _WORKER_GRACE_S)
        for kind, count, first in (("prefill", config.prefill, 0), ("decode", config.decode, config.prefill))
        for i in range(count)
    ]
    gateway_port = config.port or _Ports(config.host, *ports.taken).take()
    gateway_values = _known({"graceful_shutdown_s": _GATEWAY_GRACE_S - 1}, gateway_options)
    gateway = role("gateway", 0, gateway_port, gateway_values, _GATEWAY_GRACE_S, config.host)
    return Plan(
        endpoint=f"http://{format_address(config.host, gateway_port)}",
        etcd=[etcd],
        cluster_token=token,
        model=model,
        stages=[stage for stage in ([etcd_spec], control, nodes, [*workers, gateway]) if stage],
    )


def _name_of(model: str) -> str:
    return Path(model).name if "/" in model else model


def _worker_values(config: UpConfig, model_dir: Path, model: str, device: Literal["cpu", "gpu"]) -> dict[str, Any]:
    """What `up` says of a worker; what was left to the worker is left out."""
    values: dict[str, Any] = {
        "model": str(model_dir),
        "served_model_name": model,
        "tool_call_parser": config.tool_call_parser,
        "workers_on_machine": config.prefill + config.decode,
        "drain_timeout_s": _WORKER_DRAIN_S,
        "stop_timeout_s": _WORKER_GRACE_S - _WORKER_DRAIN_S - 1,
    }
    kv_bytes = config.kv_cache_bytes or (CPU_KV_CACHE_BYTES if device == "cpu" else 0)
    optional = {
        "kv_cache_memory_bytes": kv_bytes,
        "dtype": config.dtype,
        "max_model_len": config.max_model_len,
        "block_size": config.block_size,
        "transports": config.transports,
    }
    values |= {name: value for name, value in optional.items() if value}
    if config.enforce_eager is not None or device == "cpu":
        values["enforce_eager"] = config.enforce_eager is not False
    if not config.store_nodes:
        values["store"] = False
    return values


def _node_values(config: UpConfig, options: frozenset[str]) -> dict[str, Any]:
    size = next(
        (name for name in ("segment_bytes", "store_bytes", "capacity_bytes") if name in options), "segment_bytes"
    )
    values: dict[str, Any] = {size: config.store_bytes}
    return values | ({"transports": config.transports} if config.transports else {})


def _known(values: dict[str, Any], options: frozenset[str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in options}


def _flags(values: dict[str, Any]) -> list[str]:
    flags = []
    for name, value in values.items():
        flag = name.replace("_", "-")
        if isinstance(value, list):
            flags += [f"--{flag}", ",".join(value)]
        elif isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", str(value)]
    return flags


class _Ports:
    """Free ports, each handed out once."""

    def __init__(self, host: str, *taken: int) -> None:
        self._host = host
        self.taken = set(taken)

    def take(self) -> int:
        while (port := free_port(self._host)) in self.taken:
            continue
        self.taken.add(port)
        return port


def option_names(struct: type[msgspec.Struct]) -> frozenset[str]:
    """Field names of a role's config struct."""
    return frozenset(field.name for field in msgspec.structs.fields(struct))
