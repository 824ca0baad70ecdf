"""Which NICs are near which memory: the topology matrix that paths are chosen by (paper 3.2.2).

Knows: distances over PCI and NUMA, preferred and secondary NICs per memory location, the override file. Does not know:
sysfs' files (topology_sysfs), how a NIC is used, whether one rests. A location is `cpu:<NUMA node>`, `cuda:<index>` or `*`
(any memory); names and JSON form are those of the open-source engine's NIC priority matrix.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from mooncake.common.errors import ConfigError
from transfer_engine.config import EngineConfig
from transfer_engine.topology_sysfs import Gpu, Nic, read_gpus, read_nics, read_nodes, visible_gpus

ANY = "*"
SYSFS = Path("/sys")
RATES_KEY = "rates_bits_per_s"
_LOCATION = re.compile(r"\*|(cpu|cuda):\d+")
_FAR = 255
"""The kernel's word for "not reachable"; here: node unknown."""

Nodes: TypeAlias = Mapping[int, Mapping[int, int]]
Matrix: TypeAlias = dict[str, list[list[str]]]


class Paths(msgspec.Struct, frozen=True):
    """NICs of one memory location, each in natural order of names. `secondary` is for when no preferred one works."""

    preferred: tuple[str, ...] = ()
    secondary: tuple[str, ...] = ()

    @property
    def all(self) -> tuple[str, ...]:
        """Preferred first."""
        return self.preferred + self.secondary


class Topology(msgspec.Struct, frozen=True):
    """One machine's NICs and matrix. What is near does not change with a link's state: `Nic.active` tells only how the
    port was when this was read."""

    nics: tuple[Nic, ...] = ()
    locations: dict[str, Paths] = {}

    def nic(self, name: str) -> Nic:
        """Raises ConfigError for a NIC that this machine does not have."""
        for nic in self.nics:
            if nic.name == name:
                return nic
        raise ConfigError(f"unknown NIC {name!r}; this machine has: {_listed(nic.name for nic in self.nics)}")

    def paths(self, location: str) -> Paths:
        """NICs for memory at a location; for one that is not in the matrix those of `*`."""
        return self.locations.get(location) or self.locations.get(ANY) or Paths()

    def only(self, names: Collection[str]) -> Topology:
        """The same with some of the NICs: what an engine sees that is given a set of its own. Where no preferred NIC is
        left, the secondary ones are preferred. Raises ConfigError for an unknown one."""
        kept = {self.nic(name).name for name in names}
        return Topology(
            tuple(nic for nic in self.nics if nic.name in kept),
            {location: _kept(paths, kept) for location, paths in self.locations.items()},
        )

    def matrix(self) -> Matrix:
        """`{"cpu:0": [["mlx5_0"], ["mlx5_1"]], ...}`: location to preferred and secondary NICs."""
        return {location: [list(p.preferred), list(p.secondary)] for location, p in self.locations.items()}

    def matrix_json(self) -> str:
        """The matrix as the open-source engine's `get_local_topology` writes it, and as an override file may hold it."""
        return msgspec.json.format(msgspec.json.encode(self.matrix()), indent=2).decode()


class TopologyRecord(msgspec.Struct, frozen=True):
    """What an instance publishes of the machine that its transfer engine runs on (docs/protocol.md 2), as JSON."""

    name: str
    instance_id: str
    role: str
    hostname: str
    topology: Topology


def record(name: str, instance_id: str, role: str, topology: Topology) -> bytes:
    """This machine's TopologyRecord, encoded."""
    return msgspec.json.encode(TopologyRecord(name, instance_id, role, socket.gethostname(), topology))


decode_record = msgspec.json.Decoder(TopologyRecord).decode


def discover(sysfs: Path = SYSFS, override: Path | None = None, visible: str | None = None) -> Topology:
    """This machine's topology. No RDMA device at all is fine: every location is there, without NICs. `visible` renumbers GPUs
    as CUDA_VISIBLE_DEVICES does, which it is for this machine's own tree unless given.
    Raises ConfigError for an override file that is missing, malformed, or names a NIC that is not there."""
    if visible is None and sysfs == SYSFS:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    nics, gpus, nodes = read_nics(sysfs), visible_gpus(read_gpus(sysfs), visible), read_nodes(sysfs)
    locations = {
        f"cpu:{node}": _nearest(nics, {n.name: _node_distance(nodes, node, n) for n in nics}) for node in nodes
    }
    locations |= {f"cuda:{g.index}": _nearest(nics, {n.name: _gpu_distance(nodes, g, n) for n in nics}) for g in gpus}
    locations[ANY] = Paths(tuple(nic.name for nic in nics))
    found = Topology(nics, locations)
    return found if override is None else _overridden(found, override)


