"""Runs one command as root in a throw-away virtual machine that has soft-RoCE NICs.

    python -m tests.rdma.vm -- ibv_devinfo
    python -m tests.rdma.vm --timeout 300 --numa --share .run -- .venv/bin/python -m pytest tests/rdma/inside

The guest's root is this machine's root, read-only under an overlay in memory: Python, .venv, perftest and the source tree
need no second installation, and nothing written there reaches the host but what stands in `--share` folders. Output
streams to ours, the exit status is ours. Statuses of our own: 124 the time limit passed, 125 the guest died.

Knows: QEMU's command line, and ending what it started. Does not know: what is tested. Always emulated (TCG): some hosts' /dev/kvm is
itself nested and runs a stock kernel slower than emulation does, if at all.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.rdma.guest_image import ROOT, initramfs, vmlinux

TIMED_OUT, DIED = 124, 125
_9P = "trans=virtio,version=9p2000.L,msize=524288,cache=none"
_KERNEL_OPTIONS = "console=ttyS0 loglevel=4 reboot=t panic=-1 tsc=reliable random.trust_cpu=on mitigations=off no_timer_check norandmaps"
# norandmaps above: the emulator keeps translated code by virtual address, so equal addresses in every process spare most
# of the translating (Python starts in half the time). Nehalem: the newest model without `rep movsb`, which is emulated a byte
# at a time (copies are three times faster without), and old enough for the C library not to prefer wide vectors.
_CPU = "Nehalem"

_GUEST = r"""# Second stage, on the shared root.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root
hostname vm; ip link set lo up; ulimit -l unlimited
{mounts}
cd {cwd}
out=$(ls /dev/vport*p1 | head -n 1)
( {environment}
  {command} ) </dev/null >"$out" 2>&1
echo $? >/run/job/status
dmesg >/run/job/dmesg
sync; /bin/busybox reboot -f 2>/dev/null || echo b >/proc/sysrq-trigger
"""


@dataclass(frozen=True)
class Machine:
    """A guest. Memory in MiB; `shared` folders are writable from inside, at the same path."""

    cpus: int = 2
    memory_mib: int = 3072
    numa: bool = False
    """Two NUMA nodes, each with a PCI bus of its own and one virtio NIC on it (n0, n1 by their addresses)."""
    shared: tuple[Path, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    links: bool = True
    """Make the soft-RoCE pairs of links.py before the command runs."""


@dataclass(frozen=True)
class Outcome:
    status: int
    console: str
    """The end of what the guest's kernel printed, and what QEMU said."""


def _share(number: int, tag: str, folder: Path, options: str = "") -> list[str]:
    # A share may span several file systems of the host, hence multidevs.
    device = f"local,id=fs{number},path={folder},security_model=none,multidevs=remap{options}"
    return ["-fsdev", device, "-device", f"virtio-9p-pci,fsdev=fs{number},mount_tag={tag}"]


