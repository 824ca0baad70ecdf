"""One supervised process: its command, its log, when it is ready, how it ends.

Knows: the ready line of roles (`mooncake.common.role`) or a port that must accept connections.
Does not know: other processes, or when to start again (supervisor.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from deploy.etcd import is_listening
from deploy.processes import Process, end, family, kill
from mooncake.common.errors import MooncakeError
from mooncake.common.role import READY_PREFIX, parse_ready

_POLL_S = 0.1
_TAIL_BYTES = 16 << 10
_ERROR_SCAN_BYTES = 4 << 20
_ERROR_LINE = re.compile(r"\b[A-Z][A-Za-z]*(?:Error|Exception): [^\n]{1,300}")

State = Literal["waiting", "starting", "ready", "ended", "stopped"]


class StartFailed(MooncakeError):
    """A process ended, or took too long, before it was ready. The text ends with its last log lines."""


@dataclass(frozen=True)
class ChildSpec:
    """What to run. `port` is the one that it keeps over restarts; `ready_port`: ready when it accepts connections."""

    name: str
    role: str
    command: list[str]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    port: int = 0
    ready_port: int = 0
    host: str = "127.0.0.1"
    start_timeout_s: float = 600.0
    stop_grace_s: float = 3.0
    family_grace_s: float = 2.0  # what it started may end by itself for so long after it


class Child:
    """A process of that spec; after an end it can be started again."""

    def __init__(self, spec: ChildSpec) -> None:
        self.spec = spec
        self.state: State = "waiting"
        self.since = time.monotonic()
        self.restarts = 0
        self.ready: dict[str, str] = {}  # the ready line
        self._process: asyncio.subprocess.Process | None = None
        self._log_start = 0

    @property
    def pid(self) -> int:
        """0 while there is no process."""
        return self._process.pid if self._process is not None and self._process.returncode is None else 0

    def enter(self, state: State) -> None:
        self.state = state
        self.since = time.monotonic()

    async def start(self) -> None:
        """Starts the process in a session of its own (a Ctrl-C in the terminal is for `mooncake up` alone)."""
        self.spec.log.parent.mkdir(parents=True, exist_ok=True)
        with self.spec.log.open("ab") as log:
            self._log_start = log.tell()
            self._process = await asyncio.create_subprocess_exec(
                *self.spec.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | dict(self.spec.environment),
                start_new_session=True,
            )
        self.enter("starting")

    async def wait_ready(self) -> None:
        """Raises StartFailed."""
        deadline = time.monotonic() + self.spec.start_timeout_s
        while not self._is_ready():
            assert self._process is not None
            if self._process.returncode is not None:
                raise StartFailed(f"{self.spec.name} {describe_exit(self._process.returncode)}{self._tail()}")
            if time.monotonic() > deadline:
                raise StartFailed(
                    f"{self.spec.name} is not ready after {self.spec.start_timeout_s:.0f} s{self._tail()}"
                )
            await asyncio.sleep(_POLL_S)
        self.enter("ready")

    def _is_ready(self) -> bool:
        if self.spec.ready_port:
            return is_listening(self.spec.host, self.spec.ready_port)
        with self.spec.log.open("rb") as log:
            log.seek(self._log_start)
            for line in log.read().decode(errors="replace").splitlines(keepends=True):
                if line.startswith(READY_PREFIX) and line.endswith("\n") and (ready := parse_ready(line)) is not None:
                    self.ready = ready
                    return True
        return False

    async def wait_end(self) -> int:
        """The exit status (negative: the signal)."""
        assert self._process is not None
        return await self._process.wait()

    async def stop(self, grace_s: float | None = None) -> None:
        """SIGTERM, then after the grace SIGKILL to it and all its descendants. Returns when nothing is left."""
        process = self._process
        if process is None:
            return
        members = family([process.pid], [process.pid])
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), self.spec.stop_grace_s if grace_s is None else grace_s)
        members |= family([process.pid], [process.pid])
        kill(p for p in members if p.pid == process.pid)
        await end(members, self.spec.family_grace_s)
        await process.wait()
        self.enter("stopped")

    def relatives(self) -> set[Process]:
        """After its end: what is left of its process group."""
        return family([], [self._process.pid]) if self._process is not None else set()

    def _tail(self) -> str:
        lines = self.last_log_lines(20)
        if not lines:
            return ""
        errors = self._first_errors(3)
        parts = [f"; the last lines of {self.spec.log}:", *(f"    {line}" for line in lines)]
        return "\n".join(parts + (["  first errors in it:", *(f"    {line}" for line in errors)] if errors else []))

    def _first_errors(self, count: int) -> list[str]:
        """The root cause often stands far above the last lines (a vLLM server prints three tracebacks for one)."""
        with self.spec.log.open("rb") as log:
            log.seek(self._log_start)
            text = log.read(_ERROR_SCAN_BYTES).decode(errors="replace")
        found = (_ERROR_LINE.search(line) for line in text.splitlines() if "WARNING" not in line)
        return list(dict.fromkeys(match[0].rstrip('"') for match in found if match))[:count]

    def last_log_lines(self, count: int) -> list[str]:
        """Of the present start."""
        with self.spec.log.open("rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start, end - _TAIL_BYTES))
            return log.read().decode(errors="replace").splitlines()[-count:]


def describe_exit(status: int) -> str:
    """`ended with exit code 1`, `was killed by SIGKILL`."""
    if status < 0:
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-status).name}"
    return f"ended with exit code {status}"
