"""Progress of a start on the terminal: one line a process, redrawn in place on a TTY, plain lines elsewhere.

Does not know: how processes are started; it reads their state.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping
from typing import TextIO

from deploy.child import Child

_REDRAW_S = 0.5
_REMIND_S = 15.0
_WORDS = {"waiting": "waiting", "starting": "starting", "ready": "ready", "ended": "ended", "stopped": "stopped"}


class Progress:
    """Use as `async with Progress(children)` around the start."""

    def __init__(self, children: Mapping[str, Child], out: TextIO = sys.stdout) -> None:
        self._children = children
        self._out = out
        self._tty = out.isatty()
        self._drawn = 0
        self._said: dict[str, str] = {}
        self._start = self._reminded = time.monotonic()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Progress:
        self._task = asyncio.create_task(self._run(), name="progress")
        return self

    async def __aexit__(self, *_exc: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._draw() if self._tty else self._tell()

    async def _run(self) -> None:
        while True:
            self._draw() if self._tty else self._tell()
            await asyncio.sleep(_REDRAW_S)

    def say(self, text: str) -> None:
        """A line that stays."""
        if self._tty and self._drawn:
            self._out.write(f"\x1b[{self._drawn}A\x1b[J")
            self._drawn = 0
        self._out.write(text + "\n")
        self._out.flush()

    def _draw(self) -> None:
        width = max(len(name) for name in self._children) + 2
        up = f"\x1b[{self._drawn}A" if self._drawn else ""
        lines = []
        for name, child in self._children.items():
            since = self._seconds(child)
            lines.append(f"\x1b[2K  {name:<{width}}{_WORDS[child.state]:<10}{since}\n")
        self._out.write(up + "".join(lines))
        self._out.flush()
        self._drawn = len(lines)

    def _tell(self) -> None:
        now = time.monotonic()
        for name, child in self._children.items():
            if child.state != "waiting" and self._said.get(name) != child.state:
                self._said[name] = child.state
                self.say(f"[{now - self._start:5.1f} s] {name}: {_WORDS[child.state]}")
        if now - self._reminded > _REMIND_S:
            self._reminded = now
            loading = [name for name, child in self._children.items() if child.state == "starting"]
            if loading:
                self.say(f"[{now - self._start:5.1f} s] still starting: {', '.join(loading)}")

    def _seconds(self, child: Child) -> str:
        if child.state == "starting":
            return f"{time.monotonic() - child.since:4.0f} s"
        return ""
