"""Who takes part: pairs of processes, and what must be installed for each.

Knows: commands, environments, why a rival is missing. Does not know: what is measured. Rivals that are not in our environment
are installed into folders under .cache on first use.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import wheel

_HERE = Path(__file__).parent
_CACHE = wheel.ROOT / ".cache"
_ANSWER_S = 120.0
NIXL = "nixl-cu12==1.5.1"
MATPLOTLIB = "matplotlib==3.10.7"


class Missing(Exception):
    """Why a rival cannot take part here."""


def site(name: str, requirement: str, *options: str) -> str:
    """A folder under .cache with a requirement installed into it, made on first use. Raises Missing."""
    folder = _CACHE / name
    if not (folder / "done").exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", *options, "--target", str(folder), requirement]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        if done.returncode:
            raise Missing(f"{requirement} does not install: {(done.stderr.strip().splitlines() or ['?'])[-1][:200]}")
        (folder / "done").touch()
    return str(folder)


@dataclass(frozen=True)
class Rival:
    """One pair of processes. `ways` are the rows that it fills; `environ` may raise Missing or wheel.NoWheel."""

    name: str
    command: tuple[str, ...]
    ways: tuple[str, ...]
    environ: Callable[[], dict[str, str]] = field(default=dict)


def _by_path(file: str) -> tuple[str, ...]:
    return (sys.executable, str(_HERE / file))


def _nixl(tls: str) -> Callable[[], dict[str, str]]:
    # PYTHONPATH without the repository: NIXL's process needs nothing of ours
    return lambda: {"PYTHONPATH": site("nixl", NIXL, "--no-deps"), "UCX_TLS": tls, "NIXL_LOG_LEVEL": "ERROR"}


ALL = (
    Rival("ours", (sys.executable, "-m", "benchmarks.transfer.player_ours"), ("memcpy", "local", "shm-mapped", "shm-cma", "tcp")),
    Rival("c++", _by_path("player_cxx.py"), ("c++ tcp",), lambda: wheel.environ(wheel.wheel())),
    Rival("gloo", _by_path("player_gloo.py"), ("gloo tcp",)),
    Rival("nixl", _by_path("player_nixl.py"), ("nixl/ucx tcp",), _nixl("tcp,self")),
    Rival("nixl-shm", _by_path("player_nixl.py"), ("nixl/ucx shm",), _nixl("shm,tcp,self")),
)  # fmt: skip


class Pair:
    """A rival's target and initiator, running. Raises Missing when they do not come up."""

    def __init__(self, rival: Rival, length: int) -> None:
        self.rival = rival
        try:
            more = rival.environ()
        except wheel.NoWheel as error:
            raise Missing(str(error)) from error
        env = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONWARNINGS": "ignore"} | more
        cwd = wheel.ROOT if rival.name == "ours" else _CACHE
        self._processes: list[subprocess.Popen[str]] = []
        self._complaints = tempfile.TemporaryFile("w+")  # noqa: SIM115  # as long as the pair
        try:
            self.target = self._start("target", str(length), env=env, cwd=cwd)
            hello = self._read(self.target)
            self.initiator = self._start("initiator", env=env, cwd=cwd)
            self._write(self.initiator, hello)
            self._read(self.initiator)
        except BaseException:
            self.close()
            raise

    def _start(self, *arguments: str, env: dict[str, str], cwd: Path) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*self.rival.command, *arguments], env=env, cwd=cwd, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._complaints,
        )  # fmt: skip
        self._processes.append(process)
        return process

    def _write(self, process: subprocess.Popen[str], what: Any) -> None:
        assert process.stdin is not None
        process.stdin.write(json.dumps(what) + "\n")
        process.stdin.flush()

    def _read(self, process: subprocess.Popen[str]) -> Any:
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            line = process.stdout.readline() if selector.select(_ANSWER_S) else ""
        if not line:
            raise Missing(f"{self.rival.name}: no answer: {self._complaint()}")
        return json.loads(line)

    def ask(self, process: subprocess.Popen[str], **command: Any) -> Any:
        try:
            self._write(process, command)
        except OSError as error:
            raise Missing(f"{self.rival.name}: it has ended: {self._complaint()}") from error
        return self._read(process)

    def pause(self) -> None:
        """Stand still while others have their turn: some poll all the time."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            process.send_signal(number)

    def _complaint(self) -> str:
        self._complaints.seek(0)
        return (self._complaints.read().strip().splitlines() or ["it said nothing"])[-1][-300:]

    def close(self) -> None:
        self.resume()
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()
        self._complaints.close()
        for process in self._processes:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
