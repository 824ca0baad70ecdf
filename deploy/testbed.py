"""Test bed: a real platform (`mooncake up`) and a plain vLLM beside it, for the end-to-end tests and the benchmarks.

Knows: the command line of `mooncake up`, the run directory's `state.json`, and how to read metrics and processes from outside.
Does not know: anything inside of the roles.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

PYTHON = sys.executable
MOONCAKE = str(Path(PYTHON).with_name("mooncake"))
COMMON_ENGINE = {"dtype": "float32", "block_size": 32, "kv_cache_bytes": 64 << 20, "max_model_len": 8192}


def wait_for(what: str, probe: Callable[[], Any], timeout_s: float, every_s: float = 0.2) -> Any:
    """The first true value of `probe()`. Raises TimeoutError naming `what` and the last value or error."""
    deadline, last = time.monotonic() + timeout_s, None
    while time.monotonic() < deadline:
        try:
            last = probe()
            if last:
                return last
        except (httpx.HTTPError, OSError, KeyError, ValueError) as error:
            last = error
        time.sleep(every_s)
    raise TimeoutError(f"{what}: not within {timeout_s} s (last: {last!r})")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def sample(text: str, name: str, **labels: str) -> float:
    """Sum of the samples of that name whose labels include `labels`; 0 when there is none."""
    return sum(
        s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
        if s.name == name and all(s.labels.get(k) == v for k, v in labels.items())
    )


class PlainVLLM:
    """One ordinary `vllm serve` with the platform's model and flags: what answers are compared with."""

    def __init__(self, model_dir: Path, log: Path, *, compile_model: bool = False, served_name: str = "tiny") -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        environment = os.environ | {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "VLLM_HOST_IP": "127.0.0.1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        command = [PYTHON, "-m", "mooncake.vllm.engine_main", "--model", str(model_dir)]
        command += ["--served-model-name", served_name, "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--dtype", "float32", "--block-size", "32", "--kv-cache-memory-bytes", str(64 << 20)]
        command += ["--max-model-len", "8192", "--disable-hybrid-kv-cache-manager", "--enable-prompt-tokens-details"]
        command += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
        if not compile_model:
            command.append("--enforce-eager")
        self._log = log.open("wb")
        self.process = subprocess.Popen(
            command, env=environment, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True
        )

    def wait_ready(self, timeout_s: float = 400) -> None:
        def healthy() -> bool:
            if self.process.poll() is not None:
                raise RuntimeError(f"plain vLLM ended with {self.process.returncode}, see {self._log.name}")
            return httpx.get(self.url + "/health", timeout=2).status_code == 200

        wait_for("plain vLLM", healthy, timeout_s, 0.5)

    def stop(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        self._log.close()


@dataclass(frozen=True)
class RoleState:
    """One entry of `state.json`."""

    name: str
    role: str
    pid: int
    http_url: str
    info: dict[str, Any]


class Platform:
    """`mooncake up` as a child process."""

    def __init__(self, run_dir: Path, *arguments: str, environment: dict[str, str] | None = None) -> None:
        self.run_dir = run_dir
        run_dir.mkdir(parents=True, exist_ok=True)
        self._log = (run_dir / "up.log").open("wb")
        self.process = subprocess.Popen(
            [MOONCAKE, "up", "--run-dir", str(run_dir), *arguments],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=os.environ | (environment or {}),
            start_new_session=True,
        )

    def wait_ready(self, timeout_s: float = 500) -> None:
        def ready() -> bool:
            if self.process.poll() is not None:
                raise RuntimeError(f"mooncake up ended with {self.process.returncode}:\n{self.log_tail()}")
            # The endpoint serves as soon as it can; "ready" is when every role is there.
            return (self.run_dir / "state.json").exists() and self.state()["phase"] == "ready"

        wait_for("the platform", ready, timeout_s, 0.5)

    def log_tail(self, lines: int = 30) -> str:
        return "\n".join((self.run_dir / "up.log").read_text(errors="replace").splitlines()[-lines:])

    def state(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((self.run_dir / "state.json").read_text())
        return loaded

    @property
    def url(self) -> str:
        return str(self.state()["endpoint"])

    def role(self, name: str) -> RoleState:
        entry = self.state()["roles"][name]
        return RoleState(name, entry["role"], entry["pid"], entry.get("http_url", ""), entry.get("info", {}))

    def names(self, role: str) -> list[str]:
        return sorted(n for n, entry in self.state()["roles"].items() if entry["role"] == role)

    def metrics(self, name: str) -> str:
        return httpx.get(self.role(name).http_url + "/metrics", timeout=10).text

    def kill(self, name: str) -> int:
        """`kill -9` of a role's own process; what it started must follow by itself. Returns the pid."""
        pid = self.role(name).pid
        os.kill(pid, signal.SIGKILL)
        return pid

    def wait_restarted(self, name: str, old_pid: int, timeout_s: float = 200) -> None:
        def back() -> bool:
            role = self.role(name)
            return role.pid != old_pid and (
                not role.http_url or httpx.get(role.http_url + "/ready", timeout=2).status_code == 200
            )

        wait_for(f"{name} to come back", back, timeout_s, 0.5)

    def cpu_seconds(self) -> float:
        """CPU time used so far by the platform's whole process tree."""
        total = 0.0
        for process in [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]:
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            total += times.user + times.system
        return total

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(40)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        self._log.close()
