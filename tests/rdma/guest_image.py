"""What the virtual machine boots: a stock Debian kernel and a small initramfs made here.

Knows: finding the kernel that scripts/rdma_tools.sh unpacked, its modules and their order, the cpio format. Does not know:
QEMU, what will run in the guest. Everything made is kept in .cache/rdma under a name that tells its content.
"""

from __future__ import annotations

import hashlib
import lzma
import os
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache" / "rdma"

_BOOT_MODULES = ["virtio_pci", "virtio_console", "9pnet_virtio", "9p", "overlay"]
# rdma_rxe asks the crypto layer for "crc32" by alias, so no dependency names crc32_generic.
_RDMA_MODULES = ["crc32_generic", "rdma_rxe", "ib_uverbs", "veth", "virtio_net", "sch_netem"]

_INIT = r"""#!/bin/busybox sh
# The guest's first process: modules, the host's root under an overlay in memory, then the job's own script.
B=/bin/busybox
$B mount -t proc proc /proc; $B mount -t sysfs sys /sys; $B mount -t devtmpfs dev /dev
for m in $($B cat /modules/order); do $B insmod /modules/$m || echo "insmod $m failed"; done
o=trans=virtio,version=9p2000.L,msize=524288
$B mount -t 9p -o $o,ro,cache=loose hostroot /lower || $B reboot -f
$B mount -t tmpfs -o size=50% tmpfs /over; $B mkdir /over/up /over/work
$B mount -t overlay -o lowerdir=/lower,upperdir=/over/up,workdir=/over/work overlay /new
for d in proc sys dev; do $B mkdir -p /new/$d; $B mount --move /$d /new/$d; done
$B mkdir -p /new/dev/shm /new/dev/pts /new/dev/hugepages
$B mount -t tmpfs tmpfs /new/dev/shm; $B mount -t devpts devpts /new/dev/pts
$B mount -t hugetlbfs hugetlbfs /new/dev/hugepages
$B mount -t tmpfs tmpfs /new/run; $B mkdir -p /new/run/job
$B mount -t 9p -o $o,cache=none job /new/run/job
exec $B switch_root /new /bin/sh /run/job/guest.sh
"""


def kernel() -> Path:
    """The newest unpacked kernel (vmlinuz). Raises FileNotFoundError."""
    found = sorted(
        (CACHE / "kernel" / "boot").glob("vmlinuz-*-amd64"), key=lambda p: [int(n) for n in re.findall(r"\d+", p.name)]
    )
    if not found:
        raise FileNotFoundError("no kernel in .cache/rdma; run scripts/rdma_tools.sh")
    return found[-1]


def _keep(path: Path, data: bytes) -> Path:
    """Write a whole file or none, whoever else writes it now."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_bytes(data)
    partial.replace(path)
    return path


def vmlinux() -> Path:
    """The uncompressed kernel inside the bzImage: QEMU boots it directly (PVH), which spares the guest seconds of
    unpacking. The bzImage itself where its packing is unknown."""
    packed = kernel()
    path = CACHE / packed.name.replace("vmlinuz", "vmlinux")
    if path.exists():
        return path
    data = packed.read_bytes()
    try:
        elf = lzma.LZMADecompressor().decompress(data[data.index(b"\xfd7zXZ\0") :])
    except (ValueError, lzma.LZMAError):
        return packed
    return _keep(path, elf) if elf[:4] == b"\x7fELF" else packed


def _needs(module: bytes, index: dict[str, Path]) -> list[str]:
    """The modules that one names in its .modinfo, so that no depmod is needed; soft ones only where this kernel has them."""
    hard = re.search(rb"\0depends=([^\0]*)\0", module)
    soft = re.search(rb"\0softdep=pre: ([^\0]*?)(?: post:[^\0]*)?\0", module)
    names = hard[1].decode().split(",") if hard else []
    names += [n for n in (soft[1].decode().split() if soft else []) if n.replace("-", "_") in index]
    return [name.replace("-", "_") for name in names if name]


def module_files() -> list[Path]:
    """The modules to load, in order, each after what it needs. Raises KeyError for one that the kernel lacks."""
    version = kernel().name.removeprefix("vmlinuz-")
    folder = CACHE / "kernel" / "lib" / "modules" / version
    index = {path.name.removesuffix(".ko").replace("-", "_"): path for path in folder.rglob("*.ko")}
    order: list[Path] = []

    def add(name: str) -> None:
        path = index[name]
        if path not in order:
            for need in _needs(path.read_bytes(), index):
                add(need)
            order.append(path)

    for name in _BOOT_MODULES + _RDMA_MODULES:
        add(name)
    return order


def cpio(entries: list[tuple[str, int, bytes]]) -> bytes:
    """A newc archive of (name, mode, content)."""
    out = bytearray()
    for inode, (name, mode, data) in enumerate([*entries, ("TRAILER!!!", 0, b"")], 1):
        label = name.encode() + b"\0"
        fields = (inode, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(label), 0)
        out += b"070701" + b"".join(b"%08x" % field for field in fields) + label
        out += b"\0" * (-len(out) % 4) + data
        out += b"\0" * (-len(out) % 4)
    return bytes(out)


def initramfs() -> Path:
    """busybox, the modules and `init`, as one file."""
    version = f"{kernel()}\n{_INIT}\n{_BOOT_MODULES}\n{_RDMA_MODULES}"
    path = CACHE / f"initramfs-{hashlib.sha256(version.encode()).hexdigest()[:16]}.cpio"
    if path.exists():
        return path
    modules = module_files()
    folders = ["bin", "proc", "sys", "dev", "modules", "lower", "over", "new"]
    entries = [(folder, 0o40755, b"") for folder in folders]
    entries.append(("bin/busybox", 0o100755, (CACHE / "busybox" / "bin" / "busybox").read_bytes()))
    entries.append(("init", 0o100755, _INIT.encode()))
    entries.append(("modules/order", 0o100644, "".join(f"{module.name}\n" for module in modules).encode()))
    entries += [(f"modules/{module.name}", 0o100644, module.read_bytes()) for module in modules]
    return _keep(path, cpio(entries))
