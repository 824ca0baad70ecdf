"""The library of shim.c: built once into .cache, loaded with LD_PRELOAD, steered from inside the process that it watches.

`library()` in the test's process; `Shim()` in the other one.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

_SOURCE = Path(__file__).with_name("shim.c")
_CACHE = Path(__file__).parents[2] / ".cache"

KINDS = (
    "socket", "connect", "bind", "listen", "accept", "setsockopt", "getsockopt", "shutdown", "close", "send", "recv", "poll",
    "ioctl", "getsockname", "mmap", "memfd", "ftruncate", "vm_read", "vm_write", "thread",
)  # fmt: skip
"""In the order of shim.c's enum. "send" and "recv" are all calls that move bytes over a socket."""

FAIL, SHORT, SIGNAL_BEFORE, SIGNAL_AFTER = range(4)


def library() -> Path:
    """The built library. Skips the test where there is no compiler and none can be installed."""
    made = _CACHE / f"shim-{hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16]}.so"
    if not made.exists():
        compiler = shutil.which("gcc") or shutil.which("cc") or _install()
        _CACHE.mkdir(exist_ok=True)
        draft = made.with_suffix(f".{os.getpid()}")
        subprocess.run(
            [compiler, "-shared", "-fPIC", "-O2", "-Wall", "-o", draft, _SOURCE, "-ldl", "-lpthread"], check=True
        )
        draft.rename(made)
    return made


def _install() -> str:
    if os.geteuid() == 0 and shutil.which("apt-get"):
        command = ["apt-get", "-o", "DPkg::Lock::Timeout=300", "install", "-y", "gcc", "libc6-dev"]
        subprocess.run(command, check=False, stdout=subprocess.DEVNULL, timeout=300)
    found = shutil.which("gcc")
    if found is None:
        pytest.skip("needs a C compiler: install gcc")
    return found


class Shim:
    """In a process that was started with the library."""

    def __init__(self) -> None:
        self._own = ctypes.CDLL(None)
        self._own.shim_arm.argtypes = [ctypes.c_int] * 3 + [ctypes.c_long] * 2 + [ctypes.c_int]
        for name in ("shim_seen", "shim_fired", "shim_moved"):
            getattr(self._own, name).restype = ctypes.c_long

    def arm(self, kind: str, action: int, value: int, nth: int, times: int = 1, count_bytes: bool = False) -> None:
        """At the `nth` call of `kind` from now on (after so many bytes, with `count_bytes`), and `times` in a row: FAIL with
        errno `value`, SHORT to `value` bytes, or send ourselves the signal `value`. `nth` 0 only counts."""
        self._own.shim_arm(KINDS.index(kind), action, value, nth, times, int(count_bytes))

    def disarm(self) -> None:
        self._own.shim_disarm()

    def seen(self) -> dict[str, int]:
        """Calls of each kind since `arm`."""
        return {kind: int(self._own.shim_seen(at)) for at, kind in enumerate(KINDS)}

    def moved(self) -> int:
        """Bytes of the armed kind, when counting bytes."""
        return int(self._own.shim_moved())

    def fired(self) -> int:
        return int(self._own.shim_fired())
