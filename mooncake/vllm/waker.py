"""How an engine waits for KV without burning CPU (facts: vLLM steps without pause while a request waits for remote KV or a
finished one for its blocks to be sent).

On an empty step the scheduler half blocks here until the worker half has something to report, a client request or abort
comes in, or a bounded time has passed. The worker half pings over an abstract datagram socket named after the engine.
Knows: vLLM's engine loop by its `input_queue` (found on the call stack; without it the wait is just shorter).
Does not know: what is waited for. A lost ping costs the bounded time, never more.
"""

from __future__ import annotations

import hashlib
import logging
import queue
import socket
import sys
import threading
from types import FrameType
from typing import Any

_log = logging.getLogger(__name__)
_HOOKED_WAIT_S = 0.05
_BLIND_WAIT_S = 0.004
_MAX_FRAMES = 30


def _address(engine_id: str) -> str:
    return "\0mooncake-wake-" + hashlib.sha256(engine_id.encode()).hexdigest()[:32]


class Pinger:
    """Worker half: `ping` never waits and never fails."""

    def __init__(self, engine_id: str) -> None:
        self._address = _address(engine_id)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)

    def ping(self) -> None:
        """Wakes the scheduler half if it waits, or makes its next wait end at once."""
        try:
            self._socket.sendto(b"1", self._address)
        except OSError:
            return  # nobody listens (yet), or enough pings are under way

    def close(self) -> None:
        self._socket.close()


class Waker:
    """Scheduler half. `wait` is called by the engine's thread only."""

    def __init__(self, engine_id: str) -> None:
        self._condition = threading.Condition()
        self._input: queue.Queue[Any] | None = None
        self._searched = False
        self._flag = False
        self._socket: socket.socket | None = None
        try:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.bind(_address(engine_id))
        except OSError as error:
            _log.warning("no wake-up socket, waiting for KV will poll: %s", error)
            self._socket = None
            return
        threading.Thread(target=self._listen, name="mooncake-waker", daemon=True).start()

    def wake(self) -> None:
        """Ends the present wait, or the next one at once. Callable from any thread."""
        condition = self._condition
        with condition:
            self._flag = True
            condition.notify()

    def wait(self) -> None:
        """Blocks until there is something to do, or a bounded time."""
        if not self._searched:
            self._searched = True
            self._hook(_find_input_queue())
        timeout_s = _BLIND_WAIT_S if self._input is None or self._socket is None else _HOOKED_WAIT_S
        with self._condition:
            if not self._flag and not (self._input is not None and self._input._qsize()):
                self._condition.wait(timeout_s)
            self._flag = False

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()

    def _hook(self, found: queue.Queue[Any] | None) -> None:
        """From now on waits on the queue's own condition: a put wakes us as a ping does."""
        if found is None:
            _log.warning("vLLM's input queue was not found: waiting for KV will poll")
            return
        old = self._condition
        with old:
            self._input, self._condition = found, found.not_empty
            old.notify_all()

    def _listen(self) -> None:
        assert self._socket is not None
        while True:
            try:
                self._socket.recv(16)
            except OSError:
                return
            self.wake()


def _find_input_queue() -> queue.Queue[Any] | None:
    """`EngineCoreProc.input_queue`, from the frames above us."""
    frame: FrameType | None = sys._getframe()
    for _ in range(_MAX_FRAMES):
        if frame is None:
            return None
        found = getattr(frame.f_locals.get("self"), "input_queue", None)
        if isinstance(found, queue.Queue):
            return found
        frame = frame.f_back
    return None
