"""Small C libraries that tests need (a fake driver, a preloaded shim), built once into .cache.

Knows: where a compiler is or can be had from. Does not know: what is built.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

_CACHE = Path(__file__).resolve().parents[1] / ".cache"


def build(source: Path, *flags: str) -> Path:
    """The shared library of one C file. Skips the test where there is no compiler and none can be installed."""
    content = source.read_bytes() + repr(flags).encode()
    made = _CACHE / f"{source.stem}-{hashlib.sha256(content).hexdigest()[:16]}.so"
    if not made.exists():
        _CACHE.mkdir(exist_ok=True)
        draft = made.with_suffix(f".{os.getpid()}")
        command = [_compiler(), "-shared", "-fPIC", "-O2", "-Wall", "-o", str(draft), str(source), *flags]
        subprocess.run(command, check=True, timeout=120)
        draft.replace(made)
    return made


@functools.cache
def _compiler() -> str:
    if (found := shutil.which("gcc") or shutil.which("cc")) is not None:
        return found
    if os.geteuid() == 0 and shutil.which("apt-get"):
        command = ["apt-get", "-o", "DPkg::Lock::Timeout=300", "install", "-y", "gcc", "libc6-dev"]
        subprocess.run(command, check=False, stdout=subprocess.DEVNULL, timeout=300)
    if (found := shutil.which("gcc")) is None:
        pytest.skip("needs a C compiler: install gcc")
    return found
