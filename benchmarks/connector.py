"""vLLM's own MooncakeConnector on our `mooncake.engine` and on the open-source wheel, in one run.

    python -m benchmarks.connector [--json] [--ways ours,wheel] [--lengths 300,2000,8000] [--rounds 9]

Each way is a producer and a consumer, two vLLM CPU servers on loopback with the tiny model in float32; all of them are up at once
and take turns, in another order each round. `ours` is protocol "tcp" as it is (peers on one host share memory), `ours-tcp` with
MC_FORCE_TCP=1, `wheel` the C++ engine's TCP. TTFT: both legs are sent at once, until the first token of the decoding one.
Transfer: the producer's calls of `batch_transfer_sync_write`, timed in its own process. `prefill` is the producer of the first
way asked for one token without a transfer. Prompts are random, so nothing is cached.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

import mooncake.vllm.engine_main
from benchmarks import wheel
from tests.drop_in.pairs import InTreePair
from tests.vllm.engines import Engine

WAYS = ("ours", "ours-tcp", "wheel")
LENGTHS = (300, 2000, 8000)
WARM = 300
"""Tokens of the round before the first: connections, memory and lazy imports need no long prompts."""
ENTRY = ("-P", str(Path(mooncake.vllm.engine_main.__file__)))
"""By path, because with the wheel on PYTHONPATH there is no `mooncake.vllm`."""


def _pair(directory: Path, way: str) -> InTreePair:
    environ = {"ours": {}, "ours-tcp": {"MC_FORCE_TCP": "1"}, "wheel": {"MC_LOG_LEVEL": "WARNING"}}[way]
    if way == "wheel":
        environ |= wheel.environ(wheel.wheel())
    return InTreePair(directory, way, environ=environ, entry=ENTRY)


async def _first_token(client: httpx.AsyncClient, engine: Engine, prompt: list[int], fields: dict[str, Any]) -> float:
    """Seconds to the first streamed token."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True, "stream": True}
    began, first = time.perf_counter(), 0.0
    async with client.stream("POST", engine.url + "/v1/completions", json=body | fields) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {") and not first:
                first = time.perf_counter() - began
    return first


async def _both(client: httpx.AsyncClient, pair: InTreePair, engine_id: str, prompt: list[int]) -> dict[str, float]:
    before = _pushes(pair)
    produce, consume = pair.legs(engine_id)
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "temperature": 0, **produce}
    prefill = asyncio.create_task(client.post(pair.prefill.url + "/v1/completions", json=body))
    ttft_s = await _first_token(client, pair.decode, prompt, consume)
    (await prefill).raise_for_status()
    new = _pushes(pair)[len(before) :]
    if not new or any(push["result"] for push in new):
        raise SystemExit(f"{pair.prefill.name}: the transfer failed, see {pair.prefill.log}")
    return {
        "ttft_s": ttft_s, "transfer_s": sum(push["seconds"] for push in new),
        "bytes": sum(push["bytes"] for push in new), "pieces": sum(push["pieces"] for push in new),
    }  # fmt: skip


def _pushes(pair: InTreePair) -> list[dict[str, Any]]:
    return [json.loads(line) for line in pair.times.read_text().splitlines()] if pair.times.exists() else []


async def _measure(pairs: dict[str, InTreePair], lengths: list[int], rounds: int, until: float) -> list[dict[str, Any]]:
    generator = random.Random(11)
    ids = {way: pair.engine_id() for way, pair in pairs.items()}
    samples: dict[tuple[str, int], list[dict[str, float]]] = {}
    first = next(iter(pairs.values())).prefill
    async with httpx.AsyncClient(timeout=300) as client:
        for round_ in range(-1, rounds):
            if round_ > 0 and time.monotonic() > until:
                break
            print(f"round {round_ + 1} of {rounds}", file=sys.stderr)
            for length in lengths if round_ >= 0 else [WARM]:
                turns = [*pairs, "prefill"]
                for way in generator.sample(turns, len(turns)):
                    prompt = [generator.randrange(5, 4000) for _ in range(length)]
                    if way == "prefill":
                        sample = {"ttft_s": await _first_token(client, first, prompt, {})}
                    else:
                        sample = await _both(client, pairs[way], ids[way], prompt)
                    if round_ >= 0:
                        samples.setdefault((way, length), []).append(sample)
    return [{"way": way, "tokens": length, "samples": taken} for (way, length), taken in samples.items()]


def run(ways: list[str], lengths: list[int], rounds: int, seconds: float, directory: Path) -> dict[str, Any]:
    until = time.monotonic() + seconds
    pairs = {way: _pair(directory, way) for way in ways}
    try:
        for pair in pairs.values():
            pair.start()
        for pair in pairs.values():
            pair.wait_healthy()
        rows = asyncio.run(_measure(pairs, lengths, rounds, until))
    finally:
        for pair in pairs.values():
            pair.stop()
    host = f"{platform.machine()}, Python {platform.python_version()}"
    return {"host": host, "wheel": wheel.REQUIREMENT, "rounds": len(rows[0]["samples"]), "rows": rows}


def table(report: dict[str, Any]) -> str:
    rows = {(row["way"], row["tokens"]): row["samples"] for row in report["rows"]}
    lengths = sorted({length for _, length in rows})
    order = [way for way in (*WAYS, "prefill") if (way, lengths[0]) in rows]
    lines = [
        f"| | {' | '.join(f'{n} tokens: TTFT | transfer' for n in lengths)} |",
        "| --- |" + " --- |" * 2 * len(lengths),
    ]
    for way in order:
        cells = []
        for length in lengths:
            taken = rows[way, length]
            cells.append(_cell(taken, "ttft_s", 0))
            cells.append(_cell(taken, "transfer_s", 1) if "transfer_s" in taken[0] else "")
        lines.append(f"| {way} | {' | '.join(cells)} |")
    moved = ", ".join(
        f"{n} tokens: {_median(rows[order[0], n], 'bytes') / 2**20:.1f} MiB in {_median(rows[order[0], n], 'pieces'):.0f} pieces"
        for n in lengths
    )
    return "\n".join(
        [f"{report['host']}; {report['wheel']}; ms, median / best of {report['rounds']} rounds", "", *lines, "", moved]
    )


def _cell(samples: list[dict[str, float]], what: str, digits: int) -> str:
    best = min(sample[what] for sample in samples)
    return f"{_median(samples, what) * 1e3:.{digits}f} / {best * 1e3:.{digits}f}"


def _median(samples: list[dict[str, float]], what: str) -> float:
    return statistics.median(sample[what] for sample in samples)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON with every sample instead of a table")
    parser.add_argument(
        "--ways", default="ours,wheel", help=f"of {', '.join(WAYS)}; the first also tells the prefill alone"
    )
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)), help="prompt lengths in tokens, up to 8,190")
    parser.add_argument("--rounds", type=int, default=9, help="measured rounds")
    parser.add_argument("--seconds", type=float, default=600.0, help="no new round after so long, start-up included")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that the servers are stopped
    with tempfile.TemporaryDirectory(prefix="connector-") as folder:
        try:
            lengths = [int(length) for length in options.lengths.split(",")]
            report = run(options.ways.split(","), lengths, options.rounds, options.seconds, Path(folder))
        except wheel.NoWheel as error:
            raise SystemExit(f"the open-source wheel cannot be had: {error}; use --ways ours,ours-tcp") from error
    print(json.dumps(report, indent=1) if options.json else table(report))


if __name__ == "__main__":
    main()
