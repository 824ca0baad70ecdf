"""Ends the roles when `mooncake up` itself is gone (kill -9, crash): a process of its own that waits for the end of a
pipe.

Each line on stdin is the present list of process groups. At the end of the pipe the roles get SIGTERM, and what is
left of them and of their descendants is killed a little later. Does not know: what the groups are.
Run as a file (`python -I watchdog.py`), so that it starts in milliseconds and shares nothing with a broken
installation.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

GRACE_S = 6.0
ROOTS_FIRST_S = 2.0


class Watchdog:
    """The side of `mooncake up`."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] = subprocess.Popen(
            [sys.executable, "-I", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        self._pipe: IO[bytes] = self._process.stdin

    @property
    def pid(self) -> int:
        return self._process.pid

    def guard(self, groups: Iterable[int]) -> None:
        """From now on these groups are ended when we die."""
        try:
            self._pipe.write((" ".join(map(str, sorted(groups))) + "\n").encode())
            self._pipe.flush()
        except OSError:  # somebody killed it: `mooncake up` goes on without
            return

    def close(self) -> None:
        """Everything was stopped in order; nothing is left to guard."""
        self.guard(())
        with contextlib.suppress(OSError):
            self._pipe.close()
        self._process.wait(GRACE_S + ROOTS_FIRST_S + 5)


def _watch(processes: Any) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: list[int] = []
    for line in sys.stdin.buffer:
        groups = [int(g) for g in line.split()]
    if not groups:
        return
    left = processes.family(groups, groups)
    processes.kill([p for p in left if p.pid in groups], signal.SIGTERM)
    roots = [p for p in left if p.pid in groups]
    deadline = time.monotonic() + GRACE_S
    while time.monotonic() < deadline and any(processes.alive(p) for p in roots):
        left |= processes.family([p.pid for p in left if processes.alive(p)], groups)
        time.sleep(0.1)
    processes.kill(roots)
    deadline = time.monotonic() + ROOTS_FIRST_S  # an engine's guard cleans up when its host is gone
    while time.monotonic() < deadline and any(processes.alive(p) for p in left):
        time.sleep(0.1)
    processes.kill(left)


if __name__ == "__main__":
    spec = importlib.util.spec_from_file_location("processes", Path(__file__).with_name("processes.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["processes"] = module
    spec.loader.exec_module(module)
    os.chdir("/")
    _watch(module)
