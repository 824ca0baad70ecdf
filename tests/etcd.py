"""A real etcd for tests: started, killed, stopped and emptied at will. Fixture `etcd` in tests/conftest.py."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

from deploy.etcd import etcd_command, find_etcd, is_listening
from mooncake.common.net import free_port


class Etcd:
    """One single-member etcd on loopback ports of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.client_port = free_port()
        self.peer_port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._log = (directory / "etcd.log").open("ab")

    @property
    def endpoints(self) -> list[str]:
        return [f"127.0.0.1:{self.client_port}"]

    @property
    def data_dir(self) -> Path:
        return self.directory / "data"

    def start(self, timeout_s: float = 20.0) -> None:
        """Starts it (with whatever data there are) and waits until it accepts connections."""
        command = etcd_command(
            find_etcd(), self.data_dir, host="127.0.0.1", client_port=self.client_port, peer_port=self.peer_port
        )
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log)
        deadline = time.monotonic() + timeout_s
        while not is_listening("127.0.0.1", self.client_port):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"etcd did not start:\n{(self.directory / 'etcd.log').read_text()[-2000:]}")
            time.sleep(0.05)

    def kill(self) -> None:
        """`kill -9`."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """Stops answering without closing a connection (SIGSTOP)."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def empty(self) -> None:
        """Forgets everything; only while it is not running."""
        assert self._process is None
        shutil.rmtree(self.data_dir)

    def close(self) -> None:
        self.kill()
        self._log.close()
