"""Processes that cost milliseconds: one that has imported everything, under the shim, and forks a victim at each request.

`Zygote().fork(config)` gives a `Victim` with the face of `Peer`, whose memory the test sees even after its death.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from mooncake.common.errors import MooncakeError
from tests.transfer_engine.peer import _Main
from tests.transfer_engine.shim import Shim, library
from transfer_engine import EngineConfig, Opcode, TransferRequest, TransferStatus

Rows = list[tuple[int, int, int]]
"""(our address, the other side's, length)"""


class _Child(_Main):
    """A `_Main` whose system calls can be made to fail, and whose memory others can map."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.shim = Shim()
        self._batch: Any = None

    def pid(self) -> int:
        return os.getpid()

    def memory(self, length: int, shared: bool) -> tuple[int, int]:
        """(address, descriptor) of registered memory behind a file, so that the test can look at it from outside."""
        if shared:
            buffer = self.engine.allocate_shared(length)
            self.buffers[buffer.address] = buffer
            return buffer.address, buffer.info.fd
        fd = os.memfd_create("victim")
        os.ftruncate(fd, length)
        array = np.frombuffer(mmap.mmap(fd, length), np.uint8)
        address = self.engine.register_buffer(array)
        self.buffers[address] = array
        return address, fd

    def arm(self, *args: Any) -> None:
        self.shim.arm(*args)

    def counts(self) -> tuple[dict[str, int], int, int]:
        self.shim.disarm()
        return self.shim.seen(), self.shim.moved(), self.shim.fired()

    def submit(self, opcode: Opcode, address: str, instance_id: str, rows: Rows, deadline_s: float, arm: Any) -> None:
        segment = self.engine.open_segment(address, instance_id=instance_id)
        self._batch = self.engine.allocate_batch_id(len(rows))
        requests = [TransferRequest(opcode, ours, segment, theirs, length) for ours, theirs, length in rows]
        if arm:
            self.shim.arm(*arm)
        self.engine.submit_transfer(self._batch, requests, deadline_s=deadline_s)

    def result(self, timeout_s: float) -> TransferStatus:
        status = self.engine.wait(self._batch, timeout_s)
        if status.state.terminal:
            self.engine.free_batch_id(self._batch)
        return status

    def transfer(self, opcode: Opcode, address: str, rows: Rows, deadline_s: float, arm: Any = None) -> TransferStatus:
        """One whole transfer, a fresh opening included."""
        if arm:
            self.shim.arm(*arm)
        segment = self.engine.open_segment(address, timeout_s=deadline_s)
        try:
            requests = [TransferRequest(opcode, ours, segment, theirs, length) for ours, theirs, length in rows]
            return self.engine.transfer_sync(requests, deadline_s)
        finally:
            self.engine.close_segment(segment)


def _serve(pipe: Connection, make: Any, *args: Any) -> None:
    """Run the methods that come over the pipe, until it ends."""
    try:
        main: Any = make(*args)
        pipe.send((True, None))
    except (MooncakeError, OSError) as error:
        pipe.send((False, error))
        return
    while True:
        try:
            method, given = pipe.recv()
        except EOFError:
            return
        try:
            answer = (True, getattr(main, method)(*given))
        except Exception as error:
            answer = (False, error)
        pipe.send(answer)


def _main(control: socket.socket) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the dead vanish at once
    while True:
        message, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        pid = os.fork()
        if pid == 0:
            control.close()
            pipe = Connection(fds[0])
            with contextlib.suppress(EOFError, OSError):
                _serve(pipe, *pipe.recv())
            os._exit(0)
        os.close(fds[0])
        control.send(pid.to_bytes(4, "little"))


class Victim:
    def __init__(self, pid: int, pipe: Connection) -> None:
        self.pid = pid
        self._pipe = pipe
        self._maps: list[mmap.mmap] = []
        self.address = self.instance_id = ""

    def call(self, method: str, *args: Any, timeout_s: float = 20.0) -> Any:
        self.send(method, *args)
        return self.receive(timeout_s)

    def send(self, method: str, *args: Any) -> None:
        self._pipe.send((method, args))

    def answered(self, timeout_s: float) -> bool:
        return self._pipe.poll(timeout_s)

    def receive(self, timeout_s: float = 20.0) -> Any:
        """Raises what the call raised; EOFError when the victim died of it."""
        if not self._pipe.poll(timeout_s):
            raise TimeoutError(f"no answer in {timeout_s} s")
        try:
            good, answer = self._pipe.recv()
        except ConnectionError as error:
            raise EOFError("the victim has died") from error
        if not good:
            raise answer
        return answer

    def memory(self, length: int, shared: bool) -> tuple[int, np.ndarray]:
        """(its address there, its bytes here)."""
        address, fd = self.call("memory", length, shared)
        with open(f"/proc/{self.pid}/fd/{fd}", "r+b", buffering=0) as file:
            self._maps.append(mmap.mmap(file.fileno(), length))
        return address, np.frombuffer(self._maps[-1], np.uint8)

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def state(self) -> str:
        """One letter as in /proc/<pid>/stat; "" when it is gone."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return ""
        return stat[stat.rindex(")") + 2]

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        until = time.monotonic() + 5
        while self.state() not in ("", "Z", "X") and time.monotonic() < until:
            time.sleep(0.001)
        self._pipe.close()


class Zygote:
    """`preload`: with the shim, which `_Child` needs."""

    def __init__(self, *, preload: bool = True) -> None:
        self._control, far = socket.socketpair()
        environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        if preload:
            environment["LD_PRELOAD"] = str(library())
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(far.fileno())],
            pass_fds=[far.fileno()],
            env=environment,
            cwd=Path(__file__).parents[2],
        )
        far.close()
        self._lock = threading.Lock()

    def fork(self, config: EngineConfig, make: Any = _Child) -> Victim:
        """`make(config)` is what is served. Raises what that raises."""
        near, far = socket.socketpair()
        with self._lock:
            socket.send_fds(self._control, [b"f"], [far.fileno()])
            far.close()
            pid = int.from_bytes(self._control.recv(4), "little")
        victim = Victim(pid, Connection(near.detach()))
        victim._pipe.send((make, config))
        victim.receive()
        victim.address, victim.instance_id = victim.call("who")
        return victim

    def close(self) -> None:
        self._control.close()
        self._process.wait(10)

    def __enter__(self) -> Zygote:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


if __name__ == "__main__":
    from tests.transfer_engine import zygote

    zygote._main(socket.socket(fileno=int(sys.argv[1])))
