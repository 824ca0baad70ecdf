"""`mooncake up` around stand-in processes: restart, cannot-start, Ctrl-C, and no orphans whatever happens."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.processes import alive, family
from deploy.run_dir import RunDir, read_state
from mooncake.common.errors import ConfigError


def wait(condition: Callable[[], Any], timeout_s: float = 20.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.05)
    raise AssertionError(f"not within {timeout_s} s")


class Up:
    """The program under test and everything that it started."""

    def __init__(self, run_dir: Path, *arguments: str) -> None:
        self.run_dir = run_dir
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.deploy.stand_in", str(run_dir), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def state(self) -> dict[str, Any]:
        try:
            return read_state(str(self.run_dir))
        except ConfigError:
            return {"phase": "", "roles": {}}

    def wait_ready(self) -> None:
        wait(lambda: self.state()["phase"] == "ready")

    def family(self) -> set[Any]:
        return family([self.process.pid])

    def end(self, timeout_s: float = 20.0) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, out, err


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    running = Up(tmp_path / "run")
    running.wait_ready()
    yield running
    if running.process.poll() is None:
        running.process.kill()
        running.process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_stops_everything(up: Up, number: signal.Signals) -> None:
    everyone = up.family()
    assert len(everyone) >= 1 + 3 * 3 + 1  # up, three roles with two descendants each, the watchdog
    start = time.monotonic()
    up.process.send_signal(number)
    code, out, err = up.end()
    assert code == 0, err
    assert time.monotonic() - start < 15
    assert "Mooncake serves tiny" in out and out.rstrip().endswith("stopped")
    assert not any(alive(p) for p in everyone)
    assert not (up.run_dir / "state.json").exists()


def test_kill_9_leaves_no_orphans(up: Up) -> None:
    everyone = up.family()
    os.killpg(up.process.pid, signal.SIGKILL)
    up.process.communicate()
    wait(lambda: not any(alive(p) for p in everyone), 20)


@pytest.mark.parametrize("name", ["prefill-0", "conductor-0"])
def test_dead_role_is_started_again_and_its_children_are_gone(up: Up, name: str) -> None:
    old = up.state()["roles"][name]
    relatives = family([old["pid"]])
    assert len(relatives) == 3
    others = {n: r["pid"] for n, r in up.state()["roles"].items() if n != name}
    os.kill(old["pid"], signal.SIGKILL)
    wait(lambda: up.state()["roles"][name]["restarts"] == 1 and up.state()["roles"][name]["state"] == "ready")
    new = up.state()["roles"][name]
    assert new["pid"] != old["pid"]
    wait(lambda: not any(alive(p) for p in relatives), 5)
    assert {n: r["pid"] for n, r in up.state()["roles"].items() if n != name} == others
    assert len(family([new["pid"]])) == 3
    up.process.send_signal(signal.SIGINT)
    code, out, _ = up.end()
    assert code == 0 and f"{name} was killed by SIGKILL; starting it again" in out and "ready again" in out


def test_role_that_cannot_start(tmp_path: Path) -> None:
    up = Up(tmp_path / "run", "--broken", "decode-0")
    seen: set[Any] = set()
    while up.process.poll() is None:
        seen |= up.family()
        time.sleep(0.05)
    code, _, err = up.end()
    assert code == 1
    assert "decode-0 ended with exit code 1" in err and "no such model: decode-0" in err
    assert seen and not any(alive(p) for p in seen)
    assert not (tmp_path / "run" / "state.json").exists()


def test_ctrl_c_while_starting(tmp_path: Path) -> None:
    up = Up(tmp_path / "run")
    wait(lambda: up.state()["roles"])
    up.process.send_signal(signal.SIGINT)
    code, _, err = up.end()
    assert code == 0, err


def test_state_is_private_and_the_folder_is_locked(up: Up) -> None:
    file = up.run_dir / "state.json"
    assert file.stat().st_mode & 0o077 == 0
    assert set(json.loads(file.read_text())["roles"]) == {"conductor-0", "prefill-0", "decode-0"}
    with pytest.raises(ConfigError, match="running"):
        RunDir(str(up.run_dir))