def of_engine(config: EngineConfig, sysfs: Path = SYSFS) -> Topology:
    """What an engine of this configuration sees: with its override file, of its own NICs only. A NIC that sysfs does not
    show is left out: whether verbs have it is the transport's business. Raises ConfigError as `discover` does."""
    found = discover(sysfs, Path(config.topology_file) if config.topology_file else None)
    return found.only([nic.name for nic in found.nics if nic.name in config.nics]) if config.nics else found


# --- distances ------------------------------------------------------------------------------------------------------


def _nearest(nics: Collection[Nic], distance: Mapping[str, tuple[int, int]]) -> Paths:
    """All NICs at the smallest distance are preferred."""
    nearest = min(distance.values(), default=(0, 0))
    names = [nic.name for nic in nics]
    return Paths(
        tuple(name for name in names if distance[name] == nearest),
        tuple(name for name in names if distance[name] != nearest),
    )


def _node_distance(nodes: Nodes, node: int, nic: Nic | Gpu) -> tuple[int, int]:
    """What firmware says of the nodes; on a machine of one node everything is near."""
    if len(nodes) == 1:
        return (0, 0)
    return (0, nodes.get(node, {}).get(nic.numa_node, _FAR))


def _gpu_distance(nodes: Nodes, gpu: Gpu, nic: Nic) -> tuple[int, int]:
    """Below one PCIe bridge (fewer hops first), then the same root complex, then NUMA nodes."""
    mine, theirs = gpu.pci_path.split("/"), nic.pci_path.split("/")
    shared = 0
    while shared < min(len(mine), len(theirs)) and mine[shared] == theirs[shared] != "":
        shared += 1
    if shared > 1:
        return (0, len(mine) + len(theirs) - 2 * shared)
    if shared == 1:
        return (1, 0)
    return (2, _node_distance(nodes, gpu.numa_node, nic)[1])


# --- the override file ----------------------------------------------------------------------------------------------


def _overridden(found: Topology, file: Path) -> Topology:
    """The file's locations replace the discovered ones; its `*` also stands for all locations that it does not name."""
    try:
        content = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise ConfigError(f"topology file {file}: {error.strerror or error}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(
            f'topology file {file}: {error}; it must be JSON like {{"cpu:0": [["mlx5_0"], []]}}'
        ) from error
    rates = content.pop(RATES_KEY, {})
    named = {location: _paths(found, file, location, value) for location, value in content.items()}
    kept = {} if ANY in named else found.locations
    return Topology(_with_rates(found, file, rates), {**kept, **named})


def _paths(found: Topology, file: Path, location: str, value: object) -> Paths:
    if not _LOCATION.fullmatch(location):
        raise ConfigError(f"topology file {file}: unknown key {location!r}; use cpu:<n>, cuda:<n>, * or {RATES_KEY}")
    try:
        preferred, secondary = msgspec.convert(value, tuple[list[str], list[str]])
    except msgspec.ValidationError as error:
        wanted = '[["preferred NICs"], ["secondary NICs"]]'
        raise ConfigError(f"topology file {file}: {location} must be {wanted}: {error}") from error
    names = preferred + secondary
    _check_known(found, file, location, names)
    if len(set(names)) < len(names):
        raise ConfigError(f"topology file {file}: {location} names a NIC twice; keep each in one of its two lists")
    return Paths(tuple(preferred), tuple(secondary))


def _with_rates(found: Topology, file: Path, rates: object) -> tuple[Nic, ...]:
    try:
        given = msgspec.convert(rates, dict[str, float])
    except msgspec.ValidationError as error:
        raise ConfigError(f'topology file {file}: {RATES_KEY} must be like {{"mlx5_0": 2e11}}: {error}') from error
    _check_known(found, file, RATES_KEY, given)
    if bad := [name for name, rate in given.items() if not 0 < rate < 1e15]:
        raise ConfigError(f"topology file {file}: {RATES_KEY} of {bad[0]} must be above 0, in bits per second")
    replace = msgspec.structs.replace
    return tuple(replace(n, rate_bits_per_s=given[n.name]) if n.name in given else n for n in found.nics)


def _check_known(found: Topology, file: Path, key: str, names: Collection[str]) -> None:
    known = {nic.name for nic in found.nics}
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(
            f"topology file {file}: {key} names NIC {unknown[0]!r}; this machine has: {_listed(sorted(known))}"
        )


def _kept(paths: Paths, kept: Collection[str]) -> Paths:
    preferred = tuple(name for name in paths.preferred if name in kept)
    secondary = tuple(name for name in paths.secondary if name in kept)
    return Paths(preferred, secondary) if preferred else Paths(secondary)


def _listed(names: Collection[str] | Any) -> str:
    return ", ".join(names) or "none (see `rdma link`)"
