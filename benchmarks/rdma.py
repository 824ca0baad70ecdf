"""The transfer engine over RDMA beside perftest (`ib_write_bw`, `ib_read_bw`) in the same run: 64 KiB blocks, WRITE and READ.

    python -m benchmarks.rdma [--json] [--rounds 5] [--mib 32]          in the virtual machine of tests/rdma (soft-RoCE)
    python -m benchmarks.rdma --here --ours mlx5_0 --theirs mlx5_1      on a machine with NICs (two, or one against itself)

perftest uses one queue pair from the first of our NICs to the first of theirs; so does the first row of the engine. The second
row of the engine uses all NICs that are named. Every round runs each of them once, one after the other; medians and their
ratio are told. In the virtual machine everything is emulated, so only ratios mean anything.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing as mp
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from transfer_engine import EngineConfig, Opcode, TransferEngine, TransferVector

BLOCK_BYTES = 64 << 10
PERFTEST = {Opcode.WRITE: "ib_write_bw", Opcode.READ: "ib_read_bw"}
PERFTEST_PORT = 18515
MIB = 1 << 20
_START_S, _RUN_S = 60.0, 120.0


# --- the engine -----------------------------------------------------------------------------------------------------


def _target(pipe: Connection, nics: tuple[str, ...], length: int) -> None:
    with TransferEngine(EngineConfig(transports=("rdma",), nics=nics)) as engine:
        memory = np.zeros(length, np.uint8)
        pipe.send((engine.address, engine.register_buffer(memory)))
        while pipe.recv() == "sum":
            pipe.send(int(memory.sum(dtype=np.uint64)))


class EnginePair:
    """An initiator here, a target in another process. That is forked at once (a new interpreter takes an emulated machine
    ten seconds), so make all pairs before the first `start`: engines have threads."""

    def __init__(self, ours: tuple[str, ...], theirs: tuple[str, ...], blocks: int, settings: dict[str, int]) -> None:
        self._ours, self._blocks, self._settings = ours, blocks, settings
        self._pipe, far = mp.Pipe()
        arguments = (far, theirs, blocks * BLOCK_BYTES)
        self._process = mp.get_context("fork").Process(target=_target, args=arguments, daemon=True)
        self._process.start()

    def start(self) -> None:
        blocks = self._blocks
        if not self._pipe.poll(_START_S):
            raise SystemExit("the target's engine did not start")
        address, base = self._pipe.recv()
        self.engine = TransferEngine(EngineConfig(transports=("rdma",), nics=self._ours, **self._settings))  # type: ignore[arg-type]
        self.memory = np.ones(blocks * BLOCK_BYTES, np.uint8)
        at = self.engine.register_buffer(self.memory)
        segment = self.engine.open_segment(address)
        slots = np.arange(blocks, dtype=np.uint64) * np.uint64(BLOCK_BYTES)
        order = np.random.default_rng(0).permutation(blocks)
        columns = np.uint64(at) + slots[order], np.uint64(base) + slots, np.full(blocks, BLOCK_BYTES)
        self._vectors = {opcode: TransferVector(opcode, segment, *columns) for opcode in Opcode}

    def run(self, opcode: Opcode) -> float:
        """Bytes per second."""
        began = time.perf_counter()
        status = self.engine.transfer_sync(self._vectors[opcode], _RUN_S)
        return status.transferred_bytes / (time.perf_counter() - began)

    def check(self) -> None:
        """Bytes that went there and back again are those that were sent."""
        self.run(Opcode.WRITE)
        self._pipe.send("sum")
        if self._pipe.recv() != len(self.memory):
            raise SystemExit("wrong bytes arrived")
        self.memory[:] = 0
        self.run(Opcode.READ)
        if not self.memory.all():
            raise SystemExit("wrong bytes came back")

    def close(self) -> None:
        self.engine.close()
        with contextlib.suppress(OSError):
            self._pipe.send("end")
        self._process.join(5)
        self._process.kill()


# --- perftest -------------------------------------------------------------------------------------------------------


def _listens(port: int) -> bool:
    """Without knocking: perftest takes the first caller for its client."""
    lines = Path("/proc/net/tcp").read_text().splitlines()
    return any(line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "0A" for line in lines[1:])


@contextlib.contextmanager
def _server(command: list[str]) -> Iterator[None]:
    """Yields when it listens. Raises SystemExit with its words when it does not."""
    with tempfile.TemporaryFile("w+") as words:
        process = subprocess.Popen(command, stdout=words, stderr=words)
        try:
            deadline = time.monotonic() + _START_S
            while not _listens(PERFTEST_PORT):
                if process.poll() is not None or time.monotonic() > deadline:
                    words.seek(0)
                    raise SystemExit(f"{' '.join(command)} does not listen: {words.read()[-2000:]}")
                time.sleep(0.05)
            yield
            process.wait(20)
        finally:
            process.kill()
            process.wait()


def _gid_index(nic: str) -> int:
    from transfer_engine.transports.rdma import verbs

    context = verbs.load().Context(name=nic)
    try:
        return verbs.choose_gid(context, 1, context.query_port(1).link_layer).index
    finally:
        context.close()


def perftest(opcode: Opcode, ours: str, theirs: str, blocks: int) -> float:
    """Bytes per second. Raises SystemExit when it says nothing usable."""
    common = ["-s", str(BLOCK_BYTES), "-n", str(blocks), "-F", "-m", "4096"]

    def command(nic: str) -> list[str]:
        return [PERFTEST[opcode], "-d", nic, "-x", str(_gid_index(nic)), *common]

    client = [*command(ours), "--output=bandwidth", "127.0.0.1"]
    with _server(command(theirs)):
        done = subprocess.run(client, capture_output=True, text=True, timeout=_RUN_S, check=False)
    try:
        return float(done.stdout.split()[-1]) * MIB  # it says MB and means MiB
    except (ValueError, IndexError):
        raise SystemExit(f"{' '.join(client)} failed: {done.stdout}{done.stderr}") from None


# --- the run --------------------------------------------------------------------------------------------------------


def measure(
    ours: tuple[str, ...], theirs: tuple[str, ...], mib: int, rounds: int, settings: dict[str, int]
) -> dict[str, Any]:
    blocks = mib * MIB // BLOCK_BYTES
    pairs = {"engine, 1 NIC": EnginePair(ours[:1], theirs[:1], blocks, settings)}
    if len(ours) > 1:
        pairs[f"engine, {len(ours)} NICs"] = EnginePair(ours, theirs, blocks, settings)
    speeds: dict[tuple[str, Opcode], list[float]] = {}
    for pair in pairs.values():
        pair.start()
        pair.check()  # also the warm-up
    for _ in range(rounds):
        for opcode in (Opcode.WRITE, Opcode.READ):
            speeds.setdefault(("perftest", opcode), []).append(perftest(opcode, ours[0], theirs[0], blocks))
            for name, pair in pairs.items():
                speeds.setdefault((name, opcode), []).append(pair.run(opcode))
    for pair in pairs.values():
        pair.close()
    rows = []
    for (name, opcode), found in speeds.items():
        speed, limit = statistics.median(found), statistics.median(speeds["perftest", opcode])
        row = {"who": name, "op": opcode.name, "bytes_per_s": speed, "of_perftest": speed / limit}
        rows.append(row | {"slowest": min(found), "fastest": max(found)})
    host = (
        f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}, Python {platform.python_version()}"
    )
    return {
        "host": host,
        "block_bytes": BLOCK_BYTES,
        "bytes": blocks * BLOCK_BYTES,
        "rounds": rounds,
        **settings,
        "rows": rows,
    }


def _table(report: dict[str, Any]) -> str:
    lines = [f"{report['host']}; {report['bytes'] // MIB} MiB in blocks of 64 KiB, {report['rounds']} rounds", ""]
    lines += ["| who | op | MB/s, median | slowest to fastest | of perftest |", "| --- | --- | --- | --- | --- |"]
    for row in report["rows"]:
        speeds = f"{row['bytes_per_s'] / 1e6:.1f} | {row['slowest'] / 1e6:.1f} to {row['fastest'] / 1e6:.1f}"
        lines.append(f"| {row['who']} | {row['op']} | {speeds} | {row['of_perftest']:.2f} |")
    return "\n".join(lines)


def _in_vm(arguments: list[str]) -> int:
    from tests.rdma import vm
    from tests.rdma.places import tools

    if why_not := tools("all"):
        raise SystemExit(why_not)
    command = [sys.executable, "-m", "benchmarks.rdma", "--here", *arguments]
    machine = vm.Machine(environment=(("OPENBLAS_NUM_THREADS", "1"),))

    def show(data: bytes) -> None:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()

    outcome = vm.run(command, machine, timeout_s=600, output=show)
    if outcome.status in (vm.TIMED_OUT, vm.DIED):
        print(outcome.console, file=sys.stderr)
    return outcome.status


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--here", action="store_true", help="use this machine's NICs instead of the virtual machine's")
    parser.add_argument("--ours", type=_names, default=("rxe_a0", "rxe_a1"), help="NICs of the initiator, a,b,...")
    parser.add_argument("--theirs", type=_names, default=("rxe_b0", "rxe_b1"), help="NICs of the target, a,b,...")
    parser.add_argument("--mib", type=int, default=32, help="payload per measurement")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--slice-kib", type=int, help="the engine's rdma_slice_bytes, to find the best one")
    parser.add_argument("--window-kib", type=int, help="the engine's rdma_window_bytes")
    options = parser.parse_args()
    if not options.here:
        return _in_vm(sys.argv[1:])
    given = {"rdma_slice_bytes": options.slice_kib, "rdma_window_bytes": options.window_kib}
    settings = {field: kib << 10 for field, kib in given.items() if kib}
    report = measure(options.ours, options.theirs, options.mib, options.rounds, settings)
    print(json.dumps(report, indent=1) if options.json else _table(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
