"""What this process can say of itself and of others on the same host: identity, same-host test, proof of death.

Knows: /proc, boot ids, namespaces, pidfds. Does not know: connections.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from functools import cache
from pathlib import Path


@cache
def host_key() -> str:
    """Equal in two processes that share kernel boot, pid namespace and user; such processes may reach each other's memory."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
    return f"{boot}/{namespace}/{os.getuid()}"


def start_ticks(pid: int) -> int:
    """Start time of a process in clock ticks since boot; 0 when it does not exist."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(stat[stat.rindex(")") + 2 :].split()[19])


class ProcessWatch:
    """Tells whether one particular process on this host has ended, all threads of it. A reused pid does not fool it. Holds a
    descriptor until it has seen the end, or `close`."""

    def __init__(self, pid: int, ticks: int) -> None:
        self._pid, self._ticks = pid, ticks
        self._lock = threading.Lock()
        self._over = False
        self._fd = -1
        with contextlib.suppress(OSError, AttributeError):
            self._fd = os.pidfd_open(pid)
        if self._fd >= 0 and start_ticks(pid) != ticks:
            self.close()  # already another process: the ticks prove it

    def ended(self) -> bool:
        if self._pid == os.getpid():
            return False
        with self._lock:
            if self._fd < 0 or self._over:
                return self._over or start_ticks(self._pid) != self._ticks
            poll = select.poll()
            poll.register(self._fd, select.POLLIN)
            self._over = bool(poll.poll(0))
        if self._over:
            self.close()
        return self._over

    def close(self) -> None:
        """Later answers rest on the start time alone, unless the end was seen."""
        with self._lock:
            fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
