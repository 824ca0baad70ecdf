"""A machine without RDMA: the engine works, and forcing rdma says what to do."""

from __future__ import annotations

import subprocess
import sys

import pytest

from mooncake.common.errors import ConfigError
from transfer_engine import EngineConfig, TransferEngine
from transfer_engine.transports.rdma import verbs

absent = pytest.mark.skipif(not verbs.unavailable(), reason="this machine has an RDMA device")


@absent
def test_rdma_alone_is_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match=r"rdma: .*(apt-get install python3-pyverbs|rdma link)"):
        TransferEngine(EngineConfig(transports=("rdma",)))


@absent
def test_rdma_beside_others_is_left_out() -> None:
    with TransferEngine(EngineConfig(transports=("rdma", "tcp"))) as engine:
        assert engine.identity.transports == ("tcp",)


def test_importing_the_engine_imports_no_verbs() -> None:
    code = "import sys, transfer_engine; sys.exit(any(name.startswith('pyverbs') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_finding_debians_package_brings_nothing_else_from_its_folder() -> None:
    """/usr/lib/python3/dist-packages on the path would put Debian's packages before ours."""
    before = list(sys.path)
    verbs.unavailable()
    assert sys.path == before


@pytest.mark.parametrize(
    ("field", "value"), [("rdma_retry_count", 7), ("rdma_timeout", 31), ("rdma_queue_depth", 1), ("rdma_rest_s", 0)]
)
def test_settings_that_would_never_end_or_fit_are_refused(field: str, value: int) -> None:
    with pytest.raises(ConfigError, match=field):
        EngineConfig(**{field: value})  # type: ignore[arg-type]
