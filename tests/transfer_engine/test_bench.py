"""`mooncake bench transfer` as users run it: both roles as real processes, what it counts, what it refuses."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mooncake import cli
from mooncake.common.errors import TransferError
from tests.transfer_engine.fake import ENGINES, FakeTransport
from transfer_engine import EngineConfig, Opcode, TransferEngine
from transfer_engine.bench_load import SAMPLES, Latencies, Load
from transfer_engine.bench_phase import Phase
from transfer_engine.lanes import Job

BENCH = [sys.executable, "-m", "mooncake", "bench", "transfer"]
SMALL = ["--block-bytes", "4KiB", "--batch", "5"]


def bench(*options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*BENCH, *map(str, options)], capture_output=True, text=True, timeout=60, check=False)


@contextmanager
def target(*options: object) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """A target process and the line that it says when it is ready."""
    process = subprocess.Popen(
        [*BENCH, "--role", "target", "--json", *map(str, options)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        yield process, json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("way", ["tcp", "shm"])
def test_both_roles_with_every_operation_checked(way: str) -> None:
    done = bench("--transports", way, "--check", "--ops", 7, "--threads", 3, "--json", *SMALL)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["block_bytes"], found["batch"], found["threads"], found["checked"]) == (4096, 5, 3, True)
    assert [row["op"] for row in found["rows"]] == ["write", "read"]
    for row in found["rows"]:
        assert row["operations"] == 7
        assert row["moved"] == [{"transport": way, "nic": "", "bytes": 7 * 5 * 4096}]
        assert row["bytes_per_s"] == pytest.approx(7 * 5 * 4096 / row["seconds"])
        assert 0 < row["latency_s"]["p50"] <= row["latency_s"]["p99"]


def test_a_target_serves_several_initiators_and_ends_at_sigterm(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("a secret\n")
    shared = ("--token-file", token, "--transports", "tcp")
    with target(*shared, "--buffer-bytes", "1MiB") as (process, told):
        assert told["buffer_bytes"] == 1 << 20 and told["transports"] == ["tcp"]
        initiator = ("--role", "initiator", "--target", told["target"], *SMALL)
        for op in ("write", "read"):
            done = bench(*initiator, *shared, "--op", op, "--seconds", "0.1", "--check")
            assert done.returncode == 0, done.stderr
            assert f"\n{op} " in done.stdout and " tcp 0.00 GB" in done.stdout

        wrong = bench(*initiator, "--transports", "tcp")
        assert wrong.returncode == 1
        assert "give both sides the same --token-file" in wrong.stderr and "Traceback" not in wrong.stderr

        large = bench(*initiator, *shared, "--threads", "100")
        assert large.returncode == 2
        assert "offers 1 MiB" in large.stderr and f"--buffer-bytes {100 * 5 * 4096}" in large.stderr

        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0


def test_a_target_that_dies_is_an_error_soon() -> None:
    with target("--transports", "tcp") as (process, told):
        command = [*BENCH, "--role", "initiator", "--target", told["target"], "--seconds", "60", "--transports", "tcp"]
        environment = os.environ | {"PYTHONUNBUFFERED": "1"}
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as initiator:
            until_connected(process.pid)
            process.kill()
            assert initiator.wait(20) == 1
            assert initiator.stderr is not None
            said = initiator.stderr.read()
    assert "mooncake bench: " in said and "Traceback" not in said


def until_connected(pid: int) -> None:
    """Until somebody's data connection is accepted: three sockets are the listener, a control and a data connection."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        links = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
        if sum(link.startswith("socket:") for link in links) >= 3:
            return
        time.sleep(0.02)
    raise AssertionError("nobody connected")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--transports", "pigeon"], "unknown transport 'pigeon'; known: local, rdma, shm, tcp"),
        (["--role", "initiator"], "--role initiator needs --target host:port"),
        (["--role", "initiator", "--target", "nowhere"], "--target: not an address of the form host:port"),
        (["--target", "127.0.0.1:1"], "--target is for --role initiator"),
        (["--block-bytes", "0"], "--block-bytes"),
        (["--block-bytes", "big"], "'big' is not a size"),
        (["--op", "sideways"], "--op"),
        (["--thread", "2"], "unknown option --thread; did you mean --threads?"),
        (["--token-file", "/nonexistent"], "--token-file /nonexistent: No such file"),
        (["--token-file", "/dev/null"], "is empty"),
        (["--host", "192.0.2.1"], "cannot listen on 192.0.2.1"),
    ],
)
def test_bad_input(options: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = cli.main(["bench", "transfer", *options])
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert says in capsys.readouterr().err


def test_nobody_there() -> None:
    done = bench("--role", "initiator", "--target", "127.0.0.1:1")
    assert done.returncode == 1
    assert "127.0.0.1:1" in done.stderr and "Traceback" not in done.stderr


# --- the check itself -----------------------------------------------------------------------------------------------


class Lying(FakeTransport):
    """Moves everything, then spoils one byte of a job's last block where it went."""

    spoils = Opcode.WRITE

    def submit(self, job: Job) -> None:
        super().submit(job)
        if job.opcode is self.spoils and len(job.columns.length) > 1:  # not the proof's, which are one piece
            there = job.columns.remote if job.opcode is Opcode.WRITE else job.columns.local
            at = int(there[-1]) + int(job.columns.length[-1]) - 1
            ctypes.c_ubyte.from_address(at).value ^= 1


class LyingReader(Lying):
    spoils = Opcode.READ


@pytest.mark.parametrize("transport", [FakeTransport, Lying, LyingReader])
@pytest.mark.parametrize("opcode", list(Opcode))
def test_the_check_sees_one_wrong_byte(transport: type[FakeTransport], opcode: Opcode) -> None:
    load = Load(block_bytes=64, batch=4, threads=2, ops=4, seconds=1.0, deadline_s=5.0, check=True, seed=3)
    config = EngineConfig(transports=("fake",))
    with (
        TransferEngine(config, transports={"fake": transport}) as far,
        TransferEngine(config, transports={"fake": transport}) as engine,
    ):
        ENGINES[far.instance_id] = far
        memory = far.allocate_shared(load.total_bytes)
        phase = Phase(opcode, load, engine, engine.open_segment(far.address), memory.address)
        if getattr(transport, "spoils", None) is opcode:
            with pytest.raises(TransferError, match=f"wrong bytes after {opcode.name} number 0 of thread"):
                phase.run()
        else:
            assert phase.run().operations == 4


@pytest.mark.elsewhere("fake")
def test_bytes_are_told_nic_by_nic() -> None:
    load = Load(block_bytes=256 << 10, batch=8, threads=2, ops=20, seconds=1.0, deadline_s=10.0, check=True, seed=0)
    with (
        TransferEngine(EngineConfig(transports=("rdma",), nics=("fake2", "fake3"))) as far,
        TransferEngine(EngineConfig(transports=("rdma",), nics=("fake0", "fake1"))) as engine,
    ):
        memory = far.allocate_shared(load.total_bytes)
        segment = engine.open_segment(far.address)
        for opcode in Opcode:
            found = Phase(opcode, load, engine, segment, memory.address).run()
            assert found.moved.keys() == {("rdma", "fake0"), ("rdma", "fake1")}
            assert sum(found.moved.values()) == 20 * load.op_bytes


def test_latencies_are_bounded_and_a_sample_of_all() -> None:
    kept = Latencies(seed=1)
    for value in range(4 * SAMPLES):
        kept.add(float(value))
    assert len(kept.kept) == SAMPLES and kept.count == 4 * SAMPLES
    middle = sorted(kept.kept)[SAMPLES // 2]
    assert middle == pytest.approx(2 * SAMPLES, rel=0.02)
