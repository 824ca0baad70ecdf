"""A layer's bytes leave before the last layer is computed, as `mooncake trace` prints it."""

from __future__ import annotations

import subprocess

import httpx

from deploy.testbed import MOONCAKE, Platform
from tests.e2e.client import complete, random_prompt


async def test_first_layer_leaves_before_last_is_computed(platform: Platform, http: httpx.AsyncClient) -> None:
    answer = await complete(http, platform.url, random_prompt(1500, seed=42))
    request_id = answer.headers["x-mooncake-request-id"]
    events = httpx.get(f"{platform.url}/debug/trace/{request_id}", timeout=10).json()["events"]
    computed = {e["layer"]: e["t"] for e in events if e["event"] == "layer_computed"}
    sent = [(e["t"], e["layer"]) for e in events if e["event"] == "layer_sent"]
    assert sent and computed
    last_computed = max(e["t"] for e in events if e["event"] == "layer_computed")
    assert min(sent)[0] < last_computed, f"first layer sent at {min(sent)}, last computed at {last_computed}"

    shown = subprocess.run(
        [MOONCAKE, "trace", request_id, "--gateway", platform.url],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr
    assert "yes" in shown.stdout
