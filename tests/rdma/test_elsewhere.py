"""What happens to a test elsewhere is told here: passes, failures with their text, skips, and the death of the whole place."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rdma.guest_image import ROOT
from tests.rdma.places import tools

_SAMPLE = """
import ctypes, os, pytest
pytestmark = pytest.mark.elsewhere("fake")

@pytest.fixture
def broken():
    yield
    raise RuntimeError("a telling teardown")

def test_passes():
    assert ctypes.CDLL(None).fakeverbs_live() == 0
def test_fails():
    assert 1 == 2, "a telling text"
def test_skips():
    pytest.skip("a telling reason")
def test_ends_badly(broken):
    pass
def test_left_out():
    assert False
def test_dies():
    os.abort()
def test_after_it():
    pass
"""


@pytest.fixture
def sample() -> Iterator[Path]:
    """Below the repository, so that its settings and names hold."""
    with tempfile.TemporaryDirectory(dir=ROOT / ".cache") as folder:
        path = Path(folder, "test_sample.py")
        path.write_text(_SAMPLE)
        yield path


def test_every_kind_of_end_is_reported(sample: Path) -> None:
    if why_not := tools("fake"):
        pytest.skip(why_not)
    command = [sys.executable, "-m", "pytest", "-p", "tests.rdma.elsewhere", "-p", "no:cacheprovider", "-rA"]
    command += ["-k", "not left_out", str(sample.relative_to(ROOT))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    text = done.stdout + done.stderr
    ends = {name: end for end, name in re.findall(r"^(PASSED|FAILED|ERROR|SKIPPED) .*::(\w+)", text, re.M)}
    assert ends == {"test_passes": "PASSED", "test_fails": "FAILED", "test_ends_badly": "ERROR"} | {
        "test_dies": "FAILED",
        "test_after_it": "FAILED",
    }, text
    for wanted in (
        "a telling text",
        "a telling reason",
        "a telling teardown",
        "no end of this test",
        "Fatal Python error: Aborted",
    ):
        assert wanted in text, wanted
