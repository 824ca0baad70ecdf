"""The two cables of the virtual machine (links.sh), and what can happen to them. Only inside it.

Knows: ip, tc, the counters of the network interfaces. Does not know: verbs, the transport.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

A_NICS, B_NICS = ("rxe_a0", "rxe_a1"), ("rxe_b0", "rxe_b1")


def _run(*command: str) -> None:
    # close_fds=False: Python then starts it by vfork, which takes an emulated machine a tenth of the time.
    subprocess.run(command, check=True, close_fds=False, timeout=30)


def cut_own(cable: int) -> None:
    """Our end goes down; the far one loses its carrier."""
    _run("ip", "link", "set", f"a{cable}", "down")


def cut_far(cable: int) -> None:
    _run("ip", "link", "set", f"b{cable}", "down")


def swallow(cable: int) -> None:
    """All packets are lost on their way, and no NIC notices."""
    _run("tc", "qdisc", "replace", "dev", f"a{cable}", "root", "netem", "loss", "100%")
    _run("tc", "qdisc", "replace", "dev", f"b{cable}", "root", "netem", "loss", "100%")


FAULTS: dict[str, Callable[[int], None]] = {"own": cut_own, "far": cut_far, "silence": swallow}


def mend(cable: int) -> None:
    _run("sh", "tests/rdma/links.sh", "mend", str(cable))


def received(interface: str) -> int:
    """Bytes that came in over the cable."""
    return int(Path(f"/sys/class/net/{interface}/statistics/rx_bytes").read_text())
