"""Store roles as processes of their own, and a client with registered memory in the test's process."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np

from mooncake.common.role import parse_ready
from store.client import GetItem, PutItem, StoreClient
from transfer_engine import EngineConfig, TransferEngine

T = TypeVar("T")
ROOT = Path(__file__).parents[2]
FAST = [
    "--segment-fresh-s", "2", "--segment-timeout-s", "4", "--suspect-s", "0.5", "--max-read-lease-s", "2",
    "--max-put-lease-s", "5", "--put-grace-s", "0.5",
]  # fmt: skip


def until(condition: Callable[[], T], timeout_s: float = 20.0) -> T:
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.02)
    return value


class RoleProcess:
    """`mooncake ROLE --name NAME`, waited for until it says that it is ready."""

    def __init__(self, role: str, name: str, etcd: list[str], directory: Path, *options: str, token: str = "") -> None:
        command = [sys.executable, "-m", "mooncake", role, "--name", name, "--etcd", ",".join(etcd), *options]
        self.log = directory / f"{name}.log"
        environment = os.environ | {"MOONCAKE_LEASE_TTL_S": "2"} | ({"MOONCAKE_CLUSTER_TOKEN": token} if token else {})
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT, env=environment
            )
        self.address = self.http_url = ""

    def wait_ready(self, timeout_s: float = 60.0) -> RoleProcess:
        deadline = time.monotonic() + timeout_s
        assert self.process.stdout is not None
        while time.monotonic() < deadline and self.process.poll() is None:
            if select.select([self.process.stdout], [], [], 0.1)[0]:
                found = parse_ready(self.process.stdout.readline())
                if found is not None:
                    self.address, self.http_url = found["address"], found["http_url"]
                    return self
        self.process.kill()
        raise RuntimeError(f"not ready:\n{self.log.read_text()[-3000:]}")

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def stop(self, timeout_s: float = 5.0) -> int:
        """SIGTERM; the exit code."""
        self.process.terminate()
        return self.process.wait(timeout_s)


class Cluster:
    """One master and some nodes, restartable one by one."""

    def __init__(self, etcd: list[str], directory: Path, *, token: str = "") -> None:
        self.etcd, self.directory, self.token = etcd, directory, token
        self.roles: dict[str, RoleProcess] = {}
        self.masters: list[str] = []
        self.master_port = 0

    def start(self, segment_bytes: int, *nodes: str) -> None:
        """A master and nodes, all at once."""
        master = self.launch_master()
        for name in nodes:
            self.launch_node(name, segment_bytes)
        for role in self.roles.values():
            role.wait_ready()
        self.masters.append(master.address)

    def launch_master(self, *options: str, name: str = "store-master-0", port: int | None = None) -> RoleProcess:
        options = (*FAST, "--port", str(self.master_port if port is None else port), *options)
        role = RoleProcess("store-master", name, self.etcd, self.directory, *options, token=self.token)
        self.roles[name] = role
        return role

    def launch_node(self, name: str, segment_bytes: int, *options: str) -> RoleProcess:
        options = ("--segment-bytes", str(segment_bytes), "--heartbeat-s", "0.3", "--put-grace-s", "0.5", *options)
        self.roles[name] = RoleProcess("store-node", name, self.etcd, self.directory, *options, token=self.token)
        return self.roles[name]

    def close(self) -> None:
        for role in self.roles.values():
            role.kill()


class User:
    """An engine, registered memory and a StoreClient."""

    def __init__(self, masters: list[str], *, bytes_: int = 4 << 20, token: str = "", **options: object) -> None:
        transports = options.pop("transports", ("local", "shm", "tcp"))
        config = EngineConfig(cluster_token=token.encode(), transports=transports, name="user")  # type: ignore[arg-type]
        self.engine = TransferEngine(config)
        self.memory = np.zeros(bytes_, np.uint8)
        self.base = self.engine.register_buffer(self.memory)
        self.store = StoreClient(self.engine, masters, token=token, **options)  # type: ignore[arg-type]

    def put(self, objects: dict[bytes, bytes], deadline_s: float = 5.0, **options: int) -> list[int]:
        """Each object from a range of its own."""
        items, at = [], 0
        for key, value in objects.items():
            self.memory[at : at + len(value)] = np.frombuffer(value, np.uint8)
            items.append(PutItem(key, [(self.base + at, len(value))]))
            at += len(value)
        return self.store.batch_put(items, deadline_s, **options)

    def get(self, keys: list[bytes], length: int, deadline_s: float = 5.0) -> list[bytes | int]:
        """Bytes, or the code of what is not there."""
        self.memory[: length * len(keys)] = 0
        items = [GetItem(key, [(self.base + at * length, length)]) for at, key in enumerate(keys)]
        codes = self.store.batch_get(items, deadline_s)
        return [
            self.memory[at * length : (at + 1) * length].tobytes() if code == length else code
            for at, code in enumerate(codes)
        ]

    def close(self) -> None:
        self.store.close()
        self.engine.close()


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def value(number: int, length: int) -> bytes:
    return np.random.default_rng(number).integers(0, 256, length, np.uint8).tobytes()
