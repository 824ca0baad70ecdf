"""Fixtures that tests of several folders share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.etcd import Etcd

pytest_plugins = ("tests.rdma.elsewhere",)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--transports", default="", help="ways KVCache may move on the test beds of tests/e2e, e.g. tcp")


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[Etcd]:
    """A running etcd of this test's own."""
    directory = tmp_path / "etcd"
    directory.mkdir()
    server = Etcd(directory)
    server.start()
    yield server
    server.close()
