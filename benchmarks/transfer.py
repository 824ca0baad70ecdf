"""Throughput and latency of the transfer engine, per transport, beside the memcpy limit of the same run.

    python -m benchmarks.transfer [--json] [--ways tcp,shm-mapped,shm-cma] [--seconds 0.5]

Two processes on this host; 64 scattered blocks a batch, one batch at a time, contents checked once per row. Latency is one
block of 4 KiB by `transfer_sync`. The memcpy limit copies the same blocks with one memmove each in one thread.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing as mp
import platform
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from transfer_engine import EngineConfig, Opcode, SegmentHandle, TransferEngine, TransferVector

BLOCKS = 64
SIZES = [16 << 10, 128 << 10, 1 << 20, 16 << 20]
LATENCY_BYTES = 4096


def _target(pipe: Connection, length: int, shared: bool) -> None:
    with TransferEngine() as engine:
        memory: Any = engine.allocate_shared(length) if shared else np.ones(length, np.uint8)
        view = np.frombuffer(memory.view, np.uint8) if shared else memory
        view[:] = 1
        pipe.send((engine.address, memory.address if shared else engine.register_buffer(memory)))
        while pipe.recv() == "sum":
            pipe.send(int(view.sum(dtype=np.uint64)))
        del view


def _rounds(step: Callable[[], None], seconds: float) -> list[float]:
    times: list[float] = []
    step()
    until = time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < until:
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    return times


def _blocks(opcode: Opcode, segment: SegmentHandle, local: int, remote: int, size: int, count: int) -> TransferVector:
    """Every second block slot, in another order on either side, so that nothing can be joined."""
    slots = np.arange(count, dtype=np.uint64) * np.uint64(size)
    order = np.random.default_rng(0).permutation(count)
    return TransferVector(
        opcode, segment, np.uint64(local) + slots[order], np.uint64(remote) + slots, np.full(count, size, np.uint64)
    )


def _memcpy(size: int, seconds: float, source: np.ndarray, target: np.ndarray) -> float:
    a, b = source.ctypes.data, target.ctypes.data
    order = np.random.default_rng(0).permutation(BLOCKS).tolist()

    def step() -> None:
        for to, of in enumerate(order):
            ctypes.memmove(b + to * size, a + of * size, size)

    return BLOCKS * size / statistics.median(_rounds(step, seconds))


def _measure(way: str, seconds: float, limits: dict[int, float], source: np.ndarray) -> list[dict[str, Any]]:
    length = BLOCKS * SIZES[-1]
    context = mp.get_context("spawn")
    pipe, far = context.Pipe()
    process = context.Process(target=_target, args=(far, length, way == "shm-mapped"), daemon=True)
    process.start()
    address, base = pipe.recv()
    rows = []
    with TransferEngine(EngineConfig(transports=(way.split("-")[0],))) as engine:
        at = engine.register_buffer(source)
        segment = engine.open_segment(address)
        for opcode in Opcode:
            one = _blocks(opcode, segment, at, base, LATENCY_BYTES, 1)
            times = _rounds(lambda one=one: engine.transfer_sync(one, 10.0) and None, seconds)  # type: ignore[misc]
            cuts = statistics.quantiles(times, n=100)
            row: dict[str, Any] = {"way": way, "op": opcode.name, "block_bytes": LATENCY_BYTES, "blocks": 1}
            rows.append(row | {"latency_us_p50": cuts[49] * 1e6, "latency_us_p99": cuts[98] * 1e6})
            for size in SIZES:
                batch = _blocks(opcode, segment, at, base, size, BLOCKS)
                times = _rounds(lambda batch=batch: engine.transfer_sync(batch, 60.0) and None, seconds)  # type: ignore[misc]
                speed = BLOCKS * size / statistics.median(times)
                row = {"way": way, "op": opcode.name, "block_bytes": size, "blocks": BLOCKS}
                row |= {"bytes_per_s": speed, "of_memcpy": speed / limits[size]}
                rows.append(row)
        source[:] = 3
        engine.transfer_sync(_blocks(Opcode.WRITE, segment, at, base, SIZES[-1], BLOCKS), 60.0)
        pipe.send("sum")
        if pipe.recv() != 3 * length:
            raise SystemExit(f"{way}: wrong bytes arrived")
        source[:] = 1
    pipe.send("end")
    process.join(5)
    return rows


def _table(report: dict[str, Any]) -> str:
    lines = [
        f"{report['host']}; load average {report['load']}",
        "",
        "| way | op | 4 KiB p50 / p99 | 64 x 16 KiB | 64 x 128 KiB | 64 x 1 MiB | 64 x 16 MiB |",
    ]
    lines += ["| --- | --- | --- | --- | --- | --- | --- |"]
    limits = " | ".join(f"{report['memcpy_bytes_per_s'][str(size)] / 1e9:.2f}" for size in SIZES)
    lines.append(f"| memcpy, GB/s | | | {limits} |")
    rows = report["rows"]
    for start in range(0, len(rows), 1 + len(SIZES)):
        latency, *speeds = rows[start : start + 1 + len(SIZES)]
        cells = " | ".join(f"{row['bytes_per_s'] / 1e9:.2f} ({row['of_memcpy']:.2f})" for row in speeds)
        delay = f"{latency['latency_us_p50']:.0f} / {latency['latency_us_p99']:.0f} us"
        lines.append(f"| {latency['way']} | {latency['op']} | {delay} | {cells} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--ways", default="shm-mapped,shm-cma,tcp")
    parser.add_argument("--seconds", type=float, default=0.5, help="measured time per cell")
    options = parser.parse_args()
    with open("/proc/loadavg") as file:
        load = " ".join(file.read().split()[:2])
    source = np.ones(BLOCKS * SIZES[-1], np.uint8)
    target = np.ones(BLOCKS * SIZES[-1], np.uint8)
    limits = {size: _memcpy(size, options.seconds, source, target) for size in SIZES}
    del target
    report: dict[str, Any] = {
        "host": f"{platform.machine()}, {mp.cpu_count()} cores, Python {platform.python_version()}",
        "load": load,
        "memcpy_bytes_per_s": {str(size): limit for size, limit in limits.items()},
        "rows": [],
    }
    for way in options.ways.split(","):
        report["rows"] += _measure(way, options.seconds, limits, source)
    print(json.dumps(report, indent=1) if options.json else _table(report))


if __name__ == "__main__":
    main()
