"""One platform (2 prefill, 1 decode) and one plain vLLM for the whole session; both eager, float32, tiny model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from deploy.testbed import PlainVLLM, Platform
from mooncake.models import resolve_model

API_KEY = "test-key"
UP_ARGUMENTS = [
    *("--model", "tiny", "--prefill", "2", "--decode", "1", "--dtype", "float32", "--enforce-eager"),
    *("--kv-cache-bytes", str(64 << 20), "--max-model-len", "8192", "--store-bytes", str(256 << 20)),
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "/e2e/" in str(item.path):
            item.add_marker(pytest.mark.e2e)
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Platform, PlainVLLM]]:
    """Both started at once: most of a start is imports, and they share two cores anyway."""
    directory: Path = tmp_path_factory.mktemp("e2e")
    model = resolve_model("tiny")
    platform = Platform(directory / "run", *UP_ARGUMENTS)
    plain = PlainVLLM(model, directory / "plain.log")
    try:
        plain.wait_ready()
        platform.wait_ready()
        yield platform, plain
    finally:
        plain.stop()
        platform.stop()


@pytest.fixture(scope="session")
def platform(servers: tuple[Platform, PlainVLLM]) -> Platform:
    return servers[0]


@pytest.fixture(scope="session")
def plain(servers: tuple[Platform, PlainVLLM]) -> PlainVLLM:
    return servers[1]


@pytest_asyncio.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=180, limits=httpx.Limits(max_connections=None)) as client:
        yield client
