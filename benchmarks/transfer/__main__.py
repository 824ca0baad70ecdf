"""The transfer engine beside its rivals and the memcpy limit, in one run (after the paper's Figure 12).

    python -m benchmarks.transfer [--json] [--plot docs/img/transfer.svg] [--ways tcp,"c++ tcp"] [--rounds 3] [--seconds 0.25]

Pairs of processes on this host: our ways, the open-source C++ engine (tcp), torch.distributed with Gloo, NIXL with UCX. 64
scattered blocks at a time, and single blocks of 4 KiB for latency; the next step starts when the last is acknowledged. Contents are
checked first. Needs about 12 GiB of memory with all rivals and sizes; rivals are installed under .cache on first use.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.transfer import report, rivals
from benchmarks.transfer.contest import BLOCKS, SIZES, Contest

_WAYS = [way for rival in rivals.ALL for way in rival.ways]


def _load() -> str:
    return Path("/proc/loadavg").read_text().split()[0]


def _available_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))


def _needed_bytes(ways: set[str], largest: int) -> int:
    buffers = sum(4 if rival.name == "ours" else 2 for rival in rivals.ALL if ways & set(rival.ways))
    return buffers * BLOCKS * largest


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.transfer", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--plot", type=Path, help="also draw it into this file (.svg or .png)")
    parser.add_argument("--ways", default=",".join(_WAYS), help=f"which rows, separated by commas: {', '.join(_WAYS)}")
    parser.add_argument("--rounds", type=int, default=3, help="turns that everybody takes at each cell")
    parser.add_argument("--seconds", type=float, default=0.25, help="measured time per turn and cell")
    parser.add_argument(
        "--at-most", type=float, default=240.0, help="seconds after which no further round begins or goes on"
    )
    parser.add_argument("--largest", type=int, default=SIZES[-1], help="leave out blocks above this many bytes")
    return parser.parse_args()


def main() -> None:
    options = _options()
    ways = set(options.ways.split(","))
    if unknown := ways - set(_WAYS):
        raise SystemExit(f"unknown ways {', '.join(sorted(unknown))}; known: {', '.join(_WAYS)}")
    sizes = tuple(size for size in SIZES if size <= options.largest)
    needed = _needed_bytes(ways, sizes[-1])
    if needed > _available_bytes():
        raise SystemExit(f"needs {needed >> 30} GiB of free memory: take fewer --ways, or --largest {sizes[-1] >> 4}")
    before, until = _load(), time.monotonic() + options.at_most
    contest = Contest(list(rivals.ALL), ways, sizes)
    try:
        rows = contest.run(options.rounds, options.seconds, until)
    finally:
        contest.close()
    host = (
        f"{platform.machine()}, {len(_cores())} cores, Linux {platform.release()}, Python {platform.python_version()}"
    )
    report.add_ratios(rows)
    found: dict[str, Any] = {"host": host, "load": f"{before}, {_load()}", "missing": contest.missing, "rows": rows}
    print(json.dumps(found) if options.json else report.table(found))
    if options.plot is not None:
        try:
            report.plot(found, options.plot)
        except rivals.Missing as error:
            sys.exit(str(error))


def _cores() -> set[int]:
    return os.sched_getaffinity(0)


if __name__ == "__main__":
    main()
