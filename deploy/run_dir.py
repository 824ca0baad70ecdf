"""The folder of one running cluster: logs, etcd's data, a lock, and `state.json` for `mooncake status`, tests and
benchmarks.

`state.json` (mode 0600: it holds the cluster token):
    {"endpoint", "pid", "run_dir", "cluster", "cluster_token", "etcd": [...], "model", "phase": "starting" | "ready" |
    "stopping",
     "roles": {name: {"role", "pid", "port", "http_url", "address", "state", "restarts", "log", "info": {}}}}
Removed when the cluster stops. Does not know: how anything is started.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import IO, Any

from mooncake.common.errors import ConfigError

STATE_FILE = "state.json"


class RunDir:
    """Holds the lock of the folder while open. Raises ConfigError when another `mooncake up` has it."""

    def __init__(self, path: str) -> None:
        self.path = Path(path).absolute() if path else _default()
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            self._lock: IO[str] = (self.path / "lock").open("w")
        except OSError as error:
            raise ConfigError(f"--run-dir {self.path}: {error.strerror or error}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(
                f"a cluster is running in {self.path} already: stop it, or choose another --run-dir"
            ) from None
        shutil.rmtree(self.etcd_data, ignore_errors=True)  # of an earlier cluster; leases would delete it anyway
        for log in self.logs.glob("*.log"):
            log.unlink()

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def etcd_data(self) -> Path:
        return self.path / "etcd"

    def write_state(self, state: dict[str, Any]) -> None:
        """Replaces the file at once: a reader never sees half of it."""
        scratch = self.path / f".{STATE_FILE}.{os.getpid()}"
        with os.fdopen(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(state, file, indent=1)
        scratch.replace(self.path / STATE_FILE)

    def close(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            (self.path / STATE_FILE).unlink()
        self._lock.close()


def read_state(path: str = "") -> dict[str, Any]:
    """The state of the cluster that runs in that folder. Raises ConfigError when there is none."""
    file = (Path(path) if path else Path.cwd() / ".run") / STATE_FILE
    try:
        state: dict[str, Any] = json.loads(file.read_text())
    except FileNotFoundError:
        raise ConfigError(f"no cluster runs in {file.parent} (give --run-dir, or --etcd HOST:PORT)") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: {error}") from error
    return state


def _default() -> Path:
    here = Path.cwd()
    return here / ".run" if os.access(here, os.W_OK) else Path(tempfile.mkdtemp(prefix="mooncake-run-"))
