"""Guard between a worker host and its vLLM: no process of the engine outlives the host, however the host ends.

Run by path as `python -I -S engine_guard.py FOLDER COMMAND…` (standard library only: it starts in milliseconds). Its
stdin
is a pipe that the host holds open and never writes to: when the host is gone, also by `kill -9`, the pipe ends and
everything is killed. vLLM's own children (EngineCore, workers, resource trackers) may call setsid or lose their parent;
the guard is their sub-reaper, so they come back to it as children. SIGTERM is passed on to the engine.
FOLDER, the host's private one, is removed when the host died without doing so. Knows: processes. Does not know: vLLM.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
TRACKER_GRACE_S = 2.0


def become_subreaper() -> None:
    """Orphaned descendants become children of this process instead of init's."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(root: int) -> dict[int, bool]:
    """Pids below `root`, and whether each is a multiprocessing resource tracker. Zombies are left out."""
    return _below([pid for pid, (parent, _) in _processes().items() if parent == root])


def session_members(session: int) -> dict[int, bool]:
    """As `descendants`: the processes of a session and what is below them."""
    return _below([pid for pid, (_, of) in _processes().items() if of == session])


def _processes() -> dict[int, tuple[int, int]]:
    """Pid to parent and session of every process that is no zombie."""
    found: dict[int, tuple[int, int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{entry}/stat", "rb") as stat:
                state, parent, _, session = stat.read().rpartition(b")")[2].split()[:4]
                if state != b"Z":
                    found[int(entry)] = int(parent), int(session)
    return found


def _below(start: list[int]) -> dict[int, bool]:
    """`start` and everything below it."""
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in _processes().items():
        children.setdefault(parent, []).append(pid)
    found: dict[int, bool] = {}
    todo = list(start)
    while todo:
        pid = todo.pop()
        if pid not in found:
            found[pid] = _is_tracker(pid)
            todo += children.get(pid, ())
    return found


def _is_tracker(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as cmdline:
            return b"resource_tracker" in cmdline.read()
    except OSError:
        return False


def kill_all(find: Callable[[], dict[int, bool]], *, timeout_s: float = 10.0) -> bool:
    """SIGKILL to everything that `find` finds, until it finds nothing; False when it still does after `timeout_s`.

    Resource trackers come last: they remove the shared memory of those that were killed and then end by themselves.
    """
    start = time.monotonic()
    while time.monotonic() - start < timeout_s:
        found = find()
        spare_trackers = time.monotonic() - start < TRACKER_GRACE_S
        for pid, is_tracker in found.items():
            if not (is_tracker and spare_trackers):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if not found:
            return True
        time.sleep(0.02)
    return False


def _kill_family() -> None:
    """Everything below the guard."""

    def find() -> dict[int, bool]:
        _reap()
        return descendants(os.getpid())

    kill_all(find)


def _reap() -> dict[int, int]:
    """Collects ended children; pid to exit code."""
    ended: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended[pid] = os.waitstatus_to_exitcode(status)
    return ended


def _in_child() -> None:
    """Dies with the guard, and has default signals. Runs between fork and exec of a single-threaded process."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_SETMASK, set())


def main(folder: str, command: list[str]) -> int:
    """Runs `command` until it ends or stdin ends; returns its exit code (128 + n after signal n, 137 when killed)."""
    become_subreaper()
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    for handled in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
        signal.signal(handled, lambda *_: None)
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=_in_child)
    while True:
        readable, _, _ = select.select([0, wake_read], [], [])
        if 0 in readable and not os.read(0, 64):
            _kill_family()
            shutil.rmtree(folder, ignore_errors=True)
            return 137
        for number in os.read(wake_read, 64) if wake_read in readable else b"":
            if number in (signal.SIGTERM, signal.SIGINT):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGTERM)
        code = _reap().get(child.pid)
        if code is not None:
            _kill_family()
            return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
