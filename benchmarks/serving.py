"""Plain vLLM beside the platform in one run, on the same prompts: TTFT, TBT, throughput, and a warm store beside a cold one.

    python -m benchmarks.serving [--json] [--requests 24] [--concurrency 4] [--model tiny]

Both serve the same model with the same flags on this machine, one after the other for each prompt set (ABAB), so that other load
hits both. The platform has twice the vLLM processes on the same cores: on a CPU the split costs rather than gains, and the table says by
how much. What the store gains is the second table.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from deploy.testbed import PlainVLLM, Platform, sample, wait_for
from mooncake.models import resolve_model

PIN_PREFILL = "x-mooncake-prefill-instance"


@dataclass
class Measured:
    """What one server did with one set of prompts; seconds."""

    ttft_s: list[float] = field(default_factory=list)
    tbt_s: list[float] = field(default_factory=list)
    tokens: int = 0
    wall_s: float = 0.0

    def summary(self) -> dict[str, float]:
        return {
            "ttft_p50_ms": 1e3 * statistics.median(self.ttft_s),
            "ttft_p90_ms": 1e3 * quantile(self.ttft_s, 0.9),
            "tbt_p50_ms": 1e3 * statistics.median(self.tbt_s),
            "tbt_p90_ms": 1e3 * quantile(self.tbt_s, 0.9),
            "output_tokens_per_s": self.tokens / self.wall_s,
        }


def quantile(values: list[float], q: float) -> float:
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]


def prompts(count: int, tokens: int, seed: int) -> list[list[int]]:
    generator = random.Random(seed)
    return [[generator.randrange(10, 4000) for _ in range(tokens)] for _ in range(count)]


async def stream(
    client: httpx.AsyncClient,
    url: str,
    prompt: list[int],
    output: int,
    into: Measured,
    headers: dict[str, str] | None = None,
) -> None:
    """One streamed greedy completion; appends its TTFT and the gaps between its chunks."""
    request = {
        "model": "bench",
        "prompt": prompt,
        "max_tokens": output,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    start = last = time.perf_counter()
    first = True
    async with client.stream("POST", url + "/v1/completions", json=request, headers=headers) as response:
        if response.status_code != 200:
            raise RuntimeError(f"{url}: {response.status_code} {(await response.aread()).decode()[:300]}")
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            if '"error"' in line[:20]:
                raise RuntimeError(line)
            now = time.perf_counter()
            (into.ttft_s if first else into.tbt_s).append(now - (start if first else last))
            first, last = False, now
            into.tokens += 1


async def measure(
    client: httpx.AsyncClient, url: str, batch: list[list[int]], output: int, concurrency: int, into: Measured
) -> None:
    gate = asyncio.Semaphore(concurrency)

    async def one(prompt: list[int]) -> None:
        async with gate:
            await stream(client, url, prompt, output, into)

    start = time.perf_counter()
    await asyncio.gather(*(one(p) for p in batch))
    into.wall_s += time.perf_counter() - start


async def side_by_side(platform: Platform, plain: PlainVLLM, options: argparse.Namespace) -> dict[str, Any]:
    sizes = {"short": 128, "medium": 1000, "long": 4000}
    result: dict[str, Any] = {}
    async with httpx.AsyncClient(timeout=300, limits=httpx.Limits(max_connections=None)) as client:
        for url in (plain.url, platform.url):
            await measure(client, url, prompts(2, 300, seed=1), 4, 1, Measured())
        for name, tokens in sizes.items():
            ours, theirs = Measured(), Measured()
            for round_ in range(2):
                batch = prompts(options.requests // 2, tokens, seed=100 * tokens + round_)
                await measure(client, plain.url, batch, options.output, options.concurrency, theirs)
                await measure(client, platform.url, batch, options.output, options.concurrency, ours)
            result[name] = {"prompt_tokens": tokens, "plain": theirs.summary(), "mooncake": ours.summary()}
    return result


async def warm_store(platform: Platform, options: argparse.Namespace) -> dict[str, Any]:
    """TTFT of a prompt that nobody holds beside one that another prefill instance computed and the store keeps."""
    a, b = platform.names("prefill")[:2]
    result: dict[str, Any] = {}
    async with httpx.AsyncClient(timeout=300) as client:
        for tokens in (1000, 5000):
            cold, warm = Measured(), Measured()
            for prompt in prompts(options.pairs, tokens, seed=9 * tokens):
                saved = saved_blocks(platform, a)
                await stream(client, platform.url, prompt, 2, cold, {PIN_PREFILL: a})
                wait_saved(platform, a, saved + tokens // 256)
                await stream(client, platform.url, prompt, 2, warm, {PIN_PREFILL: b})
            medians = {"cold_ms": 1e3 * statistics.median(cold.ttft_s), "warm_ms": 1e3 * statistics.median(warm.ttft_s)}
            result[str(tokens)] = medians | {"ratio": medians["warm_ms"] / medians["cold_ms"]}
    return result


def saved_blocks(platform: Platform, name: str) -> float:
    return sample(platform.metrics(name), "mooncake_connector_store_saved_blocks_total")


def wait_saved(platform: Platform, name: str, blocks: float) -> None:
    wait_for("saves", lambda: saved_blocks(platform, name) >= blocks, 30)


def print_tables(result: dict[str, Any]) -> None:
    columns = ("ttft_p50_ms", "ttft_p90_ms", "tbt_p50_ms", "tbt_p90_ms", "output_tokens_per_s")
    print("| prompt tokens | server | TTFT p50 ms | TTFT p90 ms | TBT p50 ms | TBT p90 ms | output tokens/s |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for row in result["serving"].values():
        for server in ("plain", "mooncake"):
            print(
                f"| {row['prompt_tokens']} | {server} | " + " | ".join(f"{row[server][c]:.1f}" for c in columns) + " |"
            )
        ratios = (row["mooncake"][c] / row["plain"][c] for c in columns)
        print(f"| {row['prompt_tokens']} | ratio | " + " | ".join(f"{r:.2f}" for r in ratios) + " |")
    print("\n| prompt tokens | TTFT, cold store ms | TTFT, warm store ms | ratio |\n| --- | --- | --- | --- |")
    for tokens, row in result["store"].items():
        print(f"| {tokens} | {row['cold_ms']:.1f} | {row['warm_ms']:.1f} | {row['ratio']:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--requests", type=int, default=24, help="requests for each prompt length and server")
    parser.add_argument("--concurrency", type=int, default=4, help="requests in flight")
    parser.add_argument("--output", type=int, default=32, help="output tokens of each request")
    parser.add_argument("--pairs", type=int, default=5, help="cold and warm pairs for each prompt length")
    parser.add_argument("--model", default="tiny", help="tiny, gemma, or a model directory")
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    model = resolve_model(options.model)
    with tempfile.TemporaryDirectory() as directory:
        platform = Platform(
            Path(directory) / "run",
            *(
                "--model",
                str(model),
                "--served-model-name",
                "bench",
                "--prefill",
                "2",
                "--decode",
                "1",
                "--dtype",
                options.dtype,
            ),
            *(
                "--enforce-eager",
                "--kv-cache-bytes",
                str(64 << 20),
                "--max-model-len",
                "8192",
                "--store-bytes",
                str(512 << 20),
            ),
        )
        plain = PlainVLLM(model, Path(directory) / "plain.log", served_name="bench")
        try:
            plain.wait_ready()
            platform.wait_ready()
            result = {
                "serving": asyncio.run(side_by_side(platform, plain, options)),
                "store": asyncio.run(warm_store(platform, options)),
            }
        finally:
            plain.stop()
            platform.stop()
    if options.json:
        print(json.dumps(result))
    else:
        print_tables(result)


if __name__ == "__main__":
    main()
