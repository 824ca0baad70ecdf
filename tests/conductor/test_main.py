"""The role as a process: registry, election, side server, clean stop. Real etcd, real `mooncake conductor`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import aiohttp
import grpc.aio
import pytest

from mooncake.common.block_key import pack_keys
from mooncake.common.proto import conductor_pb2 as pb
from mooncake.common.proto import conductor_pb2_grpc
from mooncake.common.registry import InstanceRecord, Registry
from mooncake.common.role import parse_ready
from mooncake.common.rpc import aio_channel
from tests.conductor.helpers import BLOCK, MODEL, keys
from tests.etcd import Etcd

pytestmark = pytest.mark.slow
MOONCAKE = Path(sys.executable).with_name("mooncake")


class Process:
    """One `mooncake conductor`."""

    def __init__(self, process: asyncio.subprocess.Process, address: str, http_url: str) -> None:
        self.process, self.address, self.http_url = process, address, http_url
        self.channel = aio_channel(address, "")
        self.stub = conductor_pb2_grpc.ConductorStub(self.channel)

    async def leads(self) -> bool:
        return bool((await self.stub.Status(pb.StatusRequest(), timeout=2)).leader)

    async def stop(self, number: int = signal.SIGTERM) -> int:
        await self.channel.close()
        if self.process.returncode is None:
            self.process.send_signal(number)
        return await asyncio.wait_for(self.process.wait(), 20)


async def start(etcd: Etcd, name: str, log: Path) -> Process:
    environ = os.environ | {"MOONCAKE_ETCD": ",".join(etcd.endpoints), "MOONCAKE_LEASE_TTL_S": "2"}
    with log.open("ab") as errors:
        process = await asyncio.create_subprocess_exec(
            str(MOONCAKE), "conductor", "--name", name, env=environ, stdout=asyncio.subprocess.PIPE, stderr=errors
        )
    assert process.stdout is not None
    async with asyncio.timeout(30):
        while (line := await process.stdout.readline()) and not (ready := parse_ready(line.decode())):
            pass
    assert line, log.read_text()
    assert ready is not None
    return Process(process, ready["address"], ready["http_url"])


@contextlib.asynccontextmanager
async def conductors(etcd: Etcd, log: Path, *names: str) -> AsyncIterator[list[Process]]:
    started = [await start(etcd, name, log) for name in names]
    try:
        yield started
    finally:
        for each in started:
            await each.stop(signal.SIGKILL)


async def until(what: Callable[[], Awaitable[bool]], timeout_s: float = 15.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not await what():  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def test_registry_leader_standby_and_etcd_outage(etcd: Etcd, tmp_path: Path) -> None:
    registry = Registry(etcd.endpoints, "mooncake", lease_ttl_s=5)
    await registry.start()
    info = {"roles": ["prefill", "decode"], "model": MODEL, "block_size": BLOCK, "kv_capacity_tokens": 100_000}
    await registry.register(InstanceRecord("w0", "w0-life", "worker", http_url="http://w0", info=info))
    await registry.register(InstanceRecord("odd", "odd-life", "worker", info={"model": 5}))
    async with conductors(etcd, tmp_path / "log", "conductor-0", "conductor-1") as (first, second):
        await until(first.leads)
        prompt = keys(3)
        ask = pb.PlaceRequest(
            request_id="r", model=MODEL, block_keys=pack_keys(prompt), block_size=BLOCK, prompt_tokens=300
        )
        placement = (await first.stub.Place(ask)).placement
        assert placement.decode.http_url == "http://w0"
        assert not placement.HasField("prefill")  # p is d
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await second.stub.Place(ask)
        assert first.address in (caught.value.details() or "")
        async with aiohttp.ClientSession() as http:
            for path, expected in (("/health", 200), ("/ready", 200), ("/metrics", 200), ("/v1/status", 200)):
                async with http.get(first.http_url + path) as answer:
                    assert answer.status == expected
                    text = await answer.text()
            assert '"w0"' in text

        etcd.kill()
        await asyncio.sleep(3)  # longer than the lease
        assert (await first.stub.Place(ask)).placement.decode.name == "w0"
        etcd.start()

        await first.stop(signal.SIGKILL)
        await until(second.leads)
        await until(lambda: _places(second, ask))
        assert await second.stop() == 0
    await registry.close()


async def _places(conductor: Process, ask: pb.PlaceRequest) -> bool:
    return (await conductor.stub.Place(ask)).HasField("placement")


async def test_a_taken_port_is_a_clear_error(etcd: Etcd, tmp_path: Path) -> None:
    async with conductors(etcd, tmp_path / "log", "conductor-0") as (first,):
        port = first.address.rpartition(":")[2]
        process = await asyncio.create_subprocess_exec(
            str(MOONCAKE), "conductor", "--port", port, "--etcd", ",".join(etcd.endpoints), "--name", "other",
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        _, errors = await asyncio.wait_for(process.communicate(), 30)
        assert process.returncode not in (0, None)
        assert f"cannot listen on 127.0.0.1:{port}" in errors.decode()
