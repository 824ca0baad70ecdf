"""A second process with a `mooncake.engine.TransferEngine`, driven over a pipe."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from mooncake.engine import TransferEngine

OFFSET = 7
"""Buffers start here behind a page: callers register tensors wherever they lie."""


class _Main:
    def __init__(self, environ: dict[str, str]) -> None:
        os.environ.update({"MC_FORCE_TCP": "0"} | environ)  # the fork server keeps the environment of its first caller
        self.engine = TransferEngine()
        self.memory: dict[int, np.ndarray] = {}

    def do(self, method: str, *args: Any) -> Any:
        answer = getattr(self.engine, method)(*args)
        return [(note.name, note.msg) for note in answer] if method == "get_notifies" else answer

    def allocate(self, length: int) -> int:
        array = np.zeros(length + OFFSET, np.uint8)[OFFSET:]
        self.memory[array.ctypes.data] = array
        assert self.engine.register_memory(array.ctypes.data, length) == 0
        return int(array.ctypes.data)

    def read(self, address: int, offset: int, length: int) -> bytes:
        return self.memory[address][offset : offset + length].tobytes()

    def fill(self, address: int, seed: int) -> None:
        array = self.memory[address]
        array[:] = np.random.default_rng(seed).integers(0, 256, len(array), dtype=np.uint8)


def _run(pipe: Connection, environ: dict[str, str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main = _Main(environ)
    while True:
        try:
            method, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, getattr(main, method)(*args)))
        except Exception as error:
            pipe.send((False, error))


_processes = mp.get_context("forkserver")
_processes.set_forkserver_preload([__name__])


class Peer:
    """`protocol` None: not initialized."""

    def __init__(
        self, protocol: str | None = "tcp", *, host: str = "127.0.0.1", server: str = "P2PHANDSHAKE",
        environ: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        self._pipe, far = _processes.Pipe()
        self.process = _processes.Process(target=_run, args=(far, environ or {}), daemon=True)
        self.process.start()
        far.close()
        self.port = -1
        if protocol is not None:
            assert self.do("initialize", host, server, protocol, "") == 0
            self.port = self.do("get_rpc_port")

    @property
    def name(self) -> str:
        return f"127.0.0.1:{self.port}"

    def do(self, method: str, *args: Any) -> Any:
        """A method of the engine there."""
        return self.call("do", method, *args)

    def call(self, method: str, *args: Any, timeout_s: float = 60.0) -> Any:
        self._pipe.send((method, args))
        if not self._pipe.poll(timeout_s):
            raise TimeoutError(f"the peer did not answer {method} in {timeout_s} s")
        good, answer = self._pipe.recv()
        if not good:
            raise answer
        return answer

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def freeze(self) -> None:
        """SIGSTOP, and wait until every thread has stopped: the signal alone leaves some of them a moment."""
        self.signal(signal.SIGSTOP)
        deadline = time.monotonic() + 10
        for stat in Path(f"/proc/{self.process.pid}/task").glob("*/stat"):
            while stat.read_text().rpartition(") ")[2][0] != "T" and time.monotonic() < deadline:
                time.sleep(0.001)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.join(5)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        self.process.join(5)
        self._pipe.close()
