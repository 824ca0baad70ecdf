"""Processes of this machine as /proc shows them, and how a role's whole family is ended.

Knows: process groups, sessions, orphans that come back to us as their subreaper. Only processes that descend from one
of our own children are ever signalled. Does not know: roles. Linux only.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

_PR_SET_CHILD_SUBREAPER = 36


class Process(NamedTuple):
    """One line of the process table. `start` is in clock ticks since boot: with the pid it names one life."""

    pid: int
    parent: int
    group: int
    session: int
    state: str
    start: int


def table() -> dict[int, Process]:
    """All processes that can be seen now."""
    found = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                process = _parse(int(entry.name), Path(entry.path, "stat").read_text())
                found[process.pid] = process
    return found


def _parse(pid: int, stat: str) -> Process:
    fields = stat[stat.rindex(")") + 2 :].split()  # the name in brackets may hold anything
    return Process(pid, int(fields[1]), int(fields[2]), int(fields[3]), fields[0], int(fields[19]))


def family(
    roots: Iterable[int], groups: Iterable[int] = (), processes: dict[int, Process] | None = None
) -> set[Process]:
    """The roots, everybody in these process groups, and all their descendants (zombies are left out)."""
    processes = table() if processes is None else processes
    wanted = set(roots) | {p.pid for p in processes.values() if p.group in set(groups)}
    children: dict[int, list[int]] = {}
    for process in processes.values():
        children.setdefault(process.parent, []).append(process.pid)
    found: set[Process] = set()
    queue = [pid for pid in wanted if pid in processes]
    while queue:
        process = processes[queue.pop()]
        if process not in found:
            found.add(process)
            queue += children.get(process.pid, [])
    return {p for p in found if p.state != "Z"}


def alive(process: Process) -> bool:
    """Whether exactly this life goes on."""
    try:
        now = _parse(process.pid, Path(f"/proc/{process.pid}/stat").read_text())
    except (OSError, ValueError, IndexError):
        return False
    return now.start == process.start and now.state != "Z"


def kill(processes: Iterable[Process], number: signal.Signals = signal.SIGKILL) -> None:
    """Signals each that still lives."""
    for process in processes:
        if alive(process):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process.pid, number)


async def end(processes: Iterable[Process], grace_s: float) -> None:
    """Gives those that are about to end by themselves (an engine's guard cleans up) a moment, then kills the rest."""
    left, deadline = list(processes), time.monotonic() + grace_s
    while (left := [p for p in left if alive(p)]) and time.monotonic() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    kill(left)


def become_subreaper() -> None:
    """From now on orphans among our descendants become our children, so that none is lost."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def adopted(own_children: set[int], living_sessions: set[int]) -> set[Process]:
    """Orphans that came to us and belong to no living role, with their families."""
    processes, me = table(), os.getpid()
    roots = [
        p.pid
        for p in processes.values()
        if p.parent == me
        and p.pid not in own_children
        and p.session not in living_sessions
        and p.session != os.getsid(0)
    ]
    return family(roots, processes=processes)


def reap_adopted(own_children: set[int]) -> None:
    """Takes the exit status of ended orphans, so that they do not stay as zombies. Own children are left to asyncio."""
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None or ended.si_pid in own_children:
            return
        with contextlib.suppress(ChildProcessError):
            os.waitpid(ended.si_pid, os.WNOHANG)
