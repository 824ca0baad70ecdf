"""The open-source engine's wheel, kept in a folder of its own: its package is called `mooncake` too.

Knows: how it is installed and what of the system it needs. Does not know: who uses it. `environ(wheel())` makes a Python process
import that `mooncake` in the place of ours. Nothing is installed outside of `.cache`.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

REQUIREMENT = "mooncake-transfer-engine-non-cuda==0.3.13.post1"
ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".cache" / "open-source-wheel"
_DEBS = ("libibverbs1", "libnl-3-200", "libnl-route-3-200")
_CHECK = "import mooncake.engine, sys; sys.exit('open-source-wheel' not in mooncake.engine.__file__)"


class NoWheel(Exception):
    """Why it cannot be had here."""


def wheel() -> Path:
    """The folder to put first on PYTHONPATH, made on first use. Raises NoWheel."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        site = FOLDER / "site"
        if not (site / "mooncake").is_dir():
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), REQUIREMENT]
            _run(pip, FOLDER)
        if not _imports(site):
            _unpack_libraries()
            if not _imports(site):
                raise NoWheel(f"{REQUIREMENT} is installed but cannot be imported: {_import(site).stderr[-300:]}")
        return site


def environ(site: Path) -> dict[str, str]:
    """Variables for a process that shall use it; the repository stays importable behind it."""
    libraries = [str(FOLDER / "debs" / part) for part in ("usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu")]
    return {
        "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)]),
        "LD_LIBRARY_PATH": os.pathsep.join([*libraries, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]),
    }


def _import(site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _CHECK]
    return subprocess.run(
        command, env=os.environ | environ(site), cwd=FOLDER, capture_output=True, text=True, timeout=60
    )


def _imports(site: Path) -> bool:
    return _import(site).returncode == 0


def _unpack_libraries() -> None:
    """It is linked against libibverbs, also where there is no RDMA."""
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise NoWheel("the wheel needs libibverbs.so.1, and there is no apt-get here to fetch it with")
    _run(["apt-get", "download", "-q", *_DEBS], FOLDER)
    for deb in FOLDER.glob("*.deb"):
        _run(["dpkg-deb", "-x", str(deb), str(FOLDER / "debs")], FOLDER)


def _run(command: list[str], folder: Path) -> None:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoWheel(f"{command[0]}: {error}") from error
    if done.returncode:
        raise NoWheel(f"{' '.join(command[:4])} failed: {done.stderr[-300:]}")
