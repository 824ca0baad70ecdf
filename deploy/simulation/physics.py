"""What a node costs: the calibrated model of facts/simulation.md §3 (8xA800, a 70B model, TP8), with seeded noise.

The Conductor must not see these numbers: it learns its own from what the stand-ins report.
"""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NodeModel:
    """Seconds and tokens. `*_noise` are relative standard deviations."""

    prefill_base_s: float = 0.0666
    prefill_token_s: float = 1.1005e-4
    prefill_square_s: float = 7.380e-10
    prefix_token_s: float = 2.62e-6
    step_base_s: float = 0.0263
    step_sequence_s: float = 0.0037
    step_token_s: float = 3.45e-8
    join_token_s: float = 0.1 * 327_680 / 108e9
    network_token_s: float = 327_680 / 87e9
    """One token's KVCache over a node's link: pool loads, and the tail of the stream from prefill to decoding."""
    network_base_s: float = 0.002
    layers: int = 80
    prefill_kv_tokens: int = 3_000_000
    decode_kv_tokens: int = 1_330_000
    prefill_noise: float = 0.05
    decode_noise: float = 0.03

    def prefill_s(self, n: int, p: int, rng: random.Random) -> float:
        mean_s = (
            self.prefill_base_s
            + self.prefill_token_s * (n - p)
            + self.prefill_square_s * (n * n - p * p)
            + self.prefix_token_s * p
        )
        return mean_s * _noise(self.prefill_noise, rng)

    def step_s(self, batch: int, kv_tokens: int, rng: random.Random) -> float:
        mean_s = self.step_base_s + self.step_sequence_s * (batch - 1) + self.step_token_s * kv_tokens
        return mean_s * _noise(self.decode_noise, rng)

    def load_s(self, tokens: int, rng: random.Random) -> float:
        return (self.network_base_s + self.network_token_s * tokens) * _noise(self.prefill_noise, rng)

    def tail_s(self, n: int) -> float:
        """From the end of prefill until the last layer's KVCache has arrived: the other layers left while computing."""
        return self.network_base_s + self.network_token_s * n / self.layers


def _noise(sigma: float, rng: random.Random) -> float:
    return max(0.5, rng.gauss(1.0, sigma)) if sigma else 1.0
