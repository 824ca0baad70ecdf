"""`mooncake topology`: this machine's NICs and which memory they are near, and what the cluster's instances published.

Knows: how to show a topology. Does not know: how it is found (transfer_engine/topology.py). Changes nothing.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec

from deploy.status import table
from mooncake.common.errors import ConfigError, RegistryUnavailable
from mooncake.common.registry import Registry
from transfer_engine.topology import Topology, TopologyRecord, decode_record, discover

_TIMEOUT_S = 3.0
_NO_NIC = "No RDMA device (`rdma link` lists them): transfers take shm and tcp."


async def published(etcd: list[str], cluster: str) -> list[TopologyRecord]:
    """What the instances of a cluster published, by name. Raises RegistryUnavailable when etcd does not answer."""
    registry = Registry(etcd, cluster)
    await registry.start()
    try:
        if not await registry.wait_connected(_TIMEOUT_S):
            raise RegistryUnavailable(f"etcd does not answer at {', '.join(etcd)}; give its endpoints by --etcd")
        values = registry.topologies.all().values()
    finally:
        await registry.close()
    return sorted(_readable(values), key=lambda record: record.name)


def _readable(values: Any) -> list[TopologyRecord]:
    """Without records of another version, which a newer instance may have written."""
    found = []
    for value in values:
        try:
            found.append(decode_record(value))
        except msgspec.DecodeError:
            continue
    return found


def rate_text(bits_per_s: float) -> str:
    return f"{bits_per_s / 1e9:g} Gbit/s" if bits_per_s else "?"


def render(topology: Topology) -> str:
    """Two tables for people: the NICs, and location to preferred and secondary ones."""
    if not topology.nics:
        return _NO_NIC
    nics = [
        (
            nic.name,
            "active" if nic.active else "down",
            rate_text(nic.rate_bits_per_s),
            nic.link_layer or "?",
            nic.netdev or "-",
            nic.numa_node if nic.numa_node >= 0 else "?",
            nic.pci_path.rpartition("/")[2] or "-",
        )
        for nic in topology.nics
    ]
    places = [(place, " ".join(p.preferred), " ".join(p.secondary)) for place, p in topology.locations.items()]
    return "\n\n".join(
        (
            table(("NIC", "STATE", "RATE", "LINK", "NETDEV", "NUMA", "PCI"), nics),
            table(("LOCATION", "PREFERRED", "SECONDARY"), places),
        )
    )


def _json(topology: Topology) -> dict[str, Any]:
    return {"nics": msgspec.to_builtins(topology.nics), "matrix": topology.matrix()}


def main(sysfs: Path, override: Path | None, etcd: list[str], cluster: str, *, as_json: bool) -> int:
    """For the command line. `etcd` empty: this machine only. Raises ConfigError, RegistryUnavailable."""
    if not sysfs.is_dir():
        raise ConfigError(f"--sysfs {sysfs}: no such folder; leave it out for this machine's own")
    here = discover(sysfs, override)
    records = asyncio.run(published(etcd, cluster)) if etcd else []
    if as_json:
        members = [{**msgspec.to_builtins(r), "topology": _json(r.topology)} for r in records]
        print(json.dumps(_json(here) | ({"instances": members} if etcd else {}), indent=1))
        return 0
    print(render(here))
    for record in records:
        print(f"\n{record.name} ({record.role}) on {record.hostname}\n")
        print(render(record.topology))
    if etcd and not records:
        print(f"\nNo instance of cluster {cluster!r} has published a topology.")
    return 0
