"""No process of the engine outlives the host: checked with a stand-in that hides its children as well as it can."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mooncake.vllm.engine_command import EngineCommand
from mooncake.vllm.engine_process import EngineProcess, ReservedPort

# Three generations, each in a session of its own (but for "tame"); the middle one ends at once, so the last one loses its
# parent.
FAMILY = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN if sys.argv[2] == "stubborn" else lambda *_: sys.exit(0))
last = f"import os, time; open('{sys.argv[1]}/last', 'w').write(str(os.getpid())); time.sleep(600)"
middle = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {last!r}], start_new_session={sys.argv[2] != 'tame'})"
subprocess.run([sys.executable, "-c", middle], start_new_session=sys.argv[2] != "tame")
open(f"{sys.argv[1]}/first", "w").write(str(os.getpid()))
print("line one", flush=True)
print("secret t0ken inside", flush=True)
if sys.argv[2] == "fails":
    time.sleep(0.5)
    sys.exit(3)
time.sleep(600)
"""

HOST = """
import asyncio, sys
from tests.worker_host.test_engine_guard import command_in
from mooncake.vllm.engine_process import EngineProcess
from pathlib import Path

async def main():
    await EngineProcess(command_in(Path(sys.argv[1]), "stubborn")).start()
    await asyncio.sleep(600)

asyncio.run(main())
"""


def command_in(folder: Path, mode: str) -> EngineCommand:
    return EngineCommand(
        argv=[sys.executable, "-c", FAMILY, str(folder), mode],
        env=dict(os.environ),
        config_file=folder / "engine.yaml",
        config_text="{}",
        secrets=("t0ken",),
    )


def alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.02)


def pids(folder: Path) -> list[int]:
    until(lambda: all((folder / n).exists() and (folder / n).read_text() for n in ("first", "last")))
    return [int((folder / name).read_text()) for name in ("first", "last")]


@pytest.mark.parametrize("mode", ["polite", "stubborn"])
async def test_stop_leaves_nothing(tmp_path: Path, mode: str) -> None:
    engine = EngineProcess(command_in(tmp_path, mode))
    await engine.start()
    found = await asyncio.to_thread(pids, tmp_path)
    await engine.stop(1.0)
    assert not any(alive(pid) for pid in found)
    assert not alive(engine.pid)
    await engine.stop(1.0)


async def test_an_engine_that_fails_takes_its_children_along(tmp_path: Path) -> None:
    engine = EngineProcess(command_in(tmp_path, "fails"))
    await engine.start()
    assert oct((tmp_path / "engine.yaml").stat().st_mode)[-3:] == "600"
    assert await engine.wait() == 3
    assert engine.tail().splitlines() == ["line one", "secret *** inside"]
    assert not any(alive(pid) for pid in pids(tmp_path))
    await engine.stop(1.0)


async def test_a_killed_guard_leaves_nothing_of_its_session_and_other_children_alone(tmp_path: Path) -> None:
    bystander = await asyncio.create_subprocess_exec("sleep", "600")
    engine = EngineProcess(command_in(tmp_path, "tame"))
    await engine.start()
    found = await asyncio.to_thread(pids, tmp_path)
    os.kill(engine.pid, signal.SIGKILL)
    await engine.wait()
    assert not any(alive(pid) for pid in found)
    await engine.stop(1.0)
    assert bystander.returncode is None
    bystander.kill()
    await bystander.wait()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_host_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    folder = tmp_path / "private"
    folder.mkdir()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])}
    host = subprocess.Popen([sys.executable, "-c", HOST, str(folder)], env=environment)
    try:
        found = pids(folder)
        guard = int(Path(f"/proc/{found[0]}/stat").read_text().rpartition(")")[2].split()[1])
        host.send_signal(number)
        host.wait(10)
        until(lambda: not any(alive(pid) for pid in (*found, guard)))
        until(lambda: not folder.exists())
    finally:
        host.kill()
        host.wait()


def test_a_reserved_port_can_be_listened_on_and_is_given_to_nobody_else() -> None:
    import socket

    with ReservedPort("127.0.0.1") as port:
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("127.0.0.1", port))
            server.listen()
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
