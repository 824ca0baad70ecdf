"""A second process with an engine, driven from a test over a pipe.

`Peer(...)` starts it; `call(method, ...)` runs a method of `_Main` there and returns its result or raises its error.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import multiprocessing as mp
import os
import signal
import threading
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from tests.transfer_engine.gpu import Gpu
from transfer_engine import EngineConfig, Opcode, SegmentHandle, SharedBuffer, TransferEngine, TransferRequest


class _Main:
    def __init__(self, config: EngineConfig) -> None:
        self.engine = TransferEngine(config)
        self.buffers: dict[int, Any] = {}
        self.segments: dict[str, SegmentHandle] = {}
        self.notes: list[bytes] = []
        self.heard = threading.Condition()
        self.engine.on_notify(self._note)
        self.stop_writing = threading.Event()
        self.writers: list[threading.Thread] = []
        self.outcomes: list[str] = []

    def _note(self, instance_id: str, address: str, payload: bytes) -> None:
        with self.heard:
            self.notes.append(payload)
            self.heard.notify_all()

    def who(self) -> tuple[str, str]:
        return self.engine.address, self.engine.instance_id

    def allocate(self, length: int, shared: bool) -> int:
        buffer: Any = self.engine.allocate_shared(length) if shared else np.zeros(length, np.uint8)
        address = buffer.address if shared else self.engine.register_buffer(buffer)
        self.buffers[address] = buffer
        return int(address)

    # --- device memory, with the driver that the config names

    @functools.cached_property
    def _gpu(self) -> Gpu:
        return Gpu(self.engine.config.cuda_driver)

    def gpu(self, method: str, *args: Any) -> Any:
        return getattr(self._gpu, method)(*args)

    def allocate_on(self, device: int, length: int) -> int:
        address = self._gpu.allocate(length, self._gpu.ordinal(device))
        self.engine.register_local_memory(address, length, location=f"cuda:{self._gpu.ordinal(device)}")
        return address

    def free_on(self, address: int) -> None:
        self.engine.unregister_local_memory(address)
        self._gpu.free(address)

    def _array(self, address: int) -> np.ndarray:
        base = next(a for a, b in self.buffers.items() if a <= address < a + len(self._raw(b)))
        return self._raw(self.buffers[base])[address - base :]

    @staticmethod
    def _raw(buffer: Any) -> np.ndarray:
        return np.frombuffer(buffer.view, np.uint8) if isinstance(buffer, SharedBuffer) else buffer

    def read(self, address: int, length: int) -> bytes:
        return self._array(address)[:length].tobytes()

    def digest(self, address: int, length: int) -> str:
        return hashlib.sha256(self._array(address)[:length]).hexdigest()

    def fill(self, address: int, seed: int, length: int) -> None:
        self._array(address)[:length] = np.random.default_rng(seed).integers(0, 256, length, dtype=np.uint8)

    def write_bytes(self, address: int, content: bytes) -> None:
        self._array(address)[: len(content)] = np.frombuffer(content, np.uint8)

    def unregister(self, address: int) -> None:
        buffer = self.buffers.pop(address)
        if isinstance(buffer, SharedBuffer):
            buffer.close()
        else:
            self.engine.unregister_local_memory(address)

    def wait_notes(self, count: int, timeout_s: float) -> list[bytes]:
        with self.heard:
            self.heard.wait_for(lambda: len(self.notes) >= count, timeout_s)
            return list(self.notes)

    def write(self, address: str, source: int, target: int, length: int, deadline_s: float, group: int = 0) -> None:
        segment = self.engine.open_segment(address)
        self.engine.transfer_sync(
            [TransferRequest(Opcode.WRITE, source, segment, target, length)], deadline_s, group=group
        )

    def start_writing(self, address: str, target: int, length: int, group: int, block: int) -> None:
        """Overwrite [target, +length) for ever, in batches of one group, until the group is refused."""
        segment = self.engine.open_segment(address)
        source = np.random.default_rng(os.getpid()).integers(1, 256, length, dtype=np.uint8)
        at = self.engine.register_buffer(source)
        requests = [
            TransferRequest(Opcode.WRITE, at + o, segment, target + o, min(block, length - o))
            for o in range(0, length, block)
        ]
        self.stop_writing.clear()
        self.writing_from = at

        def run() -> None:
            while not self.stop_writing.is_set():
                try:
                    self.engine.transfer_sync(requests, 30.0, group=group)
                except Exception as error:
                    self.outcomes.append(type(error).__name__)
                    break

        self.writers = [threading.Thread(target=run, daemon=True) for _ in range(2)]
        for writer in self.writers:
            writer.start()

    def end_writing(self) -> list[str]:
        self.stop_writing.set()
        for writer in self.writers:
            writer.join(5)
        self.engine.unregister_local_memory(self.writing_from)
        outcomes, self.outcomes = self.outcomes, []
        return outcomes

    def stats(self) -> dict[str, float]:
        return self.engine.stats()

    def close(self) -> None:
        self.engine.close()


def _run(pipe: Connection, config: EngineConfig) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main = _Main(config)
    while True:
        try:
            method, args = pipe.recv()
        except EOFError:
            return
        if method == "exit":
            main.close()
            return
        try:
            answer = (True, getattr(main, method)(*args))
        except Exception as error:
            answer = (False, error)
        pipe.send(answer)


_processes = mp.get_context("forkserver")  # a clean process, but without importing numpy each time
_processes.set_forkserver_preload([__name__])


class Peer:
    def __init__(self, config: EngineConfig | None = None) -> None:
        self._pipe, far = _processes.Pipe()
        self.process = _processes.Process(target=_run, args=(far, config or EngineConfig()), daemon=True)
        self.process.start()
        far.close()
        self.address, self.instance_id = self.call("who")

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

    def close(self) -> None:
        with contextlib.suppress(OSError, ProcessLookupError):
            self.signal(signal.SIGCONT)
        with contextlib.suppress(OSError):
            self._pipe.send(("exit", ()))
        self.process.join(5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(5)
        self._pipe.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
