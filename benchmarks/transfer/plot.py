"""Draws a report (JSON on stdin) after the paper's Figure 12: bandwidth by block size and way. Runs by path with matplotlib."""

from __future__ import annotations

import json
import sys
from typing import Any

import matplotlib  # type: ignore[import-not-found]  # lives in a folder of its own
from matplotlib import pyplot

_COLOURS = {
    "tcp": "#1f6fb4", "c++ tcp": "#d1495b", "gloo tcp": "#edae49", "nixl/ucx tcp": "#8d6a9f",
    "shm-mapped": "#2a9d5c", "shm-cma": "#7cc99b", "nixl/ucx shm": "#c3a6cf", "local": "#5f7f8f", "memcpy": "#b0b0b0",
}  # fmt: skip


def _size(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def main() -> None:
    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "mooncake"}
    report: dict[str, Any] = json.load(sys.stdin)
    rows = report["rows"]
    ways = [way for way in _COLOURS if any(row["way"] == way for row in rows)]
    sizes = sorted({row["block_bytes"] for row in rows if row["blocks"] > 1})
    figure, panels = pyplot.subplots(1, 3, figsize=(13, 4), width_ratios=[3, 3, 1.6], layout="constrained")
    for panel, op in zip(panels, ("WRITE", "READ"), strict=False):
        for place, way in enumerate(ways):
            speeds = {
                r["block_bytes"]: r["bytes_per_s"] / 1e9
                for r in rows
                if (r["way"], r["op"]) == (way, op) and r["blocks"] > 1
            }
            at = [index + (place - len(ways) / 2) * 0.8 / len(ways) for index in range(len(sizes))]
            panel.bar(
                at,
                [speeds.get(size, 0) for size in sizes],
                0.8 / len(ways),
                color=_COLOURS[way],
                label=way,
                align="edge",
            )
        panel.set_xticks(range(len(sizes)), [f"64 x {_size(size)}" for size in sizes])
        panel.set_ylabel("GB/s")
        panel.set_title(op)
    latency = panels[2]
    for place, way in enumerate(ways):
        values = [
            row["latency_us_p50"] for row in rows if row["way"] == way and row["blocks"] == 1 and row["op"] == "WRITE"
        ]
        latency.barh(place, values[:1] or [0], color=_COLOURS[way])
    latency.set_yticks(range(len(ways)), ways)
    latency.invert_yaxis()
    latency.set_xscale("log")
    latency.set_xlabel("us")
    latency.set_title("4 KiB WRITE, median")
    panels[0].legend(fontsize="small", ncols=2)
    figure.savefig(sys.argv[1], metadata={"Date": None} if sys.argv[1].endswith(".svg") else None)


if __name__ == "__main__":
    main()
