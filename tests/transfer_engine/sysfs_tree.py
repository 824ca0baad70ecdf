"""Builds sysfs trees like those of real machines, with the links and files that the kernel has there (facts: Linux 6.1).

A PCI path is written as in /sys/devices: `pci0000:00/0000:00:01.0/0000:01:00.0`.
"""

from __future__ import annotations

import os
from pathlib import Path


class SysfsTree:
    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "devices").mkdir(parents=True, exist_ok=True)

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    def link(self, path: str, to: Path) -> None:
        """Relative, as the kernel makes them."""
        link = self.root / path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(to, link.parent.resolve()))

    def nodes(self, *distances: str) -> None:
        for node, row in enumerate(distances):
            self.write(f"devices/system/node/node{node}/distance", row)
            self.write(f"devices/system/node/node{node}/cpulist", f"{node}")

    def pci(self, path: str, *, numa: int, vendor: str = "0x8086", pci_class: str = "0x060400") -> Path:
        """A PCI device with all bridges above it."""
        parts = path.split("/")
        for depth in range(2, len(parts) + 1):
            here = "devices/" + "/".join(parts[:depth])
            if not (self.root / here / "vendor").exists():
                last = depth == len(parts)
                self.write(f"{here}/vendor", vendor if last else "0x8086")
                self.write(f"{here}/class", pci_class if last else "0x060400")
                self.write(f"{here}/numa_node", str(numa))
                self.link(f"bus/pci/devices/{parts[depth - 1]}", self.root / here)
        return self.root / "devices" / path

    def gpu(self, path: str, *, numa: int) -> None:
        self.pci(path, numa=numa, vendor="0x10de", pci_class="0x030200")

    def port(self, nic: str, port: int, *, active: bool, rate: str, layer: str = "Ethernet", netdev: str = "") -> None:
        at = f"class/infiniband/{nic}/ports/{port}"
        self.write(f"{at}/state", "4: ACTIVE" if active else "1: DOWN")
        self.write(f"{at}/rate", rate)
        self.write(f"{at}/link_layer", layer)
        if netdev:
            self.write(f"{at}/gid_attrs/ndevs/0", netdev)

    def hardware_nic(self, name: str, path: str, *, numa: int, active: bool = True, layer: str = "Ethernet") -> None:
        device = self.pci(path, numa=numa, vendor="0x15b3", pci_class="0x020000")
        (device / "infiniband" / name).mkdir(parents=True)
        self.link(f"class/infiniband/{name}", device / "infiniband" / name)
        self.link(f"class/infiniband/{name}/device", device)
        self.port(name, 1, active=active, rate="200 Gb/sec (4X HDR)", layer=layer, netdev=f"eth_{name}")

    def _rxe(self, name: str, netdev: str, rate: str) -> None:
        folder = self.root / "devices/virtual/infiniband" / name
        folder.mkdir(parents=True)
        self.link(f"class/infiniband/{name}", folder)
        self.write(f"class/infiniband/{name}/parent", netdev)
        self.port(name, 1, active=True, rate=rate)

    def rxe_on_veth(self, name: str, netdev: str) -> None:
        (self.root / "devices/virtual/net" / netdev).mkdir(parents=True)
        self.link(f"class/net/{netdev}", self.root / "devices/virtual/net" / netdev)
        self._rxe(name, netdev, "10 Gb/sec (1X FDR10)")

    def rxe_on_virtio(self, name: str, netdev: str, path: str, *, numa: int) -> None:
        virtio = self.pci(path, numa=numa, vendor="0x1af4", pci_class="0x020000") / f"virtio{netdev[-1]}"
        (virtio / "net" / netdev).mkdir(parents=True)
        self.link(f"class/net/{netdev}", virtio / "net" / netdev)
        self.link(f"class/net/{netdev}/device", virtio)
        self._rxe(name, netdev, "2.5 Gb/sec (1X SDR)")


def two_sockets(root: Path) -> SysfsTree:
    """Two sockets; on each a PCIe switch with a NIC and two GPUs below it, and a NIC of its own on another root port.
    mlx5_1 and mlx5_3 are the ones that no GPU shares a switch with; mlx5_3 is down."""
    tree = SysfsTree(root)
    tree.nodes("10 21", "21 10")
    for socket, bus in enumerate((0x00, 0x80)):
        top = f"pci0000:{bus:02x}/0000:{bus:02x}"
        switch = f"{top}:01.0/0000:{bus + 1:02x}:00.0"
        tree.hardware_nic(
            f"mlx5_{2 * socket}", f"{switch}/0000:{bus + 2:02x}:00.0/0000:{bus + 3:02x}:00.0", numa=socket
        )
        for gpu in (1, 2):
            tree.gpu(f"{switch}/0000:{bus + 2:02x}:0{gpu}.0/0000:{bus + 3 + gpu:02x}:00.0", numa=socket)
        tree.hardware_nic(
            f"mlx5_{2 * socket + 1}", f"{top}:02.0/0000:{bus + 0x10:02x}:00.0", numa=socket, active=socket == 0
        )
    return tree


def pxb_guest(root: Path) -> SysfsTree:
    """A QEMU guest with two NUMA nodes, a virtio NIC behind a pxb-pcie on each, in reversed order, and rxe on both."""
    tree = SysfsTree(root)
    tree.nodes("10 20", "20 10")
    tree.rxe_on_virtio("rxe0", "eth1", "pci0000:40/0000:40:00.0/0000:41:00.0", numa=0)
    tree.rxe_on_virtio("rxe1", "eth0", "pci0000:80/0000:80:00.0/0000:81:00.0", numa=1)
    return tree
