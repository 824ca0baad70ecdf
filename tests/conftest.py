"""Fixtures that tests of several folders share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.etcd import Etcd


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[Etcd]:
    """A running etcd of this test's own."""
    directory = tmp_path / "etcd"
    directory.mkdir()
    server = Etcd(directory)
    server.start()
    yield server
    server.close()
