"""What Linux tells of RDMA NICs, GPUs and NUMA nodes: plain reading of sysfs (paper 3.2.2).

Knows: which file says what, for hardware NICs (`device` link) and soft-RoCE (`parent` names the netdev). Does not know:
distances, preferences. The folder is a parameter, so that any machine's tree can be looked at. A file that is missing or
cannot be read means "unknown", never an error: containers hide parts of sysfs.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

_PCI_ADDRESS = re.compile(r"^[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$")
_NVIDIA, _DISPLAY_CLASS = "0x10de", "0x03"
UNKNOWN_NODE = -1


class Nic(msgspec.Struct, frozen=True, kw_only=True):
    """One RDMA device, seen through its first active port (its first port when none is)."""

    name: str
    """As verbs name it: `mlx5_0`."""
    port: int = 1
    numa_node: int = UNKNOWN_NODE
    """-1: unknown."""
    pci_path: str = ""
    """From the root complex down: `pci0000:00/0000:00:01.0/0000:01:00.0`; empty without PCI."""
    netdev: str = ""
    """Network interface of the port; empty when there is none (InfiniBand without IPoIB)."""
    link_layer: str = ""
    """`Ethernet` or `InfiniBand`."""
    rate_bits_per_s: float = 0.0
    """0: unknown. Soft-RoCE makes its rate up; an override file may correct it."""
    active: bool = False
    """Whether the port was up when this was read."""


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU. `index` counts as CUDA does with CUDA_DEVICE_ORDER=PCI_BUS_ID (or with GPUs of one kind, CUDA's own order)."""

    index: int
    numa_node: int
    pci_path: str


def read_nics(sysfs: Path) -> tuple[Nic, ...]:
    """All RDMA devices, by name in natural order (mlx5_2 before mlx5_10)."""
    found = [_nic(sysfs, folder) for folder in _entries(sysfs / "class" / "infiniband")]
    return tuple(sorted(found, key=lambda nic: _natural(nic.name)))


def read_gpus(sysfs: Path) -> tuple[Gpu, ...]:
    """All NVIDIA display and 3D controllers, by PCI address."""
    folders = [
        folder
        for folder in _entries(sysfs / "bus" / "pci" / "devices")
        if _text(folder / "vendor") == _NVIDIA and _text(folder / "class").startswith(_DISPLAY_CLASS)
    ]
    folders.sort(key=lambda folder: [int(part, 16) for part in re.split(r"[:.]", folder.name)])
    return tuple(
        Gpu(index=index, numa_node=_numa_node(sysfs, folder), pci_path=_pci_path(sysfs, folder))
        for index, folder in enumerate(folders)
    )


def visible_gpus(gpus: Sequence[Gpu], visible: str | None) -> tuple[Gpu, ...]:
    """Those that a process with this CUDA_VISIBLE_DEVICES sees (None: not set), counted as it counts them. None at all when the
    variable names GPUs by UUID, which sysfs does not know: better no preference than a wrong one."""
    if visible is None:
        return tuple(gpus)
    numbers = [part.strip() for part in visible.split(",")]
    if any(part.startswith(("GPU-", "MIG-")) for part in numbers):
        return ()
    shown = itertools.takewhile(lambda part: part.isdigit() and int(part) < len(gpus), numbers)
    return tuple(msgspec.structs.replace(gpus[int(part)], index=index) for index, part in enumerate(shown))


def read_nodes(sysfs: Path) -> dict[int, dict[int, int]]:
    """NUMA nodes and the kernel's distance from each to each (10: itself). One node 0 when the kernel tells of none."""
    root = sysfs / "devices" / "system" / "node"
    nodes = sorted(int(m[1]) for folder in _entries(root) if (m := re.fullmatch(r"node(\d+)", folder.name)))
    rows = {node: _text(root / f"node{node}" / "distance").split() for node in nodes}
    return {
        node: {
            other: int(row[at]) if len(row) == len(nodes) and row[at].isdigit() else (10 if other == node else 20)
            for at, other in enumerate(nodes)
        }
        for node, row in rows.items()
    } or {0: {0: 10}}


def _nic(sysfs: Path, folder: Path) -> Nic:
    port = _port(folder)
    at = folder / "ports" / str(port)
    netdev = _netdev(folder, at)
    device = folder / "device"
    if not device.exists() and netdev:
        device = sysfs / "class" / "net" / netdev / "device"
    return Nic(
        name=folder.name,
        port=port,
        numa_node=_numa_node(sysfs, device),
        pci_path=_pci_path(sysfs, device),
        netdev=netdev,
        link_layer=_text(at / "link_layer"),
        rate_bits_per_s=_rate(_text(at / "rate")),
        active=_is_active(at),
    )


def _port(folder: Path) -> int:
    ports = sorted(int(entry.name) for entry in _entries(folder / "ports") if entry.name.isdigit())
    active = [port for port in ports if _is_active(folder / "ports" / str(port))]
    return (active or ports or [1])[0]


def _is_active(port: Path) -> bool:
    return _text(port / "state").startswith("4:")


def _netdev(folder: Path, port: Path) -> str:
    """The port's own word for it, then soft-RoCE's parent, then the PCI device's only interface."""
    ndevs = port / "gid_attrs" / "ndevs"
    for index in range(
        _count(ndevs)
    ):  # 0, 1, ...; soft-RoCE has 1024: sorting their names would cost more than all the rest
        if name := _text(ndevs / str(index)):
            return name
    if name := _text(folder / "parent"):
        return name
    interfaces = [entry.name for entry in _entries(folder / "device" / "net")]
    return interfaces[0] if len(interfaces) == 1 else ""


def _rate(text: str) -> float:
    """`100 Gb/sec (4X EDR)` in bits per second."""
    match = re.match(r"(\d+(?:\.\d+)?) Gb/sec", text)
    return float(match[1]) * 1e9 if match else 0.0


def _upwards(sysfs: Path, device: Path) -> Iterator[Path]:
    """The device's folder and its parents' up to /sys/devices: a virtio NIC is one level below its PCI device."""
    root = Path(os.path.realpath(sysfs / "devices"))
    folder = Path(os.path.realpath(device))
    while root in folder.parents:
        yield folder
        folder = folder.parent


def _numa_node(sysfs: Path, device: Path) -> int:
    for folder in _upwards(sysfs, device):
        text = _text(folder / "numa_node")
        if text.isdigit():
            return int(text)
    return UNKNOWN_NODE


def _pci_path(sysfs: Path, device: Path) -> str:
    parts = [f.name for f in _upwards(sysfs, device) if f.name.startswith("pci") or _PCI_ADDRESS.match(f.name)]
    return "/".join(reversed(parts))


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.findall(r"\d+|\D+", name)]


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _count(folder: Path) -> int:
    try:
        return len(os.listdir(folder))
    except OSError:
        return 0


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []
