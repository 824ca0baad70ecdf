"""`mooncake gateway` as a process: it finds workers and the Conductor through a real etcd, and ends without dropping what it serves."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from mooncake.common.registry import Registry
from mooncake.common.role import parse_ready
from tests.etcd import Etcd
from tests.gateway.conftest import eventually
from tests.gateway.fakes import WORDS, FakeConductor, FakeWorker

pytestmark = pytest.mark.slow


class Process:
    """The gateway's process and what it said when it was ready."""

    def __init__(self, etcd: Etcd, *options: str) -> None:
        self._command = [sys.executable, "-m", "mooncake", "gateway", "--etcd", ",".join(etcd.endpoints), *options]
        self.url = ""

    async def __aenter__(self) -> Process:
        self.process = await asyncio.create_subprocess_exec(*self._command, stdout=asyncio.subprocess.PIPE)
        assert self.process.stdout is not None
        async with asyncio.timeout(60):
            async for line in self.process.stdout:
                if ready := parse_ready(line.decode()):
                    self.url = ready["http_url"]
                    return self
        raise AssertionError("the gateway ended")

    async def __aexit__(self, *_exc: object) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


@pytest_asyncio.fixture
async def registry(etcd: Etcd) -> AsyncIterator[Registry]:
    made = Registry(etcd.endpoints, "mooncake")
    await made.start()
    yield made
    await made.close()


async def ready(url: str) -> bool:
    async with httpx.AsyncClient() as client:
        return (await client.get(url + "/ready")).status_code == 200


async def wait_ready(url: str, timeout_s: float = 10) -> None:
    deadline = time.monotonic() + timeout_s
    while not await ready(url):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


async def test_life_of_a_gateway(etcd: Etcd, registry: Registry, tmp_path: Path) -> None:
    body: dict[str, Any] = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 4}
    config = tmp_path / "mooncake.toml"
    config.write_text('[gateway]\napi_keys = ["k"]\n')
    async with (
        FakeWorker("prefill-0", ("prefill",)) as prefill,
        FakeWorker("decode-0", ("decode",)) as decode,
        Process(etcd, "--config", str(config)) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=30, headers={"authorization": "Bearer k"}) as http,
    ):
        assert not await ready(gateway.url)
        assert (await http.post("/v1/completions", json=body)).status_code == 503
        assert [r.http_url for r in registry.instances("gateway").values()] == [gateway.url]
        for worker in (prefill, decode):
            await registry.register(worker.record)
        await wait_ready(gateway.url)
        answer = await http.post("/v1/completions", json=body)  # no Conductor yet
        assert answer.status_code == 200 and len(prefill.prefills) == 1

        conductor = FakeConductor([prefill, decode])
        await conductor.start()
        await registry.campaign("conductor", "conductor-0", "c", conductor.address)
        await asyncio.sleep(0.3)
        assert (await http.post("/v1/completions", json=body)).status_code == 200
        assert len(conductor.asked) == 1
        assert (await httpx.AsyncClient().post(gateway.url + "/v1/completions", json=body)).status_code == 401

        # SIGTERM in the middle of a stream: the stream ends as it should, then the process.
        decode.token_s = 0.2
        call = asyncio.create_task(http.post("/v1/completions", json=body | {"stream": True}))
        await eventually("decoding", lambda: decode.running["decode"])
        gateway.process.send_signal(signal.SIGTERM)
        answer = await call
        texts = [json.loads(e[6:])["choices"][0]["text"] for e in answer.text.split("\n\n")[:-2]]
        assert texts == WORDS and answer.text.endswith("data: [DONE]\n\n")
        assert await asyncio.wait_for(gateway.process.wait(), 10) == 0
        await eventually("the key to go", lambda: not registry.instances("gateway"))
        await conductor.stop()


async def test_grace_ends_with_an_error_event(etcd: Etcd, registry: Registry) -> None:
    async with (
        FakeWorker("decode-0", ("decode",)) as decode,
        Process(etcd, "--graceful-shutdown-s", "0.5") as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=30) as http,
    ):
        await registry.register(decode.record)
        await wait_ready(gateway.url)
        decode.token_s = 1.0
        body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 4, "stream": True}
        call = asyncio.create_task(http.post("/v1/completions", json=body))
        await eventually("decoding", lambda: decode.running["decode"])
        gateway.process.send_signal(signal.SIGTERM)
        answer = await call
        *_, error, done, empty = answer.text.split("\n\n")
        assert (done, empty) == ("data: [DONE]", "")
        assert json.loads(error[6:])["error"]["code"] == 503
        assert await asyncio.wait_for(gateway.process.wait(), 10) == 0


async def test_taken_port_is_said(etcd: Etcd) -> None:
    async with Process(etcd) as first:
        port = first.url.rpartition(":")[2]
        second = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "mooncake",
            "gateway",
            "--name",
            "gateway-1",
            "--etcd",
            ",".join(etcd.endpoints),
            "--port",
            port,
            stderr=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        _, said = await asyncio.wait_for(second.communicate(), 30)
        assert second.returncode
        assert b"cannot listen" in said
