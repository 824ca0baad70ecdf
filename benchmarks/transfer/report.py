"""What a run found: ratios, the table, the picture. Knows: rows of `contest`. Does not know: how they were measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.transfer.rivals import MATPLOTLIB, site

RIVAL = "c++ tcp"
Rows = list[dict[str, Any]]


def add_ratios(rows: Rows) -> None:
    """`of_memcpy` and `of_cxx` (speed, or the inverse of latency: above 1 is better than the rival). Mutates."""
    by_cell = {(row["way"], row["op"], row["block_bytes"]): _speed(row) for row in rows}
    for row in rows:
        cell = row["op"], row["block_bytes"]
        for name, way in (("of_memcpy", "memcpy"), ("of_cxx", RIVAL)):
            if (way, *cell) in by_cell:
                row[name] = round(_speed(row) / by_cell[(way, *cell)], 3)


def _speed(row: dict[str, Any]) -> float:
    return float(row["bytes_per_s"] if "bytes_per_s" in row else 1 / row["latency_us_p50"])


def table(report: dict[str, Any]) -> str:
    """Markdown."""
    rows: Rows = report["rows"]
    sizes = sorted({row["block_bytes"] for row in rows if row["blocks"] > 1})
    heads = ["way", "op", "4 KiB p50 / p99, us", *(f"{_size(size)}, GB/s" for size in sizes)]
    lines = [" | ".join(["", *heads, ""]).strip(), "|" + " --- |" * len(heads)]
    for way in dict.fromkeys(row["way"] for row in rows):
        for op in dict.fromkeys(row["op"] for row in rows):
            mine = {row["block_bytes"]: row for row in rows if row["way"] == way and row["op"] == op}
            if mine:
                cells = [_cell(row) for row in mine.values()]
                lines.append(" | ".join(["", way, op, *cells, ""]).strip())
    lines += [f"| {way} | | {why} |" + " |" * (len(heads) - 3) for way, why in report["missing"].items()]
    note = f"64 blocks at a time. In brackets: times {RIVAL}; times memcpy for the ways past the network. Load average before and after:"
    return "\n".join([f"{report['host']}. {note} {report['load']}", "", *lines])


def _cell(row: dict[str, Any]) -> str:
    if row["blocks"] == 1:
        text = f"{row['latency_us_p50']:.0f} / {row['latency_us_p99']:.0f}"
    else:
        text = f"{row['bytes_per_s'] / 1e9:.2f}"
    near = row["way"] in ("local", "shm-mapped", "shm-cma", "nixl/ucx shm") and row["blocks"] > 1
    ratio = row.get("of_memcpy" if near else "of_cxx")
    return text if ratio is None or row["way"] in (RIVAL, "memcpy") else f"{text} ({ratio:.2f})"


def _size(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def plot(report: dict[str, Any], target: Path) -> None:
    """Draw it in a process that has matplotlib. Raises Missing, CalledProcessError."""
    env = os.environ | {"PYTHONPATH": site("matplotlib", MATPLOTLIB)}
    command = [sys.executable, str(Path(__file__).with_name("plot.py")), str(target.resolve())]
    subprocess.run(command, input=json.dumps(report), text=True, env=env, check=True, timeout=120)
