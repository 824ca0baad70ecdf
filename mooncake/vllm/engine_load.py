"""How busy vLLM is, read from its own `/metrics` text.

Knows: the names of vLLM's metrics (0.32, vllm/v1/metrics/loggers.py). Pure: no I/O, takes `now`. Does not know: who
asks for the text or who is told.
"""

from __future__ import annotations

import msgspec

_RUNNING = "vllm:num_requests_running"
_WAITING = "vllm:num_requests_waiting"
_KV_USAGE = "vllm:kv_cache_usage_perc"
_ITL_SUM = "vllm:inter_token_latency_seconds_sum"
_ITL_COUNT = "vllm:inter_token_latency_seconds_count"
_STEPS = "vllm:iteration_tokens_total_count"
_WANTED = (_RUNNING, _WAITING, _KV_USAGE, _ITL_SUM, _ITL_COUNT, _STEPS)


class EngineLoad(msgspec.Struct, frozen=True):
    """One look at the engine."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    """Fraction of KV blocks in use, 0 to 1."""
    steps: int = 0
    """Engine steps so far: grows while the engine works."""


class DecodeInterval(msgspec.Struct, frozen=True):
    """Decoding between two looks: means over the interval."""

    batch: float
    kv_tokens: float
    tbt_s: float


def read_samples(text: str) -> dict[str, tuple[float, int]]:
    """Sum over label sets, and their number, of each wanted sample. Lines that are no samples are skipped."""
    found: dict[str, tuple[float, int]] = {}
    for line in text.splitlines():
        if not line.startswith("vllm:"):
            continue
        name = line.partition("{")[0].partition(" ")[0]
        if name in _WANTED:
            try:
                value = float(line.rpartition(" ")[2])
            except ValueError:
                continue
            total, number = found.get(name, (0.0, 0))
            found[name] = (total + value, number + 1)
    return found


class LoadTracker:
    """Turns successive texts into loads and decode intervals. `kv_capacity_tokens` scales the KV usage."""

    def __init__(self, kv_capacity_tokens: int) -> None:
        self._kv_capacity_tokens = kv_capacity_tokens
        self._last: tuple[float, EngineLoad, float, float] | None = None  # now, load, latency sum, latency count

    def update(self, text: str, now_s: float) -> tuple[EngineLoad, DecodeInterval | None]:
        """The load, and what was decoded since the last call (None at the first one, or when nothing was)."""
        samples = read_samples(text)
        usage, engines = samples.get(_KV_USAGE, (0.0, 1))
        load = EngineLoad(
            running=round(samples.get(_RUNNING, (0.0, 0))[0]),
            waiting=round(samples.get(_WAITING, (0.0, 0))[0]),
            kv_usage=min(1.0, max(0.0, usage / engines)),
            steps=round(samples.get(_STEPS, (0.0, 0))[0]),
        )
        latency_sum_s, latency_count = samples.get(_ITL_SUM, (0.0, 0))[0], samples.get(_ITL_COUNT, (0.0, 0))[0]
        last, self._last = self._last, (now_s, load, latency_sum_s, latency_count)
        if last is None or latency_count <= last[3] or now_s <= last[0]:
            return load, None
        before = last[1]
        spent_s, tokens = latency_sum_s - last[2], latency_count - last[3]
        # Little's law sees a burst that came and went between two looks; the looks see it when it lasts.
        batch = max(1.0, spent_s / (now_s - last[0]), (before.running + load.running) / 2)
        kv_tokens = max(before.kv_usage, load.kv_usage) * self._kv_capacity_tokens
        return load, DecodeInterval(batch=batch, kv_tokens=kv_tokens, tbt_s=max(0.0, spent_s / tokens))