def _numa(cpus: int, memory_mib: int) -> list[str]:
    """Node 0 and 1, each with half of the processors and of the memory, a PCI bus, and a NIC whose address ends in its number."""
    out: list[str] = []
    for node, first, last in ((0, 0, cpus // 2 - 1), (1, cpus // 2, cpus - 1)):
        out += ["-object", f"memory-backend-ram,id=mem{node},size={memory_mib // 2}M"]
        out += ["-numa", f"node,nodeid={node},cpus={first}-{last},memdev=mem{node}"]
        out += ["-device", f"pxb-pcie,id=pxb{node},bus=pcie.0,bus_nr={64 + 32 * node},numa_node={node}"]
        out += ["-device", f"pcie-root-port,id=port{node},bus=pxb{node},chassis={node + 1}"]
        out += ["-netdev", f"hubport,id=net{node},hubid=0"]
        out += ["-device", f"virtio-net-pci,bus=port{node},netdev=net{node},mac=52:54:00:00:00:0{node},romfile="]
    return out


def _qemu(machine: Machine, job: Path) -> list[str]:
    command = ["qemu-system-x86_64", "-machine", "q35", "-nodefaults", "-no-user-config", "-display", "none"]
    command += ["-no-reboot", "-accel", "tcg,thread=multi", "-cpu", _CPU, "-smp", str(machine.cpus)]
    command += ["-m", str(machine.memory_mib), "-kernel", str(vmlinux()), "-initrd", str(initramfs())]
    command += ["-append", _KERNEL_OPTIONS, "-serial", f"file:{job}/console"]
    command += ["-device", "virtio-serial-pci", "-chardev", f"file,id=out,path={job}/output"]
    command += ["-device", "virtserialport,chardev=out,name=out"]
    command += ["-object", "rng-random,id=rng,filename=/dev/urandom", "-device", "virtio-rng-pci,rng=rng"]
    command += _share(0, "hostroot", Path("/"), ",readonly=on") + _share(1, "job", job)
    for number, folder in enumerate(machine.shared, 2):
        command += _share(number, f"share{number}", folder)
    return command + (_numa(machine.cpus, machine.memory_mib) if machine.numa else [])


def _guest_script(machine: Machine, command: Sequence[str], cwd: Path) -> str:
    mounts = [
        f"mkdir -p {shlex.quote(str(folder))}; mount -t 9p -o {_9P} share{number} {shlex.quote(str(folder))}"
        for number, folder in enumerate(machine.shared, 2)
    ]
    links = "sh tests/rdma/links.sh up || exit 1\n  " if machine.links else ""
    exports = " ".join(f"export {shlex.quote(f'{name}={value}')};" for name, value in machine.environment)
    return _GUEST.format(
        mounts="\n".join(mounts), cwd=shlex.quote(str(cwd)), environment=exports, command=links + shlex.join(command)
    )


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no guest outlives a killed test run


def _pump(fifo: Path, output: Callable[[bytes], object]) -> None:
    with fifo.open("rb", buffering=0) as stream:
        while data := stream.read(65536):
            output(data)


def _let_go(fifo: Path) -> None:
    """A reader that waits for a writer which died before it came would wait for ever."""
    with contextlib.suppress(OSError):
        os.close(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _wait(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    try:
        process.wait(timeout_s)
        return True
    except subprocess.TimeoutExpired:
        return False
    finally:
        process.kill()
        process.wait()


def run(
    command: Sequence[str], machine: Machine, *, timeout_s: float, output: Callable[[bytes], object], cwd: Path = ROOT
) -> Outcome:
    """Boot, run `command` in `cwd`, give its output to `output` as it comes (on another thread), shut down. Blocks for at
    most `timeout_s` and a moment. Raises FileNotFoundError when scripts/rdma_tools.sh has not been run."""
    job = Path(tempfile.mkdtemp(prefix="rdma-vm-"))
    try:
        (job / "guest.sh").write_text(_guest_script(machine, command, cwd))
        os.mkfifo(job / "output")
        qemu = _qemu(machine, job)
        with (job / "qemu").open("wb") as words:
            process = subprocess.Popen(
                qemu, stdin=subprocess.DEVNULL, stdout=words, stderr=words, preexec_fn=_die_with_parent
            )
        pump = threading.Thread(target=_pump, args=(job / "output", output), daemon=True)
        pump.start()
        in_time = _wait(process, timeout_s)
        _let_go(job / "output")
        pump.join(5)
        status = _text(job / "status").strip()
        code = int(status) if status else DIED if in_time else TIMED_OUT
        return Outcome(code, _text(job / "console")[-3000:] + _text(job / "qemu"))
    finally:
        shutil.rmtree(job, ignore_errors=True)


def _to_stdout(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpus", type=int, default=2, help="virtual processors")
    parser.add_argument("--memory", type=int, default=3072, help="MiB")
    parser.add_argument("--timeout", type=float, default=300, help="seconds; past it the guest is ended")
    parser.add_argument("--numa", action="store_true", help="two NUMA nodes with a NIC each (at least 2 processors)")
    parser.add_argument("--bare", action="store_true", help="without the soft-RoCE pairs")
    parser.add_argument("--share", action="append", default=[], type=Path, help="a folder that is writable from inside")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    subprocess.run([ROOT / "scripts" / "rdma_tools.sh"], check=True)
    shared = tuple(folder.resolve() for folder in options.share)
    machine = Machine(options.cpus, options.memory, options.numa, shared, links=not options.bare)
    # SystemExit on SIGTERM, so that the guest is ended on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with contextlib.suppress(KeyboardInterrupt):
        outcome = run(options.command, machine, timeout_s=options.timeout, output=_to_stdout)
        if outcome.status in (TIMED_OUT, DIED):
            print(f"vm: no status from the guest ({outcome.status}); its console:\n{outcome.console}", file=sys.stderr)
        return outcome.status
    return 130


if __name__ == "__main__":
    sys.exit(main())
