"""A second gateway of the same cluster, with API keys, refuses wrong and missing ones."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator

import httpx
import openai
import pytest

from deploy.testbed import MOONCAKE, Platform, free_port, wait_for
from tests.e2e.test_bad_input import CHAT, assert_openai_error

KEY = "sk-right"


@pytest.fixture
def guarded(platform: Platform) -> Iterator[str]:
    """Base URL of the second gateway."""
    state, port = platform.state(), free_port()
    environment = os.environ | {
        "MOONCAKE_CLUSTER": state["cluster"],
        "MOONCAKE_ETCD": ",".join(state["etcd"]),
        "MOONCAKE_CLUSTER_TOKEN": state["cluster_token"],
        "MOONCAKE_GATEWAY_API_KEYS": KEY,
    }
    command = [MOONCAKE, "gateway", "--name", "gateway-keys", "--port", str(port)]
    with (platform.run_dir / "gateway-keys.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            url = f"http://127.0.0.1:{port}"
            wait_for("the second gateway", lambda: httpx.get(url + "/ready", timeout=2).status_code == 200, 60)
            yield url
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(40)


async def test_keys(guarded: str, http: httpx.AsyncClient) -> None:
    for headers in ({}, {"authorization": "Bearer sk-wrong"}, {"authorization": KEY}):
        for path in ("/v1/chat/completions", "/v1/completions"):
            assert_openai_error(await http.post(guarded + path, json=CHAT, headers=headers), 401)
        assert_openai_error(await http.get(guarded + "/v1/models", headers=headers), 401)
    answer = openai.OpenAI(base_url=guarded + "/v1", api_key=KEY).chat.completions.create(**CHAT)
    assert answer.usage is not None and answer.usage.completion_tokens > 0
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=guarded + "/v1", api_key="no", max_retries=0).models.list()
