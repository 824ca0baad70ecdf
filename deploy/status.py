"""`mooncake status`: who is in the cluster (etcd), who says it is ready (its own /ready), and what the Conductor sees.

Knows: the registry's roles and the Conductor's Status call. Changes nothing.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import grpc

from deploy.run_dir import read_state
from mooncake.common.errors import ConfigError, RegistryUnavailable
from mooncake.common.registry import InstanceRecord, Registry
from mooncake.common.rpc import aio_channel

REGISTRY_ROLES = ("gateway", "conductor", "worker", "store-master", "store-node")
_TIMEOUT_S = 3.0


@dataclass(frozen=True)
class Where:
    """How the cluster is found. `expected`: name to state of the processes that `mooncake up` runs here."""

    etcd: list[str]
    cluster: str
    token: str
    expected: dict[str, str]


def where(etcd: Sequence[str], cluster: str, run_dir: str) -> Where:
    """From the options, else from the run folder. Raises ConfigError when neither says."""
    token = os.environ.get("MOONCAKE_CLUSTER_TOKEN", "")
    if etcd:
        return Where(list(etcd), cluster or os.environ.get("MOONCAKE_CLUSTER", "mooncake"), token, {})
    state = read_state(run_dir)
    expected = {name: entry["state"] for name, entry in state["roles"].items() if entry["role"] != "etcd"}
    return Where(state["etcd"], cluster or state["cluster"], token or state["cluster_token"], expected)


async def collect(place: Where) -> dict[str, Any]:
    """{"instances": [...], "conductor": {...} | None, "ready": bool}. Raises RegistryUnavailable when etcd does not
    answer.
    """
    registry = Registry(place.etcd, place.cluster)
    await registry.start()
    try:
        if not await registry.wait_connected(_TIMEOUT_S):
            raise RegistryUnavailable(f"etcd does not answer at {', '.join(place.etcd)}")
        records = [r for role in REGISTRY_ROLES for r in registry.instances(role).values()]
        leader = registry.leader("conductor")
    finally:
        await registry.close()
    async with aiohttp.ClientSession() as http:
        ready = await asyncio.gather(*(_is_ready(http, record) for record in records))
    conductor = await _conductor_status(leader.address if leader else "", place.token)
    instances = [_row(record, is_ready) for record, is_ready in zip(records, ready, strict=True)]
    here = {record.name for record in records}
    instances += [
        {"name": name, "role": "", "ready": False, "state": state, "address": "", "http_url": "", "info": {}}
        for name, state in place.expected.items()
        if name not in here
    ]
    return {
        "instances": instances,
        "conductor": conductor,
        "ready": bool(instances) and all(row["ready"] for row in instances) and conductor is not None,
    }


def _row(record: InstanceRecord, ready: bool) -> dict[str, Any]:
    return {
        "name": record.name,
        "role": record.role,
        "ready": ready,
        "state": "ready" if ready else "not ready",
        "address": record.address or record.info.get("engine_url", ""),
        "http_url": record.http_url,
        "info": record.info,
    }


async def _is_ready(http: aiohttp.ClientSession, record: InstanceRecord) -> bool:
    if not record.http_url:
        return False
    try:
        async with http.get(
            record.http_url.rstrip("/") + "/ready", timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S)
        ) as answer:
            return answer.status == 200
    except (aiohttp.ClientError, TimeoutError, OSError):
        return False


async def _conductor_status(address: str, token: str) -> dict[str, Any] | None:
    if not address:
        return None
    from mooncake.common.proto import conductor_pb2, conductor_pb2_grpc

    async with aio_channel(address, token) as channel:
        try:
            status = await conductor_pb2_grpc.ConductorStub(channel).Status(
                conductor_pb2.StatusRequest(), timeout=_TIMEOUT_S
            )
        except grpc.RpcError:
            return None
    return {
        "address": address,
        "placed_total": status.placed_total,
        "rejected_total": status.rejected_total,
        "placements_in_flight": status.placements_in_flight,
        "instances": [
            {
                "name": one.name,
                "model": one.model,
                "roles": list(one.roles),
                "running": one.running,
                "waiting": one.waiting,
                "kv_usage": round(one.kv_usage, 3),
                "held_blocks": one.held_blocks,
                "queue_s": round(one.queue_s, 3),
                "draining": one.draining,
            }
            for one in status.instances
        ],
    }


def table(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns padded to their widest cell."""
    text = [[str(cell) for cell in row] for row in (headings, *rows)]
    widths = [max(len(row[i]) for row in text) for i in range(len(headings))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in text)


def render(found: dict[str, Any]) -> str:
    """For people."""
    rows = [
        (r["name"], r["role"] or "-", r["state"], r["info"].get("model", ""), r["address"], r["http_url"])
        for r in found["instances"]
    ]
    parts = [table(("NAME", "ROLE", "STATE", "MODEL", "ADDRESS", "HTTP"), rows)]
    conductor = found["conductor"]
    if conductor is None:
        parts.append("The Conductor does not answer.")
    else:
        parts.append(
            f"Conductor at {conductor['address']}: {conductor['placed_total']} placed, "
            f"{conductor['rejected_total']} rejected, {conductor['placements_in_flight']} in flight"
        )
        columns = ("name", "roles", "running", "waiting", "kv_usage", "held_blocks", "queue_s", "draining")
        workers = [
            ["+".join(w[c]) if c == "roles" else w[c] for c in columns]
            for w in sorted(conductor["instances"], key=lambda w: str(w["name"]))
        ]
        if workers:
            parts.append(table([c.upper() for c in columns], workers))
    return "\n\n".join(parts)


def main(etcd: Sequence[str], cluster: str, run_dir: str, *, as_json: bool) -> int:
    """For the command line: 0 when everything is ready, 1 when not."""
    place = where(etcd, cluster, run_dir)
    try:
        found = asyncio.run(collect(place))
    except RegistryUnavailable as error:
        raise ConfigError(str(error)) from error
    print(json.dumps(found, indent=1) if as_json else render(found))
    return 0 if found["ready"] else 1
