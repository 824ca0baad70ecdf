"""Test beds of the session: a platform and a plain vLLM with the same flags, float32, tiny model; one bed at a time.

`eager` (2 prefill, 1 decode) serves all tests but those of `compiled` (1 and 1, torch.compile), which run last. KVCache moves by
shared memory in `eager` and by tcp in `compiled`; `--transports tcp` forces one way on every bed.
"""

from __future__ import annotations

import contextlib
import fcntl
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from deploy.testbed import PlainVLLM, Platform
from mooncake.models import resolve_model

COMMON = ["--model", "tiny", "--dtype", "float32", "--kv-cache-bytes", str(64 << 20), "--max-model-len", "8192"]
BEDS = {
    "eager": [*COMMON, "--prefill", "2", "--decode", "1", "--enforce-eager", "--store-bytes", str(256 << 20)],
    "compiled": [
        *COMMON, "--prefill", "1", "--decode", "1", "--no-enforce-eager", "--store-bytes", str(64 << 20), "--transports", "tcp",
    ],
}  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "/e2e/" in str(item.path):
            item.add_marker(pytest.mark.e2e)
            item.add_marker(pytest.mark.slow)
    items.sort(key=starts_servers_of_its_own)  # stable: a bed is started once


def starts_servers_of_its_own(item: pytest.Item) -> int:
    """Order of the test beds: everything else, the compiled bed, the bare connector pair."""
    names = getattr(item, "fixturenames", ())
    return 2 if "world" in names and "beds" in names else int("compiled" in names)


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Two test beds at once on two cores miss each other's deadlines: a machine's second test run waits for the first."""
    with (Path(tempfile.gettempdir()) / "mooncake-testbed.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class Beds:
    """Starts a bed when it is asked for, and stops the one before."""

    def __init__(self, directory: Path, transports: str) -> None:
        self._directory = directory
        self.transports = transports
        self._kind = ""
        self._running: tuple[Platform, PlainVLLM] | None = None

    def get(self, kind: str) -> tuple[Platform, PlainVLLM]:
        if self._running is None or self._kind != kind:
            self.stop()
            self._kind = kind
            forced = ["--transports", self.transports] if self.transports else []
            platform = Platform(self._directory / kind, *BEDS[kind], *forced)
            plain = PlainVLLM(
                resolve_model("tiny"), self._directory / f"plain-{kind}.log", compile_model=kind == "compiled"
            )
            self._running = platform, plain  # both start at once: most of a start is imports
            try:
                plain.wait_ready()
                platform.wait_ready()
            except BaseException:
                self.stop()
                raise
        return self._running

    def stop(self) -> None:
        for server in reversed(self._running or ()):
            server.stop()
        self._running = None


@pytest.fixture(scope="session")
def beds(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[Beds]:
    with one_at_a_time():
        beds = Beds(tmp_path_factory.mktemp("e2e"), pytestconfig.getoption("--transports"))
        try:
            yield beds
        finally:
            beds.stop()


@pytest.fixture
def platform(beds: Beds) -> Platform:
    return beds.get("eager")[0]


@pytest.fixture
def plain(beds: Beds) -> PlainVLLM:
    return beds.get("eager")[1]


@pytest.fixture
def compiled(beds: Beds) -> tuple[Platform, PlainVLLM]:
    return beds.get("compiled")


@pytest_asyncio.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=180, limits=httpx.Limits(max_connections=None)) as client:
        yield client
