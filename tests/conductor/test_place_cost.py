"""A placement stays cheap for a 64k-token prompt on a cluster where everybody holds its prefix."""

from __future__ import annotations

import time

from conductor.messages import DecodeSample, PrefillSample
from mooncake.common.block_key import pack_keys, unpack_keys
from tests.conductor.helpers import BLOCK, cluster, keys, placed, report, request


def test_4000_keys_on_16_instances() -> None:
    names = [f"p{i}" for i in range(8)] + [f"d{i}" for i in range(8)]
    core, prompt = cluster(*names), keys(4000)
    for i, name in enumerate(names):
        core.worker_report(
            report(
                name,
                1,
                "prefill" if name[0] == "p" else "decode",
                stored=prompt[: 4000 - 10 * i],
                prefill_samples=[PrefillSample(n, 0, n * 1e-6) for n in range(1000, 50_000, 1000)],
                decode_samples=[DecodeSample(b, b * 1e3, 1e-3 * b) for b in range(1, 20)],
            ),
            0.0,
        )
    packed, costs_s = pack_keys(prompt), []
    for i in range(100):
        fresh = unpack_keys(packed)  # keys off the wire are new objects, whose hashes are not known yet
        start_s = time.perf_counter()
        placed(
            core.place(request(f"r{i}", 4000 * BLOCK + 1, block_keys=fresh, ttft_slo_s=1e9, tbt_slo_s=1e9), 0.01 * i)
        )
        costs_s.append(time.perf_counter() - start_s)
    best, median = min(costs_s), sorted(costs_s)[50]
    print(f"\nplace(): best {best * 1e3:.2f} ms, median {median * 1e3:.2f} ms for 4,000 keys on 16 instances")
    assert best < 0.004  # the aim is 2 ms on a quiet core
