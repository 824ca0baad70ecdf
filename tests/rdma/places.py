"""Where RDMA tests can run: the virtual machine, and a process with the verbs provider in memory.

Knows: how to get there (packages first), how long it may take, how its pytest is called. Does not know: reports.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

from tests.native import build
from tests.rdma import vm
from tests.rdma.guest_image import CACHE, ROOT

VM_TIMEOUT_S = 540.0
FAKE_TIMEOUT_S = 300.0
FAKE_NICS = 4
_TAIL = 6000


class Ended(NamedTuple):
    """Exit status of the place's pytest, and the end of its output."""

    status: int
    tail: str


class Place(Protocol):
    def unavailable(self) -> str:
        """Why it cannot be had here, with the fix; "" when it is ready. Installs what it needs, so the first call may take a
        minute or two."""

    def run(self, names: list[str], environment: dict[str, str], reports: str, take: Callable[[str], object]) -> Ended:
        """Run those tests; the place's pytest appends lines to the file that the variable `reports` names, and `take` gets each."""


@functools.cache
def tools(what: str) -> str:
    """Run scripts/rdma_tools.sh; "" or why not."""
    done = subprocess.run([ROOT / "scripts" / "rdma_tools.sh", what], capture_output=True, text=True, timeout=900)
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["scripts/rdma_tools.sh failed"])[-1]


def library() -> Path:
    """fakeverbs.c, built."""
    return build(Path(__file__).with_name("fakeverbs.c"), "-Wextra", "-Wno-unused-parameter", "-lpthread")


def _pytest(names: Path) -> list[str]:
    # Without automatic loading: looking at every installed package for plugins costs an emulated machine ten seconds.
    plugins = ["-p", "tests.rdma.elsewhere", "-p", "pytest_asyncio.plugin", "-p", "pytest_timeout"]
    return [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", *plugins, f"@{names}"]


_ALWAYS = {
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "PYTEST_ADDOPTS": "",
}


class _Folder:
    """What goes in and comes out: names of tests, lines of reports."""

    def __init__(self, path: str, names: list[str]) -> None:
        self.names, self.reports = Path(path) / "names", Path(path) / "reports"
        self.names.write_text("\n".join(names))

    def hand_over(self, take: Callable[[str], object]) -> None:
        text = self.reports.read_text() if self.reports.exists() else ""
        for line in text.splitlines(keepends=True):
            if line.endswith("\n"):  # the last one may be half of one
                take(line)


class FakePlace:
    def unavailable(self) -> str:
        why_not = tools("fake")
        if not why_not:
            library()
        return why_not

    def run(self, names: list[str], environment: dict[str, str], reports: str, take: Callable[[str], object]) -> Ended:
        with tempfile.TemporaryDirectory(prefix="rdma-fake-") as path:
            folder = _Folder(path, names)
            environment |= {
                "LD_PRELOAD": str(library()),
                "FAKEVERBS_NICS": str(FAKE_NICS),
                reports: str(folder.reports),
            }
            command = _pytest(folder.names)
            try:
                done = subprocess.run(
                    command, env=os.environ | _ALWAYS | environment, cwd=ROOT, timeout=FAKE_TIMEOUT_S,
                    stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                )  # fmt: skip
                ended = Ended(done.returncode, done.stdout[-_TAIL:])
            except subprocess.TimeoutExpired as error:
                ended = Ended(
                    vm.TIMED_OUT, f"over {FAKE_TIMEOUT_S} s\n{(error.stdout or b'')[-_TAIL:].decode(errors='replace')}"
                )
            folder.hand_over(take)
            return ended


class VmPlace:
    """One boot for all tests of a session; its output is kept in .cache/rdma/vm.log."""

    def unavailable(self) -> str:
        return tools("all")

    def run(self, names: list[str], environment: dict[str, str], reports: str, take: Callable[[str], object]) -> Ended:
        with tempfile.TemporaryDirectory(prefix="rdma-vm-tests-") as path, (CACHE / "vm.log").open("w+b") as log:
            folder = _Folder(path, names)
            environment |= _ALWAYS | {reports: str(folder.reports), "TMPDIR": "/dev/shm"}
            machine = vm.Machine(numa=True, shared=(Path(path),), environment=tuple(environment.items()))

            def output(data: bytes) -> None:
                log.write(data)
                log.flush()

            outcome = vm.run(_pytest(folder.names), machine, timeout_s=VM_TIMEOUT_S, output=output)
            folder.hand_over(take)
            log.seek(0)
            text = log.read()[-_TAIL:].decode(errors="replace")
            return Ended(outcome.status, text + (outcome.console if outcome.status in (vm.TIMED_OUT, vm.DIED) else ""))


PLACES: dict[str, Place] = {"vm": VmPlace(), "fake": FakePlace()}
