"""The vLLM server as a child process: start, output, waiting, stopping.

Knows: the guard (engine_guard.py), which sees to it that nothing of vLLM outlives this process, and how to get its
lines into our log. Does not know: what the command says (engine_command.py) or when the engine is healthy (host.py).
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import os
import signal
import socket
import sys

from mooncake.common.errors import MooncakeError
from mooncake.vllm import engine_guard
from mooncake.vllm.engine_command import EngineCommand

_log = logging.getLogger(__name__)
_engine_log = logging.getLogger("vllm")
_TAIL_LINES = 60
_LINE_LIMIT_BYTES = 8192


class EngineFailed(MooncakeError):
    """vLLM did not start, or ended, or hangs. The text holds its last lines."""


class ReservedPort:
    """A port held by a bound socket that does not listen: nobody is given it meanwhile, and vLLM, which sets
    SO_REUSEADDR as we do, can still listen there.
    """

    def __init__(self, host: str, port: int = 0) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
        except OSError as error:
            self._socket.close()
            raise MooncakeError(f"cannot reserve {host} port {port} for vLLM: {error.strerror or error}") from error
        self.port = int(self._socket.getsockname()[1])

    def __enter__(self) -> int:
        return self.port

    def __exit__(self, *_exc: object) -> None:
        self._socket.close()


class EngineProcess:
    """One run of vLLM below its guard. `start` once, then `wait`; `stop` at the end, also after a failed start."""

    def __init__(self, command: EngineCommand) -> None:
        self.command = command
        self._guard: asyncio.subprocess.Process | None = None
        self._pump: asyncio.Task[None] | None = None
        self._lifeline = -1
        self._tail: collections.deque[str] = collections.deque(maxlen=_TAIL_LINES)

    @property
    def pid(self) -> int:
        """Of the guard; 0 before the start."""
        return self._guard.pid if self._guard else 0

    def tail(self) -> str:
        """The last lines that vLLM wrote."""
        return "\n".join(self._tail)

    async def start(self) -> None:
        """Writes the configuration file and starts vLLM below its guard, in a session of its own."""
        descriptor = os.open(self.command.config_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(self.command.config_text)
        _log.info("starting vLLM", extra={"fields": {"command": " ".join(self.command.argv)}})
        # Pipes of our own: asyncio's would make `wait` wait for everyone who holds them, not for the guard.
        lifeline, self._lifeline = os.pipe()
        output, written = os.pipe()
        try:
            self._guard = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", engine_guard.__file__, str(self.command.config_file.parent)),
                *self.command.argv,
                env=self.command.env,
                stdin=lifeline,
                stdout=written,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        finally:
            os.close(lifeline)
            os.close(written)
        self._pump = asyncio.create_task(self._read_output(output), name="vllm-output")

    async def wait(self) -> int:
        """The exit code, once it has ended, nothing of it is left and its last lines have been read."""
        assert self._guard is not None
        assert self._pump is not None
        code = await self._guard.wait()
        await self._kill_rest()
        await asyncio.wait({self._pump}, timeout=2.0)
        return code

    async def stop(self, timeout_s: float) -> None:
        """SIGTERM, then after `timeout_s` SIGKILL, to all of the engine's processes. Returns when none is left."""
        if self._guard is None:
            return
        if self._guard.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._guard.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(self._guard.wait(), timeout_s)
            except TimeoutError:
                _log.warning("vLLM did not end after SIGTERM, killing it", extra={"fields": {"after_s": timeout_s}})
                await self.kill()
        await self._kill_rest()
        self._cut_lifeline()
        if self._pump is not None:
            self._pump.cancel()
            await asyncio.gather(self._pump, return_exceptions=True)

    async def kill(self) -> None:
        """Ends everything at once by closing the guard's lifeline."""
        if self._guard is None or self._guard.returncode is not None:
            return
        self._cut_lifeline()
        try:
            await asyncio.wait_for(self._guard.wait(), 15.0)
        except TimeoutError:
            self._guard.kill()
            await self._guard.wait()

    def _cut_lifeline(self) -> None:
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1

    async def _kill_rest(self) -> None:
        """What is left of the guard's session, which is nothing unless the guard itself was killed."""
        pid = self.pid
        if not await asyncio.to_thread(engine_guard.kill_all, lambda: engine_guard.session_members(pid)):
            _log.error("a process of vLLM could not be killed")

    async def _read_output(self, descriptor: int) -> None:
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
        with os.fdopen(descriptor, "rb", 0) as pipe:
            transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
            try:
                await self._read_lines(reader)
            finally:
                transport.close()

    async def _read_lines(self, reader: asyncio.StreamReader) -> None:
        pending = b""
        while chunk := await reader.read(65536):
            *lines, pending = (pending + chunk).replace(b"\r", b"\n").split(b"\n")
            for line in lines:
                self._write(line)
            if len(pending) > _LINE_LIMIT_BYTES:
                self._write(pending)
                pending = b""
        self._write(pending)

    def _write(self, raw: bytes) -> None:
        line = raw[:_LINE_LIMIT_BYTES].decode(errors="replace").rstrip()
        if not line:
            return
        for secret in self.command.secrets:  # vLLM logs its arguments
            line = line.replace(secret, "***")
        self._tail.append(line)
        _engine_log.info(line)
