"""Small calls that the end-to-end tests share: completions by token ids, random prompts, what engines computed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import httpx

from deploy.testbed import Platform, sample

FIRST_TOKEN_ID, END_TOKEN_ID = 10, 4000


def random_prompt(tokens: int, seed: int) -> list[int]:
    """Token ids of the tiny model without special tokens; equal for equal seeds."""
    generator = random.Random(seed)
    return [generator.randrange(FIRST_TOKEN_ID, END_TOKEN_ID) for _ in range(tokens)]


@dataclass(frozen=True)
class Completion:
    token_ids: list[int]
    usage: dict[str, Any]
    finish_reason: str
    headers: dict[str, str]


def body(prompt: list[int], max_tokens: int, **extra: Any) -> dict[str, Any]:
    """A greedy completion that runs its whole length."""
    return {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    } | extra


async def complete(
    client: httpx.AsyncClient,
    url: str,
    prompt: list[int],
    max_tokens: int = 16,
    headers: dict[str, str] | None = None,
    **extra: Any,
) -> Completion:
    """One completion; raises httpx.HTTPStatusError with the server's text for anything but 200."""
    response = await client.post(url + "/v1/completions", json=body(prompt, max_tokens, **extra), headers=headers)
    if response.status_code != 200:
        raise httpx.HTTPStatusError(response.text, request=response.request, response=response)
    answer = response.json()
    choice = answer["choices"][0]
    return Completion(choice["token_ids"], answer["usage"], choice["finish_reason"], dict(response.headers))


@dataclass(frozen=True)
class PromptTokens:
    """vLLM's own account of where prompt tokens came from (`vllm:prompt_tokens_by_source_total`)."""

    local_compute: float
    local_cache_hit: float
    external_kv_transfer: float

    def __sub__(self, other: PromptTokens) -> PromptTokens:
        return PromptTokens(
            self.local_compute - other.local_compute,
            self.local_cache_hit - other.local_cache_hit,
            self.external_kv_transfer - other.external_kv_transfer,
        )


def prompt_tokens(platform: Platform, name: str) -> PromptTokens:
    text = platform.metrics(name)
    metric = "vllm:prompt_tokens_by_source_total"
    return PromptTokens(
        *(sample(text, metric, source=s) for s in ("local_compute", "local_cache_hit", "external_kv_transfer"))
    )


def held(platform: Platform, name: str) -> dict[str, float]:
    """What a worker holds that an idle worker must not hold."""
    text = platform.metrics(name)
    names = (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "mooncake_connector_held_transfers",
        "mooncake_connector_waiting_loads",
        "mooncake_connector_quarantined_blocks",
    )
    return {n: value for n in names if (value := sample(text, n))}


def gateway_active(platform: Platform) -> float:
    return sample(httpx.get(platform.url + "/metrics", timeout=10).text, "mooncake_gateway_active_requests")
